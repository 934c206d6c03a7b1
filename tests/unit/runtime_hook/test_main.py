"""`create`: what it does to config.json, and that nothing but a refusal comes out of it."""

import json
import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprov.runtime_hook.config import owner_of, root_of
from gpuprov.runtime_hook.errors import Refused, reason
from gpuprov.runtime_hook.main import prepare

GPU = {"deviceNodes": [{"path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 0, "permissions": "rw"}]}
SPECIFICATION = {
    "kind": "nvidia.com/gpu", "devices": [{"name": name, "containerEdits": GPU} for name in ("0", "all")],
    "containerEdits": {
        "env": ["NVIDIA_VISIBLE_DEVICES=void"], "mounts": [{"hostPath": "/x", "containerPath": "/usr/bin/nvidia-smi"}],
    },
}  # fmt: skip
ASKS = '{"process": {"env": ["NVIDIA_VISIBLE_DEVICES=all"]}, "root": {"path": "rootfs"}}'


class Bundle:
    """A bundle, a specification and a settings file below one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "bundle"
        self.root = self.folder / "rootfs"
        self.root.mkdir(parents=True)
        self.config = self.folder / "config.json"
        self.specification = folder / "cdi/nvidia.json"
        self.specification.parent.mkdir()
        self.settings = folder / "settings.toml"
        self.absent = folder / "absent"
        self.specification.write_text(json.dumps(SPECIFICATION))
        self.set("")

    def set(self, text: str) -> None:
        """Write settings; `text` stands at their top."""
        folders = f"spec-dirs = ['{self.specification.parent}']"
        self.settings.write_text(f"{text}\n[nvidia-container-runtime.modes.cdi]\n{folders}\n")

    def prepare(self, text: str) -> None:
        self.config.write_text(text, errors="surrogateescape")
        os.utime(self.config, (1, 1))
        self.run()

    def run(self) -> None:
        prepare(str(self.folder), (str(self.settings), str(self.absent)))

    @property
    def is_untouched(self) -> bool:
        return self.config.stat().st_mtime == 1


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return Bundle(tmp_path)


@pytest.fixture(scope="module")
def one_bundle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bundle]:
    made = Bundle(tmp_path_factory.mktemp("bundle"))
    made.set("accept-nvidia-visible-devices-as-volume-mounts = true")
    yield made


@pytest.mark.parametrize(
    ("root", "folder"),
    [({"path": "/r"}, "/r"), ({"path": "rootfs"}, "/b/rootfs"), ({}, "/b/"), (None, "/b/"), ({"path": 5}, "/b/5")],
)
def test_the_root_that_a_configuration_names(root: object, folder: str) -> None:
    assert root_of({"root": root}, "/b") == folder


@pytest.mark.parametrize(
    ("linux", "owner"),
    [
        ({}, (0, 0)),
        (None, (0, 0)),
        ({"uidMappings": [{"containerID": 0, "hostID": 100000, "size": 65536}]}, (100000, 0)),
        ({"uidMappings": [{"containerID": 5, "hostID": 7}, {"hostID": 9}], "gidMappings": [{"hostID": 8}]}, (9, 8)),
        ({"uidMappings": [{"hostID": "x"}], "gidMappings": 5}, (0, 0)),
    ],
)
def test_whose_what_is_made_shall_be(linux: object, owner: tuple[int, int]) -> None:
    assert owner_of({"linux": linux}) == owner


def test_a_gpu_container_is_equipped_and_everything_else_in_it_kept(bundle: Bundle) -> None:
    odd = '"odd": [1.5, "\\ud800", 18446744073709551615]'
    bundle.prepare(ASKS.replace("all", "0").replace("{", f"{{{odd}, ", 1))
    config = json.loads(bundle.config.read_text())
    assert config["odd"] == [1.5, "\ud800", 2**64 - 1]
    assert config["process"]["env"] == ["NVIDIA_VISIBLE_DEVICES=void"]
    assert config["linux"]["devices"][0]["path"] == "/dev/nvidia0"
    assert sorted(path.name for path in bundle.folder.iterdir()) == ["config.json", "rootfs"]


def test_once_equipped_a_container_is_not_equipped_again(bundle: Bundle) -> None:
    bundle.prepare(ASKS)
    bundle.specification.unlink()
    bundle.prepare(bundle.config.read_text())
    assert bundle.is_untouched


def test_mode_and_owner_of_the_file_stay(bundle: Bundle) -> None:
    bundle.config.write_text(ASKS)
    bundle.config.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(bundle.config, 12, 34)
    before = bundle.config.stat()
    bundle.run()
    after = bundle.config.stat()
    assert after.st_ino != before.st_ino
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)


@pytest.mark.parametrize("text", ['{ "process" : {"env": ["A=1"]},\n "odd":   1.50 }\n', "{}", "[]", "null", "5"])
def test_a_container_without_gpus_is_untouched_whatever_else_is_broken(bundle: Bundle, text: str) -> None:
    bundle.specification.write_text("{broken")
    bundle.settings.write_text("{broken")
    bundle.prepare(text)
    assert bundle.config.read_text() == text
    assert bundle.is_untouched


@pytest.mark.parametrize(
    ("settings", "says"),
    [("{broken", "line 1: a key is missing"), ("typo = 1", "no key 'typo'"), ("\udcff", "can't be read")],
)
def test_broken_settings_concern_gpu_containers(bundle: Bundle, settings: str, says: str) -> None:
    bundle.settings.write_text(settings, errors="surrogateescape")
    with pytest.raises(Refused, match=says):
        bundle.prepare(ASKS)
    assert bundle.is_untouched


@pytest.mark.parametrize(
    ("edits", "says"),
    [
        ({"mounts": [{}]}, "mounts has hostPath None, which is not text"),
        ({"mounts": [5]}, "mounts has 5, which is no object"),
        ({"mounts": {"hostPath": "/x"}}, "mounts is no list"),
        ({"deviceNodes": [{"path": 5, "major": 1, "minor": 1}]}, "deviceNodes has path 5, which is not text"),
        ({"deviceNodes": [{"path": "/x", "major": True}]}, "major True, which is not a device number"),
        (
            {"deviceNodes": [{"path": "/x", "major": 1 << 64}]},
            "major 18446744073709551616, which is not a device number",
        ),
        ({"deviceNodes": [{"path": "/x\0y"}]}, "which is not text"),
        ({"additionalGids": ["video"]}, "additionalGids is no list of ids"),
        ([], "containerEdits is no object"),
        ({"hooks": [{}]}, "hooks has hookName None, which is not text"),
        ({"hooks": [{"hookName": "prestart", "path": "/x", "timeout": "5"}]}, "timeout '5', which is not seconds"),
    ],
)
def test_a_specification_that_is_none_is_refused(bundle: Bundle, edits: object, says: str) -> None:
    bundle.specification.write_text(
        json.dumps({"kind": "nvidia.com/gpu", "devices": [{"name": "all", "containerEdits": edits}]})
    )
    with pytest.raises(Refused, match=re.escape(says)) as caught:
        bundle.prepare(ASKS)
    assert str(caught.value).startswith(f"the CDI specification {bundle.specification} can't be used (")
    assert bundle.is_untouched


@pytest.mark.parametrize("text", [f"{ASKS} x", ASKS[:-1], "\ufeff" + ASKS, "[" * 100_000])
def test_invalid_json_is_refused_even_where_runc_accepts_it(bundle: Bundle, text: str) -> None:
    with pytest.raises(Refused, match=r"config\.json is not valid JSON"):
        bundle.prepare(text)
    assert bundle.is_untouched


def test_what_is_no_utf_8_is_read_as_runc_reads_it(bundle: Bundle) -> None:
    bundle.prepare(ASKS.replace("all", 'all", "A=\udcff'))
    assert json.loads(bundle.config.read_text())["process"]["env"][1] == "A=\ufffd"


def test_a_bundle_without_a_configuration_is_left_to_runc(bundle: Bundle) -> None:
    bundle.run()
    prepare(str(bundle.absent), (str(bundle.settings), str(bundle.absent)))
    assert not bundle.config.exists()


def test_a_link_loop_in_the_image_is_named_and_is_no_internal_error(bundle: Bundle) -> None:
    (bundle.root / "usr").mkdir()
    (bundle.root / "usr/bin").symlink_to("bin")
    volume = {"destination": "/data", "type": "bind", "source": str(bundle.folder), "options": ["rbind"]}
    config = {**json.loads(ASKS), "mounts": [volume]}
    with pytest.raises(OSError, match="too many links") as caught:
        bundle.prepare(json.dumps(config))
    said = "the container's files can't be prepared: /usr/bin/nvidia-smi: too many links"
    assert reason(caught.value) == said and bundle.is_untouched
    assert "please report this" in reason(KeyError("x"))


def test_a_configuration_that_cannot_be_replaced_is_refused(bundle: Bundle) -> None:
    (bundle.folder / "config.json.gpuprov").symlink_to("elsewhere")
    with pytest.raises(Refused, match=r"config\.json can't be written: Too many levels of symbolic links"):
        bundle.prepare(ASKS)
    assert bundle.is_untouched
    assert not (bundle.folder / "elsewhere").exists()


def test_a_full_disk_leaves_nothing_half_written(bundle: Bundle) -> None:
    """Python ignores SIGXFSZ: a file over the limit is an error like a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    bundle.config.write_text(ASKS)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, before[1]))
    try:
        with pytest.raises(Refused, match=r"config\.json can't be written: File too large"):
            bundle.run()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert bundle.config.read_text() == ASKS
    assert sorted(path.name for path in bundle.folder.iterdir()) == ["config.json", "rootfs"]


_WORDS = st.sampled_from(
    [
        "NVIDIA_VISIBLE_DEVICES=0", "NVIDIA_VISIBLE_DEVICES=none", "NVIDIA_VISIBLE_DEVICES=7", "CUDA_VERSION=9.0",
        "NVIDIA_DRIVER_CAPABILITIES=all", "NVIDIA_REQUIRE_CUDA=cuda>x", "CAP_SYS_ADMIN", "/dev/null",
        "/var/run/nvidia-container-devices/0", "/var/run/nvidia-container-devices/all", "a\0b", "",
    ]
)  # fmt: skip
_ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | _WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | _WORDS, inner, max_size=3),
    max_leaves=5,
)


