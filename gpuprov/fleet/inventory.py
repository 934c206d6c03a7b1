"""Read Ansible inventories with ansible-core itself, as HostTargets; never connects to a host.

ansible-core costs half a second to import, so every import of it stands inside a function.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpuprov.fleet import one_file
from gpuprov.fleet.extra_vars import plain_extra_vars, require_files
from gpuprov.fleet.inventory_messages import (
    EXTRA_VARS_HINT,
    Wrong,
    ansible_error,
    ansible_output,
    ansible_temporary_folder,
    ansible_warnings,
    ask_ansible,
    clean,
    explained,
    path_hint,
    reason_of,
    vault_hint,
    with_origins,
)
from gpuprov.fleet.ssh_config import SshArguments, parse_ssh_arguments
from gpuprov.fleet.target import HostTarget, Inventory
from gpuprov.protocol.errors import ExitCode, GpuprovError, UsageError
from gpuprov.protocol.spec import spec_from_variables
from gpuprov.protocol.spec_fields import PREFIX

_CONNECTIONS = {"ssh": "ssh", "smart": "ssh", "paramiko": "ssh", "paramiko_ssh": "ssh", "local": "local"}
_PYTHON = re.compile(r"[A-Za-z0-9/._+-]+")
_ADDRESS = re.compile(r"[\w.:%-]+")
_TRUE = frozenset((True, 1, "true", "yes", "on", "1", "y", "t"))


def read_inventory(
    sources: Sequence[str],
    *,
    limit: str = "",
    extra_vars: Sequence[str] = (),
    vault_password_file: str = "",
) -> Inventory:
    """Return the hosts that the sources (files, directories, `a,b,` lists) and the limit name.

    `extra_vars` are written as for Ansible's -e: key=value, @file.yml, JSON or YAML; they win over all others.
    Raises GpuprovError (exit code 2) for an unreadable source, and for wrong or unknown gpuprov_ variables of all hosts
    at once.
    """
    one_file.require_whole_program("--hosts")
    for source in sources:
        _require_there(source)
    require_files(extra_vars)
    with ansible_temporary_folder(), ansible_output() as output:
        try:
            hosts, extra_names = _load(sources, limit, extra_vars, vault_password_file, output)
        except ansible_error() as error:
            raise UsageError(
                "Ansible cannot read the inventory", explained(error), vault_hint(str(error)) or ask_ansible(sources[0])
            ) from None
    targets, warnings = _targets(hosts, sources, extra_names)
    return Inventory(targets, tuple(dict.fromkeys((*ansible_warnings(output), *warnings))))


def _require_there(source: str) -> None:
    """Raise GpuprovError for a missing file; an empty name would mean the working directory, with all files in it."""
    hint = "name a file, a directory or hosts with a comma: --hosts a, or --hosts a,b"
    if not source.strip():
        raise UsageError("--hosts names no inventory", f"it is {source!r}: an empty variable of a shell?", hint)
    if "," not in source and not Path(source).exists():
        raise UsageError(
            f"there is no inventory {source}", f"{Path(source).absolute()}: no such file or directory", hint
        )


def read_extra_vars(extra_vars: Sequence[str]) -> HostTarget:
    """Return this machine as the only host, described by extra variables. Raises GpuprovError (exit code 2)."""
    require_files(extra_vars)
    values: Mapping[str, Any]
    values, other = plain_extra_vars(extra_vars)
    if other:
        from ansible.parsing.dataloader import DataLoader
        from ansible.template import Templar

        with ansible_temporary_folder(), ansible_output():
            try:
                loader = DataLoader()
                values = _load_extra_vars(loader, extra_vars)
                values = _resolved("-e", values, Templar(loader=loader, variables=values).template)
            except ansible_error() as error:
                raise UsageError("Ansible cannot read the extra variables", explained(error), EXTRA_VARS_HINT) from None
    return replace(target_from_variables("localhost", values), connection="local")


def _load(
    sources: Sequence[str], limit: str, extra_vars: Sequence[str], vault_password_file: str, output: list[str]
) -> tuple[list[tuple[str, Mapping[str, Any]]], frozenset[str]]:
    """Return (name, relevant variables, templates resolved) of every host, and the names that -e sets."""
    from ansible.inventory.manager import InventoryManager
    from ansible.parsing.dataloader import DataLoader
    from ansible.template import Templar

    _find_plugins()
    loader = DataLoader()
    _give_vault_password(loader, vault_password_file)
    # Parsed one by one, to know which one fails; group_vars are searched beside all sources given to the manager.
    places = [_expanded(source) if "," in source else str(Path(source).absolute()) for source in sources]
    manager = InventoryManager(loader=loader, sources=places, parse=False)
    for source, place in zip(sources, places):
        before = len(output)
        if not manager.parse_source(place):
            reason = reason_of(source, output[before:])
            raise UsageError(
                f"Ansible cannot read the inventory {source}", reason, path_hint(reason) or ask_ansible(source)
            )
    manager.reconcile_inventory()
    variables = _variable_manager(loader, manager, extra_vars)
    if not manager.get_hosts():
        raise UsageError(f"the inventory {', '.join(sources)} names no host", "", ask_ansible(sources[0]))
    manager.subset(limit or None)
    if limit and not manager._subset:  # Ansible ignores a pattern of "[" or "," and would take all hosts
        raise UsageError("--limit names no host", repr(limit), ask_ansible(sources[0]))
    hosts = manager.get_hosts()
    if not hosts:
        raise UsageError(
            f"--limit {limit} matches no host of the inventory {', '.join(sources)}", "",
            ask_ansible(sources[0]),
        )  # fmt: skip
    found: list[tuple[str, Mapping[str, Any]]] = []
    for host in hosts:
        values = variables.get_vars(host=host)
        templar = Templar(loader=loader, variables=values)
        found.append((str(host.name), _resolved(host.name, values, templar.template)))
    return found, frozenset(map(str, variables.extra_vars))


def _expanded(names: str) -> str:
    """Return `a,b,` with ranges such as gpu[01:03] written out, as Ansible does in files and advanced_host_list."""
    from ansible.plugins.inventory import detect_range, expand_hostname_range

    words = [word.strip() for word in names.split(",")]
    every: list[str] = []
    for word in words:
        try:
            every += expand_hostname_range(word) if detect_range(word) else [word]
        except (ansible_error(), ValueError) as error:
            seen = clean(str(error)) if isinstance(error, ansible_error()) else f"in --hosts {clean(names)}"
            raise UsageError(f"the range in {clean(word)} is invalid", seen, "write a range as in gpu[01:03]") from None
    return ",".join(every) + ("" if len(every) > 1 else ",")


@functools.cache
def _find_plugins() -> None:
    from ansible.plugins.loader import init_plugin_loader

    init_plugin_loader([])


def _variable_manager(loader: Any, manager: Any, extra_vars: Sequence[str]) -> Any:
    """Return Ansible's VariableManager; -e reaches it through its global command line."""
    from ansible.vars.manager import VariableManager

    _load_extra_vars(loader, extra_vars)
    return VariableManager(loader=loader, inventory=manager)


