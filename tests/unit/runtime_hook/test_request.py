"""What a container asks for: the rules of NVIDIA's toolkit, as tables."""

import re
from typing import Any

import pytest

from gpuprov.runtime_hook import driver_files
from gpuprov.runtime_hook.errors import Refused
from gpuprov.runtime_hook.request import parse_request
from gpuprov.runtime_hook.settings import Settings

DEFAULT = {"compute", "utility"}
ALL = set(driver_files.ALL)
ENVVAR_REFUSED = {"accept-nvidia-visible-devices-envvar-when-unprivileged": False}
MOUNTS_ACCEPTED = {"accept-nvidia-visible-devices-as-volume-mounts": True}
NO_VERSIONS = ("nine", "9.0.1.2", "9.", "9.0-rc1", "-9", "v", "vv9", "4294967296", "1.4294967296", "٩", "9" * 5000)
IMEX_IGNORED = {"features.ignore-imex-channel-requests": True}
MOUNT_ROOT = "/var/run/nvidia-container-devices"
SYS_ADMIN = {"bounding": ["CAP_CHOWN", "CAP_SYS_ADMIN"]}


def config_of(environment: str = "", *mounts: str, **process: Any) -> dict[str, Any]:
    """Return a configuration; `environment` blank-separated, `mounts` destinations of /dev/null."""
    devices = [{"source": "/dev/null", "destination": path} for path in mounts]
    return {"process": {"env": environment.split(" ") if environment else [], **process}, "mounts": devices}


def devices_of(config: dict[str, Any], settings: dict[str, Any] | None = None) -> list[str] | None:
    return parse_request(config, Settings(settings or {})).devices


@pytest.mark.parametrize(
    ("environment", "devices"),
    [
        ("", None),
        ("A=1", None),
        ("NVIDIA_VISIBLE_DEVICES=", None),
        ("NVIDIA_VISIBLE_DEVICES=,", None),
        ("NVIDIA_VISIBLE_DEVICES=void", None),
        ("NVIDIA_VISIBLE_DEVICES=0,void", None),
        ("NVIDIA_VISIBLE_DEVICES=all,void", None),
        ("NVIDIA_VISIBLE_DEVICES=none", []),
        ("NVIDIA_VISIBLE_DEVICES=0,none", []),
        ("NVIDIA_VISIBLE_DEVICES=none,all", []),
        ("NVIDIA_VISIBLE_DEVICES=all", ["all"]),
        ("NVIDIA_VISIBLE_DEVICES=0,all,none", ["all"]),
        ("NVIDIA_VISIBLE_DEVICES=0", ["0"]),
        ("NVIDIA_VISIBLE_DEVICES=1,,0,", ["1", "0"]),
        ("NVIDIA_VISIBLE_DEVICES=\t0\t,\tGPU-1", ["0", "GPU-1"]),
        ("NVIDIA_VISIBLE_DEVICES=nvidia.com/gpu=0", ["nvidia.com/gpu=0"]),
        ("NVIDIA_VISIBLE_DEVICES=ALL", ["ALL"]),
        ("NVIDIA_VISIBLE_DEVICES=None", ["None"]),
        ("NVIDIA_VISIBLE_DEVICES=0 NVIDIA_VISIBLE_DEVICES=1", ["1"]),
        ("NVIDIA_VISIBLE_DEVICES=0 NVIDIA_VISIBLE_DEVICES=", None),
        ("nvidia_visible_devices=0", None),
        # Legacy images say CUDA_VERSION and no NVIDIA_REQUIRE_CUDA.
        ("CUDA_VERSION=9.0", ["all"]),
        ("CUDA_VERSION=9.0 NVIDIA_REQUIRE_CUDA=", ["all"]),
        ("CUDA_VERSION=9.0 NVIDIA_VISIBLE_DEVICES=1", ["1"]),
        ("CUDA_VERSION=9.0 NVIDIA_VISIBLE_DEVICES=", None),
        ("CUDA_VERSION=9.0 NVIDIA_REQUIRE_CUDA=cuda>=9.0", None),
        ("CUDA_VERSION=", None),
    ],
)
def test_the_environment_names_devices(environment: str, devices: list[str] | None) -> None:
    assert devices_of(config_of(environment)) == devices


