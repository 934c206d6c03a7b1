"""The man pages: one for each command, which groff prints as they stand."""

import re
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpuprov.cli.main import cli
from gpuprov.fleet import options
from gpuprov.protocol.errors import ExitCode, UsageError
from tools import cli_page, man_pages

_MOMENT = 1_790_000_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("man")
    man_pages.write_pages(made, _MOMENT)
    return made


def printed(page: Path) -> str:
    """Return a page as man shows it in 110 columns, without bold type."""
    shell = 'groff -man -ww -rLL=110n -Tutf8 -P-c -P-b -P-u -P-o "$0"'
    done = subprocess.run(("sh", "-c", shell, str(page)), capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout


def test_each_section_of_the_reference_is_a_page(folder: Path) -> None:
    sections = [line[3:].replace(" ", "-") for line in cli_page.page().splitlines() if line.startswith("## gpuprov")]
    assert sorted(path.stem for path in folder.iterdir()) == sorted(sections)


REFUSED = {
    "gpuprov-init": (), "gpuprov-playbooks": ("x",), "gpuprov-agent-build": ("-o", "x"),
    "gpuprov-bundle-create": ("--distro", "debian-12", "-o", "x"),
}  # fmt: skip


def test_the_packages_have_no_page_of_a_command_that_their_program_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, packaged = man_pages.pages(_MOMENT), man_pages.pages(_MOMENT, one_file=True)
    assert whole.keys() - packaged.keys() == {f"{name}.1" for name in REFUSED}
    assert ".B playbooks\n" in whole["gpuprov.1"] and ".B playbooks\n" not in packaged["gpuprov.1"]
    monkeypatch.setattr(options, "one_file", True)
    for name, more in REFUSED.items():
        done = CliRunner().invoke(cli, [*name.split("-")[1:], *more])
        assert isinstance(done.exception, UsageError) and "needs the whole gpuprov" in str(done.exception), done.output


def test_groff_prints_them_without_a_warning(folder: Path) -> None:
    for path in folder.iterdir():
        assert " SYNOPSIS" not in printed(path)
    install = printed(folder / "gpuprov-install.1")
    assert "gpuprov-install - Bring hosts to what the inventory says\n" in install
    lines = [" ".join(line.split()) for line in install.splitlines()]  # groff 1.24 indents less
    assert "gpuprov install --hosts inventory.ini --limit 'gpu:!lab-b' -e @site.yml -K" in lines
    assert "-C, --check, --dry-run" in lines and "3 a host needs a reboot" in lines
    status = install.partition("EXIT STATUS")[2].partition("SEE ALSO")[0]
    assert {*map(int, re.findall(r"\b\d+\b", status))} == {*ExitCode}
    assert "EXIT STATUS" not in printed(folder / "gpuprov-completion.1")


def test_mandoc_finds_no_fault(folder: Path) -> None:
    done = subprocess.run(
        ("mandoc", "-T", "lint", "-W", "warning", *folder.iterdir()), capture_output=True, text=True, check=False
    )
    assert done.stdout + done.stderr == ""


def test_text_is_no_request() -> None:
    assert man_pages.literal(".so /etc/passwd") == "\\&.so /etc/passwd"
    assert man_pages.literal("a\\fB-b 'c'") == "a\\efB\\-b \\(aqc\\(aq"
    assert man_pages.literal("more …") == "more \\[u2026]"
