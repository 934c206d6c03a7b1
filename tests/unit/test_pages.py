"""What the README and docs/ tell people to type: every command and flag is there, every link leads somewhere."""

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from gpuprov.cli.main import cli
from gpuprov.protocol.spec import option_names

_ROOT = Path(__file__).parents[2]
_PAGES = (*sorted(_ROOT.glob("*.md")), *sorted((_ROOT / "docs").rglob("*.md")))
# Where a command begins: a line of its own, or code within one; behind sudo, a prompt, or the folder that it lies in.
_CALL = re.compile(r"(?:^|`|sudo |\$ |bin/)gpuprov ((?:[a-z]|--)[^`\n#│─]*)", re.MULTILINE)
# Variables of the playbooks' own, and metrics (tests/unit/fleet/test_many_results.py).
_NO_OPTIONS = ("gpuprov_play_", "gpuprov_run_", "gpuprov_host_", "gpuprov_check_", "gpuprov_version_info",
               "gpuprov_health_finding", "gpuprov_accept_figure", "gpuprov_gpus",
               "gpuprov_known_hole_score")  # fmt: skip


def wrong_words(call: str) -> Iterator[str]:
    """Yield what `gpuprov CALL` has that the command does not; words that are no command are prose."""
    # What stands in quotes is another program's.
    words = re.sub(r"(?<= )'[^']*'", "''", call).split()
    command: click.Command = cli
    while words and isinstance(command, click.Group) and words[0] in command.commands:
        command = command.commands[words.pop(0)]
    if command is cli and not (words and words[0].startswith("-")):
        return
    known = {"-h", "--help", "--version", *(name for parameter in command.params for name in parameter.opts)}
    for word in words:
        flag = word.strip(".,;()[]\"'").partition("=")[0]
        if re.match(r"--?[a-zA-Z]", flag) and flag not in known:
            yield flag


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: str(page.name))
def test_what_a_page_says_is_there(page: Path) -> None:
    text = re.sub(r"\\\n\s*", " ", page.read_text("utf-8"))
    calls = _CALL.findall(text)
    assert [(call, wrong) for call in calls for wrong in wrong_words(call)] == []
    links = [link for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) if not link.startswith("http")]
    assert [link for link in links if not (page.parent / link).exists()] == []
    variables = set(re.findall(r"\bgpuprov_[a-z0-9_]+", text)) - {f"gpuprov_{name}" for name in option_names()}
    assert [name for name in variables if not name.startswith(_NO_OPTIONS)] == []


def test_a_wrong_flag_is_seen() -> None:
    assert list(wrong_words("bundle create --distro debian-12 --drivers 1")) == ["--drivers"]
    assert list(wrong_words("install --hosts x --check, then")) == []
    assert list(wrong_words("reads Ansible's inventories -x")) == []
