"""Our source of further components of a host's own archive, as apt wants it; pins that keep packages out."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from gpuprov.core.changes import FileFact
from gpuprov.packages.sources import COMPONENTS_PATH as PATH
from gpuprov.packages.sources import PinnedOut, gather_pinned_out, parse_policy, pin_problems, pins_on
from gpuprov.packages.sources import component_problems as problems
from gpuprov.packages.sources import component_source as source
from tests.unit.scripted import Scripted

_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
_COMPONENTS = ("contrib", "non-free", "non-free-firmware")
_DEB822 = f"""\
Types: deb deb-src
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates bookworm-backports
Components: main
Signed-By: {_KEYRING}
"""


def files(**texts: str) -> Mapping[str, FileFact]:
    """Return sources by name (`list` is /etc/apt/sources.list), and Debian's keyring."""
    paths = {
        "/etc/apt/sources.list" if name == "list" else f"/etc/apt/sources.list.d/{name}.sources": text
        for name, text in texts.items()
    }
    return {path: FileFact(text.encode(), 0o644, 0, 0) for path, text in {**paths, _KEYRING: "key"}.items()}


def made(found: Mapping[str, FileFact], components: tuple[str, ...] = _COMPONENTS) -> str:
    assert problems(found, "Debian 12", "bookworm", components) == ()
    return source(found, "bookworm", components, (_KEYRING,)).partition("\n")[2]


def test_suites_of_one_mirror_share_a_stanza_and_the_hosts_key() -> None:
    assert made(files(debian=_DEB822)) == (
        "Types: deb\nURIs: http://mirror.example/debian\nSuites: bookworm bookworm-updates\n"
        f"Components: contrib non-free non-free-firmware\nSigned-By: {_KEYRING}\n"
    )