@pytest.mark.parametrize(
    ("names", "environment", "devices"),
    [
        ("SWARM", "SWARM=1 NVIDIA_VISIBLE_DEVICES=0", ["1"]),
        ("SWARM", "NVIDIA_VISIBLE_DEVICES=0", ["0"]),
        ("SWARM", "SWARM= NVIDIA_VISIBLE_DEVICES=0", None),
        (" B , A ", "A=0 B=1", ["1", "0"]),
        ("A,B", "A=0,1 B=all", ["all"]),
        (",", "NVIDIA_VISIBLE_DEVICES=0", ["0"]),
    ],
)
def test_swarm_resources_replace_the_usual_variable(names: str, environment: str, devices: list[str] | None) -> None:
    assert devices_of(config_of(environment), {"swarm-resource": names}) == devices


@pytest.mark.parametrize(
    ("capabilities", "devices"),
    [
        (SYS_ADMIN, ["0"]),
        ({"bounding": ["CAP_CHOWN"], "effective": ["CAP_SYS_ADMIN"]}, None),
        ({"bounding": None}, None),
        (["CAP_SYS_ADMIN"], None),
        (None, None),
        ("CAP_SYS_ADMIN", None),
    ],
)
def test_privileged_containers_may_ask_where_others_not(capabilities: object, devices: list[str] | None) -> None:
    config = config_of("NVIDIA_VISIBLE_DEVICES=0", capabilities=capabilities)
    assert devices_of(config, ENVVAR_REFUSED) == devices
    assert devices_of(config) == ["0"]


@pytest.mark.parametrize(
    ("mounts", "devices"),
    [
        (("0", "GPU-1"), ["0", "GPU-1"]),
        (("0", "0/"), ["0"]),
        (("./2", "/3"), ["2", "3"]),
        (("all",), ["all"]),
        (("none",), ["none"]),
        (("a/b",), ["a/b"]),
        (("cdi/nvidia.com/gpu/0",), ["nvidia.com/gpu=0"]),
        (("cdi/nvidia.com/gpu/a/b",), ["nvidia.com/gpu=a/b"]),
        (("cdi/nvidia.com/gpu=1",), ["nvidia.com/gpu=1"]),
        # Not one of them names a device: the environment counts.
        (("cdi/nvidia.com",), ["9"]),
        (("imex/3",), ["9"]),
        (("",), ["9"]),
        (("../0",), ["9"]),
        (("cdi/nvidia.com/=0",), ["9"]),
        (("cdi/nvidia.com=0",), ["9"]),
        (("cdi/nvidia.com/gpu=",), ["9"]),
        (("cdi/gpu",), ["9"]),
        ((), ["9"]),
    ],
)
def test_mounts_of_dev_null_name_devices_if_accepted(mounts: tuple[str, ...], devices: list[str]) -> None:
    config = config_of("NVIDIA_VISIBLE_DEVICES=9", *(f"{MOUNT_ROOT}/{name}" for name in mounts))
    assert devices_of(config, MOUNTS_ACCEPTED) == devices
    assert devices_of(config) == ["9"]


@pytest.mark.parametrize(
    ("source", "destination", "devices"),
    [
        ("/dev//./null", f"{MOUNT_ROOT}/0", ["0"]),
        ("/dev/zero", f"{MOUNT_ROOT}/0", None),
        ("/dev/null", f"{MOUNT_ROOT}-not/0", None),
        ("/dev/null", f"/x/..{MOUNT_ROOT}/0", ["0"]),
    ],
)
def test_a_mount_counts_by_its_cleaned_paths(source: str, destination: str, devices: list[str] | None) -> None:
    config = {"mounts": [{"source": source, "destination": destination}]}
    assert devices_of(config, {**MOUNTS_ACCEPTED, **ENVVAR_REFUSED}) == devices


@pytest.mark.parametrize(
    ("environment", "capabilities"),
    [
        ("", DEFAULT),
        ("NVIDIA_DRIVER_CAPABILITIES=", DEFAULT),
        ("NVIDIA_DRIVER_CAPABILITIES=,", set()),
        ("NVIDIA_DRIVER_CAPABILITIES=\t A=1", set()),
        ("NVIDIA_DRIVER_CAPABILITIES=video", {"video"}),
        ("NVIDIA_DRIVER_CAPABILITIES=video,\tcompute,", {"video", "compute"}),
        ("NVIDIA_DRIVER_CAPABILITIES=all", ALL),
        ("NVIDIA_DRIVER_CAPABILITIES=telepathy,all", ALL),
        ("CUDA_VERSION=9.0", ALL),
        ("CUDA_VERSION=9.0 NVIDIA_DRIVER_CAPABILITIES=", DEFAULT),
        ("CUDA_VERSION=9.0 NVIDIA_DRIVER_CAPABILITIES=video", {"video"}),
    ],
)
def test_driver_capabilities(environment: str, capabilities: set[str]) -> None:
    request = parse_request(config_of(f"NVIDIA_VISIBLE_DEVICES=all {environment}".strip()), Settings({}))
    assert request.capabilities == capabilities


