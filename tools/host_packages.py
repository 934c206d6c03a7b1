"""The packages in the programs for hosts: resolves them into the lock file, and fetches the wheels that it names.

python -m tools.host_packages lock   # `make lock`: the newest releases that run on Python 3.9
python -m tools.host_packages fetch  # `make setup`: the locked wheels, into .cache/wheels
"""

from __future__ import annotations

import email.message
import email.parser
import hashlib
import io
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

from gpuprov.protocol.errors import GpuprovError
from tools.zipapps import LOCK, WHEELS, locked, wheels

OLDEST_PYTHON = "3.9"
_PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
_REQUIREMENT = re.compile(r'^    "([A-Za-z][^"]*)", *#( \[host\])?', re.MULTILINE)
# The one-file program contains no SSH and no Ansible, and of rich not Markdown and source code.
_LEFT_OUT = ("ansible-core", "fabric", "pygments", "markdown-it-py", "mdurl")
# Below Python 3.11, marshmallow 4 needs a package that has to be compiled; pip asks for it on its own Python alone.
_HELD = ("marshmallow<4",)
_HEAD = """\
# The packages in the agent (on hosts, and in the collection) and in gpuprov-host.pyz: version and digest of the one
# wheel that is taken, without its compiled parts. `make lock` writes this file: the newest releases for Python 3.9.
"""
_PURE = ("--implementation", "py", "--abi", "none", "--platform", "any")
# PyYAML and MarkupSafe have no pure wheel.
_COMPILED = ("--implementation", "cp", "--platform", "manylinux2014_x86_64")


def lock() -> str:
    """Return the lock file's new text. Raises CalledProcessError if pip can't resolve the requirements."""
    text = _PYPROJECT.read_text()
    asked = _REQUIREMENT.findall(text[text.index("\ndependencies = [") : text.index("\n]\n\n[project.optional")])
    agent = _resolved((one for one, on_host in asked if on_host), _HELD, _PURE)
    pins = [f"{name}=={version}" for name, (version, _) in agent.items()]
    rest = (one for one, _ in asked if not one.startswith(_LEFT_OUT))
    found = {**_resolved(rest, pins, _COMPILED), **agent}
    lines = (
        f"{name}=={version} --hash=sha256:{digest}{'  # agent' * (name in agent)}\n"
        for name, (version, digest) in sorted(found.items())
        if name not in _LEFT_OUT
    )
    return _HEAD + "".join(lines)


def fetch() -> None:
    """Fetch the locked wheels that are not in .cache/wheels yet; pip checks their digests."""
    try:
        wheels(locked())
    except GpuprovError:
        _download("--no-deps", "--require-hashes", "--requirement", str(LOCK), "--dest", str(WHEELS), *_COMPILED)


def metadata_of(wheel: bytes) -> email.message.Message:
    """Return a wheel's METADATA."""
    with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.parser.BytesParser().parsebytes(archive.read(name), headersonly=True)


def _resolved(asked: Iterable[str], held: Iterable[str], tags: tuple[str, ...]) -> dict[str, tuple[str, str]]:
    """Return name → version and SHA-256 of the newest wheels that serve the requirements and run on Python 3.9."""
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder) / "constraints.txt"
        constraints.write_text("".join(f"{line}\n" for line in held))
        _download("--dest", folder, "--constraint", str(constraints), *tags, *asked)
        found = {}
        for path in Path(folder).glob("*.whl"):
            known = metadata_of(path.read_bytes())
            name = re.sub(r"[-_.]+", "-", known["Name"]).lower()
            found[name] = (known["Version"], hashlib.sha256(path.read_bytes()).hexdigest())
    return found


def _download(*words: str) -> None:
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check")
    subprocess.run((*pip, "--only-binary", ":all:", "--python-version", OLDEST_PYTHON, *words), check=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["lock"]:
        LOCK.write_text(lock())
    fetch()
