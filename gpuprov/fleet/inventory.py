"""HostTarget, one host: how to reach it and its desired state; read from Ansible's inventories, without connecting.

ansible-core itself reads them. It costs half a second to import, and the one-file program does not have it: every
import of it stands inside a function, and extra variables (-e) that need no Ansible are read here.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpuprov.core.files import expanded
from gpuprov.core.system import System
from gpuprov.fleet import ansible_reader, options
from gpuprov.fleet.ansible_reader import EXTRA_VARS_HINT, ansible_error, ask_ansible, clean, explained, hint_for
from gpuprov.fleet.grouping import listed
from gpuprov.fleet.ssh_config import ARGUMENT_VARIABLES, SshArguments, SshConfiguration, arguments_of
from gpuprov.protocol import imex
from gpuprov.protocol.dataclass import dataclass, field, replace
from gpuprov.protocol.errors import GpuprovError, UsageError, from_os_error
from gpuprov.protocol.secrets import masked_settings
from gpuprov.protocol.spec import HostSpec, has_long_number, spec_from_variables
from gpuprov.protocol.spec_fields import PREFIX, checked_python


@dataclass(frozen=True)
class HostTarget:
    """One host. Empty text and a port of None mean: as ~/.ssh/config, or SSH's own default, says.

    `ssh_options` are (keyword, value) pairs in ssh_config(5)'s words; `ssh_config_file` stands in for the user's and
    the system's files, as `ssh -F` does. `python` is the interpreter that the inventory names, `sudo` the program that
    makes a login root. Passwords never show in repr.
    """

    name: str
    spec: HostSpec
    address: str = ""
    port: int | None = None
    user: str = ""
    identity_file: str = ""
    ssh_options: tuple[tuple[str, str], ...] = ()
    ssh_config_file: str = ""
    password: str = field(default="", repr=False)
    become: bool = True
    become_password: str = field(default="", repr=False)
    connection: str = "ssh"
    python: str = ""
    sudo: str = "sudo"

    @property
    def ssh_configuration(self) -> SshConfiguration:
        """What ssh(1) makes of its configuration files and of this host's options."""
        login = (("User", self.user), ("Port", str(self.port or "")))
        options = (*((name, value) for name, value in login if value), *self.ssh_options)
        return SshConfiguration(self.address, options, self.ssh_config_file)


@dataclass(frozen=True)
class Inventory:
    """The hosts of a run, in the inventory's order, and warnings about them."""

    hosts: tuple[HostTarget, ...]
    warnings: tuple[str, ...] = ()


# Variables of this machine; those of -e win over them.
SITE_FILE = "/etc/gpuprov/site.yml"
_VALUE = r"""(?:"[^"\\]*"|'[^'\\]*'|[^\s"'\\]*)"""
_PAIR = re.compile(rf"([A-Za-z_]\w*)=({_VALUE})", re.ASCII)
_PAIRS = re.compile(rf"\s*(?:{_PAIR.pattern}(?:\s+|$))+", re.ASCII)
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_TEMPLATE = re.compile(r"\{[{%#]")
_NOT_PLAIN = "neither key=value, JSON nor YAML; templates and vaults need the whole gpuprov, which has Ansible"
_MARKED = ("__ansible_vault", "__ansible_unsafe")


def require_files(words: Sequence[str]) -> None:
    """Raise GpuprovError if -e names a missing file, or one that is no text; Ansible's own messages mislead."""
    for name in (word[1:] for word in words if word.startswith("@")):
        path = expanded(name)
        if not path.is_file():
            seen = f"-e @{name}: {path.absolute()}"
            raise UsageError(f"there is no file {name} with extra variables", seen, EXTRA_VARS_HINT)
        try:
            path.read_text("utf-8")
        except UnicodeDecodeError as error:
            step = f"write it as YAML, or move it away: mv {name} {name}.old"
            raise UsageError(f"{name} is not text in UTF-8, so it has no variables", str(error), step) from None
        except OSError as error:
            raise from_os_error(f"{name} can't be read", error) from None


