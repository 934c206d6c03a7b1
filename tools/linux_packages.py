"""Builds gpuprov's .deb and .rpm: the one-file program, man pages and completion; no service.

Their only script removes what the program has unpacked; kept drivers lie beside that, and a rollback needs them.

python -m tools.linux_packages dist
"""

from __future__ import annotations

import gzip
import hashlib
import os
import subprocess
import sys
import tempfile
import textwrap
from email.utils import formatdate
from pathlib import Path

from click.shell_completion import get_completion_class

from gpuprov import __version__
from gpuprov.cli.main import cli
from tools import host_packages, host_program, man_pages
from tools.zipapps import files_of, locked, wheels

_CLONE = Path(__file__).resolve().parents[1]
_MAINTAINER = "gpuprov maintainers <gpuprov@users.noreply.github.com>"
_HOME = "https://github.com/gpuprov/gpuprov"
_SUMMARY = "Turn Linux machines into container hosts for NVIDIA GPUs"
_DESCRIPTION = """\
gpuprov sets up repositories and keys, kernel headers, the NVIDIA driver, the
container runtime and docker, and proves that containers see the same GPUs as
the host. If they do not, it names the cause and the command to type.
This package serves the machine that it is installed on: it needs no other
package than Python, starts no service and changes nothing by itself.
"""
_CONTROL = """\
Package: gpuprov
Version: {version}
Architecture: all
Maintainer: {maintainer}
Installed-Size: {size}
Depends: python3:any, python3 (>= 3.9) | python3.9
Section: admin
Priority: optional
Homepage: {home}
Description: {summary}
{description}
"""
_CHANGELOG = """\
gpuprov ({version}) unstable; urgency=medium

  * Release {version}: its changes are in NEWS.md.gz beside this file.

 -- {maintainer}  {date}
"""
_CLEAN = """\
rm -rf /var/cache/gpuprov/host-* /var/cache/gpuprov/.host-*
    rmdir --ignore-fail-on-non-empty /var/cache/gpuprov || :"""
_POSTRM = f"""\
#!/bin/sh
set -e
if [ "$1" = purge ] && [ -d /var/cache/gpuprov ]; then
    {_CLEAN}
fi
"""
_SPECIFICATION = """\
Name: gpuprov
Version: {version}
Release: 1
Summary: {summary}
License: Apache-2.0 AND BSD-3-Clause AND MIT AND MPL-2.0 AND Unlicense
URL: {home}
Group: System/Management
Packager: {maintainer}
BuildArch: noarch
AutoReqProv: no
Requires: /usr/bin/python3
Requires: (python3 >= 3.9 or python39 or python3.11 or python3.12 or python311)

%description
{description}
%install
cp -a %{{tree}}/. %{{buildroot}}

%postun
if [ "$1" = 0 ] && [ -d /var/cache/gpuprov ]; then
    {clean}
fi

%files
/usr/bin/gpuprov
/usr/share/bash-completion/completions/gpuprov
/usr/share/zsh/site-functions/_gpuprov
/usr/share/fish/vendor_completions.d/gpuprov.fish
/usr/share/man/man1/gpuprov*.1.gz
%doc /usr/share/doc/gpuprov
%license /usr/share/licenses/gpuprov

%changelog
* {date} {maintainer} - {version}-1
- Release {version}: its changes are in CHANGELOG.md.
"""
_LICENCES = """\
gpuprov: {home}
Copyright: gpuprov's contributors
Licence: Apache-2.0. On Debian its text is in /usr/share/common-licenses/Apache-2.0.

/usr/bin/gpuprov contains the Python packages below, unchanged.
"""
DEB = f"gpuprov_{__version__}_all.deb"
RPM = f"gpuprov-{__version__}-1.noarch.rpm"
_RPM_MACROS = {
    # One rpmbuild writes a time, a host's name and its own compression, another others.
    "use_source_date_epoch_as_buildtime": "1", "clamp_mtime_to_source_date_epoch": "1", "_buildhost": "localhost",
    "_binary_payload": "w9.gzdio", "_build_id_links": "none", "__os_install_post": "%{nil}", "__brp_compress": "%{nil}",
    "_build_name_fmt": RPM, "_target_os": "linux",
}  # fmt: skip
_LONG_LICENCE = 5000  # bytes: Apache-2.0
# Ubuntu 20.04, RHEL 8 and SUSE Linux Enterprise 15 have a newer Python beside the one that is python3.
_NEWER_PYTHON = b"""\
import os
import sys

if sys.version_info < (3, 9):
    for _python in ["/usr/bin/python3.%d" % minor for minor in range(14, 8, -1)]:
        if os.access(_python, os.X_OK):
            os.execv(_python, [_python] + sys.argv)
"""


def build(folder: Path, moment: int) -> None:
    """Build both packages in `folder`; `moment`: their time, in seconds since 1970. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as name:
        _build_deb(folder, Path(name), moment)
    with tempfile.TemporaryDirectory() as name:
        _build_rpm(folder, Path(name), moment)


def program() -> bytes:
    """Return the one-file program as the packages have it: for the distribution's python3, or a newer one beside it."""
    return host_program.build(b"#!/usr/bin/python3\n", _NEWER_PYTHON)


