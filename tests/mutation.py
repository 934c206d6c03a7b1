"""Small faults ("mutants") put into modules on which a host's safety rests, and those that the unit tests do not find.

    python -m tests.world python -m tests.mutation MODULE…     by hand, or all of MODULES: `make mutation`

mutmut makes the mutants. Here the tests are collected once, a first run notes which tests reach which function, and
each mutant meets all tests that reach its function, the shortest first, in a process of its own. No file is changed.
"""

import argparse
import ast
import contextlib
import difflib
import importlib.abc
import importlib.machinery
import io
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType

import pytest
from mutmut.mutation import trampoline
from mutmut.mutation.file_mutation import mutate_file_contents

from tests.world import MEMORY

MODULES = """
core/journal core/apply core/download fleet/host_keys packages/keys runtime_hook/request runtime_hook/requirements
runtime_hook/rootfs fleet/rolling agent/probe facts/leftovers
boot/clean boot/nvidia_docker boot/prepare boot/reboot boot/watch core/changes core/units driver/cuda_toolkit
driver/dcgm driver/vgpu driver/fabric_manager driver/imex driver/kernel driver/run_files driver/mig driver/nouveau
driver/packaged driver/running_driver driver_run engines/other_engines engines/docker_change engines/docker_proxy
engines/nvidia_docker_removal packages/apt_changes packages/interface packages/rpm_locks packages/rpm plan/with_bundle
toolkit
"""  # From boot/clean on, these hold the kinds of change: a test compares them with plan.steps.CHANGE_KINDS.
# Of the first run, and beside what its tests took there: a mutant that makes a loop endless is found, too.
_FIRST_LIMIT, _LIMIT = 3600, 20
_FORK = multiprocessing.get_context("fork")


class Mutated(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):  # type: ignore[misc]
    """One module of gpuprov with all its mutants; the process's variable chooses one of them."""

    def __init__(self, module: str) -> None:
        super().__init__(f"gpuprov.{module.replace('/', '.')}", f"gpuprov/{module}.py")
        made = mutate_file_contents(self.path, Path(self.path).read_text())
        self.source, self.mutants = made.code, [f"{self.name}.{name}" for name in made.mutant_names]

    def find_spec(self, fullname: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        wanted = fullname == self.name
        return importlib.machinery.ModuleSpec(fullname, self, origin=self.path) if wanted else None

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.source, self.path, "exec", dont_inherit=True)

    def shown(self, mutant: str) -> str:
        """Return the lines in which a mutant differs from the original."""
        lines = self.source.splitlines()
        functions = {
            node.name: lines[node.lineno : node.end_lineno]
            for node in ast.walk(ast.parse(self.source))
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        }
        name = mutant.rpartition(".")[2]
        original = name.rpartition("__mutmut_")[0] + "__mutmut_orig"
        compared = difflib.unified_diff(functions[original], functions[name], n=0, lineterm="")
        return "\n".join(f"    {line}" for line in compared if line[:2] not in ("--", "++", "@@"))


def in_child(work: Callable[[], object], limit: float) -> object:
    """Return what some work returned in a process of its own, or None if it raised or took longer than some seconds."""
    reads, writes = _FORK.Pipe(duplex=False)
    child = _FORK.Process(target=_work, args=(work, writes))
    child.start()
    writes.close()
    try:
        return reads.recv() if reads.poll(limit) else None
    except EOFError:
        return None
    finally:
        # With what its tests started.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid or 0, signal.SIGKILL)
        child.join()
        # A killed child leaves its fixtures' folders, which would fill the memory, and each test would fail.
        for left in MEMORY.glob("*"):
            shutil.rmtree(left, ignore_errors=True)


def _work(work: Callable[[], object], writes: Connection) -> None:
    os.setsid()
    with Path(os.devnull).open("r+b") as nothing:
        for number in range(3):
            os.dup2(nothing.fileno(), number)
    writes.send(work())


@dataclass
class FirstRun:
    """Of the tests without a mutant, by their numbers: which reach a function, their times in seconds, and failures."""

    reached: dict[str, list[int]] = field(default_factory=partial(defaultdict, list))
    took: dict[int, float] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)


class Mutation:
    """A plugin of pytest: instead of running the tests once, it runs them for each mutant."""

    def __init__(self, modules: list[Mutated]) -> None:
        self.modules = modules

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        begun = time.monotonic()
        first = in_child(lambda: self.first_run(session), _FIRST_LIMIT)
        assert isinstance(first, FirstRun), "the tests without a mutant did not end"
        print(*(f"left out, fails without a mutant: {name}" for name in first.failed), sep="\n")
        print(f"{len(session.items)} tests, {time.monotonic() - begun:.0f} s", flush=True)
        for module in self.modules:
            self.try_all(session, module, first)
        return True

    def try_all(self, session: pytest.Session, module: Mutated, first: FirstRun) -> None:
        begun, left = time.monotonic(), 0
        for mutant in module.mutants:
            tests = sorted(first.reached.get(mutant.rpartition("__mutmut_")[0], ()), key=first.took.__getitem__)
            limit = _LIMIT + 10 * sum(first.took[number] for number in tests)
            if in_child(partial(self.found, session, mutant, tests), limit) is False:
                left += 1
                print(f"{mutant}: {len(tests)} tests\n{module.shown(mutant)}", flush=True)
        every = sorted(set[int]().union(*(first.reached[one.rpartition("__mutmut_")[0]] for one in module.mutants)))
        assert in_child(partial(self.found, session, "none", every), _FIRST_LIMIT) is False, "the tests fail by now"
        total, minutes = len(module.mutants), (time.monotonic() - begun) / 60
        print(f"| `{module.path}` | {total} | {total - left} found | {left} left | {minutes:.1f} min |", flush=True)

    def first_run(self, session: pytest.Session) -> FirstRun:
        session.config.get_terminal_writer()._file = io.StringIO()
        first, reached = FirstRun(), set[str]()
        vars(trampoline)["record_trampoline_hit"] = lambda name, caller: reached.add(name)
        for number, (item, following) in enumerate(zip(session.items, [*session.items[1:], None])):
            trampoline.set_mutant_under_test("stats")
            begun, failed = time.monotonic(), session.testsfailed
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            first.took[number] = time.monotonic() - begun
            if session.testsfailed > failed:
                first.failed.append(item.nodeid)
            else:
                for name in reached:
                    first.reached[name].append(number)
            reached.clear()
        return first

    def found(self, session: pytest.Session, mutant: str, tests: list[int]) -> bool:
        """Tell whether a test fails with this mutant."""
        session.config.get_terminal_writer()._file = io.StringIO()
        trampoline.set_mutant_under_test(mutant)
        items = [session.items[number] for number in tests]
        for item, following in zip(items, [*items[1:], None]):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.testsfailed:
                return True
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", default=MODULES.split(), help="like driver/kernel; all by default")
    parser.add_argument("--tests", nargs="*", default=["tests/unit"], help="files or folders (default: all unit tests)")
    parser.add_argument("--mutants", nargs="*", help="only these, by the names that an earlier run printed")
    wanted = parser.parse_args()
    modules = [Mutated(name) for name in wanted.modules]
    for module in modules:
        module.mutants = [name for name in module.mutants if wanted.mutants is None or name in wanted.mutants]
    sys.meta_path[:0] = modules
    options = ("-q", "-p", "no:cacheprovider", "--hypothesis-profile=quick", "-m", "not slow and not long and not lab")
    sys.exit(pytest.main([*options, *wanted.tests], plugins=[Mutation(modules)]))


if __name__ == "__main__":
    main()
