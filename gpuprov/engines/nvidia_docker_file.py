"""The text of `/usr/bin/nvidia-docker` (its program: nvidia_docker_command.py), and how to recognise gpuprov's."""

from __future__ import annotations

PATH = "/usr/bin/nvidia-docker"
_MARK = b"# gpuprov's nvidia-docker:"
# -I -S -E: the caller's environment, folder and home do not affect imports. `-c` instead of the zip file itself, whose
# start imports more than needed.
_TEXT = """\
#!/bin/sh
# gpuprov's nvidia-docker: gives `run` and `create` the GPUs, and passes everything to docker.
python={python}
[ -x "$python" ] || {{
    echo "nvidia-docker: $python is missing: run gpuprov install on this host" >&2
    exit 127
}}
exec "$python" -I -S -E -B -c 'import sys
sys.path.insert(0, "{program}")
try:
    from gpuprov.engines.nvidia_docker_command import main
except ImportError as error:
    sys.exit("nvidia-docker: {program} is missing or broken (" + str(error) + "): run gpuprov install on this host")
main(sys.argv[1:], "{path}")' "$@"
"""


def render(python: str, program: str) -> bytes:
    """Return the file's content. `python` runs it; `program` is the zip file in which gpuprov's modules lie."""
    return _TEXT.format(python=python, program=program, path=PATH).encode()


def is_ours(content: bytes) -> bool:
    """Say whether a file of this name is gpuprov's, of any version."""
    return _MARK in content[:200]
