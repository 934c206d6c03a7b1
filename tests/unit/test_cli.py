"""The command line as its users call it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from gpuprov import __version__
from gpuprov.agent.result import HostResult
from gpuprov.cli.main import cli, main
from gpuprov.cli.reference import as_text, as_yaml
from gpuprov.fleet import command
from gpuprov.fleet.options import Options
from gpuprov.fleet.run import Fleet
from gpuprov.protocol.errors import ExitCode, Problem
from gpuprov.protocol.spec import option_names

Call = Callable[..., subprocess.CompletedProcess[str]]


def run(*argv: str, env: dict[str, str] | None = None, **more: Any) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **(env or {})}
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, env=environment, check=False, **more)


def gpuprov(*words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, "-m", "gpuprov", *words, env=env)


def in_shell(script: str, *words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return run("bash", "-c", f"set -o pipefail; {script}", "bash", *words, env=env)


def facts_of_a_fake_host(root: Path, *words: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "tests.unit.on_fake_host", str(root / "host"), "facts", *words)


def commands(command: click.Command, *words: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Yield each group and each command, and the words that call it."""
    yield words, command
    for name, inner in command.commands.items() if isinstance(command, click.Group) else ():
        yield from commands(inner, *words, name)


@pytest.fixture
def called(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """Return a function that calls the command line in this process: to start one takes longer than most answers."""

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
            patch.setattr(sys, "argv", ["gpuprov", *words])
            # It replaces them.
            patch.setattr(sys, "stdout", sys.stdout)
            patch.setattr(sys, "stderr", sys.stderr)
            main()
        assert isinstance(ended.value.code, int)
        return subprocess.CompletedProcess(words, ended.value.code, *capfd.readouterr())

    return call


def called_with(monkeypatch: pytest.MonkeyPatch, *words: str) -> Options:
    """Return the options that a call ends in."""
    seen: list[Options] = []

    def run(options: Options) -> ExitCode:
        seen.append(options)
        return ExitCode.DONE

    monkeypatch.setattr(command, "run_command", run)
    result: Result = CliRunner().invoke(cli, words, input="secret\nhunter2\n")
    assert result.exit_code == 0, result.output
    return seen[0]


@pytest.mark.parametrize("words", [words for words, _ in commands(cli)], ids=" ".join)
def test_help_has_examples(words: tuple[str, ...]) -> None:
    result = CliRunner().invoke(cli, (*words, "--help"))
    assert result.exit_code == 0
    assert "Example" in result.output and " ".join(("gpuprov", *words)) in result.output


@pytest.mark.parametrize("words", [words for words, one in commands(cli) if isinstance(one, click.Group)], ids=" ".join)
def test_lists_of_commands_are_told_in_whole_sentences(words: tuple[str, ...]) -> None:
    listed = CliRunner().invoke(cli, (*words, "--help"), terminal_width=80).output.partition("\nCommands:\n")[2]
    assert listed.strip()
    assert all(len(line) <= 80 and not line.endswith("...") and line.endswith(".") for line in listed.splitlines())


def test_every_option_says_what_it_does() -> None:
    options = [one for _, command in commands(cli) for one in command.params if isinstance(one, click.Option)]
    assert [option.opts for option in options if not (option.help or option.hidden)] == []


@pytest.mark.parametrize(
    "words", [("--help",), ("install", "--help"), ("--version",), ("completion", "bash")], ids=" ".join
)
def test_quick_answers_load_nothing_heavy(words: tuple[str, ...]) -> None:
    heavy = "ansible", "fabric", "paramiko", "requests", "marshmallow", "rich", "asyncio"
    code = (
        "import sys\nfrom gpuprov.cli.main import main\nsys.argv[1:] = " + repr(list(words)) + "\n"
        "try: main()\nexcept SystemExit: pass\n"
        f"print('LOADED', sorted(set({heavy!r}) & set(sys.modules)))"
    )
    done = run(sys.executable, "-c", code)
    assert "LOADED []" in done.stdout, done.stdout + done.stderr


def test_version() -> None:
    assert gpuprov("--version").stdout == f"gpuprov, version {__version__}\n"


def test_all_options_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    options = called_with(
        monkeypatch, "install", "--hosts", "a", "--hosts", "b", "--limit", "x", "-e", "k=1", "-e", "@f", "--check",
        "--diff", "--json", "--forks", "3", "-k", "-K", "--accept-new-host-keys", "--connect-timeout", "2.5",
        "--bootstrap-python", "-v", "--vault-password-file", "p", "--serial", "1,50%", "--max-fail", "5%",
        "--canary", "x", "--host-timeout", "9", "--report", "r.html", "--bundle", "b.tar", "--bundle-key", "AB CD",
        "--reboot", "if-needed",
    )  # fmt: skip
    assert options == Options(
        command="install", hosts=("a", "b"), limit="x", extra_vars=("k=1", "@f"), vault_password_file="p", check=True,
        diff=True, json=True, verbose=True, forks=3, password="secret", become_password="hunter2",
        accept_new_host_keys=True, connect_timeout=2.5, bootstrap_python=True, serial="1,50%", max_fail="5%",
        canary="x", host_timeout=9, report="r.html", bundle="b.tar", bundle_key="AB CD",
        overrides=(("reboot", "if-needed"),),
    )  # fmt: skip
    assert "secret" not in repr(options)
    assert "hunter2" not in repr(options)


@pytest.mark.parametrize("name", ["install", "rollback", "uninstall"])
def test_dry_run_is_another_name_of_check(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    options = called_with(monkeypatch, name, "--dry-run", "--diff")
    assert options == called_with(monkeypatch, name, "--check", "--diff") == Options(name, check=True, diff=True)


def test_what_no_option_says_is_the_default_of_its_field(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("install", "verify", "doctor", "facts", "rollback", "uninstall"):
        assert called_with(monkeypatch, name) == Options(name)


def test_verify_takes_images(monkeypatch: pytest.MonkeyPatch) -> None:
    options = called_with(monkeypatch, "verify", "--image", "ubuntu", "--torch-image", "pytorch/pytorch")
    assert options.overrides == (("verify_image", "ubuntu"), ("torch_image", "pytorch/pytorch"))


USAGE = [
    ("unknown command", ("instal",), "No such command"),
    ("unknown option", ("install", "--chek"), "No such option"),
    ("bad number", ("install", "--forks", "0"), "--forks"),
    ("no inventory there", ("install", "--hosts", "/nowhere"), "there is no inventory /nowhere"),
    ("limit without inventory", ("facts", "--limit", "a"), "--limit needs an inventory"),
    ("unknown variable", ("facts", "-e", "gpuprov_tolkit=nvidia"), "did you mean gpuprov_toolkit?"),
    ("unreadable variable", ("facts", "-e", "[1,2"), "extra variables"),
    ("missing variable file", ("facts", "-e", "@/nowhere.yml"), "/nowhere.yml"),
    ("bad image", ("verify", "--hosts", "a,", "--image", "x y"), "is not an image reference"),
    ("bad batch", ("install", "--serial", "half"), "--serial takes a number of hosts or a percentage"),
    ("report nowhere", ("facts", "--report", "/nowhere/r.html"), "/nowhere/r.html cannot be written"),
    ("report of nobody", ("facts", "--report", "~no.such/r.html"), "~no.such/r.html cannot be written"),
    ("variables of nobody", ("facts", "-e", "@~no.such/a.yml"), "there is no file ~no.such/a.yml"),
    ("page of a list", ("report", "--list", "--html", "r.html"), "leave out --run and --html"),
    ("nodes of DRA", ("kubernetes", "manifest", "--mode", "dra", "--node-selector", "a=b"), "leave out --mode dra"),
    ("metrics nowhere", ("facts", "--metrics", "/nowhere/r.prom"), "/nowhere/r.prom cannot be written"),
    ("drift without a check", ("install", "--detailed-exitcode"), "--detailed-exitcode needs --check"),
    ("unknown canary", ("install", "--hosts", "a,", "--canary", "b"), "--canary b is no host of this run"),
    ("empty inventory name", ("install", "--hosts", ""), "--hosts names no inventory"),
    ("empty limit", ("install", "--hosts", "a,", "--limit", ""), "it is empty: is a variable of the shell not set?"),
    ("empty bundle", ("install", "--bundle", ""), "it is empty"),
    ("empty key", ("bundle", "verify", __file__, "--bundle-key", " "), "it is empty"),
    ("limit that is no pattern", ("facts", "--hosts", "a,b", "--limit", "["), "--limit names no host"),
    ("limit of commas", ("facts", "--hosts", "a,b", "--limit", ","), "--limit names no host"),
    ("limit without the group's name", ("facts", "--hosts", "a,b", "--limit", "a:&"), "--limit names no host"),
    ("word that is no variable", ("facts", "-e", "gpuprov_driver_version"), "-e takes key=value"),
    ("missing bundle", ("install", "--hosts", "a,", "--bundle", "/nowhere.tar"), "there is no bundle /nowhere.tar"),
    ("check for verify", ("verify", "--check"), "No such option"),
    ("check of a diagnosis", ("doctor", "--check"), "--check: only with --fix"),
    ("diff of a diagnosis", ("doctor", "--check", "--diff"), "--check and --diff: only with --fix"),
    ("misspelled cause", ("doctor", "--explain", "gpu-nuveau"), "next: gpuprov doctor --explain gpu-nouveau"),
    ("cause and fix", ("doctor", "--explain", "gpu-nouveau", "--fix"), "--explain examines no host"),
    ("cause of hosts", ("doctor", "--explain", "gpu-nouveau", "--hosts", "a,"), "--explain examines no host"),
    ("cause of a root", ("doctor", "--explain", "gpu-nouveau", "--root", "/"), "--explain examines no host"),
    ("variable without a value", ("cuda", "--env", "LD_LIBRARY_PATH"), "give NAME=VALUE"),
    ("unknown result", ("cuda", "--explain", "7", "--json"), "7: not in gpuprov's table of CUDA results\n  seen: "),
]


@pytest.mark.parametrize(("words", "what"), [u[1:] for u in USAGE], ids=[u[0] for u in USAGE])
def test_wrong_call_ends_with_exit_code_2_and_a_sentence(called: Call, words: tuple[str, ...], what: str) -> None:
    done = called(*words)
    assert done.returncode == 2
    assert what in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "code"),
    [("facts --hosts nothere.ini", 2), ("facts -e @nothere.yml", 2), ("install --bundle nothere.tar --hosts a,", 2),
     ("facts --hosts a..b, --json", 4), ("report --list", 0), ("options --json", 0)],
)  # fmt: skip
def test_a_working_directory_that_was_removed_is_told(tmp_path: Path, words: str, code: int) -> None:
    (tmp_path / "gone").mkdir()
    done = in_shell(f'cd "$2" && rmdir "$2" && "$1" -m gpuprov {words}', sys.executable, str(tmp_path / "gone"),
                    env={"XDG_STATE_HOME": str(tmp_path)})  # fmt: skip
    assert (done.returncode, "the working directory was removed" in done.stderr) == (code, True), done.stderr
    assert "defect" not in done.stderr


@pytest.mark.parametrize("words", ["facts --hosts a..b, --json", "report --list", "options", "--help"])
@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&-"])
def test_closed_streams_leave_no_traceback(tmp_path: Path, words: str, closed: str) -> None:
    done = in_shell(f'"$1" -m gpuprov {words} {closed}', sys.executable, env={"XDG_STATE_HOME": str(tmp_path)})
    assert done.returncode == (4 if words.startswith("facts") else 0), done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "gpuprov/log").exists(), "a defect leaves a log"