CASES: dict[str, tuple[dict[str, str], str]] = {
    "one line without a key gets the distribution's keyring": (
        {"list": "deb http://mirror.example/debian/ bookworm main\n"},
        f"URIs: http://mirror.example/debian/\nSuites: bookworm\nComponents: contrib non-free non-free-firmware\n"
        f"Signed-By: {_KEYRING}\n",
    ),
    "options of one line are taken over": (
        {"list": "deb [arch=amd64,arm64 check-valid-until=no signed-by=/k] http://m bookworm-security main # why\n"},
        "URIs: http://m\nSuites: bookworm-security\nComponents: contrib non-free non-free-firmware\n"
        "Architectures: amd64 arm64\nCheck-Valid-Until: no\nSigned-By: /k\n",
    ),
    "a key in the source itself is taken over whole": (
        {"debian": "URIs: http://m\nTypes: deb\nSuites: bookworm\nComponents: main\nSigned-By:\n -----BEGIN\n mQIN\n"},
        "URIs: http://m\nSuites: bookworm\nComponents: contrib non-free non-free-firmware\n"
        "Signed-By:\n -----BEGIN\n mQIN\n",
    ),
    "components that some source has are left out": (
        {
            "list": "deb http://m bookworm main contrib\n",
            "more": "Types: deb\nURIs: http://m/\nSuites: bookworm\nComponents: non-free\n",
        },
        f"URIs: http://m\nSuites: bookworm\nComponents: non-free-firmware\nSigned-By: {_KEYRING}\n",
    ),
    "a source without a key that apt reads after ours forbids one": (
        {"local": "Types: deb\nURIs: http://m\nSuites: bookworm\nComponents: main\n"},
        "URIs: http://m\nSuites: bookworm\nComponents: contrib non-free non-free-firmware\n",
    ),
    "an alias of the release counts, another release, backports and sources of source do not": (
        {
            "list": "deb http://m stable main\ndeb http://m trixie main\ndeb http://m bookworm-backports main\n"
            "deb-src http://s bookworm main\n"
        },
        f"URIs: http://m\nSuites: stable\nComponents: contrib non-free non-free-firmware\nSigned-By: {_KEYRING}\n",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_our_source_is_made_of_the_hosts(name: str) -> None:
    texts, wanted = CASES[name]
    assert made(files(**texts)) == f"Types: deb\n{wanted}"


def test_nothing_is_written_where_the_host_has_all_components() -> None:
    assert made(files(list=f"deb http://m bookworm main {' '.join(_COMPONENTS)}\n")) == ""
    # Ours does not count: it would vanish at the second look.
    ours = files(list="deb http://m bookworm main\n")
    text = source(ours, "bookworm", _COMPONENTS, (_KEYRING,))
    again = {**ours, PATH: FileFact(text.encode(), 0o644, 0, 0)}
    assert source(again, "bookworm", _COMPONENTS, (_KEYRING,)) == text != ""


def test_without_the_keyring_apts_own_keys_count() -> None:
    found = files(list="deb http://m bookworm main\n")
    assert "Signed-By" not in made({path: file for path, file in found.items() if path != _KEYRING})


@pytest.mark.parametrize(
    ("texts", "what"),
    [
        ({}, "no source of this host is Debian 12's own archive"),
        ({"list": "deb http://m trixie main\ndeb http://m bookworm extra\n"}, "no source of this host is Debian 12's"),
        ({"list": "deb [trusted=yes] http://m bookworm main\n"}, "trusts http://m without a signature"),
        ({"debian": f"{_DEB822}Enabled: no\n"}, "no source of this host is Debian 12's"),
    ],
)
def test_sources_that_can_not_be_used_are_named(texts: dict[str, str], what: str) -> None:
    (problem,) = problems(files(**texts), "Debian 12", "bookworm", _COMPONENTS)
    assert what in problem.what and problem.next_step


# -- pins --------------------------------------------------------------------------------------------------------------
# `apt-cache policy` of apt 2.6.1 on a host with the preferences below.
POLICY = """\
site-gpu-tools:
  Installed: (none)
  Candidate: (none)
  Version table:
     1.0 -1
        500 http://10.213.10.1:8000/apt ./ Packages
docker.io:
  Installed: (none)
  Candidate: 20.10.24+dfsg1-1+deb12u1+b4
  Version table:
     20.10.24+dfsg1-1+deb12u1+b4 500
        500 http://mirror.example.org/debian bookworm/main amd64 Packages
nowhere:
  Installed: (none)
  Candidate: (none)
  Version table:
containerd:
  Installed: 1.6.20~ds1-1+deb12u1
  Candidate: 1.6.20~ds1-1+deb12u1
  Version table:
 *** 1.6.20~ds1-1+deb12u1 100
        100 /var/lib/dpkg/status
"""
PREFERENCES = """\
# the site's own
Package: libtirpc3 site-*
Pin: release *
Pin-Priority: -1

Explanation: nothing of docker's
Package: /^docker/
Pin: origin "download.docker.com"
Pin-Priority: -10

Package: *
Pin: release o=Debian
Pin-Priority: 500
"""


def test_a_package_with_versions_and_no_candidate_is_pinned_out() -> None:
    assert parse_policy(POLICY) == {"site-gpu-tools": ("1.0",)}


@pytest.mark.parametrize(
    ("name", "places"),
    [
        ("site-gpu-tools", ("/etc/apt/preferences.d/site:2",)), ("libtirpc3", ("/etc/apt/preferences.d/site:2",)),
        ("docker-ce", ("/etc/apt/preferences.d/site:7",)), ("runc", ()),
    ],
)  # fmt: skip
def test_the_records_on_a_package_are_told_with_their_lines(name: str, places: tuple[str, ...]) -> None:
    assert pins_on({"/etc/apt/preferences.d/site": PREFERENCES}, name) == places


@pytest.mark.parametrize(
    ("file", "is_read"),
    [("site", True), ("site.pref", True), ("10.nvidia.pref", True), ("site.bak", False), ("10.site", False)],
)
def test_the_files_of_preferences_that_apt_reads_are_read(tmp_path: Path, file: str, is_read: bool) -> None:
    host = Scripted(tmp_path, {"policy": POLICY})
    host.make_directory("/etc/apt/preferences.d")
    host.write(f"/etc/apt/preferences.d/{file}", PREFERENCES.encode())
    found = [one.places for one in gather_pinned_out(host, ("site-gpu-tools",))]
    assert found == ([(f"/etc/apt/preferences.d/{file}:2",)] if is_read else [])


def test_the_problem_names_the_file_and_what_apt_says() -> None:
    (one,) = pin_problems((PinnedOut("site-gpu-tools", ("1.0",), ("/etc/apt/preferences.d/site:2",)),))
    assert one.what == "a pin in apt's preferences keeps site-gpu-tools out"
    assert "apt-cache policy site-gpu-tools: Candidate: (none), of 1.0" in one.evidence
    assert one.next_step.startswith("${EDITOR:-vi} +2 /etc/apt/preferences.d/site")
    (unknown,) = pin_problems((PinnedOut("x", ("1",), ()),))
    assert unknown.next_step.startswith("grep -rn")
