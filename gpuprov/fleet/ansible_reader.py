"""Ansible's reader as gpuprov uses it, and its errors made readable: messages, the place that set a variable."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpuprov.core.commands import first_match
from gpuprov.protocol.dataclass import dataclass, replace
from gpuprov.protocol.errors import GpuprovError, Problem, UsageError
from gpuprov.protocol.words import counted

EXTRA_VARS_HINT = '-e gpuprov_driver_version=580.178.04, -e \'{"gpuprov_engines": ["podman"]}\' or -e @site.yml'
_TOO_LARGE = 1 << 20
_SHOWN = 3
_UNWRAPPED = 100_000  # columns
WARNING = "[WARNING]: "
_REFUSED = re.compile(r"Failed to parse inventory with '(?P<plugin>\w+)' plugin: (?P<reason>.+)")
_NAMES_PLUGIN, _STDERR = "Plugin configuration YAML file", "Standard error from inventory script:\n"
_DEEPEST = 100


@contextlib.contextmanager
def ansible_output() -> Iterator[list[str]]:
    """Collect Ansible's output for gpuprov's errors, so that it does not appear between the lines of a table."""
    try:
        from ansible.utils.display import Display
    except Exception as error:
        if type(error).__module__.partition(".")[0] != "ansible":
            seen = f"Python {platform.python_version()}: {type(error).__name__}: {error}"
            step = f"{shlex.quote(sys.executable)} -m pip install --upgrade ansible-core; or use an older Python"
            raise GpuprovError("ansible-core does not start with this Python", seen, step) from None
        raise UsageError("Ansible's settings are wrong", explained(error), "correct what is named") from None

    output: list[str] = []
    display = Display()
    columns, display.columns = display.columns, _UNWRAPPED
    # The prefix that marks a warning stays.
    display.display = lambda msg, *_, **__: output.append(WARNING * (WARNING in str(msg)) + clean(str(msg)))
    try:
        yield output
    finally:
        del display.display
        display.columns = columns


@contextlib.contextmanager
def ansible_temporary_folder() -> Iterator[None]:
    """Give Ansible a folder for files of its first import: the default is below HOME, needs that, and stays."""
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


def new_loader() -> Any:
    """Return Ansible's reader of YAML and JSON, which refuses deep nesting: old libyaml overflows the stack."""
    import yaml
    from ansible.parsing.dataloader import DataLoader

    class ShallowLoader(DataLoader):  # type: ignore[misc]
        def load(self, data: Any, *words: Any, **options: Any) -> Any:
            depth, text = 0, bytes(data) if isinstance(data, bytes) else str.encode(data, errors="replace")
            try:
                for event in yaml.parse(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
                    depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
                    if depth > _DEEPEST:
                        break
            except yaml.YAMLError as error:  # Ansible reports it, except for the limit of libyaml itself
                depth = _DEEPEST + 1 if "nesting depth" in str(error) else 0
            if depth > _DEEPEST:
                raise ansible_error()(f"nested too deep: at most {_DEEPEST} levels are read")
            return super().load(data, *words, **options)

    return ShallowLoader()


def clean(text: str) -> str:
    text = re.sub(r"\x1b\[[0-9;]*m", "", text).replace(WARNING, "")
    return "\n".join(line for line in text.splitlines() if line.strip()).strip()


def explained(error: BaseException) -> str:
    """Return Ansible's message with the place in a file, which Ansible stores separately, or in a nested error."""
    texts = [clean(str(error))]
    cause: BaseException | None = error
    while cause is not None:
        if context := clean(str(getattr(cause, "_formatted_source_context", None) or "")):
            return "\n".join((*texts, context))
        cause = cause.__cause__ or cause.__context__
    return texts[0]


def reason_of(source: str, output: Sequence[str]) -> str:
    """Return why Ansible cannot read a source: the reason of the plugin that its name stands for, and the place.

    Ansible tries each plugin in turn, and gives every one's reason two or three times.
    """
    lines = clean("\n".join(output)).splitlines()
    plugin = "yaml" if Path(source).suffix in (".yml", ".yaml", ".json") else "ini"
    given = [found for line in lines if (found := _REFUSED.fullmatch(line))]
    # It may name a plugin instead of hosts.
    plugin = "auto" if any(_NAMES_PLUGIN in one["reason"] for one in given) else plugin
    # Of a program that ran; each file on some file systems may be executed.
    ran = [one["reason"] for one in given if one["plugin"] == "script" and "Exec format" not in one["reason"]]
    chosen = (
        ran or [one["reason"] for one in given if one["plugin"] in (plugin, "auto")] or [one["reason"] for one in given]
    )
    told = (
        "\n".join(lines).partition(_STDERR)[2].partition("\nFailed to parse")[0].splitlines()[-_SHOWN:] if ran else ()
    )
    place = next((found[1] for line in lines if (found := re.fullmatch(r"Origin: (/.*:\d+:\d+)", line))), "")
    return "\n".join(filter(None, (chosen[-1], *told, place))) if chosen else "\n".join(lines)


def hint_for(text: str) -> str:
    """Return what to do about a path that the locale can't express, deep nesting, a vault or a plugin; else ""."""
    if (found := first_match("ansible", [text])) is None:
        return ""
    named = re.search(found[0].pattern, text)
    return found[0].next_step.format(**(named.groupdict() if named else {}))


def ask_ansible(source: str) -> str:
    """Return the command that shows how Ansible itself reads an inventory."""
    return f"ansible-inventory -i {shlex.quote(source)} --graph  # what Ansible makes of it"


@dataclass(frozen=True)
class Mistake:
    """A problem with the variables of one host, and their values."""

    host: str
    problem: Problem
    values: Mapping[str, Any]


def with_origins(
    problems: Sequence[Mistake], sources: Sequence[str], extra_names: frozenset[str]
) -> tuple[Problem, ...]:
    """Return the problems with hosts and places; a mistake of many hosts is listed once.

    `extra_names`: names set by -e.
    """
    by_problem: dict[Problem, list[Mistake]] = {}
    for wrong in problems:
        by_problem.setdefault(wrong.problem, []).append(wrong)
    texts = tuple(_texts(sources))
    found = []
    for problem, wrongs in by_problem.items():
        named = re.search(r"\b(gpuprov|ansible)_\w+", problem.what)
        hosts = [wrong.host for wrong in wrongs]
        places = _places(named.group(), wrongs, texts, extra_names) if named else ()
        more = f" and {counted(len(hosts) - _SHOWN, 'more host')}" if len(hosts) > _SHOWN else ""
        evidence = (problem.evidence, ", ".join(places), "for " + ", ".join(hosts[:_SHOWN]) + more)
        found.append(replace(problem, evidence="\n".join(filter(None, evidence))))
    return tuple(found)


def find_variable(name: str, texts: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Return `file:line` and its text for every line of the (path, text) pairs that sets the variable."""
    sets = re.compile(rf"(?<![\w.]){re.escape(name)}[\"']?\s*[:=]")
    return {
        f"{path}:{number}": line
        for path, text in texts
        for number, line in enumerate(text.splitlines(), 1)
        if sets.search(line) and not line.lstrip().startswith(("#", ";"))
    }


def _places(
    name: str, wrongs: Sequence[Mistake], texts: Sequence[tuple[str, str]], extra_names: frozenset[str]
) -> tuple[str, ...]:
    """Return where the variable gets its value: -e wins over all files; of several lines those with the value."""
    if name in extra_names:
        return ("-e",)
    values = {str(wrong.values.get(name, "")) for wrong in wrongs} - {""}
    places = find_variable(name, texts)
    with_value = tuple(place for place, line in places.items() if any(value in line for value in values))
    return with_value or tuple(places)


def _texts(sources: Sequence[str]) -> Iterator[tuple[str, str]]:
    files: set[Path] = set()
    for source in (Path("," if "," in one else one) for one in sources):  # a list of names may be too long for a path
        folder = source if source.is_dir() else source.parent
        kinds = [path for kind in ("group_vars", "host_vars") for path in (folder / kind).rglob("*")]
        files |= {source, *kinds, *(source.glob("*") if source.is_dir() else ())}
    for path in sorted(files):
        with contextlib.suppress(OSError):  # such as another user's file, which Ansible does not read
            if path.is_file() and path.stat().st_size < _TOO_LARGE:
                yield str(path), path.read_text("utf-8", "replace")
