"""Standard output and error that outlive their reader (`| head`, a full disk, an old locale), and standard input.

The command line prints all text by `say` and `say_text`, tables by rich (fleet/report.py): files of images, bundles and
containers may hold control sequences, which must not reach the terminal.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from gpuprov.protocol.errors import UsageError, from_os_error
from gpuprov.protocol.words import line, plain


class _ProtectedOutput(io.FileIO):
    """A descriptor for writing; data that can't be written is dropped, and the reason is stored."""

    refusal: OSError | None = None

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            self.refusal = self.refusal or error
            return len(data)


@contextmanager
def protected_outputs() -> Iterator[None]:
    """Protect standard output and error. Raises GpuprovError, after the work, if output could not be written.

    A reader that closed early is not a failure. Characters that the locale lacks become question marks.
    """
    # Closed streams (`>&-`) lead to /dev/null: libraries write without checking. In this order the new files get the
    # numbers 0 to 2, which no connection must ever get.
    for name, flags, mode in (("stdin", os.O_RDONLY, "r"), ("stdout", os.O_WRONLY, "w"), ("stderr", os.O_WRONLY, "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.open(os.devnull, flags), mode, closefd=False))  # noqa: SIM115
    kept: list[_ProtectedOutput] = []
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        kept.append(_ProtectedOutput(stream.fileno(), "wb", closefd=False))
        by_line = stream.line_buffering or stream.write_through  # the latter: PYTHONUNBUFFERED
        text = io.TextIOWrapper(io.BufferedWriter(kept[-1]), stream.encoding, "replace", line_buffering=by_line)
        setattr(sys, name, text)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for refusal in filter(None, (one.refusal for one in kept)):
            if not isinstance(refusal, BrokenPipeError):
                raise from_os_error("the output could not be written to its end", refusal)


def say(*lines: object, err: bool = False) -> None:
    """Print lines. Nothing in one of them begins another line or moves the cursor."""
    for one in lines:
        click.echo(line(one), err=err)


def say_text(text: object, *, err: bool = False, nl: bool = True) -> None:
    """Print text of several lines (an error, JSON, a file), without control sequences."""
    click.echo(plain(text), err=err, nl=nl)


def show(found: object, lines: Iterable[object], *, as_json: bool) -> None:
    """Print a result as JSON, or as lines for people."""
    say_text(json.dumps(found, indent=2)) if as_json else say(*lines)


def percentage(label: str) -> Callable[[int, int], None]:
    """Return a function that shows, given (done, total), the progress on standard error, if that is a terminal."""
    shown = ""

    def show(done: int, total: int) -> None:
        nonlocal shown
        shows = f"{label} {100 * done // total} %" if done < total else " " * len(shown)
        if shows != shown and sys.stderr.isatty():
            click.echo(f"\r{shows}" if done < total else f"\r{shows}\r", nl=False, err=True)
        shown = shows

    return show


def standard_input(what: str) -> bytes:
    """Return all of standard input; at a terminal, print what is expected."""
    if sys.stdin is None:  # closed, and nobody has called protected_outputs
        return b""
    if sys.stdin.isatty():
        say(f"reading {what} from standard input; Ctrl-D ends it", err=True)
    return sys.stdin.buffer.read()


def object_text(path: str, what: str, hint: str) -> str:
    """Return the text of a file (`-`: standard input) that holds a JSON object; raises GpuprovError (exit code 2)."""
    evidence = "it is no object"
    try:
        content = standard_input(f"a {what}") if path == "-" else Path(path).read_bytes()
        text = content.decode("utf-8", "replace")
        if isinstance(json.loads(text), dict):
            return text
    except (OSError, ValueError, RecursionError) as error:
        evidence = str(error)
    raise UsageError(f"{'standard input' if path == '-' else path} holds no {what}", evidence, hint)
