"""Runs that are cut off: killed at any moment, disconnected, started twice; the next one ends where it should."""

import contextlib
import random
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.integration.killed import held_at, journal_lines, kill_at, require_undisturbed
from tests.integration.test_host_program import bare_host
from tests.integration.test_install import etc, packages
from tests.lab import Host
from tests.lab.fixtures import Site, gpuprov, gpuprov_started, gpuprov_succeeds
from tests.lab.shell import wait_for
from tools import host_program

pytestmark = [pytest.mark.lab, pytest.mark.root]
_KILLS = 10
_KILLED = ("main", "twin")
# Of the journal's lines, at which a run is far from its beginning and its end.
_IN_THE_MIDDLE = 5
# Such that it does not match the command that looks for it.
_AGENT = "agent-[0-9a-f]*[.]pyz"
# It spares root by default, who logs in here.
_LOGIND = "[Login]\nKillUserProcesses=yes\nKillExcludeUsers=nobody\n"


def start(site: Site, host: str) -> subprocess.Popen[str]:
    return gpuprov_started("install", "--hosts", site.inventory(host))


def require_completed(site: Site, host: Host) -> None:
    """The agent of a run that nobody watches any more ends, and has made all changes."""
    wait_for("the agent's end", lambda: host.ssh(f"pgrep -f '{_AGENT}'", check=False).returncode != 0)
    assert "main: 0 changes" in gpuprov("install", "--hosts", site.inventory("main")).stdout


def test_killed_at_ten_moments_the_next_run_ends_as_an_undisturbed_one(site: Site) -> None:
    """Two hosts at once: much of a run is waiting."""
    with ThreadPoolExecutor(len(_KILLED)) as pool:
        list(pool.map(lambda index: killed_and_again(site, _KILLED[index], index), range(len(_KILLED))))
    gpuprov_succeeds("verify", "--hosts", site.inventory(*_KILLED))


def killed_and_again(site: Site, name: str, index: int) -> None:
    """Kill this host's share of ten runs; after each, the next run ends as an undisturbed one.

    Half of them at a line of the journal, half in the command that the agent begins after it.
    """
    host = site.fresh(name)
    inventory = site.inventory(name)
    gpuprov_succeeds("install", "--hosts", inventory)
    undisturbed = (etc(host), packages(host))
    # The last line says that the run has ended.
    moments = [(line, command) for line in range(1, journal_lines(host)) for command in (False, True)]
    drawn = random.Random(20).sample(moments, _KILLS)
    for line, in_command in drawn[index :: len(_KILLED)]:
        host.reset()
        with start(site, name) as process:
            kill_at(host, process, line, in_command=in_command)
            process.communicate(timeout=120)
        told = f"{name} at line {line}, in a command: {in_command}"
        done = gpuprov("install", "--hosts", inventory)
        assert done.returncode == 0, f"{told}:\n{done.stdout}"
        require_undisturbed(host, inventory, undisturbed, told)


def test_a_dropped_connection_does_not_end_the_work(site: Site) -> None:
    host = site.fresh("main")
    with start(site, "main") as process, held_at(host, process, _IN_THE_MIDDLE):
        process.kill()
        process.communicate()
        # As if the network were gone: the server's side of all connections ends too.
        host.ssh("pkill -9 -f 'sshd: root@notty'", check=False)
    require_completed(site, host)


def test_the_end_of_the_login_does_not_end_the_work(site: Site) -> None:
    """As above, on a host whose logind ends what a login leaves behind, as clusters have it."""
    host = site.fresh("main")
    host.add_archive()
    host.ssh("apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install libpam-systemd", timeout=300)
    host.ssh("mkdir /etc/systemd/logind.conf.d; cat > /etc/systemd/logind.conf.d/site.conf", stdin=_LOGIND)
    host.ssh("systemctl restart systemd-logind")
    with start(site, "main") as process, held_at(host, process, _IN_THE_MIDDLE):
        scope = host.ssh(f"grep -ho 'session-.*[.]scope' /proc/$(pgrep -o -f '{_AGENT}')/cgroup").stdout.strip()
        process.kill()
        process.communicate()
        host.ssh("pkill -9 -f 'sshd: root@notty'", check=False)
        wait_for("the login has ended", lambda: host.ssh(f"systemctl is-active {scope}", check=False).returncode != 0)
    require_completed(site, host)


