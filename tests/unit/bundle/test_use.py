"""A bundle on a host: what is refused before anything changes, what it is used for, and that nothing of it stays."""

import dataclasses
import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from gpuprov.agent import install
from gpuprov.agent.push import STORE_BUNDLE
from gpuprov.agent.run import run_request
from gpuprov.bundle.manifest import BundleFacts, BundleImage, BundlePackage, Manifest
from gpuprov.core.changes import Change
from gpuprov.core.commands import Completed
from gpuprov.core.places import CACHE_DIRECTORY, FOLDER
from gpuprov.core.system import sha256_of
from gpuprov.engines.containers import image_identity
from gpuprov.facts.host import gather
from gpuprov.plan.context import source_of
from gpuprov.plan.steps import make_plan
from gpuprov.protocol.errors import ExitCode
from gpuprov.protocol.events import ChangeDone, Event, Finished, Planned
from gpuprov.protocol.request import Request, request_from_line
from gpuprov.protocol.spec import HostSpec, SiteRepository, spec_to_json
from tests import simgpu
from tests.bundles import DRIVER, FILES, KEY, MANIFEST, bundle_bytes, listed, write_test_bundle
from tests.files import put
from tests.unit.ask import ask
from tests.unit.fake_host import BUILD_PACKAGES, RELEASE, FakeHost
from tests.unit.test_reboot import RebootingHost

pytestmark = pytest.mark.root
BUNDLE = "/root/bundle.tar"
# An inventory may name repositories that a host without a network can't reach.
SPEC = HostSpec(packages=("site-gpu-tools",))
IMAGE_FILE = "images/app_1-00000000.tar"


class BundleHost(FakeHost):
    """The fake host, with a docker that keeps images, and an eye on what apt finds."""

    def __init__(self, root: Path, gpus: int = 2, *, metal: bool = False) -> None:
        super().__init__(root, gpus, metal=metal)
        self.images: dict[str, str] = {}
        self.sources = ""
        self.seen_by_apt: set[str] = set()

    def _apt_get(self, words: tuple[str, ...]) -> tuple[int, str]:
        if "install" in words:
            settings = [word for option, word in zip(words, words[1:]) if option == "-o"]
            listed_in = dict(setting.split("=", 1) for setting in settings).get("Dir::Etc::sourcelist", "")
            self.sources = self.read_text(listed_in) or ""
            self.seen_by_apt = set(self.list_directory(f"{FOLDER}/repository"))
        return super()._apt_get(words)

    def _docker(self, words: tuple[str, ...]) -> tuple[int, str]:
        if words[:2] == ("image", "inspect"):
            found = self.images.get(words[-1])
            return (0, f"{found}\n") if found else (1, f"Error: No such image: {words[-1]}")
        if words[0] == "load":
            self.images["app:1"] = self.read_text(words[-1]) or ""
            return 0, "Loaded image: app:1"
        if words[0] in ("rmi", "tag"):
            found = self.images.pop("app:1", "")
            if words[0] == "tag":
                self.images[words[2]] = words[1]
            return 0, found
        return super()._docker(words)


@pytest.fixture
def host(tmp_path: Path) -> BundleHost:
    made = BundleHost(tmp_path)
    write_test_bundle(tmp_path / "root/bundle.tar")
    return made


def with_image() -> tuple[Manifest, dict[str, bytes]]:
    image = BundleImage("app:1", sha256_of(b"what is in app:1"), IMAGE_FILE)
    return dataclasses.replace(MANIFEST, images=(image,)), {**FILES, IMAGE_FILE: b"what is in app:1"}


def run(host: FakeHost, spec: HostSpec = SPEC, **options: Any) -> Finished:
    return events(host, spec, **options)[1]


def events(
    host: FakeHost, spec: HostSpec = SPEC, *, check: bool = False, digest: str = "", bundle: str = BUNDLE
) -> tuple[list[Event], Finished]:
    ended, found = ask(host, Request("install", spec_to_json(spec), check=check, bundle=bundle, bundle_digest=digest))
    return found, ended


def problem(finished: Finished) -> str:
    assert finished.exit_code == ExitCode.FAILED
    for one in finished.problems:
        assert one.what and one.evidence and one.next_step
    return "\n".join(str(one) for one in finished.problems)