@pytest.mark.parametrize(("address", "what"), [
    ("a..b", "the name a..b is not known"),
    ("fe80::1%none0", "this machine has no network interface none0"),
    ("fe80::1", "fe80::1 is an address of one link, and names no interface, as fe80::1%eth0"),
])  # fmt: skip
def test_an_address_that_leads_nowhere_is_explained(address: str, what: str) -> None:
    done = gpuprov("facts", "--hosts", "a,", "-e", f"ansible_host={address}")
    assert (done.returncode, what in done.stdout) == (ExitCode.UNREACHABLE, True), done.stdout


def test_this_machine_needs_root() -> None:
    code = "import os; os.geteuid = lambda: 1000; from gpuprov.cli.main import main; main()"
    done = run(sys.executable, "-c", code, "install")
    assert done.returncode == 2
    assert "next: put sudo before it" in done.stderr and "sudo gpuprov" not in done.stderr


def test_a_user_without_name_or_home_gets_no_traceback(tmp_path: Path) -> None:
    # As in a container with a user id of its own.
    code = (
        "import os, pwd, sys; del os.environ['HOME']; sys.argv[1:] = ['report', '--list']\n"
        "def unknown(_): raise KeyError\n"
        "pwd.getpwuid = unknown\n"
        "from gpuprov.cli.main import main; main()"
    )
    done = run(sys.executable, "-c", code, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("home", ["/proc/self", "writable"])
def test_the_inventory_needs_no_home_and_leaves_nothing_there(tmp_path: Path, home: str) -> None:
    (tmp_path / "hosts").write_text("here ansible_connection=local gpuprov_nope=1\n")
    (tmp_path / "writable").mkdir()
    done = gpuprov("facts", "--hosts", str(tmp_path / "hosts"), env={"HOME": str(tmp_path / home)})
    assert (done.returncode, "there is no variable gpuprov_nope" in done.stderr) == (2, True)
    assert not (tmp_path / home / ".ansible").exists()


@pytest.mark.parametrize(("piped", "said"), [("", "SSH password"), ("secret\n", "sudo password")])
def test_passwords_that_nobody_can_type_are_told(piped: str, said: str) -> None:
    words = ("-m", "gpuprov", "install", "--hosts", "a,", "-k", "-K")
    done = run(sys.executable, *words, input=piped, start_new_session=True)
    assert done.returncode == 2
    assert done.stderr.startswith(f"there is nobody to ask for the {said}\n")


def test_unexpected_exception_leaves_a_log_and_no_traceback(tmp_path: Path) -> None:
    code = (
        "import gpuprov.cli.reference as r\nfrom gpuprov.cli.main import main\n"
        "def broken(columns): raise ZeroDivisionError('oh')\nr.as_text = broken\nmain()"
    )
    done = run(sys.executable, "-c", code, "options", env={"XDG_STATE_HOME": str(tmp_path)})
    log = next((tmp_path / "gpuprov/log").iterdir())
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert str(log) in done.stderr
    assert "ZeroDivisionError: oh" in log.read_text()


def test_options_list_every_variable_in_every_form(called: Call) -> None:
    names = [f"gpuprov_{name}" for name in option_names()]
    text, markdown, as_json = (called("options", *form).stdout for form in ((), ("--markdown",), ("--json",)))
    assert [entry["name"] for entry in json.loads(as_json)] == names
    assert all(name in text and f"| `{name}` |" in markdown for name in names)
    assert len(markdown.splitlines()) == len(names) + 2


def test_options_fit_on_a_terminal_and_lose_no_word() -> None:
    wide, narrow = as_text(), as_text(60)
    meanings = [line for line in narrow.splitlines() if line.startswith("    ")]
    assert all(len(line) <= 60 or " " not in line.strip() for line in meanings)
    assert narrow.split() == wide.split()


def test_options_on_a_terminal_and_in_yaml_have_no_markdown() -> None:
    for text in (as_text(), as_yaml({}).partition("\n")[2]):
        assert "`" not in text and "](" not in text
        assert "(docs/rack.md)" in text


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script_names_the_program(called: Call, shell: str) -> None:
    done = called("completion", shell)
    assert done.returncode == 0
    assert "_GPUPROV_COMPLETE" in done.stdout


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("ver", "plain,verify"),
        ("doctor --explain gpu-n", "plain,gpu-nouveau"),
        ("install --hosts ", "file,"),
        ("install --bundle ", "file,"),
        ("report --html ", "file,"),
        ("bundle verify ", "file,"),
        ("cdi validate ", "file,"),
        ("cdi generate --driver-root ", "dir,"),
        ("runtime configure --config ", "file,"),
        ("hook explain --bundle ", "dir,"),
    ],
)
def test_words_and_paths_complete(called: Call, monkeypatch: pytest.MonkeyPatch, words: str, completed: str) -> None:
    monkeypatch.setenv("_GPUPROV_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", f"gpuprov {words}")
    monkeypatch.setenv("COMP_CWORD", str(len(f"{words}x".split())))
    assert called().stdout == f"{completed}\n"