def plain_extra_vars(words: Sequence[str]) -> tuple[dict[str, Any], str]:
    """Return the variables set by -e, and "" or the first word that only Ansible can read.

    Such words have templates, vaults or mistakes, or need Ansible's settings. Raises GpuprovError (exit code 2) for
    them in the one-file program.
    """
    found: dict[str, Any] = {}
    for word in filter(None, words):
        values = _read(word)
        # ansible.cfg may ask for dictionaries to be merged.
        if values is None or any(isinstance(found.get(name), dict) for name in values):
            if options.one_file:
                seen = f"-e {masked_settings(word)}\n{_NOT_PLAIN}"
                raise UsageError("the extra variables cannot be read", seen, _step_for(word))
            return {}, word
        found |= values
    return found, ""


def _read(word: str) -> dict[str, Any] | None:
    if word.startswith("@"):
        try:
            text = expanded(word[1:]).read_text("utf-8")
        except (OSError, UnicodeDecodeError):
            return None
        return _mapping(text)
    if word.startswith(("{", "[")):
        return _mapping(word)
    if _TEMPLATE.search(word) or word.startswith(("/", ".")) or not _PAIRS.fullmatch(word):
        return None
    return {name: value[1:-1] if value[:1] in ("'", '"') else value for name, value in _PAIR.findall(word)}


def _mapping(text: str) -> dict[str, Any] | None:
    """Return a JSON or YAML mapping of plain values, or None."""
    import yaml

    try:
        try:
            values = json.loads(text)
        except ValueError:
            values = yaml.safe_load(text)
        named = isinstance(values, dict) and all(isinstance(name, str) and _NAME.fullmatch(name) for name in values)
        return values if named and _is_plain(values) else None
    except (yaml.YAMLError, ValueError, RecursionError):
        return None


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(name not in _MARKED and _is_plain(name) and _is_plain(one) for name, one in value.items())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return not _TEMPLATE.search(value) if isinstance(value, str) else isinstance(value, (bool, int, float, type(None)))


_CONNECTIONS = {"ssh": "ssh", "smart": "ssh", "paramiko": "ssh", "paramiko_ssh": "ssh", "local": "local"}
# Beside Ubuntu's sudo-rs lies the older sudo, as sudo.ws.
_SUDO = re.compile(r"(/[A-Za-z0-9/._+-]*/)?sudo([.-](ws|rs))?|")
_ADDRESS = re.compile(r"[\w.:%-]+")
_TRUE = frozenset(("true", "yes", "on", "1", "y", "t"))
# How to reach a host, and the variables that say it: of several the first that has a value.
_VARIABLES = {
    "address": ("ansible_host", "ansible_ssh_host"), "port": ("ansible_port", "ansible_ssh_port"),
    "user": ("ansible_user", "ansible_ssh_user"), "connection": ("ansible_connection",),
    "identity_file": ("ansible_ssh_private_key_file", "ansible_private_key_file"),
    "password": ("ansible_password", "ansible_ssh_pass", "ansible_ssh_password"),
    "become_user": ("ansible_become_user",), "become_method": ("ansible_become_method",),
    "become_exe": ("ansible_become_exe", "ansible_sudo_exe"),
    "become_password": ("ansible_become_password", "ansible_become_pass", "ansible_sudo_pass"),
    "python": ("ansible_python_interpreter",),
}  # fmt: skip
# Variables of Ansible's ssh and sudo, the setting of that meaning, harmless values, and what to use instead.
_UNUSED = (
    (("ansible_become_flags", "ansible_sudo_flags"), "DEFAULT_BECOME_FLAGS", r"(\s*-[EHSkn]+)*\s*",
     "gpuprov calls sudo -n or, with a password, sudo -S"),
    (("ansible_private_key", "ansible_ssh_private_key", "ansible_ssh_pkcs11_provider"), "", "",
     "use ansible_ssh_private_key_file, or ssh-add"),
    (("ansible_ssh_executable",), "", "(.*/)?ssh", "gpuprov speaks SSH itself"),
)  # fmt: skip
_HEEDED = {*itertools.chain(*_VARIABLES.values()), *ARGUMENT_VARIABLES, "ansible_become"}