def _like(**keys: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """An object with these keys, each there or not; or something odd."""
    return st.fixed_dictionaries({}, optional=keys) | _ODD


_MOUNT = _like(source=_WORDS, destination=_WORDS | _ODD, options=_ODD)
_CONFIGS = _like(
    process=_like(env=st.lists(_WORDS | _ODD), user=_like(uid=_ODD), capabilities=_like(bounding=st.lists(_WORDS))),
    root=_like(path=_WORDS | _ODD),
    mounts=st.lists(_MOUNT, max_size=3) | _ODD,
    linux=_like(devices=st.lists(_ODD, max_size=3), resources=_like(devices=st.lists(_ODD, max_size=3))),
    hooks=_like(prestart=_ODD),
)


@given(config=_CONFIGS)
def test_no_configuration_raises_anything_but_a_refusal(one_bundle: Bundle, config: Any) -> None:
    text = json.dumps(config)
    try:
        one_bundle.prepare(text)
    except Refused as refused:
        assert str(refused)
        assert one_bundle.config.read_text() == text
        assert one_bundle.is_untouched
    else:
        assert one_bundle.is_untouched is (one_bundle.config.read_text() == text)


_INNOCENT = _like(
    process=_like(env=st.lists(st.sampled_from(["A=1", "NVIDIA_VISIBLE_DEVICES=void", "NVIDIA_DRIVER=x"]))),
    root=_ODD,
    mounts=st.lists(_like(source=st.just("/dev/null"), destination=st.text(max_size=5)), max_size=3),
)


@given(config=_INNOCENT, indent=st.none() | st.integers(0, 3))
def test_no_configuration_without_a_request_is_touched(one_bundle: Bundle, config: Any, indent: int | None) -> None:
    text = json.dumps(config, indent=indent)
    one_bundle.prepare(text)
    assert one_bundle.config.read_text() == text
    assert one_bundle.is_untouched