def _build_deb(folder: Path, work: Path, moment: int) -> None:
    tree = work / "tree"
    _write_common(tree, moment, zsh="vendor-completions")
    documents = tree / "usr/share/doc/gpuprov"
    _write(documents / "copyright", _licences())
    _write(documents / "changelog.gz", _compressed(_filled(_CHANGELOG, date=formatdate(moment))))
    _write(documents / "NEWS.md.gz", _compressed((_CLONE / "CHANGELOG.md").read_text("utf-8")))
    files = sorted(path for path in tree.rglob("*") if path.is_file())
    sums = (f"{hashlib.md5(path.read_bytes()).hexdigest()}  {path.relative_to(tree)}\n" for path in files)
    _write(tree / "DEBIAN/md5sums", "".join(sums))
    size = sum(path.stat().st_size for path in files) // 1024
    _write(tree / "DEBIAN/postrm", _POSTRM, 0o755)
    _write(tree / "DEBIAN/control", _filled(_CONTROL, size=size, description=textwrap.indent(_DESCRIPTION, " ")))
    _set_times(tree, moment)
    _run(moment, "dpkg-deb", "-Zxz", "--root-owner-group", "--build", str(tree), str(folder / DEB))


def _build_rpm(folder: Path, work: Path, moment: int) -> None:
    tree = work / "tree"
    _write_common(tree, moment, zsh="site-functions")
    _write(tree / "usr/share/licenses/gpuprov/LICENSE", (_CLONE / "LICENSE").read_bytes())
    _write(tree / "usr/share/licenses/gpuprov/LICENSES.packages", _licences())
    _write(tree / "usr/share/doc/gpuprov/CHANGELOG.md", (_CLONE / "CHANGELOG.md").read_bytes())
    _set_times(tree, moment)
    # rpm wants a date as "Mon Jan 01 2024".
    day, month, year = formatdate(moment).split()[1:4]
    date = f"{formatdate(moment)[:3]} {month} {day} {year}"
    specification = work / "gpuprov.spec"
    _write(specification, _filled(_SPECIFICATION, date=date, description=_DESCRIPTION, clean=_CLEAN))
    macros = {**_RPM_MACROS, "_topdir": str(work / "top"), "_rpmdir": str(folder.resolve()), "tree": str(tree)}
    defined = (word for name, value in macros.items() for word in ("--define", f"{name} {value}"))
    _run(moment, "rpmbuild", "--quiet", "-bb", "--target", "noarch", *defined, str(specification))


def _filled(template: str, **values: object) -> str:
    return template.format(version=__version__, maintainer=_MAINTAINER, home=_HOME, summary=_SUMMARY, **values)


def _licences() -> str:
    """Return whose work the program contains, and under which licences; Debian has the long ones in a place."""
    parts = [_filled(_LICENCES)]
    for name, wheel in sorted(wheels(locked()).items()):
        version = host_packages.metadata_of(wheel)["Version"]
        texts = [
            content.decode() for path, content in files_of(wheel)
            if ".dist-info/" in path and not path.endswith("/METADATA") and len(content) < _LONG_LICENCE
        ]  # fmt: skip
        text = "\n".join(texts) or "Licence: as its METADATA in the program says.\n"
        parts.append(f"{'-' * 70}\n{name} {version}\n\n{text}")
    return "\n".join(parts)


def _write_common(tree: Path, moment: int, zsh: str) -> None:
    """Write program, completion and man pages into a tree; `zsh`: the folder of functions that zsh loads."""
    _write(tree / "usr/bin/gpuprov", program(), 0o755)
    share = tree / "usr/share"
    places = {
        "bash": "bash-completion/completions/gpuprov", "zsh": f"zsh/{zsh}/_gpuprov",
        "fish": "fish/vendor_completions.d/gpuprov.fish",
    }  # fmt: skip
    for shell, place in places.items():
        completion = get_completion_class(shell)
        assert completion is not None
        _write(share / place, completion(cli, {}, "gpuprov", "_GPUPROV_COMPLETE").source())
    for name, page in man_pages.pages(moment, one_file=True).items():
        _write(share / f"man/man1/{name}.gz", _compressed(page))


def _write(path: Path, content: str | bytes, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    path.chmod(mode)


def _set_times(tree: Path, moment: int) -> None:
    """Give all files one time, and folders the mode that any umask would give another."""
    for path in sorted(tree.rglob("*"), reverse=True):
        if path.is_dir():
            path.chmod(0o755)
        os.utime(path, (moment, moment))
    tree.chmod(0o755)
    os.utime(tree, (moment, moment))


def _compressed(text: str) -> bytes:
    return gzip.compress(text.encode(), 9, mtime=0)


def _run(moment: int, *argv: str) -> None:
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(moment), "LC_ALL": "C", "TZ": "UTC"}
    subprocess.run(argv, env=environment, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    from tools.release import release_time

    build(Path(sys.argv[1]), release_time())
