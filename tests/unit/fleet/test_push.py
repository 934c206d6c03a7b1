"""The commands that store the agent in a login user's home, and run it as root: real sh, in a /root of its own."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpuprov.agent.probe import Probe, Python
from gpuprov.agent.push import STORE, agent_command

AGENT = b"import sys; print('ran', sys.argv[0], sys.argv[1:], sys.stdin.read())"
DIGEST = hashlib.sha256(AGENT).hexdigest()
MINE = f"/root/.cache/gpuprov/agent-{DIGEST}.pyz"


class Account:
    """A login user's home, and root's, which a mount namespace puts in the place of /root."""

    def __init__(self, folder: Path) -> None:
        self.home, self.root = folder / "home", folder / "root"
        self.home.mkdir()
        self.root.mkdir()
        self.stored = self.home / f".cache/gpuprov/agent-{DIGEST}.pyz"
        self.probe = Probe("Linux x86_64", 1000, str(self.stored.parent), "", (Python(sys.executable, (3, 11, 2)),), 0)

    def store(self) -> None:
        command = ("sh", "-c", STORE, "sh", DIGEST)
        subprocess.run(
            command, input=AGENT, check=True, timeout=30, env={"HOME": str(self.home), "PATH": "/usr/bin:/bin"}
        )

    def run(self) -> subprocess.CompletedProcess[str]:
        command = (*agent_command(self.probe, DIGEST), "job")
        enter = ("unshare", "--mount", "sh", "-c", 'mount --bind "$1" /root; shift; exec "$@"', "sh", str(self.root))
        return subprocess.run(
            (*enter, *command), input="request", capture_output=True, text=True, timeout=30, check=False
        )


@pytest.fixture
def account(tmp_path: Path) -> Account:
    return Account(tmp_path)


def test_a_home_directory_that_is_missing_is_not_made(account: Account, capfd: pytest.CaptureFixture[str]) -> None:
    account.home.rmdir()
    with pytest.raises(subprocess.CalledProcessError):
        account.store()
    assert f"there is no home directory {account.home}" in capfd.readouterr().err
    assert not account.home.exists()


@pytest.mark.root
def test_chroots_its_own_copy_of_what_the_user_stored(account: Account) -> None:
    account.store()
    ran = f"ran {MINE} ['job'] request\n"
    assert account.run().stdout == ran
    kept = account.root / MINE.removeprefix("/root/")
    assert (kept.stat().st_mode & 0o777, kept.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    # Later, the user's file no longer counts.
    account.stored.write_bytes(b"print('hostile')")
    assert account.run().stdout == ran
    # A copy that is not whole is stored again.
    kept.write_bytes(AGENT[:10])
    account.stored.write_bytes(AGENT)
    assert account.run().stdout == ran


@pytest.mark.root
@pytest.mark.parametrize("place", ["FIFO", "FIFO with a writer", "/dev/zero"])
def test_root_reads_regular_files_only(account: Account, place: str) -> None:
    account.store()
    account.stored.unlink()
    with contextlib.ExitStack() as stack:
        if place == "/dev/zero":
            account.stored.symlink_to(place)
        else:
            os.mkfifo(account.stored)
            if place == "FIFO with a writer":
                stack.callback(os.close, os.open(account.stored, os.O_RDWR))
        done = account.run()
    assert (done.returncode, done.stdout) == (126, "")
    assert "the stored agent is not the one that was sent" in done.stderr


@pytest.mark.root
def test_the_eight_newest_agents_stay_in_both_homes(account: Account) -> None:
    mine = account.root / ".cache/gpuprov"
    mine.mkdir(parents=True)
    account.stored.parent.mkdir(parents=True)
    others = {"bundle-old.tar", "local-agent.pyz", "agent-unpacked"}
    for folder in (account.stored.parent, mine):
        (folder / "agent-unpacked").mkdir()
        for age, name in enumerate(
            [*(f"agent-{number}.pyz" for number in range(7)), ".agent-9", "agent-8.pyz", *others]
        ):
            (folder / name).touch()
            # Older than the one that is stored, also for a shell without libfaketime.
            os.utime(folder / name, (1_700_000_000 - age, 1_700_000_000 - age))
    account.store()
    assert account.run().returncode == 0
    for folder in (account.stored.parent, mine):
        kept = {path.name for path in folder.iterdir()}
        assert kept == {*(f"agent-{number}.pyz" for number in range(7)), *others, account.stored.name}


@pytest.mark.root
@pytest.mark.parametrize("content", [b"print('hostile')", AGENT + b" ", b"", None])
def test_root_does_not_run_what_the_user_replaced(account: Account, content: bytes | None) -> None:
    account.store()
    if content is None:
        account.stored.unlink()
        account.stored.symlink_to("/etc/shadow")
    else:
        account.stored.write_bytes(content)
    done = account.run()
    assert (done.returncode, done.stdout) == (126, "")
    assert "the stored agent is not the one that was sent" in done.stderr
    assert list((account.root / ".cache/gpuprov").iterdir()) == []
