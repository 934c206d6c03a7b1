"""Which repositories a host shall have, and what becomes of the sources that people had before."""

from dataclasses import replace

import pytest

from gpuprov.core.changes import Change, FileFact, RemoveFile, WriteFile
from gpuprov.core.commands import Completed
from gpuprov.packages.failures import finish_apt, finish_rpm
from gpuprov.packages.keys import InstallKey
from gpuprov.protocol.spec import HostSpec, SiteRepository
from gpuprov.repos import apt_repositories
from tests.apt_host import plan_repositories, problems
from tests.keys import key_fingerprint, key_packet
from tests.unit.refused import refused

URI = "https://apt.example.org/gpu"
KEY_URL = "https://apt.example.org/gpu/key.asc"
SOURCE = "/etc/apt/sources.list.d/gpuprov-site.sources"
KEY = "/etc/apt/keyrings/gpuprov-site.gpg"
OTHERS = "/etc/apt/sources.list.d/others"
WITHDRAWN = "AE09FE4BBD223A84B2CCFCE3F60F4B3D7FA2AF80"
KEYS = {key_fingerprint(number): key_packet(number) for number in (1, 2)}
(PINNED, FIRST), (_, SECOND) = KEYS.items()


def spec(fingerprint: str, *, uri: str = URI, suite: str = "./", components: str = "") -> HostSpec:
    return HostSpec(repositories=(SiteRepository("site", uri, KEY_URL, fingerprint, suite, components),))


def fact(content: str | bytes, mode: int = 0o644) -> FileFact:
    return FileFact(content.encode() if isinstance(content, str) else content, mode, 0, 0)


def settled(fingerprint: str, key: bytes, architecture: str = "x86_64") -> dict[str, FileFact]:
    """The files of a host that is as `spec` says."""
    (one,) = apt_repositories(spec(fingerprint), architecture)
    return {KEY: fact(key), SOURCE: fact(str(one))}


def test_a_flat_repository_has_no_components() -> None:
    (one,) = apt_repositories(spec("A" * 40), "x86_64")
    assert str(one) == f"Types: deb\nURIs: {URI}\nSuites: ./\nArchitectures: amd64\nSigned-By: {KEY}\n"
    assert (one.source_path, one.key_path) == (SOURCE, KEY)


@pytest.mark.parametrize(("components", "line"), [("", "main"), ("main contrib", "main contrib")])
def test_a_repository_with_a_suite_has_components(components: str, line: str) -> None:
    (one,) = apt_repositories(spec("A" * 40, suite="bookworm", components=components), "aarch64")
    assert f"Suites: bookworm\nComponents: {line}\nArchitectures: arm64\n" in str(one)


def test_nvidias_repository_comes_with_its_toolkit() -> None:
    assert apt_repositories(HostSpec(), "x86_64") == ()
    wanted = HostSpec(toolkit="nvidia", toolkit_repository="https://mirror.example.org/toolkit/")
    (one,) = apt_repositories(wanted, "x86_64")
    assert (one.uri, one.suite) == ("https://mirror.example.org/toolkit/stable/deb/amd64", "/")
    assert one.key_url == "https://mirror.example.org/toolkit/gpgkey"
    assert one.key_fingerprint == "C95B321B61E88C1809C4F759DDCAE044F796ECB0"


def test_release_candidates_lie_beside_the_stable_releases() -> None:
    found = apt_repositories(HostSpec(toolkit="nvidia", toolkit_channel="experimental"), "x86_64")
    base = "https://nvidia.github.io/libnvidia-container"
    assert [one.uri for one in found] == [f"{base}/stable/deb/amd64", f"{base}/experimental/deb/amd64"]
    assert {one.key_url for one in found} == {f"{base}/gpgkey"}
    assert len({one.source_path for one in found}) == 2
    assert apt_repositories(HostSpec(toolkit_channel="experimental"), "x86_64") == ()


def test_back_on_the_stable_channel_the_other_repository_goes() -> None:
    both = HostSpec(toolkit="nvidia", toolkit_channel="experimental")
    files = {one.source_path: fact(str(one)) for one in apt_repositories(both, "x86_64")}
    changes = plan_repositories(files, replace(both, toolkit_channel="stable"), "x86_64")
    gone = [change.path for change in changes if isinstance(change, RemoveFile)]
    assert gone == ["/etc/apt/sources.list.d/gpuprov-nvidia-container-toolkit-experimental.sources"]


def test_a_bare_host_gets_the_key_before_the_source() -> None:
    pinned = "A" * 40
    key, source = plan_repositories({}, spec(pinned), "x86_64")
    assert key == InstallKey(KEY, KEY_URL, pinned)
    assert isinstance(source, WriteFile) and source.path == SOURCE


