"""nouveau and nova kept off the GPUs: what is planned where, what is proved, what is undone."""

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuprov.boot import reboot
from gpuprov.checks import features
from gpuprov.checks.outcome import Failed
from gpuprov.core.apply import apply_changes
from gpuprov.core.changes import Change, capture_path, text_diff
from gpuprov.core.commands import Completed
from gpuprov.core.journal import new_journal
from gpuprov.core.system import System
from gpuprov.driver import nouveau
from gpuprov.facts import kernels
from gpuprov.facts.host import HostFacts, gather
from gpuprov.facts.kernels import BLACKLIST, DRACUT_CONFIGURATION, LOADED_OPTIONS, MODULE_OPTIONS, Image, kernel_of
from gpuprov.machine.pci import PciGpu
from gpuprov.plan.context import source_of
from gpuprov.plan.refusals import refusals
from gpuprov.protocol.errors import GpuprovError
from gpuprov.protocol.spec import HostSpec, parse_spec
from tests.files import put
from tests.runs import undo_last
from tests.unit.fake_host import RELEASE, FakeHost
from tests.unit.refused import refused

pytestmark = pytest.mark.root
IMAGE = f"/boot/initrd.img-{RELEASE}"


def spec(**values: Any) -> HostSpec:
    return parse_spec({"driver_version": "550.163.01", **values})


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    made = FakeHost(tmp_path / "root", metal=True)
    # Built long before.
    os.utime(made.path(IMAGE), (1000, 1000))
    return made


def apply(host: FakeHost, changes: tuple[Change, ...]) -> None:
    journal = new_journal(host, "install")
    try:
        apply_changes(changes, host, journal, lambda event: None)
    finally:
        journal.end("done")


def test_blacklist_and_initramfs_then_nothing_and_back(host: FakeHost) -> None:
    before = host.tree()
    changes = nouveau.plan(source_of(gather(host), spec()))
    assert [change.summary() for change in changes] == [
        f"keep nouveau, nova_core and nova_drm off the GPUs ({BLACKLIST}); rebuild the initramfs of {RELEASE}"
    ]
    assert "+blacklist nova_core" in changes[0].diff(host)
    apply(host, changes)
    assert kernels.holds_file(host.read_text(IMAGE) or "", BLACKLIST)
    assert nouveau.plan(source_of(gather(host), spec())) == ()
    undo_last(host)
    assert host.tree() == before


def test_an_image_older_than_the_blacklist_is_rebuilt_alone(host: FakeHost) -> None:
    apply(host, nouveau.plan(source_of(gather(host), spec())))
    os.utime(host.path(IMAGE), (1000, 1000))
    (change,) = nouveau.plan(source_of(gather(host), spec()))
    assert isinstance(change, nouveau.KeepNouveauOut)
    assert change.files == ()
    assert [image.path for image in change.images] == [IMAGE]


def test_a_blacklist_written_while_the_clock_was_ahead_is_written_again(host: FakeHost) -> None:
    apply(host, nouveau.plan(source_of(gather(host), spec())))
    tomorrow = time.time() + 86400
    os.utime(host.path(BLACKLIST), (tomorrow, tomorrow))
    apply(host, nouveau.plan(source_of(gather(host), spec())))
    assert nouveau.plan(source_of(gather(host), spec())) == ()


def test_an_image_that_still_loads_nouveau_is_an_error_and_is_undone(host: FakeHost) -> None:
    before = host.tree()
    host.initramfs_forgets = True
    problem = refused(apply, host, nouveau.plan(source_of(gather(host), spec())))
    assert host.tree() == before and problem.what == f"{IMAGE} would still load nouveau at boot"
    assert problem.evidence == f"it was rebuilt, holds nouveau.ko and not {BLACKLIST}"
    assert "modprobe.d" in problem.next_step


def test_undo_that_cannot_rebuild_an_image_is_an_error(host: FakeHost) -> None:
    (change,) = nouveau.plan(source_of(gather(host), spec()))
    before = change.capture(host)
    told: list[tuple[str, int, int]] = []
    outcome = change.apply(host, lambda *words: told.append(words)) or {}
    assert told == [(f"rebuilding {IMAGE}", 0, 1)]
    assert "blacklist" not in change.diff(host)
    host.initramfs_error = "cpio: write error: No space left on device"
    with pytest.raises(GpuprovError, match="No space left on device"):
        change.undo(host, before, outcome)
    change.undo(host, before, None)
    # A power cut may have left no image.
    host.initramfs_error = ""
    host.remove(IMAGE)
    change.undo(host, before, None)
    assert host.exists(IMAGE)