@pytest.mark.parametrize(
    ("supported", "asked", "given"),
    [("compute", "all", {"compute"}), ("video,utility", "", {"utility"}), ("", "all", set()), ("", "", set())],
)
def test_settings_bound_the_driver_capabilities(supported: str, asked: str, given: set[str]) -> None:
    config = config_of(f"NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES={asked}")
    request = parse_request(config, Settings({"supported-driver-capabilities": supported}))
    assert request.capabilities == given


@pytest.mark.parametrize(
    ("environment", "requirements"),
    [
        ("", []),
        ("NVIDIA_REQUIRE_CUDA=cuda>=12.4", ["cuda>=12.4"]),
        ("NVIDIA_REQUIRE_CUDA=cuda>=12.4 NVIDIA_REQUIRE_DRIVER=driver>=550", ["cuda>=12.4", "driver>=550"]),
        ("NVIDIA_REQUIRE_JETPACK=x NVIDIA_REQUIRE_JETPACK_HOST_MOUNTS=y", []),
        ("NVIDIA_REQUIRE_X=", [""]),
        ("CUDA_VERSION=9.0", ["cuda>=9.0"]),
        ("CUDA_VERSION=v11.4.2 NVIDIA_REQUIRE_X=driver>1", ["driver>1", "cuda>=11.4"]),
        ("CUDA_VERSION=12", ["cuda>=12.0"]),
        ("CUDA_VERSION=012.04", ["cuda>=12.4"]),
        ("CUDA_VERSION=9.0 NVIDIA_REQUIRE_CUDA=cuda>=8.0", ["cuda>=8.0"]),
        *((f"NVIDIA_REQUIRE_CUDA=cuda>=99 NVIDIA_DISABLE_REQUIRE={word}", []) for word in ("1", "t", "T", "true")),
        *((f"NVIDIA_REQUIRE_CUDA=cuda>=99 NVIDIA_DISABLE_REQUIRE={word}", []) for word in ("TRUE", "True")),
        ("CUDA_VERSION=nonsense NVIDIA_DISABLE_REQUIRE=1", []),
        *(
            (f"NVIDIA_REQUIRE_CUDA=cuda>=99 NVIDIA_DISABLE_REQUIRE={word}", ["cuda>=99"])
            for word in ("", "0", "yes", "tRUE")
        ),
    ],
)
def test_requirements(environment: str, requirements: list[str]) -> None:
    config = config_of(f"NVIDIA_VISIBLE_DEVICES=all {environment}".strip())
    assert parse_request(config, Settings({})).requirements == requirements
    assert parse_request(config, Settings({"disable-require": True})).requirements == []


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ("NVIDIA_DRIVER_CAPABILITIES=compute,telepathy", "asks for telepathy; this host gives compat32, compute"),
        ("NVIDIA_DRIVER_CAPABILITIES=none", "asks for none"),
        ("NVIDIA_DRIVER_CAPABILITIES=Compute", "asks for Compute"),
        ("NVIDIA_MIG_CONFIG_DEVICES=all", "NVIDIA_MIG_CONFIG_DEVICES is for privileged containers"),
        ("NVIDIA_MIG_MONITOR_DEVICES=0", "NVIDIA_MIG_MONITOR_DEVICES is for privileged containers"),
        *((f"CUDA_VERSION={text}", f"CUDA_VERSION={text} is no version") for text in NO_VERSIONS),
    ],
)
def test_what_cannot_be_is_refused(environment: str, says: str) -> None:
    with pytest.raises(Refused, match=re.escape(says)):
        parse_request(config_of(f"NVIDIA_VISIBLE_DEVICES=all {environment}".strip()), Settings({}))


def test_a_privileged_container_may_ask_for_mig_devices() -> None:
    asked = "NVIDIA_VISIBLE_DEVICES=all NVIDIA_MIG_CONFIG_DEVICES=all NVIDIA_MIG_MONITOR_DEVICES=0:1"
    request = parse_request(config_of(asked, capabilities=SYS_ADMIN), Settings({}))
    assert (request.devices, request.mig_config, request.mig_monitor) == (["all"], "all", "0:1")