def test_a_host_that_is_right_is_not_touched() -> None:
    for fingerprint, key in KEYS.items():
        assert plan_repositories(settled(fingerprint, key), spec(fingerprint), "x86_64") == ()


WRONG_KEYS = (SECOND, FIRST + SECOND, SECOND + FIRST, b"", b"<html>", FIRST[:-1])
ONE = str(apt_repositories(spec(PINNED), "x86_64")[0])


@pytest.mark.parametrize(
    ("path", "found", "change"),
    [
        *((KEY, fact(key), InstallKey(KEY, KEY_URL, PINNED)) for key in WRONG_KEYS),
        (KEY, fact(FIRST, 0o600), InstallKey(KEY, KEY_URL, PINNED)),
        (SOURCE, fact(f"{ONE}Trusted: yes\n"), WriteFile(SOURCE, ONE.encode())),
        (SOURCE, fact(ONE, 0o600), WriteFile(SOURCE, ONE.encode())),
    ],
)
def test_a_file_that_is_not_exactly_right_is_replaced(path: str, found: FileFact, change: Change) -> None:
    assert plan_repositories({**settled(PINNED, FIRST), path: found}, spec(PINNED), "x86_64") == (change,)


DEBIAN = "deb http://mirror.example/debian bookworm main\n"
STANZA = "Types: deb\nURIs: http://mirror.example/debian\nSuites: sid\n"


@pytest.mark.parametrize(
    ("path", "content", "cleaned"),
    [
        (f"{OTHERS}.list", f"deb {URI} ./\n", ""),
        (f"{OTHERS}.list", f"# x\n\ndeb [arch=amd64 signed-by=/a.gpg] {URI}/ ./\ndeb-src {URI} ./\n", ""),
        (f"{OTHERS}.list", f"  deb\t[ trusted=yes ]\t{URI}\t./\n", ""),
        (f"{OTHERS}.sources", f"Types: deb\nURIs: {URI}\nSuites: ./\n", ""),
        (f"{OTHERS}.sources", f"types: deb\nuris:{URI}/\nsuites: ./\n", ""),
        (f"{OTHERS}.list", f"{DEBIAN}deb {URI} ./\n", f"{DEBIAN}# deb {URI} ./\n"),
        ("/etc/apt/sources.list", f"{DEBIAN}\n\ndeb {URI} ./ # the site's", f"{DEBIAN}\n\n# deb {URI} ./ # the site's"),
        (f"{OTHERS}.sources", f"{STANZA}\nTypes: deb\nURIs: {URI}\nSuites: ./\n",
         f"{STANZA}\n# Types: deb\n# URIs: {URI}\n# Suites: ./\n"),
        (f"{OTHERS}.sources", f"# x\nTypes: deb\nURIs: {URI}\nSuites: ./\nSigned-By:\n -----BEGIN\n .\n\n{STANZA}",
         f"# # x\n# Types: deb\n# URIs: {URI}\n# Suites: ./\n# Signed-By:\n#  -----BEGIN\n#  .\n\n{STANZA}"),
    ],
)  # fmt: skip
def test_a_second_source_goes_and_among_others_is_commented_out(path: str, content: str, cleaned: str) -> None:
    found = {path: fact(content, 0o640)}
    assert problems(found, spec("A" * 40), "x86_64") == ()
    (change,) = (c for c in plan_repositories(found, spec("A" * 40), "x86_64") if getattr(c, "path", "") == path)
    removed = RemoveFile(path, f"a second source for {URI}")
    assert change == (WriteFile(path, cleaned.encode(), 0o640) if cleaned else removed)
    again = plan_repositories({path: fact(cleaned)}, spec("A" * 40), "x86_64")
    assert not any(getattr(change, "path", "") == path for change in again)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (f"Types: deb\nURIs: http://mirror.example/debian {URI}\nSuites: ./\n", 2),
        (f"Types: deb\nURIs: http://mirror.example/debian\n  {URI}\nSuites: ./\n", 3),
    ],
)
def test_a_stanza_with_other_repositories_is_its_owners(content: str, line: int) -> None:
    path = f"{OTHERS}.sources"
    found = {path: fact(content)}
    (problem,) = problems(found, spec("A" * 40), "x86_64")
    assert problem.evidence == f"{path}, line {line}"
    assert URI in problem.what and "Signed-By" in problem.what
    changes = plan_repositories(found, spec("A" * 40), "x86_64")
    assert not any(getattr(change, "path", "") == path for change in changes)