def _load_extra_vars(loader: Any, extra_vars: Sequence[str]) -> dict[str, Any]:
    from ansible import context
    from ansible.module_utils.common.collections import ImmutableDict
    from ansible.utils.vars import load_extra_vars

    context.CLIARGS = ImmutableDict(extra_vars=tuple(map(_trusted(), extra_vars)))
    load_extra_vars.extra_vars = None  # Ansible caches the first answer for the life of the process
    loaded: dict[str, Any] = load_extra_vars(loader=loader)
    if "_raw_params" in loaded:  # Ansible also accepts words without "=", and drops them
        raise UsageError("-e takes key=value, JSON or @file.yml", repr(loaded["_raw_params"]), EXTRA_VARS_HINT)
    return loaded


def _trusted() -> Callable[[str], str]:
    """Return a text whose templates may be resolved; ansible-core requires this since 2.19."""
    import ansible.template

    trust: Callable[[str], str] = getattr(ansible.template, "trust_as_template", str)
    return trust


def _resolved(host: str, values: Mapping[str, Any], template: Callable[[Any], Any]) -> dict[str, Any]:
    resolved = {}
    for name, value in values.items():
        if name.startswith((PREFIX, "ansible_")):
            try:
                resolved[str(name)] = template(value)
            except ansible_error() as error:
                if name.startswith(PREFIX) or name in _HEEDED:
                    raise UsageError(
                        f"{host}: the template in {name} does not resolve",
                        explained(error),
                        f"correct {name} in the inventory",
                    ) from None
    return resolved


def _give_vault_password(loader: Any, path: str) -> None:
    from ansible import constants
    from ansible.parsing.vault import get_file_vault_secret

    path = path or getattr(constants, "DEFAULT_VAULT_PASSWORD_FILE", None) or ""
    if path:
        secret = get_file_vault_secret(filename=str(Path(path).expanduser()), vault_id="default", loader=loader)
        secret.load()
        loader.set_vault_secrets([("default", secret)])


def _targets(
    hosts: Sequence[tuple[str, Mapping[str, Any]]], sources: Sequence[str], extra_names: frozenset[str]
) -> tuple[tuple[HostTarget, ...], list[str]]:
    targets: list[HostTarget] = []
    warnings: list[str] = []
    problems: list[Wrong] = []
    for name, values in hosts:
        try:
            arguments = _ssh_arguments(values)
            targets.append(target_from_variables(name, values, arguments))
            warnings += [f"{name}: {warning}" for warning in arguments.warnings]
        except GpuprovError as error:
            problems += [Wrong(name, problem, values) for problem in error.problems]
    if problems:
        raise GpuprovError.several(with_origins(problems, sources, extra_names), exit_code=ExitCode.USAGE)
    return tuple(targets), warnings


