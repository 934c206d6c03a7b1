"""Running the build tools: a failure shows the command and what it said, not only its exit code."""

import shlex
import subprocess
from pathlib import Path

TIMEOUT_SECONDS = 300


class BuildError(RuntimeError):
    """The simulation could not be built; the message holds the command, its output and what to do."""


def output_of(*argv: str, hint: str, cwd: Path | None = None) -> str:
    """The standard output of a build tool; raises BuildError with `hint` as the next step."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, cwd=cwd, check=False)
    except FileNotFoundError as error:
        raise BuildError(f"{argv[0]} is not installed; {hint}") from error
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip()
        raise BuildError(f"{shlex.join(argv)} ended with {done.returncode}: {said}\n{hint}".rstrip())
    return done.stdout
