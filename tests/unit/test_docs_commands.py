"""Every command in README and docs/ is one, and tests execute it or its page says why not (tests/docs_commands.py)."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from ansible.cli.playbook import PlaybookCLI
from click.testing import CliRunner

from gpuprov.cli.main import cli
from tests.docs_commands import (
    EXAMPLES,
    HERE,
    NO_FILE,
    OTHERS,
    PAGES,
    PROGRAMS,
    ROOT,
    SHARED,
    TESTS,
    TUTORIALS,
    TYPED,
    Command,
    calls_in,
    commands,
    matching,
)

_COMMANDS = tuple(command for page in PAGES for command in commands(page))
_PROGRAM = r"(?:gpuprov|ansible-playbook|make)\b"
# In $(…), and at the beginning of a command.
_CALL = re.compile(rf"\$\(({_PROGRAM}[^)|]*)|(?:^|\| |&& )({_PROGRAM}.*?)(?= \| | && |$)")
# The options that each command over hosts has.
_OF_ALL = {name for one in cli.commands["facts"].params for name in one.opts}
_HOW = """\
next: let a test execute it and name its file in TESTS or OTHERS of tests/docs_commands.py, or put
      <!-- example: WHY NO TEST EXECUTES IT --> above the block's fence; for one command: EXAMPLES there"""


def calls(command: Command, program: str) -> Iterator[list[str]]:
    """Yield the arguments of each call of a program in a line of the shell, redirections left out."""
    for inner, outer in _CALL.findall(command.text):
        words = shlex.split(inner or outer)
        if words[0] == program:
            for sign in ("<", ">"):
                if sign in words:
                    at = words.index(sign)
                    del words[at : at + 2]
            yield words[1:]


def parsed(words: list[str]) -> tuple[str, click.Command, list[str]]:
    """Return subcommand, click command and options of `gpuprov WORDS`, which click parses and does not run."""
    context = cli.make_context("gpuprov", list(words))
    command: click.Command = cli
    names: list[str] = []
    rest = words
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        name, found, rest = command.resolve_command(context, rest)
        assert found is not None
        assert name is not None
        names, command = [*names, name], found
        context = command.make_context(name, list(rest), parent=context)
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    return " ".join(names), command, [word.partition("=")[0] for word in rest if word.partition("=")[0] in known]


def aliases(command: click.Command, option: str) -> list[str]:
    """Return the names of an option that do the same."""
    for parameter in command.params:
        for names in (parameter.opts, parameter.secondary_opts):
            if option in names:
                return names
    return []


def is_called(wanted: list[set[str]], files: tuple[str, ...]) -> bool:
    """Say whether one call in these files has one of each of these words."""
    return any(all(names & words for names in wanted) for file in files for words in calls_in(file))


def missing(command: Command) -> Iterator[str]:
    """Yield what no test executes of a command that is no example."""
    if matching(command.text, HERE) is not None:
        return
    if command.program not in PROGRAMS:
        yield f"{command.program} is not in PROGRAMS"
    for words in calls(command, "gpuprov"):
        name, found, options = parsed(words)
        if name not in TESTS:
            yield f"`gpuprov {name}` is not in TESTS"
            continue
        wanted = [{word} for word in name.split()]
        for names in (set(aliases(found, option)) for option in options):
            if not names & _OF_ALL:
                wanted.append(names)
            elif not is_called([names], (*TESTS[name], *SHARED)):
                yield f"no test has {min(names)}"
        if not is_called(wanted, TESTS[name]):
            yield f"no call in {', '.join(TESTS[name])} has {', '.join(map(min, wanted))}"
    if command.program != "gpuprov" and matching(command.text, OTHERS) is None:
        yield "no pattern of OTHERS"


@pytest.fixture(autouse=True)
def _files_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let click take the pages' files, which are not here, for existing ones."""
    monkeypatch.setattr(click.Path, "convert", lambda path, value, *_: value)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.name))
def test_each_command_is_executed_by_a_test_or_marked(page: Path) -> None:
    wrong = [f"{one}\n    {why}" for one in commands(page) if not one.example for why in missing(one)]
    assert wrong == [], "\n".join((*wrong, _HOW))


