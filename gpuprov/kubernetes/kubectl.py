"""The user's own kubectl: one call with a time limit and bounded output, and a sentence for each way that it fails.

Calls use the API's paths (`--raw`): no discovery, no cache on disk, the same with each release of kubectl. kubectl gets
the user's environment, because kubeconfig files run programs of the user's. A Ctrl-C does not reach it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import IO, Any

from gpuprov.core.commands import NOT_FOUND, TIMED_OUT, Completed, first_match
from gpuprov.protocol.errors import ExitCode, GpuprovError
from gpuprov.protocol.words import one_line

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stop:
    """Whether a stop was requested; `tell` gets a sentence at the first signal."""

    def __init__(self, tell: Callable[[str], None] = lambda _: None) -> None:
        self._asked = threading.Event()
        self._tell = tell
        # The exit code of the signal.
        self.code: ExitCode | None = None

    @property
    def is_asked(self) -> bool:
        return self._asked.is_set()

    def ask(self) -> None:
        """Request a stop."""
        self._asked.set()

    def wait(self, seconds: float) -> None:
        """Wait for that long, or until a stop is requested."""
        self._asked.wait(seconds)

    def pause(self, seconds: float) -> None:
        """Wait for that long even after a stop request: for the removal."""
        time.sleep(seconds)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals during the block."""

        def take(number: int, frame: FrameType | None) -> None:
            if not self._asked.is_set():
                self.code = ExitCode(128 + number)
                self._asked.set()
                self._tell("stopping: the test pods are being removed")

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, take) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


_SECONDS = 40
_REQUEST_SECONDS = 30
_LAST_WORDS_SECONDS = 5
# A page of a list; a server that never ends must not fill our memory.
_MOST_BYTES = 64 << 20
_MOST_ERROR = 64 << 10
_LONGEST_LINE = 600
_TOO_MUCH = 253
GONE = "(NotFound)"


@dataclass(frozen=True)
class _Failure:
    """A pattern in kubectl's output, its meaning, the next command, and the exit code."""

    pattern: str
    what: str
    next_step: str
    exit_code: ExitCode = ExitCode.FAILED


# The order decides: a refusal by a quota is Forbidden too.
_FAILURES = (
    _Failure("command not found", "kubectl is not installed",
             "install it (Debian 13: apt install kubectl), or run gpuprov where it is", ExitCode.USAGE),
    _Failure(r"context \S+ does not exist|no context exists", "the kubeconfig has no such context",
             "kubectl config get-contexts", ExitCode.USAGE),
    _Failure(r"error loading config|no configuration has been provided|kubeconfig\S* is invalid|invalid configuration",
             "kubectl can't use the kubeconfig", "name it with --kubeconfig FILE; kubectl config view", ExitCode.USAGE),
    _Failure(r"exceeded quota|must specify (limits|requests)|insufficient quota",
             "a quota of the namespace refuses the test pod",
             "kubectl describe quota; or give another namespace with --namespace"),
    _Failure("violates PodSecurity", "Pod Security of the namespace refuses the test pod",
             "the test pod meets the standard `restricted`: kubectl describe namespace; kubectl get mutating"
             "webhookconfigurations"),
    _Failure(r"being terminated", "the namespace is being removed", "wait, or give another one with --namespace"),
    _Failure(r"denied the request|admission webhook", "an admission webhook of the cluster refuses the test pod",
             "look at the policy that it names; or give another namespace with --namespace"),
    _Failure(r"\(Forbidden\)", "the cluster forbids it to this account (RBAC)",
             "kubectl auth can-i --list; docs/kubernetes.md lists the permissions that verify needs"),
    _Failure("Please enter Username", "the kubeconfig has no credentials for this cluster",
             "kubectl config view; log in, or name another one with --kubeconfig FILE", ExitCode.USAGE),
    _Failure(r"\(Unauthorized\)|must be logged in|getting credentials: ", "the cluster does not accept the credentials",
             "log in again, then: kubectl auth whoami", ExitCode.UNREACHABLE),
    _Failure(r"x509: |certificate", "the API server's certificate is not trusted",
             "check certificate-authority in the kubeconfig: kubectl config view", ExitCode.UNREACHABLE),
    _Failure(r"\(NotFound\)", "the cluster does not have it", "kubectl get namespaces; kubectl api-resources"),
    _Failure(r"connection to the server|Unable to connect|dial tcp|i/o timeout|deadline exceeded|no route to host|"
             r"EOF|TLS handshake|time limit|ServiceUnavailable|InternalError|currently unable|Client\.Timeout",
             "the cluster's API server does not answer", "kubectl cluster-info", ExitCode.UNREACHABLE),
)  # fmt: skip