def target_from_variables(name: str, values: Mapping[str, Any], arguments: SshArguments | None = None) -> HostTarget:
    """Return the host described by resolved inventory variables. Raises GpuprovError (exit code 2)."""
    arguments = arguments or SshArguments()
    become_user = _first(values, "ansible_become_user") or "root"
    method = _first(values, "ansible_become_method") or "sudo"
    if become_user != "root" or method.rsplit(".", 1)[-1] != "sudo":
        raise UsageError(
            f"gpuprov becomes root by sudo, not {become_user} by {method}",
            "ansible_become_user, _method",
            "take both out of the inventory, or set them to root and sudo",
        )
    return HostTarget(
        name=name,
        spec=spec_from_variables(values),
        address=_address(_first(values, "ansible_host", "ansible_ssh_host") or name),
        port=_port(_first(values, "ansible_port", "ansible_ssh_port")),
        user=_user(_first(values, "ansible_user", "ansible_ssh_user") or _configured("DEFAULT_REMOTE_USER")),
        identity_file=_first(values, "ansible_ssh_private_key_file", "ansible_private_key_file")
        or _configured("DEFAULT_PRIVATE_KEY_FILE"),
        ssh_options=arguments.options,
        ssh_config_file=arguments.config_file,
        password=_first(values, "ansible_password", "ansible_ssh_pass", "ansible_ssh_password"),
        become=str(values.get("ansible_become", True)).lower() in _TRUE,
        become_user=become_user,
        become_password=_first(values, "ansible_become_password", "ansible_become_pass", "ansible_sudo_pass"),
        connection=_connection(_first(values, "ansible_connection") or "ssh"),
        python=_python(_first(values, "ansible_python_interpreter")),
        origin=str(values.get("inventory_file") or ""),
    )


_HEEDED = frozenset(
    ("ansible_host", "ansible_ssh_host", "ansible_port", "ansible_ssh_port", "ansible_user", "ansible_ssh_user",
     "ansible_ssh_private_key_file", "ansible_private_key_file", "ansible_password", "ansible_ssh_pass",
     "ansible_ssh_password", "ansible_become", "ansible_become_user", "ansible_become_method",
     "ansible_become_password", "ansible_become_pass", "ansible_sudo_pass", "ansible_connection",
     "ansible_python_interpreter", "ansible_ssh_common_args", "ansible_ssh_extra_args")
)  # fmt: skip


def _ssh_arguments(values: Mapping[str, Any]) -> SshArguments:
    text = " ".join(filter(None, (_first(values, "ansible_ssh_extra_args"), _first(values, "ansible_ssh_common_args"))))
    try:
        return parse_ssh_arguments(text)
    except ValueError as error:
        raise UsageError(
            "ansible_ssh_common_args is no list of arguments", f"{error}: {text}", "close what is quoted, as in a shell"
        ) from None


def _first(values: Mapping[str, Any], *names: str) -> str:
    return next((str(values[name]) for name in names if values.get(name) not in (None, "")), "")


def _address(text: str) -> str:
    # It becomes a pattern in an SSH configuration, and Fabric splits text such as user@host:port.
    if not _ADDRESS.fullmatch(text) or text.count(":") == 1:
        raise UsageError(
            "ansible_host is neither a name nor an address",
            repr(text),
            "user and port go into ansible_user and ansible_port",
        )
    return text


def _user(text: str) -> str:
    """Return a login's name. Raises GpuprovError (exit code 2) for one that would be another keyword to ssh."""
    if not text.isprintable():
        raise UsageError("ansible_user is no name of a user", repr(text), "correct ansible_user")
    return text


def _port(text: str) -> int | None:
    if text and not (text.isascii() and text.isdigit() and 0 < int(text) < 65536):
        raise UsageError("ansible_port is not a port number", repr(text), "a number from 1 to 65535; default: 22")
    return int(text) if text else None


def _connection(text: str) -> str:
    known = _CONNECTIONS.get(text.rsplit(".", 1)[-1])
    if known is None:
        raise UsageError("ansible_connection must be ssh or local", repr(text), "leave it out: ssh is the default")
    return known


def _python(text: str) -> str:
    if text.startswith("auto") or not text:
        return ""
    if not _PYTHON.fullmatch(text):
        raise UsageError(
            "ansible_python_interpreter is not the path of a program", repr(text),
            "a path such as /usr/bin/python3, or leave it out",
        )  # fmt: skip
    return text


def _configured(name: str) -> str:
    """Return a setting from ansible.cfg or Ansible's environment, if Ansible is loaded."""
    constants = sys.modules.get("ansible.constants")
    return str(getattr(constants, name, None) or "")