def test_agent_build_writes_the_file(tmp_path: Path) -> None:
    done = gpuprov("agent", "build", "-o", str(tmp_path / "agent.pyz"))
    assert (done.returncode, done.stderr) == (0, "")
    assert str((tmp_path / "agent.pyz").stat().st_size) in done.stdout
    nowhere = gpuprov("agent", "build", "-o", str(tmp_path / "nowhere/agent.pyz"))
    assert (nowhere.returncode, "agent.pyz can't be written" in nowhere.stderr) == (1, True)


@pytest.mark.parametrize(
    ("redirected", "code", "said"),
    [("| true", 0, ""), ("| head -n 1", 0, ""), (">&-", 0, ""), (">/dev/full", 1, "No space left on device")],
)
def test_a_run_goes_on_when_its_reader_is_gone(tmp_path: Path, redirected: str, code: int, said: str) -> None:
    """`tee` dies of the same Ctrl-C that lets the hosts finish."""
    page = tmp_path / "page.html"
    words = facts_of_a_fake_host(tmp_path, "--json", "--report", str(page))
    done = in_shell(f'"$@" {redirected}', *words, env={"XDG_STATE_HOME": str(tmp_path)})
    assert (done.returncode, said in done.stderr, "defect" in done.stderr) == (code, True, False), done.stderr
    assert "localhost" in page.read_text()
    assert len(list((tmp_path / "gpuprov/runs").iterdir())) == 1


