"""An image for machines that are not here: what its plan asks for, what it leaves out, and what is removed last."""

import base64
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuprov.boot import clean, prepare
from gpuprov.core.changes import Change, FileFact, WriteFile
from gpuprov.core.commands import Completed
from gpuprov.core.system import ImageSystem
from gpuprov.driver import generations, kernel
from gpuprov.driver_run import InstallDriver
from gpuprov.facts.boot import MODULES, NODES, SSH_KEYGEN, SSH_KEYS
from gpuprov.facts.host import HostFacts, gather
from gpuprov.facts.kernels import ImageFacts, InstalledKernel, gather_identity, kernel_to_come, newest_kernel
from gpuprov.plan.context import PlanContext, source_of
from gpuprov.plan.preflight import preflight
from gpuprov.plan.steps import make_plan
from gpuprov.protocol import tables
from gpuprov.protocol.errors import GpuprovError
from gpuprov.protocol.models import generation_of
from gpuprov.protocol.spec import GENERATIONS, HostSpec, parse_spec
from gpuprov.protocol.tables import PACKAGED
from tests.files import put
from tests.unit.fake_host import FakeHost

ROOT = Path(__file__).resolve().parents[2]
_OLD, _NEW = "6.1.0-12-amd64", "6.1.0-13-amd64"
_SAID = {"target": "image", "image_gpus": ["ampere"], "image_nvswitch": False, "driver_version": "550.163.01",
         "driver_url": "/root/driver.run"}  # fmt: skip


@pytest.fixture
def facts(tmp_path: Path) -> HostFacts:
    """An image with two kernels, of which neither has a module."""
    found = gather(FakeHost(tmp_path / "host", gpus=0))
    kernels = tuple(InstalledKernel(release, headers=False, module=False) for release in (_OLD, _NEW))
    image = ImageFacts(kernels, generations.ids_of(("ampere",), PACKAGED), offline=True)
    return replace(found, image=image, kernel=kernel_to_come(_NEW), gpus=())


def spec(**more: object) -> HostSpec:
    return parse_spec({**_SAID, **more})


def what(facts: HostFacts, wanted: HostSpec) -> str:
    return "\n".join(str(problem) for problem in preflight(PlanContext(facts, wanted)))


def test_each_generation_that_can_be_said_has_a_device_id_of_its_own() -> None:
    found = [generation_of(one, PACKAGED) for one in generations.ids_of(GENERATIONS, PACKAGED)]
    names = [row.name.lower().replace(" lovelace", "").replace(" ", "-") for row in found if row is not None]
    assert names == list(GENERATIONS)


def test_generation_that_a_sites_table_lacks_is_named() -> None:
    table = tables.packaged(tables.MODELS)
    others = [one for one in table["generations"] if one["name"] != "Volta"]
    own = tables.Tables({tables.MODELS: {**table, "generations": others}})
    with pytest.raises(GpuprovError, match="volta"):
        generations.ids_of(("maxwell", "volta"), own)


def test_an_image_that_could_not_work_is_refused(facts: HostFacts) -> None:
    assert "which kernel modules the image needs is not said" in what(facts, spec(image_gpus=[]))
    assert "which kernel modules" not in what(facts, spec(image_gpus=[], kernel_module_type="open"))
    assert "whether the image will meet NVSwitches" in what(facts, spec(image_nvswitch=None))
    assert "NVSwitches" not in what(facts, spec(image_nvswitch=None, image_gpus=["turing"]))
    assert "can't be divided by MIG" in what(facts, spec(mig_layout=["disabled"]))
    empty = replace(facts, image=ImageFacts(offline=True), kernel=kernel_to_come(""))
    assert "there is no kernel in this image" in what(empty, spec())
    assert "there is no kernel" not in what(empty, spec(kernel_modules="none")), "it comes from elsewhere"
    pascal = replace(
        facts, image=replace(facts.image or ImageFacts(), device_ids=generations.ids_of(("pascal",), PACKAGED))
    )
    assert "no longer serves this host's Pascal GPU" in what(pascal, spec(driver_version="590.48.01"))


def test_the_plan_builds_for_each_kernel_and_describes_no_device(facts: HostFacts) -> None:
    plan = make_plan(facts, spec())
    assert plan.problems == ()
    said = [item.change.summary() for item in plan.changes]
    assert f"build the driver's modules for {_OLD}, {_NEW}; load none" in said
    packages = next(one for one in said if one.startswith("install ") and "headers" in one)
    assert f"linux-headers-{_OLD}" in packages and f"linux-headers-{_NEW}" in packages
    assert not {"device nodes", "cdi", "reboot"} & {item.step for item in plan.changes}


def test_the_installer_is_told_the_kernel_and_never_asks_the_machine(facts: HostFacts) -> None:
    (change,) = source_of(facts, spec()).plan()
    assert isinstance(change, InstallDriver)
    assert (change.image_kernel, change.module_type, change.without_systemd) == (_NEW, "proprietary", True)
    newer = source_of(facts, spec(driver_version="580.65.06")).plan()[0]
    assert isinstance(newer, InstallDriver) and newer.module_type == "open"


