"""What is wrong with an inventory, made readable: what Ansible says, and the file and line that set a variable."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from gpuprov.wire.errors import Problem

EXTRA_VARS_HINT = '-e gpuprov_driver_version=550.163.01, -e \'{"gpuprov_engines": ["podman"]}\' or -e @site.yml'
_TOO_LARGE = 1 << 20
_SHOWN = 3


@contextlib.contextmanager
def ansible_said() -> Iterator[list[str]]:
    """Collect what Ansible would print: it belongs into our errors, not between the lines of a table."""
    from ansible.utils.display import Display

    said: list[str] = []
    display = Display()
    display.display = lambda msg, *_, **__: said.append(clean(str(msg)))
    try:
        yield said
    finally:
        del display.display


@contextlib.contextmanager
def ansible_temporary_folder() -> Iterator[None]:
    """Give Ansible a folder for what it makes at its first import: its own is below HOME, needs that, and stays."""
    if "ANSIBLE_LOCAL_TEMP" in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="gpuprov-ansible-") as folder:
        os.environ["ANSIBLE_LOCAL_TEMP"] = folder
        try:
            yield
        finally:
            del os.environ["ANSIBLE_LOCAL_TEMP"]


def ansible_error() -> type[Exception]:
    from ansible.errors import AnsibleError

    error: type[Exception] = AnsibleError
    return error


def worth_telling(said: Sequence[str]) -> list[str]:
    """Return those of Ansible's warnings that tell of a mistake in the call."""
    return [line for line in said if "Could not match supplied host pattern" in line]


def clean(text: str) -> str:
    text = re.sub(r"\x1b\[[0-9;]*m", "", text).replace("[WARNING]: ", "")
    return "\n".join(line for line in text.splitlines() if line.strip()).strip()


def explained(error: BaseException) -> str:
    """Return Ansible's message with the place in a file that it is about, which it keeps apart, or deeper down."""
    texts = [clean(str(error))]
    cause: BaseException | None = error
    while cause is not None:
        context = clean(str(getattr(cause, "_formatted_source_context", None) or ""))
        if context:
            return "\n".join((*texts, context))
        cause = cause.__cause__ or cause.__context__
    return texts[0]


def vault_hint(text: str) -> str:
    return "name the vault's password file with --vault-password-file" if "vault" in text.lower() else ""


def ask_ansible(source: str) -> str:
    """Return the command that shows what Ansible itself makes of an inventory."""
    return f"ansible-inventory -i {shlex.quote(source)} --graph  # what Ansible makes of it"


def with_origins(problems: Sequence[tuple[str, Problem]], sources: Sequence[str]) -> tuple[Problem, ...]:
    """Return (host, problem) pairs as problems that name hosts and places; the same mistake of many hosts is one."""
    by_problem: dict[Problem, list[str]] = {}
    for host, problem in problems:
        by_problem.setdefault(problem, []).append(host)
    texts = tuple(_texts(sources))
    return tuple(_with_origin(problem, hosts, texts) for problem, hosts in by_problem.items())


def find_variable(name: str, texts: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Return `file:line` for every line of the (path, text) pairs that sets the variable."""
    sets = re.compile(rf"(?<![\w.]){re.escape(name)}[\"']?\s*[:=]")
    return tuple(
        f"{path}:{number}"
        for path, text in texts
        for number, line in enumerate(text.splitlines(), 1)
        if sets.search(line) and not line.lstrip().startswith(("#", ";"))
    )


def _with_origin(problem: Problem, hosts: Sequence[str], texts: Sequence[tuple[str, str]]) -> Problem:
    named = re.search(r"\b(gpuprov|ansible)_\w+", problem.what)
    places = find_variable(named.group(), texts) if named else ()
    more = f" and {len(hosts) - _SHOWN} more hosts" if len(hosts) > _SHOWN else ""
    evidence = (problem.evidence, ", ".join(places), "for " + ", ".join(hosts[:_SHOWN]) + more)
    return replace(problem, evidence="\n".join(part for part in evidence if part))


def _texts(sources: Sequence[str]) -> Iterator[tuple[str, str]]:
    for path in sorted(set(_files(sources))):
        if path.is_file() and path.stat().st_size < _TOO_LARGE:
            yield str(path), path.read_text("utf-8", "replace")


def _files(sources: Sequence[str]) -> Iterator[Path]:
    for source in map(Path, sources):
        folder = source if source.is_dir() else source.parent
        yield source
        if source.is_dir():
            yield from source.glob("*")
        for kind in ("group_vars", "host_vars"):
            yield from (folder / kind).rglob("*")
