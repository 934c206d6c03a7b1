"""The .deb and the .rpm: what lintian and rpmlint say; installed, used and removed by apt, dnf and zypper."""

import shutil
import subprocess
from pathlib import Path

import pytest

from gpuprov import __version__
from tests.integration.apt_chroot import ChrootHost, chroot_host
from tests.lab.prepare import rpm_distribution
from tests.lab.rpm_repository import RpmPackage, build_package
from tools import linux_packages

pytestmark = [pytest.mark.root, pytest.mark.slow]
_LATER = [pytest.param(release, marks=pytest.mark.long) for release in ("bullseye", "trixie")]
_CLONE = Path(__file__).resolve().parents[2]
_MANAGERS = {"rocky-9.5": ("dnf", "install"), "opensuse-tumbleweed": ("zypper", "install", "--allow-unsigned-rpm")}
_PLACES = ("usr/share/man/man1", "usr/share/bash-completion", "usr/share/zsh", "usr/share/fish", "usr/bin")


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with both packages."""
    folder = tmp_path_factory.mktemp("packages")
    linux_packages.build(folder, 1_790_000_000)
    return folder


@pytest.mark.parametrize("checker", [
    ("lintian", "--allow-root", "--fail-on", "error,warning,info,pedantic", "-EIL", "pedantic", linux_packages.DEB),
    ("rpmlint", "--strict", "-c", str(_CLONE / "tools/rpmlint.toml"), linux_packages.RPM),
], ids=lambda argv: argv[0])  # fmt: skip
def test_the_distributions_checkers_find_nothing(packages: Path, checker: tuple[str, ...]) -> None:
    done = subprocess.run(checker, cwd=packages, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def ours(host: ChrootHost) -> set[str]:
    return {str(path) for place in _PLACES for path in (host.root / place).rglob("*gpuprov*")}


def run(host: ChrootHost, *argv: str) -> str:
    done = host.run(argv)
    assert done.ok, done.evidence()
    return done.stdout


def use(host: ChrootHost) -> None:
    """Call the installed program: what a person types first, completion and a page of the manual."""
    assert run(host, "gpuprov", "--version") == f"gpuprov, version {__version__}\n"
    assert "facts of 1 host" in run(host, "gpuprov", "facts")
    script = (
        "source /usr/share/bash-completion/completions/gpuprov; COMP_WORDS=(gpuprov inst); COMP_CWORD=1; "
        "_gpuprov_completion gpuprov inst gpuprov; echo ${COMPREPLY[@]}"
    )
    assert run(host, "bash", "-c", script) == "install\n"
    assert (host.root / "usr/share/man/man1/gpuprov-install.1.gz").exists()


@pytest.mark.parametrize("release", ["bookworm", *_LATER])
def test_apt_installs_and_removes_the_deb(release: str, packages: Path, tmp_path: Path) -> None:
    with chroot_host(release, tmp_path) as host:
        shutil.copy(packages / linux_packages.DEB, host.root / "root")
        run(host, "apt-get", "install", "--yes", f"/root/{linux_packages.DEB}")
        use(host)
        kept = host.root / "var/cache/gpuprov/of-others"
        kept.touch()
        run(host, "apt-get", "remove", "--yes", "gpuprov")
        assert ours(host) == set() and len(list(kept.parent.iterdir())) == 2
        run(host, "apt-get", "purge", "--yes", "gpuprov")
        assert list(kept.parent.iterdir()) == [kept]


@pytest.mark.parametrize("os_release", _MANAGERS)
def test_dnf_and_zypper_install_and_remove_the_rpm(os_release: str, packages: Path, tmp_path: Path) -> None:
    manager, *install = _MANAGERS[os_release]
    yes = ("--non-interactive",) if manager == "zypper" else ("--assumeyes",)
    with chroot_host("rpm", tmp_path) as host:
        rpm_distribution(host.root, os_release)
        # The host is Debian underneath: its rpm does not know that it has a Python.
        python = build_package(RpmPackage("python3", version="3.9.18", provides="/usr/bin/python3"), host.root / "root")
        shutil.copy(packages / linux_packages.RPM, host.root / "root")
        command = (manager, *yes, *install, f"/root/{linux_packages.RPM}")
        refused = host.run(command)
        assert not refused.ok and "python3" in refused.stdout + refused.stderr
        run(host, *command, f"/root/{python.name}")
        use(host)
        run(host, manager, *yes, "remove", "gpuprov")
        assert ours(host) == set() and not (host.root / "var/cache/gpuprov").exists()