@pytest.mark.parametrize("words", ["options --json", "--help", "cdi list --json", "completion bash"])
def test_short_answers_end_quietly_with_their_reader(words: str) -> None:
    done = in_shell(f'"$1" -m gpuprov {words} | head -n 1', sys.executable)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("words", [("facts", "--hosts"), ("verify", "--hosts"), ("install", "--check", "--hosts")])
def test_a_locale_that_is_not_installed_ends_no_command(tmp_path: Path, words: tuple[str, ...]) -> None:
    """Ansible's own programs end with it; so what reads an inventory and its templates may not need those."""
    hosts = tmp_path / "hosts"
    hosts.write_text("here ansible_connection=local gpuprov_nope='{{ 1 + 1 }}'\n")
    done = gpuprov(*words, str(hosts), env={"LC_ALL": "xx_XX.UTF-8", "LANG": "xx_XX.UTF-8"})
    assert (done.returncode, done.stderr.splitlines()[0]) == (2, "there is no variable gpuprov_nope")


def test_an_old_locale_shows_question_marks(tmp_path: Path) -> None:
    old = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    done = run(*facts_of_a_fake_host(tmp_path), env=old)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()
    assert "  ?  " in done.stdout  # a dash: no driver


# A module that is loaded then → the exit status: by the signal itself, or as a shell tells it.
LOADED = {"gpuprov.protocol.errors": -signal.SIGINT, "gpuprov.fleet.command": 128 + signal.SIGINT}


