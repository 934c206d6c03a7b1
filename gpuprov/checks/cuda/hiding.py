"""Libraries on the host that hide those of the driver: older ones that the loader finds before them.

For the plan, `gpuprov verify` and the doctor.
"""

from __future__ import annotations

import contextlib
import re

from gpuprov.checks.cuda.search import LIBCUDA, LIBNVIDIA_ML, Candidate, Libraries, Program, find_loader, search
from gpuprov.core.changes import parent_of
from gpuprov.core.system import System
from gpuprov.facts.driver import ENVIRONMENT, PRELOAD, HidingLibrary
from gpuprov.facts.interpreter import replaceable
from gpuprov.packages import dpkg, interface
from gpuprov.runtime_hook.rootfs import Root

_SECONDS = 20
_VARIABLES = ("LD_PRELOAD", "LD_LIBRARY_PATH")
# No driver is installed below these by its installer or by a distribution.
_FOREIGN = ("/usr/local/", "/opt/", "/home/", "/root/", "/srv/", "/tmp/")


def gather_hiding(system: System, version: str) -> tuple[HidingLibrary, ...]:
    """Return the libraries that hide those of the driver of this version: the loaded one's, or the one to install."""
    if not version:
        return ()
    program = Program(environment_of_logins(system.read_text(ENVIRONMENT) or ""))
    with contextlib.closing(Root(str(system.path("/")))) as root:
        loader = find_loader(root)
        found = [search(root, loader, program, name) for name in (LIBNVIDIA_ML, LIBCUDA)]
    return tuple(_named(system, one, own) for one in found if (own := hidden(one, version)) is not None)


def environment_of_logins(text: str) -> dict[str, str]:
    """Return the loader's variables in /etc/environment (pam_env(8))."""
    pairs = re.findall(r"""^\s*(?:export\s+)?(\w+)=["']?([^"'\n]*)""", text, re.MULTILINE)
    return {name: value for name, value in pairs if name in _VARIABLES}


def hidden(found: Libraries, version: str) -> str | None:
    """Return the driver's library that another one hides, "" if it is not there yet; None if nothing hides it."""
    one = found.winner
    # CUDA's stubs and compatibility libraries are another matter: programs ask for them.
    if one is None or one.stub or one.compat or (one.version == version and not one.fault):
        return None
    others = (other for other in found.others if parent_of(other.chain[-1]) != parent_of(one.chain[-1]))
    own = next((other.path for other in others if other.version == version), None)
    return own if own is not None else "" if one.path.startswith(_FOREIGN) else None


def _named(system: System, found: Libraries, own: str) -> HidingLibrary:
    one = found.winner
    assert one is not None
    paths = tuple(dict.fromkeys((one.path, *one.chain)))
    # /lib may be a link to /usr/lib: the same file by two names.
    shown = (paths[0], *(path for path in paths[1:] if system.real_path(parent_of(paths[0])) + _base(paths[0]) != path))
    # A link may lead to any file: only the library's own names in the folder that the loader searches are removed.
    folder, stem = system.real_path(parent_of(paths[0])), f"/{found.name.partition('.so')[0]}.so"
    in_folder = (path for path in shown if system.real_path(parent_of(path)) == folder)
    removable = tuple(path for path in in_folder if _base(path).startswith(stem))
    owner = _owner(system, removable[-1]) if removable else ""
    foreign = replaceable(system, folder, system_groups=True)
    reason = _reason(system, one)
    return HidingLibrary(found.name, shown, one.version, reason, own, owner, one.fault, removable, foreign)


def _base(path: str) -> str:
    return "/" + path.rpartition("/")[2]


def _reason(system: System, one: Candidate) -> str:
    """Return why the loader takes it, with the line of the file that makes it."""
    source, _, rest = one.reason.partition(" ")
    if source == PRELOAD:
        return _line(system, PRELOAD, re.escape(rest.rpartition(" ")[2])) + f" names {rest.rpartition(' ')[2]}"
    if source in _VARIABLES:
        return _line(system, ENVIRONMENT, rf"\b{source}=") + f" sets {source}"
    folder = parent_of(one.path)
    file, directory = "/etc/ld.so.conf", "/etc/ld.so.conf.d"
    for path in (file, *(f"{directory}/{name}" for name in system.list_directory(directory))):
        place = _line(system, path, rf"^\s*{re.escape(folder)}/?\s*(?:#.*)?$")
        if place != path:
            return f"{place} names {folder}"
    return one.reason


def _line(system: System, path: str, pattern: str) -> str:
    """Return `path:line` of the first line that matches, the path alone if none does."""
    lines = (system.read_text(path) or "").splitlines()
    number = next((number for number, line in enumerate(lines, 1) if re.search(pattern, line)), 0)
    return f"{path}:{number}" if number else path


def _owner(system: System, path: str) -> str:
    """Return the package that owns a file, nothing if none does."""
    if system.which("dpkg-query"):
        # NAME[:ARCHITECTURE][, NAME…]: PATH
        own = rf"^([a-z0-9][a-z0-9.+-]+)[^ ]*(?:, .*)?: (?:/usr)?{re.escape(path.removeprefix('/usr'))}$"
        if found := re.search(own, dpkg.owner(system, path), re.MULTILINE):
            return found[1]
    if system.which("rpm"):
        done = system.run(("rpm", "--query", "--file", "--queryformat", "%{NAME}\n", path), timeout=_SECONDS)
        interface.require_answer(done, f"rpm does not tell which package has {path}")
        return done.stdout.strip() if done.ok else ""
    return ""