@pytest.mark.parametrize("environment", ["NVIDIA_MIG_CONFIG_DEVICES=all", "NVIDIA_DRIVER_CAPABILITIES=telepathy"])
def test_who_asks_for_no_gpu_is_refused_nothing(environment: str) -> None:
    assert devices_of(config_of(environment)) is None


@pytest.mark.parametrize(
    ("version", "capabilities", "privileged"),
    [
        ("1.0.0-rc1", ["CAP_SYS_ADMIN"], True),
        ("1.0.0-rc4", ["CAP_SYS_ADMIN"], True),
        ("1.0.0-rc4", SYS_ADMIN, False),
        ("1.0.0-rc5", ["CAP_SYS_ADMIN"], False),
        ("1.0.0-rc5", SYS_ADMIN, True),
        ("1.0.2", SYS_ADMIN, True),
        ("nonsense", SYS_ADMIN, True),
    ],
)
def test_privilege_depends_on_specification_version(version: str, capabilities: object, privileged: bool) -> None:
    config = {**config_of("NVIDIA_VISIBLE_DEVICES=0", capabilities=capabilities), "ociVersion": version}
    assert parse_request(config, Settings({})).privileged is privileged


@pytest.mark.parametrize(
    ("annotations", "devices"),
    [
        ({"cdi.k8s.io/a": "nvidia.com/gpu=0,nvidia.com/gpu=1"}, ["nvidia.com/gpu=0", "nvidia.com/gpu=1"]),
        ({"cdi.k8s.io/b": "x", "cdi.k8s.io/a": "y, y"}, ["y", " y", "x"]),
        ({"other/a": "x"}, ["9"]),
        ({"cdi.k8s.io/a": 5}, ["9"]),
        ({}, ["9"]),
        (None, ["9"]),
        ([], ["9"]),
    ],
)
def test_annotations_come_before_everything_else(annotations: object, devices: list[str]) -> None:
    config = {**config_of("NVIDIA_VISIBLE_DEVICES=9", f"{MOUNT_ROOT}/0"), "annotations": annotations}
    assert devices_of(config) == devices


def test_annotations_and_mounts_need_no_privilege() -> None:
    annotated = {**config_of(), "annotations": {"cdi.k8s.io/a": "nvidia.com/gpu=0"}}
    assert devices_of(annotated, ENVVAR_REFUSED) == ["nvidia.com/gpu=0"]
    assert devices_of(config_of("", f"{MOUNT_ROOT}/0"), {**ENVVAR_REFUSED, **MOUNTS_ACCEPTED}) == ["0"]


def devices_of_mounts(mounts: object) -> list[str] | None:
    return devices_of({**config_of("NVIDIA_VISIBLE_DEVICES=9"), "mounts": mounts}, MOUNTS_ACCEPTED)


@pytest.mark.parametrize("mounts", [None, 5, "x", {}, [None, "x", 5, []], [{}], [{"source": "/dev/null"}]], ids=repr)
def test_mounts_that_name_nothing_leave_it_to_the_environment(mounts: object) -> None:
    assert devices_of_mounts(mounts) == ["9"]


def test_mounts_of_other_files_are_passed_over() -> None:
    other = {"source": "/dev/zero", "destination": f"{MOUNT_ROOT}/1"}
    named = {"source": "/dev/null", "destination": f"{MOUNT_ROOT}/2"}
    elsewhere = {"source": "/dev/null", "destination": "/elsewhere/3"}
    assert devices_of_mounts([other, "x", elsewhere, named]) == ["2"]


def test_a_container_that_asks_for_no_gpu_asks_for_nothing_else() -> None:
    request = parse_request(config_of("NVIDIA_MIG_CONFIG_DEVICES=all NVIDIA_REQUIRE_CUDA=cuda>=99"), Settings({}))
    assert request.devices is None
    assert (request.mig_config, request.mig_monitor, request.by_annotation) == ("", "", False)
    assert (request.capabilities, request.requirements, request.imex_channels, request.extras) == (
        frozenset(), [], [], [],
    )  # fmt: skip