def test_a_login_that_is_ended_slowly_does_not_end_the_work(site: Site) -> None:
    """logind sends SIGTERM to all that a login has begun, and then SIGHUP: on a busy host not at once."""
    host = site.fresh("main")
    with start(site, "main") as process, held_at(host, process, _IN_THE_MIDDLE):
        host.ssh(f"first=$(pgrep -o -f '{_AGENT}'); kill -CONT $first; kill $first; sleep 0.1; kill -HUP $first")
        process.kill()
        process.communicate()
    require_completed(site, host)


def test_the_second_of_two_runs_names_who_holds_the_lock(site: Site) -> None:
    host = site.fresh("main")
    with start(site, "main") as first:
        with held_at(host, first, _IN_THE_MIDDLE):
            second = gpuprov("install", "--hosts", site.inventory("main"))
        output, _ = first.communicate(timeout=120)
    assert second.returncode == 1
    assert "another gpuprov run holds this host" in second.stdout
    assert "gpuprov install, since" in second.stdout
    assert first.returncode == 0, output


def test_ctrl_c_ends_the_run_and_leaves_no_mess(site: Site) -> None:
    host = site.fresh("main")
    with start(site, "main") as process:
        with held_at(host, process, _IN_THE_MIDDLE):
            process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=120)
    assert "Traceback" not in output
    assert process.returncode == 128 + signal.SIGINT, output
    # The host's changes had begun: it has come to its end.
    gpuprov_succeeds("install", "--hosts", site.inventory("main"))
    assert "main: 0 changes" in gpuprov("install", "--hosts", site.inventory("main")).stdout


# The lock of dpkg, so that a run waits with its plan printed; ends with its input.
HOLD_DPKG = (
    "import fcntl; held = open('/var/lib/dpkg/lock-frontend', 'w'); fcntl.lockf(held, 2); print(flush=True); input()"
)
HERE = f"cd /root && exec python3 {host_program.NAME} install"


def start_here(host: Host) -> subprocess.Popen[str]:
    """Start the one-file program on the host itself."""
    argv = (*host.ssh_argv(), HERE)
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@contextlib.contextmanager
def waiting_for_dpkg(host: Host, begin: Callable[[], subprocess.Popen[str]]) -> Iterator[subprocess.Popen[str]]:
    """Begin a run and yield it once its plan is printed and it waits."""
    holding = (*host.ssh_argv("root"), f'python3 -c "{HOLD_DPKG}"')
    with subprocess.Popen(holding, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with begin() as process:
            assert process.stdout is not None
            seen = ""
            while "holds the package manager's lock" not in seen:
                line = process.stdout.readline()
                assert line, seen
                seen += line
            yield process
        holder.communicate("\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=str)
def test_ctrl_c_after_the_plan_changes_nothing_on_this_machine(site: Site, number: int) -> None:
    host = bare_host("bullseye", site)
    before = etc(host)
    with waiting_for_dpkg(host, lambda: start_here(host)) as process:
        host.ssh(f"pkill -{int(number)} -f '[g]puprov-host.pyz'")
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 128 + number, output
    assert "no change was begun" in output and "Traceback" not in output
    assert etc(host) == before
    assert not (host.root / "var/lib/gpuprov/runs").exists()


def test_ctrl_c_between_two_changes_says_what_is_done_on_this_machine(site: Site) -> None:
    host = bare_host("bullseye", site)
    with start_here(host) as process:
        with held_at(host, process, _IN_THE_MIDDLE):
            host.ssh("pkill -INT -f '[g]puprov-host.pyz'")
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGINT, output
    assert "stopped as asked after " in output
    assert "\n        not made: " in output and "made: " in output, output
    assert "1 host installed" in host.ssh(HERE).stdout
    assert "0 changes" in host.ssh(HERE).stdout


def test_ctrl_c_over_ssh_while_a_host_is_looked_at_changes_nothing(site: Site) -> None:
    host = site.fresh("main")
    before = etc(host)
    with waiting_for_dpkg(host, lambda: start(site, "main")) as process:
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGINT, output
    assert "no change was begun" in output and "ended by Ctrl-C" in output
    assert etc(host) == before
    assert not (host.root / "var/lib/gpuprov/runs").exists()
