"""A host without DNS: said before the first change, within seconds, and only where names are needed."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gpuprov.core.changes import FileFact
from gpuprov.core.commands import TIMED_OUT, Completed
from gpuprov.packages.sources import dns_problem
from gpuprov.protocol.errors import ExitCode
from gpuprov.protocol.events import ChangeStarted, Event, Finished
from gpuprov.protocol.request import Request
from gpuprov.protocol.spec import parse_spec, spec_to_json
from tests import simgpu
from tests.files import put
from tests.unit.ask import ask
from tests.unit.fake_host import FakeHost

pytestmark = pytest.mark.root
SAID = "DNS does not answer"
SUSE_WITH_PROXY = 'PROXY_ENABLED="yes"\nHTTP_PROXY="http://proxy.example:3128"\n'


class Nameless(FakeHost):
    """A host on which each look-up takes all its time, and the clock goes with it."""

    known = ""
    looked_up = 0

    def run(self, argv: Sequence[str], **more: Any) -> Completed:
        if argv[0] != "getent":
            return super().run(argv, **more)
        self.looked_up += 1
        if argv[-1] == self.known:
            return Completed(tuple(argv), 0, "192.0.2.1 STREAM\n", "")
        self.sleep(more["timeout"])
        return Completed(tuple(argv), TIMED_OUT, "", "")


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nameless:
    monkeypatch.delenv("http_proxy", raising=False)
    monkeypatch.delenv("https_proxy", raising=False)
    host = Nameless(tmp_path)
    simgpu.install_tree(host.root)
    put(host.root / "usr/bin/getent", "", 0o755)
    write(host, "etc/apt/sources.list", "deb http://a.example/debian x main\n# deb file:/old ./\n")
    write(host, "etc/apt/sources.list.d/b.sources", "Types: deb\nURIs: https://b.example/x\nSuites: x\nComponents: y\n")
    write(host, "etc/resolv.conf", "nameserver 192.0.2.53\n")
    return host


def write(host: FakeHost, path: str, text: str) -> None:
    put(host.root / path, text)


def install(host: FakeHost, **values: Any) -> tuple[Finished, list[Event]]:
    spec = parse_spec({"driver": "preinstalled", "packages": ["site-tool"], **values})
    return ask(host, Request("install", spec_to_json(spec)))


def test_it_is_known_before_the_first_change(host: Nameless) -> None:
    begun = host.now()
    finished, events = install(host)
    (problem,) = finished.problems
    assert finished.exit_code == ExitCode.FAILED and SAID in problem.what
    assert problem.evidence == "getent ahosts a.example: no answer in 8 s\n/etc/resolv.conf: nameserver 192.0.2.53"
    assert "getent ahosts a.example" in problem.next_step
    assert not [event for event in events if isinstance(event, ChangeStarted)]
    assert host.now() - begun < 30


@pytest.mark.parametrize(
    ("path", "text", "needed"),
    [
        ("etc/apt/apt.conf.d/80site", 'Acquire::http::Proxy "http://proxy.example:3128";\n', False),
        ("etc/apt/apt.conf", 'Acquire::http::Proxy::a.example "http://192.0.2.2/";\n', False),
        ("etc/dnf/dnf.conf", "[main]\nproxy=http://proxy.example:3128\n", False),
        ("etc/sysconfig/proxy", SUSE_WITH_PROXY, False),
        ("etc/apt/sources.list.d/c.list", "deb file:/srv/mirror ./\n", False),
        # A proxy in a comment is none.
        ("etc/apt/apt.conf.d/80site", '// Acquire::http::Proxy "http://old.example";\n', True),
        ("etc/apt/apt.conf.d/80site", "# proxy=http://x\n", True),
    ],
)
def test_a_name_that_no_source_needs_is_not_looked_up(host: Nameless, path: str, text: str, needed: bool) -> None:
    write(host, path, text)
    assert (SAID in str(install(host)[0].problems), host.looked_up > 0) == (needed, needed)


def test_an_image_without_a_resolver_is_named(host: Nameless) -> None:
    (host.root / "etc/resolv.conf").unlink(missing_ok=True)
    assert "/etc/resolv.conf: no such file" in str(install(host)[0].problems)


def test_one_name_that_is_known_is_enough(host: Nameless) -> None:
    host.known = "b.example"
    assert SAID not in str(install(host)[0].problems)


RPM = "[off]\nname=x\nbaseurl=file:/x\nenabled=0\n[on]\nname=y\nmirrorlist=https://m.example/?r=$releasever\n"


@pytest.mark.parametrize(("text", "names"), [(RPM, ("m.example",)), (RPM.replace("enabled=0", ""), ()), ("x", ())])
@pytest.mark.parametrize("folder", ["/etc/yum.repos.d", "/etc/zypp/repos.d"])
def test_the_names_of_rpm_sources(tmp_path: Path, folder: str, text: str, names: tuple[str, ...]) -> None:
    host = Nameless(tmp_path)
    write(host, "usr/bin/getent", "")
    (host.root / "usr/bin/getent").chmod(0o755)
    found = dns_problem(host, "dnf", {f"{folder}/a.repo": FileFact(text.encode(), 0o644, 0, 0)})
    assert (found is not None, host.looked_up) == (bool(names), len(names))
