"""Explain why a host accepts a login but runs no command: its account, its shell or its sudo. Pure.

Patterns match messages of sudo 1.8 and 1.9, shadow's nologin, OpenSSH and Linux-PAM, in the C locale.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpuprov.core.commands import Completed
from gpuprov.protocol.errors import Problem


@dataclass(frozen=True)
class _Sign:
    """A pattern in a program's output, its meaning and the next step. `what` may use the pattern's named groups."""

    pattern: str
    what: str
    next_step: str


_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
_OTHER_USER = "set ansible_user to an account that may"
_SUDOERS = f"on the host, as root: echo 'USER ALL=(ALL) ALL' > /etc/sudoers.d/gpuprov; or {_OTHER_USER}"
_SUDO = (
    _Sign("you must have a tty to run sudo", "sudo on the host requires a terminal (requiretty)",
          "on the host, as root: echo 'Defaults !requiretty' > /etc/sudoers.d/gpuprov; or set ansible_user to root"),
    _Sign(r"(?P<user>\S+) is not in the sudoers file", "{user} is not in sudoers on the host", _SUDOERS),
    _Sign(r"[Uu]ser (?P<user>\S+) is not allowed to (?:execute|run)",
          "{user} may run some commands with sudo on the host, and not gpuprov", _SUDOERS),
    _Sign(r"(?:[Uu]ser|sudo:) (?P<user>\S+) may not run sudo", "{user} may not use sudo on the host", _SUDOERS),
    _Sign(r"may not run sudo", "this user may not use sudo on the host", _SUDOERS),
    _Sign(r"(?:[Aa]ccount|password) (?:or password )?(?:is|has) expired|account validation failure",
          "sudo on the host refuses an expired account or password",
          "on the host, as root: chage -l USER shows what has expired; passwd USER sets a new password"),
    _Sign(r"no new privileges", "sudo can't make this login root: the session has no_new_privs",
          "look at NoNewPrivileges= of the host's sshd unit; or set ansible_user to root"),
    _Sign(r"effective uid is not 0|must be owned by uid 0 and have the setuid bit",
          "sudo on the host is not setuid root", "on the host, as root: ls -l /usr/bin/sudo; findmnt -T /usr/bin/sudo"),
    _Sign(r"(?:syntax|parse) error|no valid sudoers sources|is world writable|should be mode 0?440",
          "sudo on the host can't read its configuration", "on the host, as root: visudo -c"),
)  # fmt: skip
_SHELL = (
    _Sign(r"[Aa]ccount is (?:currently )?not available", "the account may not log in: its shell is nologin",
          f"on the host, as root: usermod -s /bin/sh USER; or {_OTHER_USER}"),
    _Sign(r"password has expired|[Pp]assword change required|required to change your password",
          "the account's password has expired",
          f"log in by hand and change it; or on the host, as root: passwd USER; or {_OTHER_USER}"),
    _Sign(r"[Aa]ccount has expired", "the account has expired",
          f"on the host, as root: chage -E -1 USER; or {_OTHER_USER}"),
    _Sign(r"not permitted to log in yet|[Ss]ystem is going down",
          "the host lets nobody but root log in now (/etc/nologin)",
          "wait for the end of its boot, or look at /run/nologin and /etc/nologin on the host"),
)  # fmt: skip


def sudo_problem(output: str) -> Problem | None:
    """Return why sudo refuses regardless of the password, None if its output names no such reason."""
    return _found(_SUDO, output)


def account_problem(done: Completed, user: str = "") -> Problem | None:
    """Return why an account runs no command, from what came instead of the probe's answer; None if unknown.

    `user`: its name, where the inventory has it.

    A shell that runs the probe writes to stdout. stderr proves nothing: sshd complains there of a missing home.
    """
    found = _found(_SHELL, f"{done.stderr}\n{done.stdout}", user)
    name = user if _NAME.fullmatch(user) else "USER"
    if found is None and not done.stdout.strip() and done.returncode == 1:
        return Problem(
            "the account's shell ends at once and runs nothing, as /bin/false does",
            "\n".join(["exit code 1, no output", *done.stderr.strip().splitlines()[-4:]]),
            f"on the host: getent passwd {name}; as root: usermod -s /bin/sh {name}; or {_OTHER_USER}",
        )  # fmt: skip
    return found


def _found(signs: tuple[_Sign, ...], output: str, known: str = "") -> Problem | None:
    for sign in signs:
        for line in output.splitlines():
            match = re.search(sign.pattern, line)
            if match is not None:
                named = match.groupdict()
                # The host chooses this text, and the next step is a command: a name or nothing.
                user = named.get("user") or known
                step = sign.next_step.replace("USER", user) if _NAME.fullmatch(user) else sign.next_step
                return Problem(sign.what.format(**named), line.strip()[:300], step)
    return None