@dataclass(frozen=True)
class Kubectl:
    """How kubectl is called: its program, and which cluster of which kubeconfig, empty for kubectl's own choice."""

    context: str = ""
    kubeconfig: str = ""
    program: str = "kubectl"

    def get(self, path: str, *, doing: str) -> Any:
        """Return the JSON at a path of the API. Raises GpuprovError; `doing` completes its first line."""
        return self._json(("get", "--raw", path), b"", doing)

    def find(self, path: str, *, doing: str) -> Any:
        """Return the JSON at a path, None if it does not exist. Raises GpuprovError for any other failure."""
        done = self.run(("get", "--raw", path))
        return None if GONE in done.stderr else self._parsed(done, doing)

    def text(self, path: str, *, doing: str) -> str:
        """Return the content of an API path as text. Raises GpuprovError."""
        done = self.run(("get", "--raw", path))
        if not done.ok:
            raise failure(done, doing)
        return done.stdout

    def create(self, path: str, content: Any, *, doing: str) -> Any:
        """Create an object and return it as the API server has it. Raises GpuprovError."""
        return self._json(("create", "--raw", path, "-f", "-"), json.dumps(content).encode(), doing)

    def delete(self, path: str, uid: str, *, doing: str) -> None:
        """Delete the object with exactly this uid; no effect if it is gone. Raises GpuprovError."""
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}, "gracePeriodSeconds": 5}
        done = self.run(("delete", "--raw", path, "-f", "-"), json.dumps(body).encode())
        if not done.ok and GONE not in done.stderr:
            raise failure(done, doing)

    def _json(self, words: tuple[str, ...], stdin: bytes, doing: str) -> Any:
        return self._parsed(self.run(words, stdin), doing)

    def _parsed(self, done: Completed, doing: str) -> Any:
        if not done.ok:
            raise failure(done, doing)
        try:
            return json.loads(done.stdout)
        except (ValueError, RecursionError):
            raise GpuprovError(
                f"{doing}: the answer is invalid JSON", one_line(done.stdout[:_LONGEST_LINE]), "kubectl cluster-info",
                exit_code=ExitCode.UNREACHABLE,
            ) from None  # fmt: skip

    def run(self, words: tuple[str, ...], stdin: bytes = b"") -> Completed:
        """Run kubectl to its end or its time limit; a failure is a value."""
        chosen = (
            *((f"--kubeconfig={self.kubeconfig}",) if self.kubeconfig else ()),
            *((f"--context={self.context}",) if self.context else ()),
            f"--request-timeout={_REQUEST_SECONDS}s",
        )
        return _run((self.program, *chosen, *words), stdin)


def failure(done: Completed, doing: str) -> GpuprovError:
    """Return the meaning of a failed call of kubectl."""
    # Without credentials kubectl prompts for a name on stdout, and no one answers.
    lines = (*done.stderr.splitlines(), *done.stdout[:_LONGEST_LINE].splitlines()[:1])
    said = [one_line(line)[:_LONGEST_LINE] for line in lines if line.strip()] or ["(silent)"]
    found = first_match(_FAILURES, lambda row: row.pattern, said)
    row, line = found or (_Failure("", "kubectl failed", "kubectl cluster-info"), said[-1])
    seen = f"`{' '.join((os.path.basename(done.argv[0]), *done.argv[1:]))}` exited {done.returncode}\n{line}"  # noqa: PTH119
    return GpuprovError(f"{doing}: {row.what}", seen, row.next_step, exit_code=row.exit_code)


def _run(argv: tuple[str, ...], stdin: bytes) -> Completed:
    try:
        process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        return Completed(argv, NOT_FOUND, "", f"{argv[0]}: command not found" if missing else f"{argv[0]}: {error}")
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    out = _Reader(process.stdout, _MOST_BYTES, process)
    err = _Reader(process.stderr, _MOST_ERROR, process)
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(stdin)
        process.stdin.close()
    late = False
    try:
        process.wait(_SECONDS)
    except subprocess.TimeoutExpired:
        late = True
        _kill(process)
        process.wait()
    # A program that outlives kubectl, such as a credential plugin's daemon, keeps the pipes open.
    out.join(_LAST_WORDS_SECONDS)
    err.join(_LAST_WORDS_SECONDS)
    said = bytes(err.kept).decode("utf-8", "replace")
    if late or out.full:
        said += "\nstopped after its time limit" if late else "\nstopped: it prints more than gpuprov reads"
        return Completed(argv, TIMED_OUT if late else _TOO_MUCH, "", said)
    return Completed(argv, process.returncode, bytes(out.kept).decode("utf-8", "replace"), said)


class _Reader(threading.Thread):
    """Reads a pipe to its end, closes it and keeps the first `most` bytes; what prints more is killed.

    Only this thread closes the pipe: another one would wait for the read.
    """

    def __init__(self, pipe: IO[bytes], most: int, process: subprocess.Popen[bytes]) -> None:
        super().__init__(daemon=True)
        self.kept = bytearray()
        self.full = False
        self._pipe, self._most, self._process = pipe, most, process
        self.start()

    def run(self) -> None:
        with self._pipe:
            while chunk := self._pipe.read1(1 << 16):  # type: ignore[attr-defined]
                if len(self.kept) + len(chunk) > self._most:
                    self.full = True
                    _kill(self._process)
                    return
                self.kept += chunk


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End kubectl and the programs that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