def test_it_is_all_that_an_installation_needs(host: BundleHost) -> None:
    """The driver's version too; nothing is fetched, and apt is shown nothing else."""
    finished = run(host)
    assert finished.exit_code == ExitCode.DONE, finished.problems
    assert host.installed["site-gpu-tools"] == "1.0"
    assert host.sources == f"deb [signed-by={FOLDER}/repository/key.gpg] file:{FOLDER}/repository ./\n"
    assert host.seen_by_apt == {"Packages", "InRelease", "key.gpg", "site-gpu-tools_1.0_all.deb"}
    (installer,) = [command for command in host.commands if command[0] == "sh"]
    assert installer[1] == f"{FOLDER}/{DRIVER}"


def test_nothing_of_it_stays_and_the_second_run_is_empty(host: BundleHost) -> None:
    run(host)
    assert host.list_directory("/var/cache/gpuprov") == ("driver",)
    before = host.state()
    assert run(host).changed == 0
    assert host.state() == before
    assert not any("gpuprov" in name for name in host.list_directory("/etc/apt/sources.list.d"))


def test_sources_that_an_inventory_names_are_left_as_they_are(host: BundleHost) -> None:
    """They can't be reached; and one that an earlier run wrote is not this run's to remove."""
    host.write("/etc/apt/sources.list.d/gpuprov-old.sources", b"Types: deb\n")
    assert run(host, dataclasses.replace(SPEC, toolkit_repository="https://unreachable.example")).exit_code == 0
    assert host.list_directory("/etc/apt/sources.list.d") == ("gpuprov-old.sources",)


def test_check_says_what_an_installation_would_do(host: BundleHost) -> None:
    before = host.state()
    planned = next(event for event in events(host, check=True)[0] if isinstance(event, Planned))
    assert host.state() == before
    done = [event.key for event in events(host)[0] if isinstance(event, ChangeDone)]
    assert [change.key for change in planned.changes] == done


def tampered() -> bytes:
    content = bundle_bytes()
    place = content.index(b"Package: site-gpu-tools\n")
    return content[:place] + b"p" + content[place + 1 :]


def for_other(**fields: Any) -> Callable[[], bytes]:
    return lambda: bundle_bytes(dataclasses.replace(MANIFEST, **fields))


def with_another_key() -> bytes:
    return bundle_bytes(files={**FILES, "repository/key.gpg": KEY[:-1] + b"3"})