@pytest.mark.parametrize("module", LOADED)
def test_ctrl_c_while_modules_load_leaves_no_traceback(module: str) -> None:
    """The kernel delivers it within a module that is loaded early."""
    code = (
        "import os, runpy, signal, sys\n"
        "class Early:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == {module!r}: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Early())\nsys.argv[1:] = ['facts']\nrunpy.run_module('gpuprov', run_name='__main__')"
    )
    done = run(sys.executable, "-c", code)
    assert (done.returncode, done.stdout, done.stderr) == (LOADED[module], "", "")


def test_next_command_repeats_the_choice_of_hosts() -> None:
    assert command.next_command(Options("install", ("my hosts",), limit="gpu")) == (
        "gpuprov verify --hosts 'my hosts' --limit gpu"
    )
    assert command.next_command(Options("verify", ("hosts",), limit="a")) == "gpuprov doctor --hosts hosts --limit a"
    assert command.next_command(Options("verify")) == "gpuprov doctor"
    asked = Options("install", ("h",), extra_vars=("gpuprov_docker=none", "ansible_password=secret"),
                    vault_password_file="~/vault", password="a", become_password="b")  # fmt: skip
    assert command.next_command(asked) == (
        "gpuprov verify --hosts h --vault-password-file '~/vault' -k -K -e gpuprov_docker=none -e …"
    )
    assert command.next_command(Options("doctor", ("hosts",))) == ""
    assert command.next_command(Options("install", root="/mnt")) == "gpuprov verify --root /mnt"


