"""How the lab runs commands: what fails says what it was and what it printed."""

import subprocess
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

Found = TypeVar("Found")


class LabError(Exception):
    """The lab could not do something; the message says what, what was seen, and what to do."""


def run(argv: Sequence[str], *, check: bool = True, stdin: str = "", timeout: float = 60) -> str:
    """Run a command and return its output. Raises LabError if it fails and `check` is set."""
    try:
        done = subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=timeout, check=False)
    except FileNotFoundError:
        raise LabError(f"there is no program {argv[0]}; next: make setup") from None
    except subprocess.TimeoutExpired:
        raise LabError(f"`{' '.join(argv)}` did not end within {timeout:g} s") from None
    if check and done.returncode != 0:
        raise LabError(f"`{' '.join(argv)}` exited {done.returncode}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def wait_for(what: str, condition: Callable[[], Found], seconds: float = 300) -> Found:
    """Wait until a condition holds; return its value. Raises LabError if it takes longer, as only a fault does."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise LabError(f"{what} did not happen within {seconds:g} s")
        time.sleep(0.05)
    return found
