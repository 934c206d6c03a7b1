"""Carries one request to gpuprov's agent on a host, over Ansible's own connection, and its answer back.

The agent is the one that `gpuprov --hosts` pushes: the same file, at the same place, once per version, its digest
checked. gpuprov/agent/playbook_task.py makes the request and reads the answer; nothing is decided here.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import os
import platform
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from ansible import constants
from ansible.errors import AnsibleError
from ansible.module_utils.parsing.convert_bool import boolean
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

_HERE = Path(__file__).resolve()
# Inside an installed collection the agent lies beside roles and plugins; in a clone it is built from the clone.
_CARRIED = _HERE.parents[2] / "files" / "gpuprov-agent.pyz"
_CLONE = _HERE.parents[3]
_PAUSE_SECONDS = 3.0
# Each plugin has its own: ansible_ssh_pass, ansible_su_pass, ansible_paramiko_password, ansible_private_key_passphrase.
_PASSWORD = re.compile(r"ansible_(\w+_)?pass(word|phrase)?")
# A job whose time is over ends between two changes.
_GRACE_SECONDS = 30.0
# ssh's own lines (ssh_config(5)); in stderr they would stand among the host's.
_ERRORS_ALONE = " -o LogLevel=ERROR"
# Documented in plugins/modules/agent.py; playbook_task.task_request has parameters of these names.
_ARGUMENTS = {
    "command": {"type": "str", "default": "install"},
    "steps": {"type": "list", "elements": "str", "default": []},
    "container": {"type": "str", "default": ""},
    "fix": {"type": "bool", "default": False},
    "allow": {"type": "list", "elements": "str", "default": [], "choices": ["reset", "reboot"]},
    "remember": {"type": "bool", "default": False},
    "this_run": {"type": "bool", "default": False},
    "window": {"type": "str", "default": ""},
    "minutes": {"type": "int", "default": 10},
}


class ActionModule(ActionBase):  # type: ignore[misc]
    """`gpuprov.host.agent`; its arguments are documented in plugins/modules/agent.py."""

    _supports_check_mode = True
    _supports_diff = True
    _supports_async = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Run the task and return its result."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        arguments = self.validate_argument_spec(_ARGUMENTS)[1]
        self._warnings: list[str] = []
        self._quiet_ssh()
        self._task_vars = task_vars or {}
        self._agent, self._digest = _agent()
        from gpuprov.agent import playbook_task
        from gpuprov.protocol.errors import GpuprovError
        from gpuprov.protocol.secrets import hidden, secret_forms

        command, check = arguments["command"], bool(self._task.check_mode)
        try:
            variables = self._with_domain(self._variables(), required=command not in ("verify", "health", "facts"))
            bundle, bundle_digest = _bundle(variables) if command in playbook_task.INSTALLING else ("", "")
            request = playbook_task.task_request(
                **{name: arguments[name] for name in _ARGUMENTS}, variables=variables, check=check,
                diff=bool(self._task.diff), run_id=_run_id(), bundle=bundle, bundle_digest=bundle_digest,
                upgrade=_flag(variables, playbook_task.UPGRADE_VARIABLE), now=time.time(),
            )  # fmt: skip
            is_local, hosts = self._connection.transport == "local", self._task_vars["ansible_play_hosts_all"]
            request = request.sent(here=is_local, alone=len(hosts) == 1)
            skipped = playbook_task.skipped_in_check_mode(command) if check else None
            if skipped is not None:
                return {**result, **skipped}
            if not check and (request.changes_the_host or command in playbook_task.INSTALLING):
                self._require_whole_domain(request, alone=arguments["this_run"])
            self._bootstrap = _flag(variables, playbook_task.BOOTSTRAP_VARIABLE) and not check
            if self._task.async_val:
                job = self._begin_job(command, request)
                if not self._task.poll:
                    # Nothing of the host's answer: Ansible obeys `add_host` in an action plugin's result.
                    return {**result, **job.started()}
                found = self._end_of_job(job)
            else:
                found = playbook_task.task_result(command, self._events(request))
        except GpuprovError as error:
            found = playbook_task.failure(error)
        found = replace(found, warnings=(*found.warnings, *self._warnings))
        found = hidden(found, secret_forms(self._secrets(), self._passwords()))
        return {**result, **self._displayed(found.answer(_local_facts(self._task_vars)), self._task_vars)}

    def _quiet_ssh(self) -> None:
        """Make ssh print its errors alone: stderr is the host's then, without banners and notices of new host keys."""
        option = "ssh_extra_args"
        if self._connection.has_option(option):
            others = (self._connection.get_option(option) or "").removesuffix(_ERRORS_ALONE)
            self._connection.set_option(option, others + _ERRORS_ALONE)

    def _displayed(self, found: dict[str, Any], task_vars: dict[str, Any]) -> dict[str, Any]:
        """Print the result's one line for people, and return the result; with -v Ansible shows all of it."""
        from gpuprov.agent.playbook_task import one_line

        line = one_line(found)
        if line and not self._task.no_log and Display().verbosity == 0:
            Display().display(f"{task_vars.get('inventory_hostname', 'host')}: {line}")
        return found

    def _variables(self) -> dict[str, Any]:
        """Return the gpuprov_ variables, their templates resolved."""
        from gpuprov.protocol.errors import UsageError

        found = {}
        for name in sorted(name for name in self._task_vars if name.startswith("gpuprov_")):
            try:
                found[name] = self._templar.template(self._task_vars[name])
            except AnsibleError as error:
                step = f"define what it names for this host, or remove {name}"
                raise UsageError(f"the template in {name} does not resolve", str(error), step) from None
        return found

    def _with_domain(self, variables: dict[str, Any], *, required: bool = True) -> dict[str, Any]:
        """Return the variables with the nodes of the host's IMEX domain, from those of all hosts of the inventory.

        Unless `required`, a host that the play leaves out, whose facts are missing, only costs the domain's check.
        """
        from gpuprov.protocol.errors import UsageError
        from gpuprov.protocol.imex import domain_nodes, with_nodes

        own, reading = self._task_vars.get("inventory_hostname", ""), ""

        def value(name: str, variable: str) -> Any:
            nonlocal reading
            reading = name
            return self._task_vars["hostvars"][name].get(variable)

        try:
            return dict(with_nodes(own, variables, lambda name: domain_nodes(name, self._task_vars["groups"], value)))
        except AnsibleError as error:
            what = f"an IMEX variable of {reading} does not resolve"
            if required or reading in self._task_vars["ansible_play_hosts_all"]:
                step = f"set gpuprov_imex_address of {reading} to an address, or run over all hosts of the domain"
                raise UsageError(what, str(error), step) from None
            self._warnings.append(f"the IMEX domain is not checked: {what}, which this play leaves out: {error}")
            return variables

    def _require_whole_domain(self, request: Any, *, alone: bool) -> None:
        """Raise GpuprovError if the play changes a part of an IMEX domain: a limit, a batch, a host that failed.

        `alone`: the task goes back on this host only.
        """
        from gpuprov.protocol.errors import GpuprovError
        from gpuprov.protocol.imex import split_problem

        nodes = request.spec["imex_nodes"]
        if len(nodes) > 1:
            running = [self._task_vars["inventory_hostname"]] if alone else self._task_vars["ansible_play_batch"]
            problem = split_problem(request.spec["imex_domain"], nodes, running)
            if problem is not None:
                raise GpuprovError.several((problem,))

    def _secrets(self) -> dict[str, Any]:
        """Return the values of the specification that resolve; URLs in them may have logins, `vgpu` has a token."""
        from gpuprov.protocol.errors import GpuprovError

        try:
            return {name[len("gpuprov_") :]: value for name, value in self._variables().items()}
        except GpuprovError:
            return {}

    def _passwords(self) -> tuple[str, ...]:
        """Return the passwords of the connection, which a host is told and may print."""
        variables, become = _connection_variables(self._task_vars, self._task.delegate_to), self._connection.become
        found = [self._play_context.password, self._play_context.become_pass]
        if become is not None:  # of Ansible's settings too
            found.append(become.get_option("become_pass", playcontext=self._play_context))
        for name in filter(_PASSWORD.fullmatch, variables):
            with contextlib.suppress(AnsibleError):  # of a plugin that is not used
                found.append(self._templar.template(variables[name]))
        return tuple(str(word) for word in found if word)

    def _begin_job(self, command: str, request: Any) -> Any:
        """Let the agent continue without the connection (`async`), and return the Job."""
        from gpuprov.agent.agent import JOB, Job
        from gpuprov.agent.playbook_task import for_a_job
        from gpuprov.agent.push import require
        from gpuprov.protocol.codec import dump

        probe, request = self._prepare(for_a_job(request))
        job = Job(
            id=f"j{secrets.randbelow(10**12)}.{os.getpid()}",
            folder=self.get_shell_option("async_dir", default="~/.ansible_async"),
            command=command,
            seconds=self._task.async_val,
            local_facts=_local_facts(self._task_vars),
        )
        done = self._run_agent(probe, f"{dump(request)}\n{dump(job)}\n".encode(), JOB)
        require(done, "the job can't be begun on the host", f"may the user write to {job.folder} there?")
        return job

    def _end_of_job(self, job: Any) -> Any:
        """Return the TaskResult in the job's file, once it is there.

        Ansible would have the host run async_status, and take what that prints as the task's result.
        """
        from gpuprov.agent.playbook_task import job_result
        from gpuprov.protocol.errors import GpuprovError

        seconds, self._task.async_val = self._task.async_val, 0
        deadline = time.monotonic() + seconds + _GRACE_SECONDS
        home, folder = ("~/", job.folder[2:]) if job.folder.startswith("~/") else ("", job.folder)
        path = f"{home}{shlex.quote(f'{folder}/{job.id}')}"
        while time.monotonic() < deadline:
            time.sleep(self._task.poll)
            try:
                done = self._low_level_execute_command(f"cat {path}", sudoable=True)
            except AnsibleError:
                self._connection.reset()
                continue
            found = job_result(done["stdout"]) if done["rc"] == 0 else None
            if found is not None:
                self._low_level_execute_command(f"rm -f {path}", sudoable=True)
                return found
        raise GpuprovError(
            f"the job has no result after {seconds} s, the task's async", f"looked for {job.folder}/{job.id}",
            "give the task more time; the agent stops after the change that it is at",
        )  # fmt: skip

    def _events(self, request: Any) -> tuple[Any, ...]:
        """Return the events of the run, and of those that follow a reboot."""
        events: tuple[Any, ...] = ()
        for one in request.runs():
            found, finished = self._ask(one)
            events += found
            if not finished.left_boot:
                break
            self._wait_for_boot(finished.left_boot)
        return events

    def _ask(self, request: Any) -> tuple[tuple[Any, ...], Any]:
        """Send the request to the host's agent, put there first if it is missing; return its events, and the last."""
        from gpuprov.agent.playbook_task import split_output
        from gpuprov.agent.push import unfinished_problem
        from gpuprov.protocol.codec import dump
        from gpuprov.protocol.errors import GpuprovError

        probe, request = self._prepare(request)
        done = self._run_agent(probe, f"{dump(request)}\n".encode())
        events, finished, strays = split_output(done.stdout)
        if finished is None:
            raise GpuprovError.several((unfinished_problem(done, strays, by_ansible=True),))
        return events, finished

    def _run_agent(self, probe: Any, lines: bytes, *arguments: str) -> Any:
        """Run the agent with this input; where root can't read what the login user stored, root stores its own."""
        from gpuprov.agent.push import NOT_STORED, UNREADABLE, agent_command, require, require_root, store_command

        command = shlex.join((*agent_command(probe, self._digest), *arguments))
        done = self._on_host(command, lines, become=True)
        if done.returncode == UNREADABLE:
            store = shlex.join(store_command(self._digest, by_root=True))
            require(self._on_host(store, self._agent, become=True), *NOT_STORED)
            done = self._on_host(command, lines, become=True)
        if (become := self._connection.become) is not None:
            require_root(done, become.get_option("become_user", playcontext=self._play_context))
        return done

    def _prepare(self, request: Any) -> tuple[Any, Any]:
        """Return what the host is (a Probe), and the request for it: agent and bundle are there."""
        from gpuprov.agent.playbook_task import BOOTSTRAP_OPTION
        from gpuprov.agent.probe import NOT_BOOTSTRAPPED, bootstrap_input, bootstrap_script, python_problem
        from gpuprov.agent.push import NOT_STORED, require, store_command
        from gpuprov.protocol.errors import GpuprovError

        variables = _connection_variables(self._task_vars, self._task.delegate_to)
        of_settings = getattr(constants, "INTERPRETER_PYTHON", None)  # Ansible resolves templates in this too
        named = _named_python(self._templar.template(variables.get("ansible_python_interpreter") or of_settings))
        probe = self._probe(named)
        if probe.python is None and self._bootstrap:
            done = self._on_host(bootstrap_script(probe), bootstrap_input(request.spec), become=True)
            require(done, *NOT_BOOTSTRAPPED)
            probe = self._probe(named)
        problem = python_problem(probe, named, BOOTSTRAP_OPTION)
        if problem is not None:
            raise GpuprovError.several((problem,))
        self._warn_of_twin(probe.machine, self._task.delegate_to or self._task_vars.get("inventory_hostname", "host"))
        if probe.agent_digest != self._digest:
            require(self._on_host(shlex.join(store_command(self._digest)), self._agent), *NOT_STORED)
        if request.bundle:
            request = replace(request, bundle=self._bring_bundle(request))
        return probe, request

    def _warn_of_twin(self, machine: str, name: str) -> None:
        """Warn of a machine that the play reaches under another name too; the host's lock lets one run at a time."""
        from gpuprov.agent.probe import claim_in, unproven_note

        other = claim_in(Path(constants.DEFAULT_LOCAL_TMP) / "gpuprov-machines", name, machine)
        if other:
            self._warnings.append(unproven_note(name, other))

    def _bring_bundle(self, request: Any) -> str:
        """Return the path of the bundle on the host, copied there as Ansible copies files if it is missing."""
        from gpuprov.agent.push import ASK_BUNDLE, NO_ROOM, TAKE_BUNDLE, BundlePlace, ending, parse_stored, require
        from gpuprov.protocol.errors import GpuprovError

        place = BundlePlace(request.bundle_digest, Path(request.bundle).stat().st_size)
        asked = self._on_host(shlex.join(place.command(ASK_BUNDLE)), b"", become=True)
        there = parse_stored(asked.stdout.splitlines())
        if there is None:
            raise GpuprovError("the host does not say what it has of the bundle", ending(asked), "run it again")
        if there[1]:
            return place.path
        folder = self._make_tmp_path()
        copied = self._connection._shell.join_path(folder, "bundle")
        try:
            self._transfer_file(request.bundle, copied)
            stored = self._on_host(shlex.join(place.command(TAKE_BUNDLE, copied)), b"", become=True)
        finally:
            self._remove_tmp_path(folder)
        require(stored, *NO_ROOM)
        return place.path

    def _wait_for_boot(self, left: str) -> None:
        """Return once the host is up in another boot than the one it has left."""
        from gpuprov.agent.push import BOOT_SECONDS, not_up
        from gpuprov.protocol.errors import ExitCode, GpuprovError

        deadline, seen = time.monotonic() + BOOT_SECONDS, ""
        while time.monotonic() < deadline:
            time.sleep(_PAUSE_SECONDS)
            try:
                self._connection.reset()
                seen = not_up(left, lambda command, timeout: self._on_host(command, b""))
            except AnsibleError as error:
                seen = str(error)  # it is down, or not up yet
            if not seen:
                return
        raise GpuprovError(
            "the host did not come back from its reboot", f"waited {BOOT_SECONDS:g} s; last: {seen}",
            "look at its console; once it is up, run the same playbook again: it goes on where it stopped",
            exit_code=ExitCode.UNREACHABLE,
        )  # fmt: skip

    def _probe(self, named_python: str) -> Any:
        from gpuprov.agent.probe import PROBE, parse_probe, probe_command, system_problem
        from gpuprov.agent.push import no_probe_problem
        from gpuprov.protocol.errors import GpuprovError

        # Ansible becomes root in its own way: no sudo is tried, which hosts log as a refusal.
        done = self._on_host(probe_command(self._digest, named_python, sudo=":"), PROBE.encode())
        probe = parse_probe(done.stdout)
        if probe is None:
            raise GpuprovError.several((no_probe_problem(done)[0],))
        if (problem := system_problem(probe)) is not None:
            raise GpuprovError.several((problem,))
        return probe

    def _on_host(self, command: str, stdin: bytes, *, become: bool = False) -> Any:
        """Run a command with bytes on its standard input, as the task's become says or as the login user."""
        from gpuprov.core.commands import Completed

        plugin = self._connection.become if become and not self._is_pipelining_enabled("new") else None
        # A password gets a terminal in the place of the standard input: over a local connection, and for su everywhere.
        # Up to ansible-core 2.18 its plugin does not say so.
        is_local = self._connection.transport == "local"
        has_terminal = plugin is not None and (is_local or not getattr(plugin, "pipelining", plugin.name != "su"))
        if (self._connection.has_pipelining and not has_terminal) or not (stdin or become):
            done = self._low_level_execute_command(command, sudoable=become, in_data=stdin)
        else:
            done = self._with_file(command, stdin, become=become)
        return Completed((command,), done["rc"], done["stdout"], done["stderr"])

    def _with_file(self, command: str, stdin: bytes, *, become: bool) -> dict[str, Any]:
        """Do the same where there is no standard input for it (paramiko, su): through a file on the host."""
        folder = self._make_tmp_path()
        remote = self._connection._shell.join_path(folder, "stdin")
        try:
            with tempfile.NamedTemporaryFile() as local:
                local.write(stdin)
                local.flush()
                self._transfer_file(local.name, remote)
            line = f"{command} < {shlex.quote(remote)}"
            return dict(self._low_level_execute_command(line, sudoable=become))
        finally:
            self._remove_tmp_path(folder)


