"""What Ansible says, kept from the terminal and made readable: warnings, errors and the places that they are about."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import tempfile
from collections.abc import Iterator, Sequence

EXTRA_VARS_HINT = '-e gpuprov_driver_version=580.178.04, -e \'{"gpuprov_engines": ["podman"]}\' or -e @site.yml'


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