def read_inventory(
    sources: Sequence[str], *, limit: str = "", extra_vars: Sequence[str] = (), vault_password_file: str = ""
) -> Inventory:
    """Return the hosts that the sources (files, directories, `a,b,` lists) and the limit name.

    `extra_vars` are written as for Ansible's -e: key=value, @file.yml, JSON or YAML; they win over all others.
    Raises GpuprovError (exit code 2) for an unreadable source, and for wrong or unknown gpuprov_ variables of all hosts
    at once.
    """
    options.require_whole_program("--hosts")
    hint = "name a file, a directory or hosts with a comma: --hosts a, or --hosts a,b"
    for source in sources:
        if not source.strip():  # it would mean the working directory, with all files in it
            raise UsageError("--hosts names no inventory", f"it is {source!r}: an empty variable of a shell?", hint)
        if "," not in source and not Path(source).exists():
            seen = f"{Path(source).absolute()}: no such file or directory"
            raise UsageError(f"there is no inventory {source}", seen, hint)
    require_files(extra_vars)
    with ansible_reader.ansible_temporary_folder(), ansible_reader.ansible_output() as output:
        try:
            hosts, extra_names = _load(sources, limit, extra_vars, vault_password_file, output)
            targets, warnings = _targets(hosts, sources, extra_names)
        except (ansible_error(), UnicodeEncodeError) as error:
            raise UsageError(
                "Ansible cannot read the inventory", explained(error), hint_for(str(error)) or ask_ansible(sources[0])
            ) from None
    # Invalid groups, skipped files, names that match no host.
    of_ansible = [clean(line) for line in output if line.startswith(ansible_reader.WARNING)]
    return Inventory(targets, tuple(dict.fromkeys((*of_ansible, *warnings))))


def site_words() -> tuple[str, ...]:
    """Return the word for -e that reads this machine's own variables, none if it has none.

    Raises GpuprovError (exit code 2) for what is no file of text that root alone can write, and for a wrong variable.
    """
    system, folder = System(), SITE_FILE.rpartition("/")[0]
    there = system.status(SITE_FILE)
    if there is None or os.geteuid() != 0:
        return ()
    for path, kind, found in ((folder, "directory", system.status(folder)), (SITE_FILE, "file", there)):
        if found and found.kind not in (kind, "link"):
            step = f"move it away: mv {path} {path}.old; then write the variables to a file: {SITE_FILE}"
            raise UsageError(f"{path} is not an ordinary {kind}", f"it is: {found.kind}", step)
        if found and (found.kind != kind or found.uid != 0 or found.mode & 0o022):
            seen = f"{path} is a {found.kind} of user {found.uid} with mode {found.mode:o}"
            step = f"chown root:root {folder} {SITE_FILE}; chmod go-w {folder} {SITE_FILE}; neither may be a link"
            raise UsageError(f"others than root could change {SITE_FILE}, so it is not used", seen, step)
    word = f"@{SITE_FILE}"
    require_files((word,))
    lines = Path(SITE_FILE).read_bytes().splitlines()
    if all(one.partition(b"#")[0].strip() in (b"", b"---") for one in lines):
        return ()  # Ansible refuses a file of comments alone, as `gpuprov options --write` makes it
    spec_from_variables(plain_extra_vars((word,))[0], SITE_FILE)
    return (word,)