@pytest.mark.parametrize(("version", "skips"), [("550.163.01", True), ("535.261.03", False)])
def test_options_that_an_installer_does_not_know_are_left_out(version: str, skips: bool) -> None:
    driver = InstallDriver(version, "/driver.run", "", "x86_64", True, "open", image_kernel=_NEW, without_systemd=True)
    found = driver.arguments(dkms=True, temporary="/t", log="/l")
    beside = ("--skip-module-load", "--allow-installation-with-running-driver") if skips else ()
    last = (f"--kernel-name={_NEW}", "--no-nouveau-check", "--no-x-check", *beside, "--no-systemd")
    assert found[-len(last) :] == last and found[: -len(last)][-1].endswith("libglvnd")
    older = replace(driver, version="460.106.00", module_type="auto")
    assert "--no-systemd" not in older.arguments(dkms=True, temporary="/t", log="/l")
    plain = InstallDriver(version, "/driver.run", "", "x86_64", True)
    found = plain.arguments(dkms=False, temporary="/t", log="/l")
    both = ("--skip-module-load", "--allow-installation-with-running-driver")
    assert replace(plain, keep_loaded=True).arguments(dkms=False, temporary="/t", log="/l") == (*found, *both)


def test_only_kernels_without_a_module_are_built_again(facts: HostFacts) -> None:
    kernels = (InstalledKernel(_OLD, headers=True, module=False), InstalledKernel(_NEW, headers=True, module=True))
    driver = replace(facts.driver, library_version="550.163.01")
    done = replace(facts, image=ImageFacts(kernels), driver=driver, driver_damage="")
    assert kernel.plan_image(source_of(done, spec())) == (kernel.BuildModules((_OLD,)),)
    whole = replace(done, image=ImageFacts(kernels[1:]))
    for there, wanted in ((whole, spec()), (done, spec(kernel_modules="none")), (replace(done, image=None), spec())):
        assert kernel.plan_image(source_of(there, wanted)) == ()
    # A driver that comes has modules for none.
    for version in ("", "535.261.03"):
        before = replace(done, driver=replace(facts.driver, library_version=version))
        assert kernel.plan_image(source_of(before, spec())) == (kernel.BuildModules((_OLD, _NEW)),)


def test_no_modules_are_loaded_by_a_list_and_ssh_keys_are_made_at_boot(facts: HostFacts) -> None:
    for there in (False, True):
        facts = replace(facts, boot=replace(facts.boot, ssh_keygen=there))
        (change,) = prepare.plan(source_of(facts, spec()))
        assert isinstance(change, prepare.PrepareBoot)
        assert MODULES not in dict(change.files) and (SSH_KEYS in change.units) is there
        # Beside what all hosts have.
        assert NODES in change.units


def test_the_builders_devices_are_hidden_and_no_unit_is_started(tmp_path: Path) -> None:
    host = FakeHost(tmp_path / "host", gpus=2)
    (tmp_path / "host/boot").mkdir()
    for release in (_OLD, _NEW):
        (tmp_path / f"host/lib/modules/{release}").mkdir(parents=True)
        (tmp_path / f"host/boot/vmlinuz-{release}").touch()
    system = ImageSystem(host, newest_kernel(host))
    assert system.kernel_release() == _NEW
    found = gather(system)
    assert (found.gpus, found.driver_loaded_version, found.driver.nodes) == ((), "", ())
    assert system.offline and system.run(("systemctl", "restart", "docker.service")).ok
    assert not system.run(("systemctl", "is-active", "--quiet", "docker.service")).ok
    assert system.environment["SYSTEMD_OFFLINE"] == "1"


def test_the_identity_goes_and_nothing_of_it_is_in_the_journal(tmp_path: Path) -> None:
    host = FakeHost(tmp_path / "host", gpus=0)
    secrets = {
        "etc/machine-id": "0123", "etc/ssh/ssh_host_rsa_key": "private", "etc/cdi/nvidia.json": "GPU-1234",
        "var/lib/NetworkManager/secret_key": "4711", "boot/loader/random-seed": "noise",
    }  # fmt: skip
    for name, text in secrets.items():
        put(host.root / name, text)
    (host.root / "etc/ssh/sshd_config").write_text("kept")
    paths = gather_identity(host)
    # Made by the run itself, after the plan.
    (host.root / "etc/ssh/ssh_host_ed25519_key").write_text("private")
    assert paths == ("/boot/loader/random-seed", "/etc/cdi/nvidia.json", "/etc/machine-id", "/etc/ssh/ssh_host_rsa_key",
                     "/var/lib/NetworkManager/secret_key")  # fmt: skip
    change = clean.CleanImage(paths)
    noted = json.dumps(change.capture(host))
    assert not any(text in noted or base64.b64encode(text.encode()).decode() in noted for text in secrets.values())
    told: list[str] = []
    change.apply(host, lambda message, done, total: told.append(message if (done, total) == (0, 0) else ""))
    assert told == [
        "remove /boot/loader/random-seed", "remove /etc/cdi/nvidia.json", "empty /etc/machine-id",
        "remove /etc/ssh/ssh_host_ed25519_key", "remove /etc/ssh/ssh_host_rsa_key",
        "remove /var/lib/NetworkManager/secret_key",
    ]  # fmt: skip
    assert (host.root / "etc/machine-id").read_bytes() == b""
    assert (host.root / "etc/ssh/sshd_config").read_text() == "kept"
    assert gather_identity(host) == ()


