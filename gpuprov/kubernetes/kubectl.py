"""The user's own kubectl: one call with a time limit and bounded output, and a sentence for each way that it fails.

Calls use the API's paths (`--raw`): no discovery, no cache on disk, the same with each release of kubectl. kubectl gets
the user's environment, because kubeconfig files run programs of the user's. A Ctrl-C does not reach it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuprov.core.commands import Completed, first_match, run_command
from gpuprov.protocol.errors import ExitCode, GpuprovError
from gpuprov.protocol.words import one_line

_SECONDS = 40
_REQUEST_SECONDS = 30
# More than a list of 5,000 nodes, Kubernetes' limit; a server that never ends must not fill our memory.
_MOST_BYTES = 128 << 20
_LONGEST_LINE = 600


@dataclass(frozen=True)
class Meaning:
    """A pattern in the output of kubectl, or in what the cluster says of a pod; its meaning, and the next step."""

    pattern: str
    what: str
    next_step: str
    exit_code: ExitCode = ExitCode.FAILED


def meaning(rows: Iterable[Meaning], lines: Iterable[str]) -> tuple[Meaning, str] | None:
    """Return the first row that a line matches, and the line."""
    return first_match(rows, lambda row: row.pattern, lines)


# The order decides: a refusal by a quota is Forbidden too.
_FAILURES = (
    Meaning("command not found", "kubectl is not installed",
            "install it (Debian 13: apt install kubectl), or run gpuprov where it is", ExitCode.USAGE),
    Meaning(r"context \S+ does not exist|no context exists", "the kubeconfig has no such context",
            "kubectl config get-contexts", ExitCode.USAGE),
    Meaning(r"error loading config|no configuration has been provided|kubeconfig\S* is invalid|invalid configuration",
            "kubectl can't use the kubeconfig", "name it with --kubeconfig FILE; kubectl config view", ExitCode.USAGE),
    Meaning(r"quota|must specify (limits|requests)|violates PodSecurity|being terminated|denied the request|webhook",
            "the namespace refuses the test pod",
            "kubectl describe namespace; or give another one with --namespace NAME"),
    Meaning(r"\(Forbidden\)", "the cluster forbids it to this account (RBAC)",
            "kubectl auth can-i --list; docs/kubernetes.md lists the permissions that verify needs"),
    Meaning("Please enter Username", "the kubeconfig has no credentials for this cluster",
            "kubectl config view; log in, or name another one with --kubeconfig FILE", ExitCode.USAGE),
    Meaning(r"\(Unauthorized\)|must be logged in|getting credentials: ", "the cluster does not accept the credentials",
            "log in again, then: kubectl auth whoami", ExitCode.UNREACHABLE),
    Meaning(r"x509: |certificate", "the API server's certificate is not trusted",
            "check certificate-authority in the kubeconfig: kubectl config view", ExitCode.UNREACHABLE),
    Meaning(r"\(NotFound\)", "the cluster does not have it", "kubectl get namespaces; kubectl api-resources"),
    Meaning(r"connection to the server|Unable to connect|dial tcp|i/o timeout|deadline exceeded|no route to host|"
            r"EOF|TLS handshake|time limit|ServiceUnavailable|InternalError|currently unable|Client\.Timeout",
            "the cluster's API server does not answer", "kubectl cluster-info", ExitCode.UNREACHABLE),
)  # fmt: skip


@dataclass(frozen=True)
class Kubectl:
    """How kubectl is called: its program, and which cluster of which kubeconfig, empty for kubectl's own choice.

    The methods raise GpuprovError, and `doing` completes its first line.
    """

    context: str = ""
    kubeconfig: str = ""
    program: str = "kubectl"

    def get(self, path: str, *, doing: str) -> Any:
        """Return the JSON at a path of the API."""
        text = self.text(path, doing=doing)
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise GpuprovError(
                f"{doing}: the answer is invalid JSON", one_line(text[:_LONGEST_LINE]), "kubectl cluster-info",
                exit_code=ExitCode.UNREACHABLE,
            ) from None  # fmt: skip

    def text(self, path: str, *, doing: str) -> str:
        """Return the content at a path of the API."""
        return _succeeded(self.run(("get", "--raw", path)), doing).stdout

    def has(self, path: str, *, doing: str) -> bool:
        """Say whether there is an object at a path of the API."""
        done = self.run(("get", "--raw", path))
        return "(NotFound)" not in done.stderr and _succeeded(done, doing).ok

    def create(self, path: str, content: Any, *, doing: str) -> None:
        """Create an object."""
        _succeeded(self.run(("create", "--raw", path, "-f", "-"), json.dumps(content).encode()), doing)

    def delete(self, path: str, *, doing: str) -> None:
        """Delete the object, or all objects, at a path of the API, with 5 seconds to end."""
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 5}
        _succeeded(self.run(("delete", "--raw", path, "-f", "-"), json.dumps(body).encode()), doing)

    def run(self, words: tuple[str, ...], stdin: bytes = b"") -> Completed:
        """Run kubectl to its end or its time limit; a failure is a value."""
        chosen = (
            *((f"--kubeconfig={self.kubeconfig}",) if self.kubeconfig else ()),
            *((f"--context={self.context}",) if self.context else ()),
            f"--request-timeout={_REQUEST_SECONDS}s",
        )
        return run_command(
            (self.program, *chosen, *words), timeout=_SECONDS, stdin=stdin, env=os.environ, on_line=None,
            folder=None, most=_MOST_BYTES,
        )  # fmt: skip


def _succeeded(done: Completed, doing: str) -> Completed:
    if not done.ok:
        raise failure(done, doing)
    return done


def failure(done: Completed, doing: str) -> GpuprovError:
    """Return the meaning of a failed call of kubectl."""
    # Without credentials kubectl prompts for a name on stdout, and no one answers.
    lines = (*done.stderr.splitlines(), *done.stdout[:_LONGEST_LINE].splitlines()[:1])
    said = [one_line(line)[:_LONGEST_LINE] for line in lines if line.strip()] or ["(silent)"]
    row, line = meaning(_FAILURES, said) or (Meaning("", "kubectl failed", "kubectl cluster-info"), said[-1])
    seen = f"`{' '.join((Path(done.argv[0]).name, *done.argv[1:]))}` exited {done.returncode}\n{line}"
    return GpuprovError(f"{doing}: {row.what}", seen, row.next_step, exit_code=row.exit_code)