def test_click_parses_each_gpuprov_command() -> None:
    wrong = []
    for command in _COMMANDS:
        for words in calls(command, "gpuprov"):
            try:
                parsed(words)
            except click.ClickException as error:
                wrong.append(f"{command}\n    {error.format_message()}")
    assert wrong == []


def test_what_needs_no_host_is_executed_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for pattern, code in HERE.items():
        found = [words for one in _COMMANDS if matching(one.text, {pattern: code}) for words in calls(one, "gpuprov")]
        assert found, f"no page has {pattern}"
        for words in found:
            done = CliRunner().invoke(cli, words, prog_name="gpuprov")
            assert str(done.exit_code) == code, f"gpuprov {shlex.join(words)}: {done.output}"
            assert done.output


def test_ansible_parses_each_playbook_command() -> None:
    playbooks: set[str] = set()
    for command in _COMMANDS:
        for words in calls(command, "ansible-playbook"):
            parser = PlaybookCLI(["ansible-playbook", *words])
            parser.parse()
            named = parser.post_process_args(parser.parser.parse_args(words)).args
            playbooks.update(re.sub(r"gpuprov\.host\.(\w+)", r"playbooks/\1.yml", name) for name in named)
    assert len(playbooks) >= 3
    program = str(Path(sys.executable).with_name("ansible-playbook"))
    argv = [program, "--syntax-check", "-i", "localhost,", *sorted(playbooks)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr


def test_make_has_each_target() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = "\n".join(page.read_text("utf-8") for page in PAGES)
    named = {words[0] for command in _COMMANDS for words in calls(command, "make")}
    named |= set(re.findall(r"`(?:sudo )?make ([a-z-]+)", text))
    assert len(named) > 10
    assert named <= targets


def test_the_tables_name_what_is_there() -> None:
    files = {file for files in TESTS.values() for file in files} | {*SHARED, *OTHERS.values()} - set(NO_FILE)
    assert [file for file in sorted(files) if not (ROOT / "tests" / file).is_file()] == []
    for name, tests in TESTS.items():
        assert parsed(name.split())[0] == name if name == "advisories" else name.split()[0] in cli.commands
        for file in tests:
            assert name.split()[-1] in (ROOT / "tests" / file).read_text("utf-8"), f"{file} never says {name}"
    for table in (OTHERS, EXAMPLES, HERE):
        unused = [pattern for pattern in table if not any(matching(one.text, {pattern: ""}) == "" for one in _COMMANDS)]
        assert unused == []


def test_each_tutorial_is_typed_by_a_test() -> None:
    text = TUTORIALS.read_text("utf-8")
    pages = [page.name for page in TYPED]
    assert pages
    assert [name for name in pages if f'"{name}"' not in text] == []


def test_what_is_wrong_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```\nsudo gpuprov verify --hosts a \\\n  --canary 1   # c\nfrobnicate x\n```\n\n"
        "<!-- example: needs a GPU -->\n```\ndocker run x\n```\n\n```yaml\na: b\n```\n\n```\nprinted\n```\n\n"
        "```\nlab# docker ps\ngpuprov printed\n```\n"
    )
    found = list(commands(page))
    assert [(one.line, one.text, one.example) for one in found] == [
        (2, "gpuprov verify --hosts a --canary 1", ""),
        (4, "frobnicate x", ""),
        (9, "docker run x", "needs a GPU"),
        (21, "docker ps", ""),
    ]
    assert list(missing(found[1])) == ["frobnicate is not in PROGRAMS", "no pattern of OTHERS"]
    assert list(missing(found[3])) == ["no pattern of OTHERS"]
    with pytest.raises(click.NoSuchOption):
        parsed(["verify", "--no-such-option"])
    # Each of the options is in a test of the command, but no call has all of them.
    verify = Command("page.md", 1, "gpuprov verify --kubernetes --root /srv/image")
    assert list(missing(verify)) == [f"no call in {', '.join(TESTS['verify'])} has verify, --kubernetes, --root"]