REFUSED: dict[str, tuple[Callable[[], bytes], HostSpec, str]] = {
    "tampered": (tampered, SPEC, "a file in the bundle was tampered with or damaged"),
    "another key": (with_another_key, SPEC, "the key of the bundle's repository is not the one that its manifest"),
    "no key": (for_other(repository_key=""), SPEC, "no full fingerprint of the key that signed their repository"),
    "truncated": (lambda: bundle_bytes()[:-700], SPEC, "the bundle is cut off"),
    "not one": (lambda: b"#!/bin/sh\n" * 100, SPEC, "no bundle that gpuprov wrote"),
    "another release": (for_other(version="11"), SPEC, "the bundle is for debian 11 on x86_64, this host is another"),
    "no headers": (
        bundle_bytes, dataclasses.replace(SPEC, kernel_modules="build"), f"--kernel {RELEASE}",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_bundle_that_does_not_serve_is_refused_before_anything_changes(host: BundleHost, name: str) -> None:
    make, spec, says = REFUSED[name]
    host.path(BUNDLE).write_bytes(make())
    if name == "no headers":
        host.path("/proc").mkdir(exist_ok=True)
        host.path("/proc/modules").write_text("loop 1 0 - Live 0x0\n")
    before = host.state()
    assert says in problem(run(host, spec))
    assert host.state() == before
    assert not host.exists("/var/cache/gpuprov/bundle")
    assert host.exists(BUNDLE)


def test_a_disk_that_is_too_small_is_told_before(host: BundleHost, monkeypatch: pytest.MonkeyPatch) -> None:
    content = bytes(3 << 20)
    write_test_bundle(host.path(BUNDLE), files={**FILES, "repository/zzz.deb": content})
    monkeypatch.setattr(host, "free_bytes", lambda path: 2 << 20)
    before = host.state()
    assert "2 MiB free on the file system of /var/cache/gpuprov, 3 MiB needed" in problem(run(host))
    assert host.state() == before


def test_another_bundle_than_the_one_that_was_asked_for_is_refused(host: BundleHost) -> None:
    assert "expected 1111" in problem(run(host, digest="1" * 64))
    assert listed(MANIFEST, FILES).files
    assert "can't be read" in problem(run(host, bundle="/root/no-such.tar"))


def test_a_damaged_upload_is_removed_and_the_next_run_uploads_again(host: BundleHost) -> None:
    place = "/var/cache/gpuprov/bundle-1.tar"
    host.make_directory("/var/cache/gpuprov")
    host.path(place).write_bytes(tampered())
    assert "tampered" in problem(run(host, bundle=place))
    assert not host.exists(place)
    host.path(place).write_bytes(bundle_bytes())
    assert run(host, bundle=place).exit_code == ExitCode.DONE
    assert host.exists(place)


# -- images ---------------------------------------------------------------------------------------------------------


def test_an_image_is_loaded_once(host: BundleHost) -> None:
    write_test_bundle(host.path(BUNDLE), *with_image())
    keys = [event.key for event in events(host)[0] if isinstance(event, ChangeDone)]
    assert keys[-1] == "load image app:1 from the bundle"
    assert image_identity(host, "app:1") == sha256_of(b"what is in app:1")
    assert run(host).changed == 0


def test_an_image_that_is_not_the_manifests_is_an_error(host: BundleHost) -> None:
    manifest, files = with_image()
    image = dataclasses.replace(manifest.images[0], identity=sha256_of(b"another"))
    write_test_bundle(host.path(BUNDLE), dataclasses.replace(manifest, images=(image,)), files)
    assert "the image that docker loaded is not the app:1 of the manifest" in problem(run(host))
    assert host.images == {}


def test_the_request_of_an_older_controller_still_works(host: BundleHost) -> None:
    """A request without the two fields is one without a bundle."""

    assert request_from_line(json.dumps({"command": "facts"})) == Request("facts", bundle="", bundle_digest="")


class PodmanHost(BundleHost):
    """The same with podman in place of docker."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        for program in ("docker", "dockerd"):
            (root / "usr/bin" / program).unlink()
        put(root / "usr/bin/podman", "#!/bin/sh\n", 0o755)

    def run(self, argv: Sequence[str], **more: Any) -> Completed:
        assert argv[0] not in ("docker", "dockerd")
        if argv[0] != "podman":
            return super().run(argv, **more)
        code, said = self._docker(tuple(argv[1:]))
        return Completed(tuple(argv), code, said, said)


def test_without_docker_podman_gets_the_images_and_gives_them_back(tmp_path: Path) -> None:
    host = PodmanHost(tmp_path)
    write_test_bundle(host.path(BUNDLE), *with_image())
    spec = dataclasses.replace(SPEC, docker="none")
    before = host.state()
    finished = run(host, spec)
    assert finished.exit_code == ExitCode.DONE, finished.problems
    assert host.images == {"app:1": "what is in app:1"}
    assert run(host, spec).changed == 0
    run_request(Request("rollback"), lambda event: None, host)
    assert host.images == {} and host.state() == before


# -- without a network -------------------------------------------------------------------------------------------------
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
    ended, _ = ask(host, Request("install", spec_to_json(spec), bundle=BUNDLE))
    assert ended.left_boot == "boot-1", ended.problems
    assert host.installed["site-gpu-tools"] == "1.0"
    assert not host.images
    assert not host.exists(FOLDER)
    request = request_from_line(host.read_text("/var/lib/gpuprov/resume.json") or "")
    host.boot("nvidia")
    ended, _ = ask(host, request)
    assert ended.exit_code == ExitCode.DONE, ended
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


def test_a_stored_bundle_leaves_the_upload_of_another_controller(tmp_path: Path) -> None:
    ages = {"bundle-b-9.tar": 0, "bundle-c-9.tar.part": 0, "bundle-d-9.tar.part": 2 * 86400, "agent-e": 0}
    for name, age in ages.items():
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    script = STORE_BUNDLE.replace(CACHE_DIRECTORY, str(tmp_path))
    subprocess.run(("sh", "-c", script, "sh", "bundle-a-5.tar", "5"), input=b"whole", check=True, timeout=60)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["agent-e", "bundle-a-5.tar", "bundle-c-9.tar.part"]