def read_extra_vars(extra_vars: Sequence[str]) -> HostTarget:
    """Return this machine as the only host, described by extra variables. Raises GpuprovError (exit code 2)."""
    return replace(target_from_variables("localhost", variables_of(extra_vars)), connection="local")


def variables_of(extra_vars: Sequence[str]) -> Mapping[str, Any]:
    """Return the variables that words of -e set, templates resolved. Raises GpuprovError (exit code 2)."""
    require_files(extra_vars)
    values, other = plain_extra_vars(extra_vars)
    if other:
        with ansible_reader.ansible_temporary_folder(), ansible_reader.ansible_output():
            from ansible.template import Templar

            try:
                loader = ansible_reader.new_loader()
                values = ansible_extra_vars(loader, extra_vars)
                values = _resolved("-e", values, Templar(loader=loader, variables=values).template)
            except ansible_error() as error:
                seen = explained(error)
                step = hint_for(str(error)) or _step_for(seen)
                raise UsageError("Ansible cannot read the extra variables", seen, step) from None
    return values


def _step_for(text: str) -> str:
    # Nobody typed -e for this machine's own file.
    return (
        f"correct {SITE_FILE}: YAML, with lines as gpuprov_engines: [podman]" if SITE_FILE in text else EXTRA_VARS_HINT
    )


def _load(
    sources: Sequence[str], limit: str, extra_vars: Sequence[str], vault_password_file: str, output: list[str]
) -> tuple[imex.Hosts, frozenset[str]]:
    """Return (name, relevant variables, templates resolved) of every host, and the names that -e sets."""
    from ansible.inventory.manager import InventoryManager
    from ansible.plugins.loader import init_plugin_loader
    from ansible.template import Templar
    from ansible.utils.collection_loader import AnsibleCollectionConfig
    from ansible.vars.hostvars import HostVars
    from ansible.vars.manager import VariableManager

    if AnsibleCollectionConfig.collection_finder is None:  # once in a process
        init_plugin_loader([])
    loader = ansible_reader.new_loader()
    _give_vault_password(loader, vault_password_file)
    # Parsed one by one, to know which one fails; group_vars are searched beside all sources given to the manager.
    places = [with_ranges(source) if "," in source else str(Path(source).absolute()) for source in sources]
    manager = InventoryManager(loader=loader, sources=places, parse=False)
    for source, place in zip(sources, places):
        before = len(output)
        if not manager.parse_source(place):
            reason = ansible_reader.reason_of(source, output[before:])
            step = hint_for(reason) or ask_ansible(source)
            raise UsageError(f"Ansible cannot read the inventory {source}", reason, step)
    manager.reconcile_inventory()
    ansible_extra_vars(loader, extra_vars)  # they reach the manager through Ansible's global command line
    variables = VariableManager(loader=loader, inventory=manager)
    HostVars(manager, variables, loader)  # registers itself there: templates may read other hosts' variables
    if not manager.get_hosts():
        raise UsageError(f"the inventory {', '.join(sources)} names no host", "", ask_ansible(sources[0]))
    manager.subset(limit or None)
    # Ansible ignores a pattern of "[" or ",", would take all hosts, and fails at one of "&" or "!".
    if limit and (not manager._subset or {"&", "!"} & set(manager._subset)):
        raise UsageError("--limit names no host", repr(limit), ask_ansible(sources[0]))
    if not (hosts := manager.get_hosts()):
        what = f"--limit {limit} matches no host of the inventory {', '.join(sources)}"
        raise UsageError(what, "", ask_ansible(sources[0]))

    def read(name: str, heeded: Sequence[str] = ()) -> Mapping[str, Any]:
        values = variables.get_vars(host=manager.get_host(name))
        template = Templar(loader=loader, variables=values).template
        return _resolved(name, {key: one for key, one in values.items() if not heeded or key in heeded}, template)

    found = imex.with_lists(
        [(str(host.name), read(host.name)) for host in hosts], manager.get_groups_dict(),
        lambda name: read(name, imex.VARIABLES),
    )  # fmt: skip
    return found, frozenset(map(str, variables.extra_vars))


