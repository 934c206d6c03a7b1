"""With a bundle nothing is asked of the network: apt has it as its only source in all that it does, reboots or not."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gpuprov.agent import install
from gpuprov.agent.run import run_request
from gpuprov.bundle.manifest import BundleFacts, BundlePackage, Manifest
from gpuprov.core.changes import Change
from gpuprov.core.commands import Completed
from gpuprov.core.places import FOLDER
from gpuprov.facts.host import gather
from gpuprov.plan.context import source_of
from gpuprov.plan.steps import make_plan
from gpuprov.protocol.errors import ExitCode
from gpuprov.protocol.events import Event, Finished
from gpuprov.protocol.request import Request, request_from_line
from gpuprov.protocol.spec import HostSpec, SiteRepository, spec_to_json
from tests import simgpu
from tests.bundles import FILES, MANIFEST, write_test_bundle
from tests.unit.bundle.test_use import BUNDLE, SPEC, BundleHost, problem, run, with_image
from tests.unit.fake_host import BUILD_PACKAGES, RELEASE, FakeHost
from tests.unit.test_reboot import RebootingHost

pytestmark = pytest.mark.root
ONLY_SOURCE = f"Dir::Etc::sourcelist={FOLDER}/sources.list"
SITE = SiteRepository("site", "https://mirror.example/apt", "https://mirror.example/key.asc", "A" * 40)
# All that would bring repositories and keys without a bundle.
FROM_EVERYWHERE = dataclasses.replace(
    SPEC, repositories=(SITE,), toolkit="nvidia", cuda="12.4", packages=("site-gpu-tools=1.0",), hold_pinned=True
)
TOOLKIT = (
    "nvidia-container-toolkit", "nvidia-container-toolkit-base", "libnvidia-container-tools", "libnvidia-container1",
    "cuda-toolkit-12-4",
)  # fmt: skip


def holding(*names: str, manifest: Manifest = MANIFEST) -> Manifest:
    file = manifest.packages[0].file
    packages = (*manifest.packages, *(BundlePackage(name, "1.0", "amd64", file) for name in names))
    return dataclasses.replace(manifest, packages=packages)


def calls(host: FakeHost) -> list[tuple[str, ...]]:
    """Return the calls of apt-get that look at sources: not those that take packages away."""
    return [command for command in host.commands if command[0] == "apt-get" and "purge" not in command]


class TornHost(BundleHost):
    """A host on which an installation was killed: half of one package lies there, the configuration of another."""

    torn = True

    def run(self, argv: Sequence[str], **options: Any) -> Completed:
        if argv[0] == "dpkg":
            self.commands.append(tuple(argv))
            return Completed(tuple(argv), 0, "half is in a mess\n" if self.torn and "--audit" in argv else "", "")
        return super().run(argv, **options)

    def _dpkg_query(self, words: tuple[str, ...]) -> tuple[int, str]:
        code, text = super()._dpkg_query(words)
        if "${Conffiles}" in words[1]:
            return code, text
        half = "half-installed half 1.0 amd64 install reinstreq \n" if self.torn else ""
        left = "" if "site-gpu-tools" in self.installed else "config-files site-gpu-tools 0.9 amd64 deinstall ok \n"
        return code, text + half + left

    def _apt_get(self, words: tuple[str, ...]) -> tuple[int, str]:
        if "--reinstall" in words:
            self.torn = False
            return 0, ""
        return super()._apt_get(words)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return where the addresses come to lie that a run would ask for."""
    found: list[str] = []

    def ask(system: object, urls: Sequence[str]) -> tuple[()]:
        found.extend(urls)
        return ()

    monkeypatch.setattr(install, "unreachable", ask)
    return found