@pytest.mark.parametrize("files", [True, False])
def test_undo_rebuilds_images_of_kernels_that_came_and_none_of_those_that_went(host: FakeHost, files: bool) -> None:
    """dracut fails without /lib/modules/KERNEL, and update-initramfs makes an image that nothing boots."""
    apply(host, nouveau.plan(source_of(gather(host), spec())))
    coming, gone = "6.1.0-99-amd64", "6.1.0-1-amd64"
    host.make_directory(f"/lib/modules/{coming}")
    host.write(f"/boot/initrd.img-{coming}", b"")
    changed = [capture_path(host, BLACKLIST)] if files else []
    before = {"files": changed, "images": [[one, f"/boot/initrd.img-{one}"] for one in (RELEASE, gone)]}
    host.commands.clear()
    nouveau.KeepNouveauOut.undo(host, before, {})
    assert [words[-1] for words in host.commands] == [RELEASE, *[coming] * files]


def test_an_image_that_is_up_to_date_is_not_rebuilt(host: FakeHost) -> None:
    apply(host, nouveau.plan(source_of(gather(host), spec())))
    host.path(BLACKLIST).unlink()
    (change,) = nouveau.plan(source_of(gather(host), spec()))
    assert change.summary().endswith(f"rebuild the initramfs of {RELEASE}")
    host.path(IMAGE).unlink()
    (change,) = nouveau.plan(source_of(gather(host), spec()))
    assert change.summary().endswith(f"({BLACKLIST})")


def test_what_the_command_says_is_shown(host: FakeHost) -> None:
    host.initramfs_error = "cpio: write error: No space left on device"
    problem = refused(apply, host, nouveau.plan(source_of(gather(host), spec())))
    assert "No space left on device" in problem.evidence and "df -h /boot" in problem.next_step
    assert not host.exists(BLACKLIST)


@pytest.mark.parametrize("mode", ["", "driver"])
def test_dracut_is_told_to_omit_the_drivers(host: FakeHost, mode: str) -> None:
    facts = gather(host)
    facts = replace(facts, initramfs=replace(facts.initramfs, dracut=True))
    (change,) = nouveau.plan(source_of(facts, spec(coherent_memory=mode)))
    assert isinstance(change, nouveau.KeepNouveauOut)
    options = (MODULE_OPTIONS,) if mode else ()
    assert [path for path, _ in change.files] == [BLACKLIST, DRACUT_CONFIGURATION, *options]
    _, *lines = (dict(change.files)[DRACUT_CONFIGURATION] or b"").decode().splitlines()
    installs = [f'install_items+=" {path} "' for path in (BLACKLIST, *options)]
    assert lines == ['omit_drivers+=" nouveau nova_core nova_drm "', *installs]
    assert (f"; set the options of the module nvidia ({MODULE_OPTIONS});" in change.summary()) is bool(mode)


def test_every_image_is_rebuilt(host: FakeHost) -> None:
    """Also where the driver's own files keep nouveau out: then no image is searched for gpuprov's."""
    releases = (RELEASE, "6.1.0-14-amd64")
    images = tuple(Image(release, f"/boot/initrd.img-{release}") for release in releases)
    host.make_directory("/etc/modprobe.d")
    host.write(BLACKLIST, b"z\n")
    files = ((BLACKLIST, None), (MODULE_OPTIONS, b"x\n"), (DRACUT_CONFIGURATION, b"y\n"))
    change, told = nouveau.KeepNouveauOut(files, images), list[tuple[str, int, int]]()
    assert change.summary().endswith(f"; rebuild the initramfs of {', '.join(releases)}")
    assert change.diff(host) == "\n".join(text_diff(path, host.read_bytes(path), content) for path, content in files)
    before = change.capture(host)
    assert before == {
        "files": [capture_path(host, path) for path, _ in files],
        "images": [[image.kernel, image.path] for image in images],
    }
    host.commands.clear()
    change.apply(host, lambda *words: told.append(words))
    assert told == [(f"rebuilding {image.path}", number, 2) for number, image in enumerate(images)]
    rebuilds = [("update-initramfs", "-u", "-k", release) for release in releases]
    assert host.commands == rebuilds and [host.read_bytes(path) for path, _ in files] == [None, b"x\n", b"y\n"]
    host.make_directory(f"/lib/modules/{releases[1]}")
    nouveau.KeepNouveauOut.undo(host, before, {})
    assert sorted(host.commands) == sorted([*rebuilds, *rebuilds])
    assert [host.read_bytes(path) for path, _ in files] == [b"z\n", None, None]


def test_an_image_as_old_as_the_configuration_is_not_rebuilt(host: FakeHost) -> None:
    apply(host, nouveau.plan(source_of(gather(host), spec())))
    facts = gather(host)
    facts = replace(facts, initramfs=replace(facts.initramfs, configured=facts.initramfs.images[0].modified))
    assert nouveau.plan(source_of(facts, spec())) == ()


