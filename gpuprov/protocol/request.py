"""What an agent is asked: one request, one line of JSON."""

from collections.abc import Mapping
from typing import Any

from gpuprov.protocol.codec import FORMER_NAME, WrongDataError, load, parse
from gpuprov.protocol.dataclass import dataclass, field, replace
from gpuprov.protocol.errors import UsageError

_EXAMPLE = """echo '{"command": "facts"}' | sudo python3 -I agent.pyz"""
COMMANDS = ("install", "verify", "health", "accept", "facts", "doctor", "cuda", "rollback", "uninstall")
CHANGING = ("install", "rollback", "uninstall")
# A host that requests more reboots has a fault that reboots do not fix.
MOST_REBOOTS = 3
# Of `accept`: below the time after which a silent host is given up.
MOST_MINUTES = 60


@dataclass(frozen=True)
class Request:
    """The request to an agent. `spec` holds the options without prefix, as spec.spec_to_json returns them.

    `check`: report the plan and change nothing. `diff`: include the diffs of the planned changes.
    `fix`: the doctor fixes the causes that gpuprov can fix; `allow`: it may also reset GPUs, or reboot the host.
    `caller_returns`: the caller repeats the request after a reboot; otherwise the host resumes by itself.
    `wait_seconds`: how long to wait for a lock that another program (apt, say) holds.
    `steps`: names of plan.STEPS, to carry out only this part of the plan; empty means all.
    `run_id`: requests with the same one are parts of one run, which a rollback undoes as a whole.
    `bundle`: the path of a bundle on the host, to install from it alone; `bundle_digest`: the SHA-256 that its
    manifest must have, empty for any. `tables`: tables that replace the agent's own (protocol/tables.py).
    `arguments`: what the command itself takes; `accept` takes `minutes`, `cuda` takes `subject` and `variables`,
    `rollback` `this_run`.
    `agent`: the path of the agent's own file on the host, which gpuprov_watch keeps; the agent names its own.
    `remember`: verify records the present GPUs as the expected ones.
    `upgrade`: take the driver that is recommended now, not what an earlier run chose.
    `fleet_drivers`: GPU models → the driver that other hosts of the inventory have, for a host that has none.
    `require_drained`: the host is not drained; an installation stops before it would disturb containers.
    """

    command: str
    spec: Mapping[str, Any] = field(default_factory=dict)
    check: bool = False
    diff: bool = False
    caller_returns: bool = False
    wait_seconds: int = 120
    steps: tuple[str, ...] = ()
    run_id: str = ""
    bundle: str = ""
    bundle_digest: str = ""
    tables: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    fix: bool = False
    allow: tuple[str, ...] = ()
    remember: bool = False
    upgrade: bool = False
    fleet_drivers: Mapping[str, str] = field(default_factory=dict)
    require_drained: bool = field(default=False, metadata={FORMER_NAME: "undisturbed"})
    agent: str = ""

    @property
    def changes_the_host(self) -> bool:
        """Say whether two such requests, at once or one after the other, would interfere."""
        changing = self.command in CHANGING or (self.command == "doctor" and self.fix)
        return changing and not self.check

    def sent(self, *, here: bool, alone: bool) -> "Request":
        """Return the request for a machine; `here`: it is the caller's own; `alone`: it is the only one of the run."""
        # The caller's must not reboot while it runs others: their runs would end with it. A run can return to others.
        if here and not alone:
            allow = tuple(one for one in self.allow if one != "reboot")
            return replace(self, spec={**self.spec, "reboot": "never"}, allow=allow, caller_returns=False)
        return replace(self, caller_returns=not here)

    def runs(self) -> "tuple[Request, ...]":
        """Return the request for each run: the first, and one after each reboot; the last may not reboot the host."""
        return (*(self,) * MOST_REBOOTS, replace(self, spec={**self.spec, "reboot": "never"}))


def request_from_line(line: str) -> Request:
    """Return the request that a line holds. Raises GpuprovError (exit code 2) for anything else."""
    try:
        # A misspelt `check` must not become an installation.
        request = load(Request, parse(line), trusted=True, exact=True)
    except WrongDataError as error:
        raise UsageError("the agent got no valid request", str(error), _EXAMPLE) from None
    if request.command not in COMMANDS:
        raise UsageError(f"the agent knows no command {request.command!r}", ", ".join(COMMANDS), _EXAMPLE)
    return request
