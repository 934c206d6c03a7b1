"""The deployed runtime under every Python of this machine, and what is said where its Python is gone or too old."""

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuprov.core.system import System
from gpuprov.facts.interpreter import Interpreter, compile_bytecode
from gpuprov.runtime_hook.deploy import STAND_IN
from tests.integration.container_bench import Bench
from tests.pythons import NEWEST, VERSIONS, too_old

pytestmark = pytest.mark.root
ALL = "NVIDIA_VISIBLE_DEVICES=all"
GONE = "/usr/bin/python3.10-gone"
WAYS = {"runtime": "", "hook": "prestart", "CDI hook": "createContainer"}
MakeBench = Callable[[str], Bench]


@pytest.fixture
def made(tmp_path: Path) -> Iterator[MakeBench]:
    """Deploy the runtime for a Python; the container goes when the test ends."""
    benches: list[Bench] = []

    def make(python: str) -> Bench:
        benches.append(Bench(tmp_path, "runc", python))
        return benches[-1]

    yield make
    for bench in benches:
        bench.delete()


def without_python(made: MakeBench) -> Bench:
    """Deploy the runtime for a Python that is gone, on a machine that has no python3 either."""
    bench = made(GONE)
    for program in (bench.runtime, bench.deployed.hook):
        text = program.read_text()
        assert f"|| python={STAND_IN}\n" in text
        program.write_text(text.replace(f"|| python={STAND_IN}\n", f"|| python={STAND_IN}-gone\n"))
    return bench


def hooks(bench: Bench, stage: str) -> dict[str, Any]:
    return {"hooks": {stage: [bench.hook_entry(stage)]}} if stage else {}


def refusal(bench: Bench, stage: str, *words: str) -> str:
    """Return what the start of a GPU container says, which must fail."""
    bench.configure(ALL, **hooks(bench, stage))
    done = bench.create(*words, runtime=bench.low_level if stage else "")
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.mark.parametrize("python", [*VERSIONS, pytest.param(NEWEST, marks=pytest.mark.slow)], indirect=True)
@pytest.mark.parametrize("compiled", [True, False], ids=["byte code", "sources"])
@pytest.mark.parametrize("way", ["runtime", "hook"])
def test_a_container_gets_its_gpus_under(made: MakeBench, python: str, way: str, compiled: bool) -> None:
    bench = made(python)
    library = bench.deployed.folder / "host/usr/lib/gpuprov/runtime_hook"
    # Each entry says which Python loaded it.
    trace = f'open("{bench.folder}/ran", "w").write(__import__("sys").version)\n'
    for name in ("main", "hook_main"):
        source = library / f"{name}.py"
        source.write_text(source.read_text().replace("\ndef main(", f"\n{trace}\ndef main(", 1))
    shutil.rmtree(library / "__pycache__")
    if compiled:
        ask = "import sys; print(sys.implementation.cache_tag)"
        tag = subprocess.run((python, "-c", ask), capture_output=True, text=True, check=True).stdout.strip()
        compile_bytecode(System(), Interpreter(python, cache_tag=tag), str(library))
        made_files = {path.name for path in (library / "__pycache__").glob(f"*main.*{tag}")}
        assert {re.sub(r"\.\d+\.", " ", name) for name in made_files} == {f"main {tag}", f"hook_main {tag}"}
    lines = bench.report(ALL, by_hook=WAYS[way])
    assert sum(re.match(r"node /dev/nvidia\d ", line) is not None for line in lines) == 2, lines
    assert any(line.startswith("file /usr/lib/x86_64-linux-gnu/libcuda.so") for line in lines)
    assert (bench.folder / "ran").read_text().startswith(f"{Path(python).name[len('python') :]}.")


@pytest.mark.parametrize("way", WAYS)
def test_a_python_that_is_gone_is_named_in_one_line(made: MakeBench, way: str) -> None:
    bench = without_python(made)
    said = refusal(bench, WAYS[way])
    sentence = f"gpuprov: the container runtime needs {GONE}, which is missing: run gpuprov install"
    assert sentence in said
    if way == "runtime":
        assert said.count("\n") == 1
    bench.configure("A=1", arguments=["sh", "-c", ":"])
    assert bench.create().returncode == 0


@pytest.mark.parametrize("way", WAYS)
def test_python3_stands_in_for_a_python_that_is_gone(made: MakeBench, way: str) -> None:
    """As after an upgrade of the distribution: the modules have no byte code for it."""
    bench = made(GONE)
    shutil.rmtree(bench.deployed.folder / "host/usr/lib/gpuprov/runtime_hook/__pycache__")
    lines = bench.report(ALL, by_hook=WAYS[way]) if way != "CDI hook" else bench.report(ALL)
    assert sum(re.match(r"node /dev/nvidia\d ", line) is not None for line in lines) == 2, lines
    bench.settings.write_text("")
    assert bench.begin(ALL).returncode == 0


@pytest.mark.parametrize("flag", [["--log={}"], ["--log", "{}"]], ids=["one word", "two words"])
def test_the_engine_finds_that_line_in_its_log(made: MakeBench, tmp_path: Path, flag: list[str]) -> None:
    bench, log = without_python(made), tmp_path / "engine log.json"
    refusal(bench, "", *(word.format(log) for word in flag), "--log-format", "json")
    entry = json.loads(log.read_text())
    assert entry["level"] == "error"
    assert entry["msg"].startswith(f"gpuprov: the container runtime needs {GONE}, which is missing")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", entry["time"])


def test_a_log_that_cannot_be_written_leaves_the_line_on_stderr(made: MakeBench) -> None:
    said = refusal(without_python(made), "", "--log", "/nowhere/log.json")
    assert said.count("\n") == 1 and "which is missing" in said


def test_settings_without_a_python_are_told_too(made: MakeBench) -> None:
    bench = without_python(made)
    bench.settings.write_text("")
    assert "which is missing" in refusal(bench, "")


@pytest.mark.parametrize("way", WAYS)
def test_a_python_that_is_too_old_is_named_in_one_line(made: MakeBench, way: str) -> None:
    python = too_old()
    bench = made(python)
    ask = "import sys; print('%d.%d.%d' % sys.version_info[:3])"
    version = subprocess.run((python, "-c", ask), capture_output=True, text=True, check=True).stdout.strip()
    sentence = (
        f"gpuprov: the container runtime needs Python 3.9 or later, and {python} is {version}: run gpuprov install"
    )
    assert sentence in refusal(bench, WAYS[way])
    bench.settings.write_text("")
    assert sentence in refusal(bench, WAYS[way])
