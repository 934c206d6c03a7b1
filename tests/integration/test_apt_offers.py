"""What repositories have, asked of the real apt of three Debian releases: fresh, checked, and the host untouched."""

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gpuprov.facts.host import gather_files
from gpuprov.packages import managers
from gpuprov.packages.apt import APT
from gpuprov.protocol.request import Request
from gpuprov.protocol.spec import HostSpec, parse_spec, spec_to_json
from tests.apt_host import plan_repositories
from tests.integration.apt_chroot import (
    NEEDS,
    RELEASES,
    ChrootHost,
    SiteServer,
    chroot_host,
    configure_site,
    plan_site,
    site_server,
)
from tests.loopback import LOGIN_IN_URL, LoginHandler, served
from tests.unit.ask import ask

pytestmark = [pytest.mark.slow, *NEEDS]
_KERNEL = "6.1.0-99-amd64"
_HOOK = "".join(
    f'APT::Update::{name} {{ "touch /tmp/hook-ran"; }};\n' for name in ("Post-Invoke", "Post-Invoke-Success")
)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SiteServer]:
    with site_server(tmp_path) as made:
        made.add("tool", "1.0")
        made.add("tool", "2.0")
        yield made


@pytest.fixture(params=RELEASES)
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ChrootHost]:
    """A host whose apt has a hook for refreshes, as desktops and command-not-found bring them."""
    with chroot_host(request.param, tmp_path) as made:
        made.write("/etc/apt/apt.conf.d/90hook", _HOOK.encode())
        yield made


def state(host: ChrootHost) -> list[object]:
    """Return what a question must leave as it is."""
    places = ("etc", "var/lib/apt", "var/lib/dpkg", "var/cache/apt", "var/tmp", "tmp")
    found = [path for place in places for path in sorted((host.root / place).rglob("*"))]
    return [(str(path), path.lstat().st_mtime_ns, path.lstat().st_size) for path in found]


def test_a_repository_that_is_yet_to_be_set_up_is_asked_in_a_copy(host: ChrootHost, server: SiteServer) -> None:
    before = state(host)
    answer = managers.ask(host, APT, ("tool", "nobody-has-this"), plan_site(host, server))
    assert answer.problems == ()
    assert answer.found == {"tool": ("2.0", "1.0")}
    assert answer.lacking(("tool", "nobody-has-this")) == ("nobody-has-this",)
    assert state(host) == before


def test_a_planned_repository_with_a_login_is_asked(host: ChrootHost, server: SiteServer) -> None:
    (own,) = server.spec.repositories
    with served(server.folder, LoginHandler) as url:
        spec = HostSpec(repositories=(replace(own, uri=url.replace("//", f"//{LOGIN_IN_URL}@")),))
        answer = managers.ask(host, APT, ("tool",), plan_repositories(gather_files(host), spec, "x86_64"))
    assert (answer.problems, answer.found) == ((), {"tool": ("2.0", "1.0")})


def test_the_answer_is_fresh_though_the_hosts_index_is_not(host: ChrootHost, server: SiteServer) -> None:
    configure_site(host, server)
    assert host.exists("/tmp/hook-ran"), "an ordinary refresh runs it"
    host.remove("/tmp/hook-ran")
    server.add("newcomer")
    for old in server.folder.glob("tool_*.deb"):
        old.unlink()
    server.add("another")
    # A web server tells seconds apart, no less.
    for name in ("InRelease", "Packages"):
        os.utime(server.folder / name, (time.time() + 10,) * 2)
    before = state(host)
    answer = managers.ask(host, APT, ("tool", "newcomer"), ())
    assert answer.problems == ()
    assert answer.lacking(("tool", "newcomer")) == ("tool",)
    assert state(host) == before


def test_a_planned_repository_that_was_tampered_with_is_not_asked(host: ChrootHost, server: SiteServer) -> None:
    release = server.folder / "InRelease"
    release.write_text(release.read_text().replace("MD5Sum:", "MD5Summe:", 1))
    before = state(host)
    (problem,) = managers.ask(host, APT, ("tool",), plan_site(host, server)).problems
    assert problem.what.startswith("the package index could not be refreshed: "), problem
    assert state(host) == before


def test_a_source_of_the_host_that_is_out_of_reach_is_told(host: ChrootHost, server: SiteServer) -> None:
    configure_site(host, server, refreshed=False)
    host.write("/etc/apt/sources.list", b"deb http://127.0.0.9:9/debian stable main\n")
    (problem,) = managers.ask(host, APT, ("tool",), ()).problems
    assert problem.what == "the package index could not be refreshed: a repository can't be reached"
    assert "127.0.0.9:9" in problem.evidence


# What is wrong with a source → what a dry run says of it; the host is as it was.
BROKEN = {
    b"deb http://127.0.0.9:9/debian stable main\n": "a repository can't be reached",
    b"deb nonsense\n": "a package source can't be read",
    b"deb [trusted http://127.0.0.9:9/debian ./\n": "a package source can't be read",
}


@pytest.mark.parametrize("line", BROKEN, ids=["out-of-reach", "malformed", "malformed-option"])
def test_dry_run_names_broken_sources_and_other_problems(host: ChrootHost, server: SiteServer, line: bytes) -> None:
    host.write("/etc/apt/sources.list.d/broken.list", line)
    own = spec_to_json(server.spec)["repositories"]
    values = {"driver": "preinstalled", "repositories": own, "packages": ["tool"]}
    before = state(host)
    finished, _ = ask(host, Request("install", spec_to_json(parse_spec(values)), check=True))
    assert any("there is no NVIDIA GPU" in one.what for one in finished.problems)
    (said,) = (one for one in finished.problems if BROKEN[line] in one.what)
    assert "broken.list" in said.evidence or "127.0.0.9:9" in said.evidence
    assert state(host) == before


@pytest.mark.parametrize("somebody_has_them", [False, True])
def test_a_run_tells_that_nobody_has_the_kernels_headers(
    host: ChrootHost, server: SiteServer, monkeypatch: pytest.MonkeyPatch, *, somebody_has_them: bool
) -> None:
    if somebody_has_them:
        server.add(f"linux-headers-{_KERNEL}")
    monkeypatch.setattr(host, "kernel_release", lambda: _KERNEL)
    # Without a GPU nothing else is told.
    gpu = host.root / "sys/bus/pci/devices/0000:2a:00.0"
    gpu.mkdir(parents=True)
    for name, value in {"vendor": "0x10de", "device": "0x20b0", "class": "0x030200"}.items():
        (gpu / name).write_text(f"{value}\n")
    own = spec_to_json(server.spec)["repositories"]
    spec = parse_spec({"driver_version": "550.163.01", "kernel_modules": "build", "repositories": own})
    before = state(host)
    finished, _ = ask(host, Request("install", spec_to_json(spec), check=True))
    said = [one for one in finished.problems if "headers" in one.what]
    assert bool(said) is not somebody_has_them
    assert state(host) == before
    if not somebody_has_them:
        (problem,) = said
        assert problem.what == f"no repository of this host has the headers of the running kernel {_KERNEL}"
        assert problem.next_step.startswith("boot the newest kernel: apt-get install linux-image-amd64")