def test_no_change_has_an_address(tmp_path: Path, asked: list[str]) -> None:
    host = BundleHost(tmp_path)
    host.available.update(dict.fromkeys(TOOLKIT, "1.0"))
    write_test_bundle(tmp_path / "root/bundle.tar", holding(*TOOLKIT))
    finished = run(host, FROM_EVERYWHERE)
    assert finished.exit_code == ExitCode.DONE, finished.problems
    assert asked == []
    assert host.list_directory("/etc/apt/sources.list.d") == ()
    assert host.held == {"site-gpu-tools"}
    assert len(calls(host)) == 2
    assert all(ONLY_SOURCE in command for command in calls(host))
    assert run(host, FROM_EVERYWHERE).changed == 0


def test_without_a_bundle_apt_has_the_hosts_own_sources(tmp_path: Path) -> None:
    host = BundleHost(tmp_path)
    plan = make_plan(gather(host), dataclasses.replace(FROM_EVERYWHERE, driver_version=simgpu.DRIVER_VERSION))
    assert not plan.problems
    assert {url for item in plan.changes for url in item.change.urls}
    assert not any(getattr(item.change, "options", ()) for item in plan.changes)


def test_half_of_a_package_is_unpacked_again_from_the_bundle(tmp_path: Path) -> None:
    host = TornHost(tmp_path)
    write_test_bundle(tmp_path / "root/bundle.tar")
    finished = run(host)
    assert finished.exit_code == ExitCode.DONE, finished.problems
    verbs = [next(word for word in command if word in ("update", "install")) for command in calls(host)]
    assert verbs == ["update", "install", "install", "install"]
    assert ["--simulate" in command for command in calls(host)] == [False, True, False, False]
    assert ["--reinstall" in command for command in calls(host)] == [False, False, True, False]
    assert all(ONLY_SOURCE in command for command in calls(host))


def test_the_drivers_pin_comes_from_the_bundle_too(tmp_path: Path) -> None:
    host = FakeHost(tmp_path, metal=True)
    facts = dataclasses.replace(gather(host), bundle=BundleFacts(MANIFEST))
    changes: tuple[Change, ...] = source_of(facts, HostSpec(driver="packages", driver_version="580")).plan_preparation()
    assert len(changes) == 2
    assert all(ONLY_SOURCE in getattr(change, "options", ()) for change in changes)
    problems = make_plan(facts, HostSpec(driver="packages", driver_version="580")).problems
    assert "nvidia-driver-pinning-580" in str(problems[0])


def test_a_run_uses_its_bundle_after_a_reboot(tmp_path: Path) -> None:
    class Host(RebootingHost, BundleHost):
        """Nouveau has the GPU; docker keeps images."""

    host = Host(tmp_path / "root")
    manifest, files = with_image()
    write_test_bundle(host.path(BUNDLE), holding("libtirpc3", manifest=manifest), files)
    spec = HostSpec(driver="preinstalled", packages=("site-gpu-tools",), reboot="if-needed")
    events: list[Event] = []
    run_request(Request("install", spec_to_json(spec), bundle=BUNDLE), events.append, host)
    assert isinstance(events[-1], Finished)
    assert events[-1].left_boot == "boot-1", events[-1].problems
    assert host.installed["site-gpu-tools"] == "1.0"
    assert not host.images
    assert not host.exists(FOLDER)
    request = request_from_line(host.read_text("/var/lib/gpuprov/resume.json") or "")
    host.boot("nvidia")
    assert run_request(request, events.append, host) == ExitCode.DONE, events[-1]
    assert host.images
    assert not host.exists(FOLDER)
    assert all(ONLY_SOURCE in command for command in calls(host))


def test_headers_of_kernels_to_come_are_asked_for_by_name(tmp_path: Path) -> None:
    """They are no kernel's that `--kernel` could name."""
    host = FakeHost(tmp_path, metal=True)
    host.installed["linux-image-amd64"] = "6.1.55-1"
    write_test_bundle(tmp_path / "root/bundle.tar", holding(*BUILD_PACKAGES, "libtirpc3"), FILES)
    says = problem(run(host))
    assert f"--kernel {RELEASE}" in says
    assert "--package linux-headers-amd64" in says