def with_ranges(names: str) -> str:
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


def ansible_extra_vars(loader: Any, extra_vars: Sequence[str]) -> dict[str, Any]:
    """Return the values of -e as Ansible reads them, for its later calls too. Raises Ansible's errors."""
    import ansible.template
    from ansible import context
    from ansible.module_utils.common.collections import ImmutableDict
    from ansible.utils.vars import load_extra_vars

    # ansible-core requires this since 2.19 of texts whose templates may be resolved.
    trusted: Callable[[str], str] = getattr(ansible.template, "trust_as_template", str)
    context.CLIARGS = ImmutableDict(extra_vars=tuple(map(trusted, extra_vars)))
    load_extra_vars.extra_vars = None  # Ansible caches the first answer for the life of the process
    try:
        loaded: dict[str, Any] = load_extra_vars(loader=loader)
    except ansible_error():
        context.CLIARGS = ImmutableDict(extra_vars=())
        raise
    if "_raw_params" in loaded:  # Ansible also accepts words without "=", and drops them
        seen = "a word of it has no `=`: put quotes around a value with blanks, as in -e \"name='a b'\""
        raise UsageError("-e takes key=value, JSON or @file.yml", seen, EXTRA_VARS_HINT)
    return loaded


def _resolved(host: str, values: Mapping[str, Any], template: Callable[[Any], Any]) -> dict[str, Any]:
    resolved = {}
    for name, value in values.items():
        if name.startswith((PREFIX, "ansible_")):
            try:
                resolved[str(name)] = template(value)
            except ansible_error() as error:
                if name.startswith(PREFIX) or name in _HEEDED:
                    what = f"{host}: the template in {name} does not resolve"
                    step = hint_for(str(error)) or f"correct {name} in the inventory"
                    raise UsageError(what, explained(error), step) from None
    if wrong := [name for name, value in resolved.items() if has_long_number(value)]:
        raise UsageError(f"{host}: {wrong[0]} has a number of more than 64 bits", "", f"correct {wrong[0]}")
    return resolved


def _give_vault_password(loader: Any, path: str) -> None:
    from ansible import constants
    from ansible.parsing import vault

    path = path or getattr(constants, "DEFAULT_VAULT_PASSWORD_FILE", None) or ""
    named = [one.rpartition("@")[::2] for one in constants.DEFAULT_VAULT_IDENTITY_LIST]
    secrets = []
    for label, file in ((name or "default", file) for name, file in (*named, ("", path)) if file):
        try:
            secret = vault.get_file_vault_secret(filename=str(expanded(file)), vault_id=label, loader=loader)
            secret.load()
            secrets.append((label, secret))
        except ansible_error():
            if file == path:  # of a list, not every user has all passwords
                raise
    loader.set_vault_secrets(secrets)
    # Since ansible-core 2.19, a single vaulted value (!vault) takes its password from here; initialize() works once.
    if context := getattr(vault, "VaultSecretsContext", None):
        context._current = context(loader._vault.secrets)


def _targets(
    hosts: Sequence[tuple[str, Mapping[str, Any]]], sources: Sequence[str], extra_names: frozenset[str]
) -> tuple[tuple[HostTarget, ...], list[str]]:
    targets: list[HostTarget] = []
    warnings: dict[str, list[str]] = {}
    problems: list[ansible_reader.Mistake] = []
    for name, values in hosts:
        try:
            arguments = arguments_of(values)
            targets.append(target_from_variables(name, values, arguments))
            for warning in (*arguments.warnings, *_unused(values)):
                warnings.setdefault(warning, []).append(name)
        except GpuprovError as error:
            problems += [ansible_reader.Mistake(name, problem, values) for problem in error.problems]
    if problems:
        raise UsageError.several(ansible_reader.with_origins(problems, sources, extra_names))
    return tuple(targets), [f"{listed(names)}: {warning}" for warning, names in warnings.items()]