def _connection_variables(task_vars: dict[str, Any], delegate: str | None) -> dict[str, Any]:
    """Return the variables of the host that is connected to: with delegate_to not those of the task's own."""
    return (task_vars.get("ansible_delegated_vars") or {}).get(delegate) or {} if delegate else task_vars


def _named_python(value: object) -> str:
    """Return the interpreter that the variable or Ansible's settings name, nothing where it is to be found out."""
    from gpuprov.protocol.spec_fields import checked_python

    return checked_python(str(value or "").strip())


def _flag(variables: dict[str, Any], name: str) -> bool:
    """Return a variable of plays that is true or false."""
    from gpuprov.protocol.errors import UsageError

    try:
        return bool(boolean(variables.get(name) or False))
    except TypeError as error:
        raise UsageError(f"{name} must be true or false", str(error), f"-e {name}=true, or leave it out") from None


def _local_facts(task_vars: dict[str, Any]) -> dict[str, Any]:
    """Return ansible_local as it is: a task that sets a part of it replaces it whole."""
    return dict((task_vars.get("ansible_facts") or {}).get("ansible_local") or task_vars.get("ansible_local") or {})


def _run_id() -> str:
    """Return what all tasks of this ansible-playbook process have in common, and no other's: a roll-back undoes them.

    Every task runs in a child of that process. Its start time is field 22 of proc(5)'s stat.
    """
    parent = os.getppid()
    try:
        begun = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        begun = ""
    return f"ansible-playbook {platform.node()} {parent} {begun}"