def test_cuda_versions_of_four_thousand_digits_are_none() -> None:
    longest = f"NVIDIA_VISIBLE_DEVICES=all CUDA_VERSION=9.1.{'1' * 3999}"
    assert parse_request(config_of(longest), Settings({})).requirements == ["cuda>=9.1"]
    with pytest.raises(Refused, match="is no version"):
        parse_request(config_of(f"{longest}1"), Settings({}))


@pytest.mark.parametrize(
    ("environment", "mounts", "settings", "channels"),
    [
        ("NVIDIA_IMEX_CHANNELS=0,3", (), {}, ["0", "3"]),
        ("NVIDIA_IMEX_CHANNELS=all", (), {}, []),
        ("NVIDIA_IMEX_CHANNELS=none", (), {}, []),
        ("NVIDIA_IMEX_CHANNELS=0,void", (), {}, []),
        ("", (), {}, []),
        ("CUDA_VERSION=9.0", (), {}, []),
        ("NVIDIA_IMEX_CHANNELS=1", ("imex/2",), MOUNTS_ACCEPTED, ["2"]),
        ("NVIDIA_IMEX_CHANNELS=1", ("imex/2",), {}, ["1"]),
        ("NVIDIA_IMEX_CHANNELS=1", (), IMEX_IGNORED, []),
    ],
)
def test_channels(environment: str, mounts: tuple[str, ...], settings: dict[str, Any], channels: list[str]) -> None:
    config = config_of(f"NVIDIA_VISIBLE_DEVICES=0 {environment}".strip(), *(f"{MOUNT_ROOT}/{name}" for name in mounts))
    assert parse_request(config, Settings(settings)).imex_channels == channels


def test_unprivileged_channels_count_as_devices_do() -> None:
    config = config_of("NVIDIA_IMEX_CHANNELS=1", f"{MOUNT_ROOT}/0")
    request = parse_request(config, Settings({**MOUNTS_ACCEPTED, **ENVVAR_REFUSED}))
    assert (request.devices, request.imex_channels) == (["0"], [])


@pytest.mark.parametrize("name", ["gds", "mofed", "gdrcopy", "nvswitch"])
def test_what_goes_with_gpus_is_asked_for_by_name(name: str) -> None:
    for value, extras in (("enabled", [name]), ("1", []), ("ENABLED", [])):
        config = config_of(f"NVIDIA_VISIBLE_DEVICES=0 NVIDIA_{name.upper()}={value}")
        assert parse_request(config, Settings({})).extras == extras


def test_an_environment_that_cannot_be_read_closes_the_door_for_gpu_containers_alone() -> None:
    with pytest.raises(Refused, match="an entry without '=': 'BROKEN'"):
        devices_of(config_of("NVIDIA_VISIBLE_DEVICES=0 BROKEN"))
    assert devices_of(config_of("A=1 NVIDIA_VISIBLE_DEVICES")) is None


@pytest.mark.parametrize(
    ("environment", "mounts", "settings", "says"),
    [
        ("NVIDIA_VISIBLE_DEVICES=0", (), {}, "named by NVIDIA_VISIBLE_DEVICES"),
        ("S=0", (), {"swarm-resource": "S"}, "named by S"),
        ("CUDA_VERSION=9.0", (), {}, "a legacy image: all devices"),
        ("NVIDIA_VISIBLE_DEVICES=0", (), ENVVAR_REFUSED, "when-unprivileged is false"),
        ("NVIDIA_VISIBLE_DEVICES=0 NVIDIA_DISABLE_REQUIRE=1", (), {}, "not checked: NVIDIA_DISABLE_REQUIRE"),
        ("NVIDIA_VISIBLE_DEVICES=0", (), {"disable-require": True}, "not checked: disable-require"),
        ("", (), {}, "NVIDIA_VISIBLE_DEVICES is not set"),
        ("NVIDIA_VISIBLE_DEVICES=void", (), {}, "NVIDIA_VISIBLE_DEVICES names no device"),
        ("S= NVIDIA_VISIBLE_DEVICES=0", (), {"swarm-resource": "S"}, "S names no device"),
        ("NVIDIA_VISIBLE_DEVICES=0", (), {}, "NVIDIA_DRIVER_CAPABILITIES is not set: the default"),
        ("CUDA_VERSION=9.0", (), {}, "NVIDIA_DRIVER_CAPABILITIES is not set: all for a legacy image"),
        ("NVIDIA_VISIBLE_DEVICES=0 NVIDIA_IMEX_CHANNELS=all", (), {}, "NVIDIA_IMEX_CHANNELS=all is no channel"),
        ("NVIDIA_VISIBLE_DEVICES=0", (), IMEX_IGNORED, "IMEX channels don't count: ignore-imex-channel-requests is"),
        ("NVIDIA_VISIBLE_DEVICES=0", ("0",), MOUNTS_ACCEPTED, "devices are named by volume mounts"),
        ("NVIDIA_VISIBLE_DEVICES=0", ("0",), {}, "accept-nvidia-visible-devices-as-volume-mounts is false"),
        ("NVIDIA_VISIBLE_DEVICES=0", ("cdi/nvidia.com",), MOUNTS_ACCEPTED, "no CDI device don't count: cdi/nvidia.com"),
        ("NVIDIA_VISIBLE_DEVICES=0", ("imex/2",), MOUNTS_ACCEPTED, "IMEX channels are named by volume mounts"),
    ],
)
def test_the_rule_that_decided_is_named(
    environment: str, mounts: tuple[str, ...], settings: dict[str, Any], says: str
) -> None:
    config = config_of(environment, *(f"{MOUNT_ROOT}/{name}" for name in mounts))
    assert [one for one in parse_request(config, Settings(settings)).decisions if says in one]