@pytest.mark.parametrize(
    ("uri", "retired"),
    [
        ("https://nvidia.github.io/nvidia-docker/ubuntu18.04/$(ARCH)", True),
        ("https://nvidia.github.io/nvidia-container-runtime/stable/debian10/$(ARCH)", True),
        ("https://nvidia.github.io/libnvidia-container/stable/ubuntu18.04/$(ARCH)", True),
        ("https://nvidia.github.io/libnvidia-container/debian11/amd64", True),
        ("https://nvidia.github.io/libnvidia-container/stable/debian10/$(ARCH)", True),
        ("https://nvidia.github.io/libnvidia-container/experimental/deb/$(ARCH)", False),
        ("https://nvidia.github.io/libnvidia-container/stable/deb/arm64", False),
        ("https://mirror.example.org/nvidia-docker/ubuntu18.04/amd64", False),
    ],
)
def test_nvidias_retired_repositories_go_with_its_toolkit_or_on_request(uri: str, retired: bool) -> None:
    path = f"{OTHERS}.list"
    found = {path: fact(f"deb {uri} /\n")}
    changes = plan_repositories(found, HostSpec(toolkit="nvidia"), "x86_64")
    assert (RemoveFile(path, "NVIDIA has retired this repository") in changes) is retired
    assert (plan_repositories(found, HostSpec(migrate_nvidia_docker=True), "x86_64") != ()) is retired
    assert plan_repositories(found, HostSpec(), "x86_64") == ()


@pytest.mark.parametrize(
    ("path", "content"),
    [
        (f"{OTHERS}.list", f"# deb {URI} ./\n{DEBIAN}"), (f"{OTHERS}.list", f"deb {URI}/other ./\n"),
        (f"{OTHERS}.list.save", f"deb {URI} ./\n"),
        (f"{OTHERS}.sources", f"# URIs: {URI}\nTypes: deb\nURIs: http://mirror.example/debian\nSuites: sid\n"),
        # Another suite of the same mirror is another repository, with the distribution's key.
        ("/etc/apt/sources.list", f"deb {URI} bookworm main\n"),
        (f"{OTHERS}.sources", f"Types: deb\nURIs: {URI}\nSuites: bookworm bookworm-updates\nComponents: main\n"),
        (f"{OTHERS}.sources", f"Enabled: no\nTypes: deb\nURIs: {URI}\nSuites: ./\n"),
        (f"{OTHERS}.sources", f"Types: deb\nURIs: {URI}\nSuites: ./\nenabled: No\n"),
        (f"{OTHERS}.sources", ""), ("/etc/cdi/nvidia.json", f"deb {URI} ./\n"),
    ],
)  # fmt: skip
def test_what_is_no_active_source_for_it_stays(path: str, content: str) -> None:
    found = {path: fact(content)}
    assert problems(found, spec("A" * 40), "x86_64") == ()
    assert not any(isinstance(change, RemoveFile) for change in plan_repositories(found, spec("A" * 40), "x86_64"))


@pytest.mark.parametrize("architecture", ["x86_64", "aarch64"])
def test_the_list_that_nvidia_tells_people_to_write_is_replaced(architecture: str) -> None:
    """Its URI has a variable in it; side by side apt would refuse to work ("Conflicting values set for Signed-By")."""
    base = "https://nvidia.github.io/libnvidia-container/stable/deb"
    keyring = "/usr/share/keyrings/nvidia-container-toolkit-keyring.gpg"
    lists = "/etc/apt/sources.list.d/nvidia-container-toolkit.list"
    active = f"deb [signed-by={keyring}] {base}/$(ARCH) /\n"
    experimental = f"#deb [signed-by={keyring}] {base.replace('stable', 'experimental')}/$(ARCH) /\n"
    changes = plan_repositories({lists: fact(active + experimental)}, HostSpec(toolkit="nvidia"), architecture)
    assert [change.path for change in changes if isinstance(change, RemoveFile)] == [lists]


def test_each_suite_of_a_repository_counts() -> None:
    wanted = spec("A" * 40, suite="stable testing", components="main")
    found = {f"{OTHERS}.list": fact(f"deb {URI} testing main\n")}
    assert any(isinstance(change, RemoveFile) for change in plan_repositories(found, wanted, "x86_64"))


def test_what_is_no_longer_asked_for_goes_and_nothing_else() -> None:
    strangers = {
        "/etc/apt/sources.list": fact(DEBIAN),
        f"{OTHERS}.list": fact("deb http://example.com/x ./\n"),
        "/etc/apt/keyrings/docker.asc": fact("a key"),
    }
    changes = plan_repositories({**settled(PINNED, FIRST), **strangers}, HostSpec(), "x86_64")
    assert changes == tuple(RemoveFile(path, "no longer asked for") for path in (KEY, SOURCE))