def test_an_identity_that_is_there_goes_and_ssh_gets_new_keys_with_the_undo(tmp_path: Path, facts: HostFacts) -> None:
    class KeyHost(FakeHost):
        def run(self, argv: Sequence[str], **more: Any) -> Completed:
            assert 0 < more["timeout"] <= 60
            return super().run(argv, **more)

    assert facts.image is not None
    assert clean.plan(replace(facts, image=None), spec()) == clean.plan(facts, spec()) == ()
    host, paths = KeyHost(tmp_path / "other", gpus=0), ("/etc/machine-id", "/etc/ssh/ssh_host_rsa_key")
    (change,) = clean.plan(replace(facts, image=replace(facts.image, identity=paths)), spec())
    assert change.summary() == "clean the image: empty /etc/machine-id, remove /etc/ssh/ssh_host_rsa_key"
    assert change.diff(host).splitlines() == [f"-{path}" for path in paths]
    change.undo(host, change.capture(host), None)
    host.make_directory(SSH_KEYGEN.rpartition("/")[0])
    host.write(SSH_KEYGEN, b"\x7fELF")
    without_keys = clean.CleanImage(paths[:1])
    without_keys.undo(host, without_keys.capture(host), {})
    assert host.commands == []
    change.undo(host, change.capture(host), {})
    assert host.commands == [(SSH_KEYGEN, "-A")]


def test_the_mark_of_an_image_is_written_once_and_goes_from_a_host(facts: HostFacts) -> None:
    (mark,) = clean.plan_mark(facts, spec())
    assert isinstance(mark, WriteFile)

    def planned(content: bytes) -> tuple[Change, ...]:
        there = {**facts.files, "/etc/gpuprov/image": FileFact(content, 0o644, 0, 0)}
        return clean.plan_mark(replace(facts, files=there), spec())

    assert (planned(mark.content), planned(b"another version's")) == ((), (mark,))
    # On a host there is nothing to write, and where no mark is, nothing to remove.
    assert clean.plan_mark(replace(facts, image=None), spec()) == clean.plan_mark(facts, HostSpec()) == ()
    marked = replace(facts, image=None, files={**facts.files, "/etc/gpuprov/image": FileFact(b"", 0o644, 0, 0)})
    found = clean.plan_mark(marked, HostSpec())
    assert (mark.summary(), [one.key for one in found]) == ("write /etc/gpuprov/image", ["remove /etc/gpuprov/image"])


def test_no_example_of_an_image_sets_a_password() -> None:
    examples = [path for path in (ROOT / "examples").rglob("*") if path.is_file()]
    password = re.compile(r"passw(?!ord is set)|pwauth: true")
    assert examples and not [path for path in examples if password.search(path.read_text())]


@pytest.mark.parametrize("remove", [True, False])
def test_the_key_that_signs_modules_goes_only_on_request(remove: bool, tmp_path: Path, facts: HostFacts) -> None:
    host = FakeHost(tmp_path / "clean", gpus=0)
    key = "/var/lib/dkms/mok.key"
    put(host.root / key[1:], "private")
    image = replace(facts.image or ImageFacts(), identity=(), signing_keys=(key,))
    wanted = spec(image_remove_signing_key=remove)
    changes = clean.plan(replace(facts, image=image), wanted)
    assert [change.diff(host) for change in changes] == ([f"-{key}"] if remove else [])
    assert changes == ((clean.CleanImage((key,), signing_keys=True),) if remove else ())
    without = replace(facts, image=replace(image, signing_keys=()))
    assert clean.warning(replace(facts, image=None), wanted) == clean.warning(without, wanted) == ""
    assert (key in clean.warning(replace(facts, image=image), wanted)) is not remove
    # DKMS makes the key while this run builds the modules.
    told: list[str] = []
    change = clean.CleanImage((), signing_keys=remove)
    change.apply(host, lambda message, *numbers: told.append(message if numbers == (0, 0) else ""))
    (message,) = told
    assert host.exists(key) is not remove and message.startswith(f"remove {key}" if remove else f"keep {key}")


def test_the_shutdown_after_an_image_saves_no_random_seed(tmp_path: Path) -> None:
    host = FakeHost(tmp_path / "host", gpus=0)
    host.make_directory("/run/systemd/system")
    clean.CleanImage(()).apply(host, lambda *_: None)
    drop_in = "/run/systemd/system/systemd-random-seed.service.d/gpuprov-image.conf"
    assert host.read_text(drop_in) == "[Service]\nExecStop=\n" and ("systemctl", "daemon-reload") in host.commands
    clean.CleanImage.undo(host, {"paths": []}, {})
    assert not host.exists(drop_in)