def _bundle(variables: dict[str, Any]) -> tuple[str, str]:
    """Return the bundle that the variables name, and its digest; one that is not right is refused before it travels."""
    from gpuprov.agent.playbook_task import BUNDLE_KEY_VARIABLE, BUNDLE_VARIABLE
    from gpuprov.bundle.open import digest_once
    from gpuprov.protocol.errors import UsageError

    named, key = (str(variables.get(name) or "") for name in (BUNDLE_VARIABLE, BUNDLE_KEY_VARIABLE))
    if key and not named:
        raise UsageError(f"{BUNDLE_KEY_VARIABLE} needs {BUNDLE_VARIABLE}", "", f"add -e {BUNDLE_VARIABLE}=FILE")
    path = str(Path(named).expanduser().absolute()) if named else ""
    return (path, digest_once(path, key, Path(constants.DEFAULT_LOCAL_TMP))) if path else ("", "")


def _agent() -> tuple[bytes, str]:
    """Return the agent and its SHA-256, and make `import gpuprov` find the code that is in it.

    It lies unpacked in the folder that ansible-playbook has for the time of its run: Python imports nothing from a zip
    file inside a collection (Ansible's own import hook), and slowly from any other.
    """
    folder = Path(constants.DEFAULT_LOCAL_TMP) / "gpuprov"
    if not folder.exists():
        _unpack(_found(), folder)
    content = (folder / "agent.pyz").read_bytes()
    sys.path.insert(0, str(folder / "modules"))
    return content, hashlib.sha256(content).hexdigest()


def _unpack(content: bytes, folder: Path) -> None:
    made = Path(tempfile.mkdtemp(dir=constants.DEFAULT_LOCAL_TMP))
    (made / "agent.pyz").write_bytes(content)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        archive.extractall(made / "modules")
    try:
        made.rename(folder)
    except OSError:
        shutil.rmtree(made)  # another host's task was faster


def _found() -> bytes:
    """Return the agent: the collection's, or one built from the clone by its own environment, this one or its .venv."""
    if _CARRIED.exists():
        return _CARRIED.read_bytes()
    program = _CLONE / ".venv/bin/python"
    python = sys.executable if importlib.util.find_spec("gpuprov") else str(program)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "agent.pyz"
        command = (python, "-m", "gpuprov", "agent", "build", "-o", str(path))
        try:
            done = subprocess.run(command, cwd=_CLONE, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            raise AnsibleError(
                f"gpuprov's agent cannot be built\n  seen: neither {sys.executable} nor {program} has gpuprov\n"
                f"  next: make -C {_CLONE} setup, or install the collection gpuprov.host"
            ) from None
        if done.returncode != 0:
            raise AnsibleError(f"gpuprov's agent cannot be built\n  seen: {done.stderr.strip()}")
        return path.read_bytes()