def test_a_driver_from_packages_needs_the_gpus_as_much(host: FakeHost) -> None:
    facts = gather(host)
    assert nouveau.plan(source_of(facts, spec(driver="packages"))) == nouveau.plan(source_of(facts, spec()))


@pytest.mark.parametrize(
    ("metal", "values"), [(True, {"kernel_modules": "none"}), (True, {"driver": "preinstalled"}), (False, {})]
)
def test_who_brings_the_driver_otherwise_keeps_nouveau_out_otherwise(
    tmp_path: Path, metal: bool, values: dict[str, str]
) -> None:
    assert nouveau.plan(source_of(gather(FakeHost(tmp_path / "other", metal=metal)), spec(**values))) == ()


PARAMS = 'ImexChannelCount: 2048\nCoherentGPUMemoryMode: "{}"\nRegistryDwords: ""\n'
GH200 = "2342"


@pytest.fixture
def grace(host: FakeHost) -> HostFacts:
    """A host with a coherent GPU, on which nouveau is kept out and the driver is loaded with its default mode."""
    apply(host, nouveau.plan(source_of(gather(host), spec(driver_version="580.95.05"))))
    put(host.path(LOADED_OPTIONS), PARAMS.format(""))
    return gather(host)


def asks(mode: str = "driver", **values: Any) -> HostSpec:
    return parse_spec({"driver_version": "580.95.05", "coherent_memory": mode, "driver": "preinstalled", **values})


def test_coherent_memory_is_an_option_of_the_module_in_every_initramfs(host: FakeHost, grace: HostFacts) -> None:
    before = host.tree()
    changes = nouveau.plan(source_of(gather(host), asks()))
    named = f"set the options of the module nvidia ({MODULE_OPTIONS}); rebuild the initramfs of {RELEASE}"
    assert [one.summary() for one in changes] == [named]
    assert "+options nvidia NVreg_CoherentGPUMemoryMode=driver" in changes[0].diff(host)
    apply(host, changes)
    assert "options nvidia-current NVreg_CoherentGPUMemoryMode=driver" in (host.read_text(MODULE_OPTIONS) or "")
    assert kernels.holds_file(host.read_text(IMAGE) or "", MODULE_OPTIONS)
    assert nouveau.plan(source_of(gather(host), asks())) == ()
    (other,) = nouveau.plan(source_of(gather(host), asks("numa")))
    assert "+options nvidia NVreg_CoherentGPUMemoryMode=numa" in other.diff(host)
    apply(host, nouveau.plan(source_of(gather(host), asks(""))))
    assert not host.exists(MODULE_OPTIONS), "no longer asked for"
    undo_last(host)
    assert host.exists(MODULE_OPTIONS), "and given back"
    assert {*before} < {*host.tree()}


def test_a_preinstalled_driver_keeps_nouveau_out_by_itself(host: FakeHost) -> None:
    """An image may hold nouveau.ko then, without gpuprov's blacklist: only the option is gpuprov's."""
    apply(host, nouveau.plan(source_of(gather(host), asks())))
    content = kernels.list_content(host, Image(RELEASE, IMAGE))
    assert kernels.modules_in(content, nouveau.MODULES) and not kernels.holds_file(content, BLACKLIST)
    assert kernels.holds_file(content, MODULE_OPTIONS)
    assert nouveau.plan(source_of(gather(host), asks())) == ()


@pytest.mark.parametrize(("loaded", "asked", "other"), [
    (PARAMS.format(""), "driver", True),
    (PARAMS.format("numa"), "driver", True),
    (PARAMS.format("driver"), "driver", False),
    (PARAMS.format("driver"), "", False),
    ("RegistryDwords: 0\n", "driver", False),  # before 580
])  # fmt: skip
def test_reboot_for_another_memory_mode(host: FakeHost, grace: HostFacts, loaded: str, asked: str, other: bool) -> None:
    host.path(LOADED_OPTIONS).write_text(loaded)
    found = reboot.reasons(source_of(gather(host), asks(asked)))
    name = "numa" if "numa" in loaded else "unset"
    assert [one.endswith(f" {name}, not {asked}") for one in found if "CoherentGPUMemoryMode" in one] == [True] * other
    checks = dict(features.checks(ReallyRun(str(host.root)), asks(asked)))
    assert list(checks) == (["coherent memory"] if asked else [])
    if asked and loaded.startswith("Imex") and not other:
        assert checks["coherent memory"]() == (asked, "")
    elif asked:
        with pytest.raises(Failed, match="systemctl reboot"):
            checks["coherent memory"]()


class ReallyRun(System):
    """A root file system whose files the machine's own programs read."""

    def run(self, argv: Sequence[str], **more: Any) -> Completed:
        return super().run([str(self.path(one)) if one.startswith("/") else one for one in argv], **more)