def test_a_withdrawn_key_is_refused() -> None:
    (problem,) = problems({}, spec(WITHDRAWN), "x86_64")
    assert "key of repository site is withdrawn" in problem.what and WITHDRAWN in problem.evidence


@pytest.mark.parametrize("login", ["token", "u:", "u:a%20b", "u:a%0Ab", "u:%23", ":p", "u:a%22b"])
def test_a_login_that_no_package_manager_can_read_is_refused(login: str) -> None:
    (problem,) = problems({}, spec("A" * 40, uri=f"https://{login}@apt.example.org/gpu"), "x86_64")
    assert "the login in the URL of repository site" in problem.what


def test_two_repositories_of_one_name_are_refused() -> None:
    one = SiteRepository("site", URI, KEY_URL, "A" * 40)
    other = SiteRepository("site", f"{URI}/other", KEY_URL, "B" * 40)
    (problem,) = problems({}, HostSpec(repositories=(one, other)), "x86_64")
    assert problem.what == "two repositories have the name site"
    nvidias = HostSpec(toolkit="nvidia", repositories=(SiteRepository("nvidia-container-toolkit", URI, KEY_URL, "A"),))
    (problem,) = problems({}, nvidias, "x86_64")
    assert "nvidia-container-toolkit" in problem.what


def test_two_repositories_of_one_url_are_refused() -> None:
    """Each has a key file of its own, and apt reads no source at all where two Signed-By of a URL differ."""
    one, other = (SiteRepository(name, uri, KEY_URL, "A" * 40) for name, uri in (("a", URI), ("b", f"{URI}/")))
    (problem,) = problems({}, HostSpec(repositories=(one, other)), "x86_64")
    assert "two repositories have the URL" in problem.what and URI in problem.what and "a, b" in problem.evidence
    assert problems({}, HostSpec(repositories=(one, replace(other, suite="other/"))), "x86_64") == ()
    url = "https://nvidia.github.io/libnvidia-container/stable/deb/$(ARCH)"
    nvidias = HostSpec(toolkit="nvidia", repositories=(SiteRepository("nvidia", url, KEY_URL, "A", suite="/"),))
    (problem,) = problems({}, nvidias, "x86_64")
    assert "nvidia, nvidia-container-toolkit" in problem.evidence


REFUSED = "E: Failed to fetch http://dead.example/InRelease  Could not connect to dead.example:80 (192.0.2.1)"
UNKNOWN = "E: Failed to fetch http://gone.example/InRelease  Temporary failure resolving 'gone.example'"
DNF_REFUSED = "- Curl error (7): Couldn't connect to server for http://dead.example/repodata/repomd.xml"
DNF_UNKNOWN = "- Curl error (6): Couldn't resolve host name for http://gone.example/repodata/repomd.xml"
DNF_GONE = "- Status code: 404 for http://old.example/repodata/repomd.xml (IP: 192.0.2.1)"
ZYPPER = ("Download (curl) error for 'http://gone.example/repomd.xml':", "Error code: Connection failed",
          "Error message: Could not resolve host: gone.example")  # fmt: skip


@pytest.mark.parametrize(
    ("lines", "decisive", "meaning"),
    [
        ((REFUSED, UNKNOWN), REFUSED, "can't be reached"), ((UNKNOWN, REFUSED), UNKNOWN, "name is not known"),
        ((DNF_REFUSED, DNF_UNKNOWN), DNF_REFUSED, "can't be reached"),
        ((DNF_UNKNOWN, DNF_REFUSED), DNF_UNKNOWN, "name is not known"),
        ((DNF_GONE, DNF_UNKNOWN), DNF_GONE, "gone from it"),
        (("Errors during downloading metadata:", DNF_REFUSED, DNF_GONE), DNF_REFUSED, "can't be reached"),
        ((ZYPPER[0], ZYPPER[2], DNF_REFUSED), ZYPPER[2], "name is not known"),
    ],
)  # fmt: skip
def test_first_error_of_several_repositories_decides(lines: tuple[str, ...], decisive: str, meaning: str) -> None:
    finish = finish_apt if decisive.startswith("E:") else finish_rpm
    problem = refused(finish, Completed(("program",), 1, "", "\n".join(lines)), "the index could not be read")
    assert problem.what.endswith(meaning) and problem.evidence.endswith(decisive)