@pytest.mark.parametrize("asking", ["annotation", "mount", "legacy image", "environment"])
def test_however_gpus_are_asked_for_an_unreadable_environment_refuses(asking: str) -> None:
    config = {
        "annotation": {**config_of("BROKEN"), "annotations": {"cdi.k8s.io/a": "nvidia.com/gpu=0"}},
        "mount": config_of("BROKEN", f"{MOUNT_ROOT}/0"),
        "legacy image": config_of("CUDA_VERSION=9.0 BROKEN"),
        "environment": config_of("BROKEN NVIDIA_VISIBLE_DEVICES=none"),
    }[asking]
    with pytest.raises(Refused, match="an entry without '='"):
        devices_of(config, MOUNTS_ACCEPTED)


REQUESTABLE = {"nvidia-container-runtime.modes.cdi.requestable-kinds": ["vendor.com/storage"]}
DEFAULT_KIND = {"nvidia-container-runtime.modes.cdi.default-kind": "vendor.com/storage"}


@pytest.mark.parametrize(
    ("config", "settings", "allowed"),
    [
        (config_of("NVIDIA_VISIBLE_DEVICES=vendor.com/storage=admin"), {}, False),
        (config_of("NVIDIA_VISIBLE_DEVICES=0,vendor.com/storage=admin"), {}, False),
        (config_of("NVIDIA_VISIBLE_DEVICES=nvidia.com.vendor.com/gpu=0"), {}, False),
        (config_of("NVIDIA_VISIBLE_DEVICES=management.nvidia.com/gpu=all"), {}, False),
        (config_of("NVIDIA_VISIBLE_DEVICES=nvidia.com/gds=all,runtime.nvidia.com/gpu=0,1"), {}, True),
        # Not qualified: a name of the default kind, which is then not there.
        (config_of("NVIDIA_VISIBLE_DEVICES=vendor.com=admin"), {}, True),
        (config_of("NVIDIA_VISIBLE_DEVICES=vendor.com/storage=admin"), REQUESTABLE, True),
        (config_of("NVIDIA_VISIBLE_DEVICES=vendor.com/other=admin"), REQUESTABLE, False),
        (config_of("NVIDIA_VISIBLE_DEVICES=vendor.com/storage=admin"), DEFAULT_KIND, True),
        (config_of("SWARM=vendor.com/storage=admin"), {"swarm-resource": "SWARM"}, False),
        (config_of("", f"{MOUNT_ROOT}/cdi/vendor.com/storage/admin"), MOUNTS_ACCEPTED, False),
        (config_of("", f"{MOUNT_ROOT}/cdi/nvidia.com/gpu/0"), MOUNTS_ACCEPTED, True),
        ({"annotations": {"cdi.k8s.io/x": "vendor.com/storage=admin"}}, {}, True),
    ],
)
def test_container_may_name_devices(config: dict[str, Any], settings: dict[str, Any], allowed: bool) -> None:
    if allowed:
        assert devices_of(config, settings)
        return
    # Privilege makes no difference.
    for capabilities in ({}, SYS_ADMIN):
        config["process"]["capabilities"] = capabilities
        with pytest.raises(Refused, match="devices of nvidia\\.com alone: use the engine's --device "):
            devices_of(config, settings)
