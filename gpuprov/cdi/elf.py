"""The name by which the loader knows a library: its soname, read from the file itself. Reads only."""

from __future__ import annotations

from gpuprov.core.system import System

# No library of a driver has a name as long as this; a hostile one may.
_LONGEST = 128


def soname(system: System, path: str) -> str:
    """Return the DT_SONAME of a library (gABI, "Dynamic Section"); nothing for a file that is none or has none."""
    # Here, because most hosts have all links and nobody need read a library.
    from elftools.common.exceptions import ELFError
    from elftools.elf.elffile import ELFFile

    try:
        with system.open(path) as file:
            segments = ELFFile(file).iter_segments("PT_DYNAMIC")  # type: ignore[no-untyped-call]
            names = [tag.soname for segment in segments for tag in segment.iter_tags("DT_SONAME")]
    # What a broken file makes the library stumble over is not only its own error.
    except (OSError, ELFError, ValueError, KeyError, IndexError, AttributeError, TypeError, AssertionError, EOFError):
        return ""
    name = str(names[0]) if names else ""
    return name if 0 < len(name) <= _LONGEST and "/" not in name and name.isprintable() else ""
