"""config.json as runc and crun themselves read it: keys given twice, or in another case of letters."""

import json
from pathlib import Path

import pytest

from tests.integration.container_bench import Bench, bench, low_level_runtime

__all__ = ["bench"]
pytestmark = pytest.mark.root

# The last key of the document gives the container another user.
OTHER_USER = '{"user": {"uid": 4321, "gid": 0}}'
KEYS = ("process", "PROCESS", "Process", "proce\u017fs")


def spoil(bench: Bench, key: str, *environment: str) -> bytes:
    """Write a configuration whose last key overrides the keys before it; return the file's bytes."""
    bench.configure(*environment, arguments=["grep", "^Uid:", "/proc/self/status"])
    text = bench.config.read_text()
    assert json.loads(text)["process"]["user"]["uid"] == 0
    bench.config.write_text(f"{text.rstrip()[:-1]}, {json.dumps(key, ensure_ascii=False)}: {OTHER_USER}}}")
    return bench.config.read_bytes()


@pytest.mark.parametrize("key", KEYS)
def test_runc_runs_another_user_than_an_exact_reader_sees(key: str, tmp_path: Path) -> None:
    bench = Bench(tmp_path, low_level_runtime("runc", tmp_path))
    spoil(bench, key, "A=1")
    try:
        assert bench.create(runtime=bench.low_level).returncode == 0
        bench.caller = bench.low_level
        assert bench.output()[0].split() == ["Uid:", *["4321"] * 4]
    finally:
        bench.delete()


@pytest.mark.parametrize("key", KEYS)
def test_a_gpu_container_with_such_a_key_does_not_start(bench: Bench, key: str) -> None:
    before = spoil(bench, key, "NVIDIA_VISIBLE_DEVICES=0")
    done = bench.create()
    assert done.returncode == 1
    assert done.stderr.startswith("gpuprov: ")
    assert f"the key {key!r}" in done.stderr
    assert done.stderr.count("\n") == 1
    assert bench.config.read_bytes() == before


@pytest.mark.parametrize("key", KEYS[1:])
def test_one_without_gpus_is_left_to_the_low_level_runtime(bench: Bench, key: str) -> None:
    before = spoil(bench, key, "A=1")
    assert bench.create().returncode == 0
    assert bench.config.read_bytes() == before


def test_the_prestart_hook_refuses_it_too(bench: Bench) -> None:
    bench.configure("NVIDIA_VISIBLE_DEVICES=0", hooks={"prestart": [bench.hook_entry("prestart")]})
    bench.config.write_text(bench.config.read_text().rstrip()[:-1] + ', "Linux": {}}')
    done = bench.create(runtime=bench.low_level)
    assert done.returncode != 0
    # crun says of a hook's refusal its exit code alone.
    said = "exit code: 1" if "crun" in bench.low_level else "'Linux', which runc reads as 'linux'"
    assert said in done.stderr