# What a host names is completed by its inventory or image, and by what is no password.
TYPED = [
    (Options("doctor"), "gpuprov install -e a=b"),
    (Options("doctor", root="/mnt/a b"), "gpuprov install --root '/mnt/a b' -e a=b"),
    (Options("doctor", ("my hosts",), extra_vars=("gpuprov_k=a b",)),
     "gpuprov install --hosts 'my hosts' --limit lab-a -e 'gpuprov_k=a b' -e a=b"),
    *(
        (Options("doctor", ("h",), extra_vars=(variable, "@site.yml")),
         "gpuprov install --hosts h --limit lab-a -e @site.yml -e … -e a=b")
        for variable in (
            "ansible_become_password=hunter2", "gpuprov_docker=none\nansible_become_pass=hunter2",
            "gpuprov_driver_url=https://me:hunter2@mirror/x.run", '{"a": "hunter2"}',
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("options", "typed"), TYPED)
def test_the_doctors_installation_is_told_as_it_is_to_be_typed_here(options: Options, typed: str) -> None:
    problem = Problem("what", "seen", "systemctl start x; gpuprov install -e a=b")
    (there,) = command.with_whole_commands((HostResult("lab-a", ExitCode.FAILED, problems=(problem,)),), options)
    assert there.problems[0].next_step == f"systemctl start x; {typed}"


@pytest.mark.parametrize(("command_name", "whole"), [("install", True), ("doctor", True), ("verify", False)])
def test_the_way_that_works_on_a_host_names_that_host(
    command_name: str, whole: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As it was, it would have changed the machine at which it is typed."""
    ill = HostResult(
        "lab-a", ExitCode.USAGE, problems=(Problem("old", "", "gpuprov uninstall; gpuprov install -e a=b"),)
    )
    monkeypatch.setattr(Fleet, "run", lambda *_: (ill,))
    command.run_command(Options(command_name, ("lab-a,",)))
    place = "--hosts lab-a, --limit lab-a"
    assert (f"gpuprov uninstall {place}; gpuprov install {place} -e a=b" in capsys.readouterr().out) is whole


def test_a_link_to_the_report_to_be_stays(tmp_path: Path) -> None:
    (tmp_path / "latest.html").symlink_to("new.html")
    command.require_writable(str(tmp_path / "latest.html"))
    assert [path.name for path in tmp_path.iterdir() if path.is_symlink()] == ["latest.html"]
    assert not (tmp_path / "new.html").exists()


def test_typed_passwords_yield_to_those_of_the_inventory(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("lab-a ansible_become_password=kept\nlab-b\n")
    options = Options("facts", (str(tmp_path / "hosts"),), become_password="typed", password="ssh")
    found = command.inventory_of(options).hosts
    assert [(host.become_password, host.password) for host in found] == [("kept", "ssh"), ("typed", "ssh")]


@pytest.mark.parametrize(
    ("result", "line"),
    [
        ("803", "803  cudaErrorSystemDriverMismatch, CUDA_ERROR_SYSTEM_DRIVER_MISMATCH: libcuda and the"),
        ("cuda_error_no_device", "38, 100  cudaErrorNoDevice"),
    ],
)
def test_a_result_of_cuda_is_explained(called: Call, result: str, line: str) -> None:
    assert called("cuda", "--explain", result).stdout.startswith(line)


def test_every_command_that_goes_to_hosts_has_the_same_options_for_them() -> None:
    wanted = {
        "--hosts", "--limit", "-l", "--extra-vars", "-e", "--vault-password-file", "--accept-new-host-keys",
        "--connect-timeout", "--ask-pass", "-k", "--ask-become-pass", "-K",
    }  # fmt: skip
    found = {" ".join(words): {flag for one in command.params for flag in one.opts} for words, command in commands(cli)}
    # Two read the inventory, and go to no host; one has none yet.
    with_hosts = {name for name, flags in found.items() if "--hosts" in flags} - {"bundle create", "options", "init"}
    assert with_hosts >= {"install", "doctor", "hook explain"}
    # -e is docker run's --env for `gpuprov cuda`; what a host shall be concerns it not.
    left_out = {"cuda": {"--extra-vars"}}
    assert {name: wanted - found[name] for name in with_hosts if wanted - found[name]} == left_out


def test_doctor_explains_a_cause(called: Call) -> None:
    done = called("doctor", "--explain", "gpu-nouveau")
    labels = [line.split()[0] for line in done.stdout.splitlines()[1:-1]]
    assert (done.returncode, labels) == (0, ["means:", "sign:", "type:", "--fix:"])
    assert "a GPU is bound to nouveau" in done.stdout and "/etc/modprobe.d/gpuprov-nouveau.conf" in done.stdout