def _unused(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield what to use instead of each of Ansible's settings that gpuprov does not follow."""
    for names, setting, harmless, instead in _UNUSED:
        found = {name: str(values[name]) for name in names if values.get(name)} or {names[0]: configured(setting)}
        yield from (f"{name} has no effect here: {instead}" for name, value in found.items()
                    if value and not re.fullmatch(harmless, value))  # fmt: skip


def target_from_variables(name: str, values: Mapping[str, Any], arguments: SshArguments | None = None) -> HostTarget:
    """Return the host described by resolved inventory variables. Raises GpuprovError (exit code 2)."""
    given = {
        what: next((str(values[one]) for one in names if values.get(one) not in (None, "")), "")
        for what, names in _VARIABLES.items()
    }
    address, connection = given["address"] or name, given["connection"] or "ssh"
    user, port = (given[one] or configured(f"DEFAULT_REMOTE_{one.upper()}") for one in ("user", "port"))
    become = str(values.get("ansible_become", True)).lower() in _TRUE
    become_user, method, exe = given["become_user"], given["become_method"], given["become_exe"]
    if not become or user == "root":
        become_user = method = exe = ""
    elif arguments is not None:  # a host of an inventory
        method, exe = method or configured("DEFAULT_BECOME_METHOD"), exe or configured("DEFAULT_BECOME_EXE")
    arguments = arguments or SshArguments()
    known = _CONNECTIONS.get(connection.rsplit(".", 1)[-1], "")
    python = checked_python(given["python"] or configured("INTERPRETER_PYTHON"))
    is_port = re.fullmatch("[0-9]{1,5}|", port) and int(port or 1) in range(1, 65536)
    for text, is_valid, what, next_step in (
        # An address becomes a pattern in an SSH configuration, and Fabric splits text such as user@host:port.
        (address, _ADDRESS.fullmatch(address) and address.count(":") != 1,
         "ansible_host is neither a name nor an address",
         "write it without brackets; user and port go into ansible_user and ansible_port"),
        (port, is_port, "ansible_port is not a port number", "a number from 1 to 65535; default: 22"),
        # Another line would be another keyword to ssh.
        (user, user.isprintable(), "ansible_user is no name of a user", "correct ansible_user"),
        (become_user, become_user in ("", "root"), "gpuprov becomes root, not ansible_become_user",
         "take it out, or for gpuprov alone: -e ansible_become_user=root"),
        (method, method.rsplit(".", 1)[-1] in ("", "sudo"),
         "gpuprov becomes root by sudo, not by ansible_become_method (ansible.cfg: become_method)",
         "if sudo works too: -e ansible_become_method=sudo; else log in as root: -e ansible_user=root"),
        (exe, _SUDO.fullmatch(exe), "gpuprov becomes root by sudo, not by ansible_become_exe",
         "if sudo works too: -e ansible_become_exe=sudo; else log in as root: -e ansible_user=root"),
        (connection, known, "ansible_connection must be ssh or local", "leave it out: ssh is the default"),
    ):  # fmt: skip
        if not is_valid:
            raise UsageError(what, repr(text), next_step)
    return HostTarget(
        name=name,
        spec=spec_from_variables(values),
        address=address,
        port=int(port) if port else None,
        user=user,
        identity_file=given["identity_file"] or configured("DEFAULT_PRIVATE_KEY_FILE"),
        ssh_options=arguments.options,
        ssh_config_file=arguments.config_file,
        password=given["password"],
        become=become,
        become_password=given["become_password"],
        connection=known,
        python=python,
        sudo=exe or "sudo",
    )


def configured(name: str) -> str:
    """Return a setting from ansible.cfg or Ansible's environment, if Ansible is loaded."""
    return str(getattr(sys.modules.get("ansible.constants"), name, None) or "")