@pytest.mark.parametrize(("device", "values", "problem"), [
    (GH200, {}, ""),
    ("2941", {}, ""),
    ("2e12", {}, "Blackwell"),  # GB10
    ("2330", {}, "H100"),
    (GH200, {"driver": "runfile", "driver_version": "570.133.20"}, "driver 570.133.20"),
])  # fmt: skip
def test_coherent_memory_that_is_not_there(grace: HostFacts, device: str, values: dict[str, str], problem: str) -> None:
    facts = replace(grace, gpus=(PciGpu("0000:1b:00.0", device, "nvidia"),))
    facts = replace(facts, driver=replace(facts.driver, library_version=""))
    others = {*refusals(source_of(facts, asks("", **values)))}
    found = [str(one) for one in refusals(source_of(facts, asks(**values))) if one not in others]
    assert [problem in one for one in found] == ([True] if problem else [])


# The names of Debian and Ubuntu, of the RHEL family and of SUSE; programs; the command.
COMMANDS = {
    "initrd.img-6.1.0-13-amd64": ("update-initramfs dracut", "update-initramfs -u -k 6.1.0-13-amd64"),
    "initrd.img-6.1.0-14-amd64": ("dracut", "dracut --force /boot/initrd.img-6.1.0-14-amd64 6.1.0-14-amd64"),
    "initramfs-5.14.0-427.13.1.el9_4.x86_64.img": (
        "dracut",
        "dracut --force /boot/initramfs-5.14.0-427.13.1.el9_4.x86_64.img 5.14.0-427.13.1.el9_4.x86_64",
    ),
    "initrd-6.4.0-150600-default": (
        "mkinitrd",
        "mkinitrd -k vmlinuz-6.4.0-150600-default -i initrd-6.4.0-150600-default",
    ),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_distributions_own_command(tmp_path: Path, name: str) -> None:
    programs, command = COMMANDS[name]
    host = FakeHost(tmp_path / "root")
    for program in programs.split():
        put(host.root / "usr/bin" / program, "#!/bin/sh\n", 0o755)
    assert " ".join(kernels.rebuild_command(host, Image(kernel_of(name), f"/boot/{name}"))) == command


def test_other_files_are_no_images() -> None:
    assert kernel_of("vmlinuz-6.1.0-13-amd64") == kernel_of("config-6.1.0-13-amd64") == ""


def test_no_command_is_said(tmp_path: Path) -> None:
    with pytest.raises(GpuprovError, match="its program is not installed"):
        kernels.rebuild_command(FakeHost(tmp_path / "root"), Image("6.1", "/boot/initramfs-6.1.img"))


LISTINGS = {
    "usr/lib/modules/6.1.0-13-amd64/kernel/drivers/gpu/drm/nouveau/nouveau.ko": ("nouveau",),
    "usr/lib/modules/7.0.0-14-generic/kernel/drivers/gpu/nova-core/nova_core.ko.zst": ("nova_core",),
    "-rw-r--r--   1 root root 1234 Apr  8 2025 usr/lib/modules/5.14.0/drm/nouveau/nouveau.ko.xz": ("nouveau",),
    "usr/lib/modules/6.1.0-13-amd64/kernel/drivers/gpu/drm/nova/nova-drm.ko": ("nova_drm",),
    "usr/lib/modules/6.1.0-13-amd64/kernel/drivers/platform/x86/nouveau-wmi.ko": (),
}


@pytest.mark.parametrize("listing", LISTINGS)
def test_modules_in_a_listing(listing: str) -> None:
    assert kernels.modules_in(f"etc/fstab\n{listing}\nbin/sh\n", nouveau.MODULES) == LISTINGS[listing]


def test_the_blacklist_in_a_listing() -> None:
    assert kernels.holds_file(f"etc\n{BLACKLIST[1:]}\n", BLACKLIST)
    assert kernels.holds_file(f"-rw-r--r-- 1 root root 92 Apr  8 2025 {BLACKLIST[1:]}\n", BLACKLIST)
    assert not kernels.holds_file("etc/modprobe.d/gpuprov-nouveau.conf.old\n", BLACKLIST)


BOUND = {"nouveau": True, "NovaCore": True, "nova_core": True, "nvidia": False, "vfio-pci": False, "": False}


@pytest.mark.parametrize("driver", BOUND)
def test_which_drivers_are_in_the_way(host: FakeHost, driver: str) -> None:
    facts = gather(host)
    assert {gpu.driver for gpu in facts.gpus} == {"nouveau"}
    gpus = (replace(facts.gpus[0], driver=driver),)
    expected = (f"GPU {gpus[0].bus_id} is bound to {driver}",) if BOUND[driver] else ()
    assert nouveau.bound(gpus) == expected
