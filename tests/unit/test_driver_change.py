"""Who changed the driver's files and when: only what a log says of the very version that is there."""

import pytest

from gpuprov.cdi.discover import DriverFacts
from gpuprov.facts.driver import package_change, since, version_difference
from tests.unit.fake_host import FakeHost

NEW = "580.178.04"
_DPKG = f"2026-11-20 06:12:44 upgrade libnvidia-compute-580:amd64 550.163.01-1 {NEW}-1\n"
# dnf logs the package that comes, and later the one that goes (dnf/yum/rpmtrans.py, _elemProgress).
_DNF = (
    f"2026-11-20T06:12:44+0000 SUBDEBUG Upgrade: nvidia-driver-libs-3:{NEW}-1.el9.x86_64\n"
    "2026-11-20T06:12:51+0000 SUBDEBUG Upgraded: nvidia-driver-libs-3:550.163.01-1.el9.x86_64\n"
)
# As dnf 5.4 logs a package.
_DNF5 = (
    f'2026-11-20T06:12:44+0000 [29809] INFO RPM callback install start "akmod-nvidia-3:{NEW}-1.fc43.x86_64" total 408\n'
    '2026-11-20T06:12:51+0000 [29809] INFO RPM callback erase start "akmod-nvidia-3:550.163.01-1.fc43.x86_64" total 9\n'
)
_ZYPPER = f"2026-11-20 06:12:44|install|nvidia-compute-G06|{NEW}-1|x86_64|root@a|repo|1f|\n"


@pytest.mark.parametrize(
    ("path", "line", "other", "said"),
    [
        ("/var/log/dpkg.log", _DPKG, "/var/log/apt/history.log", "apt upgraded them (2026-11-20 06:12)"),
        ("/var/log/dpkg.log", _DPKG, "", "dpkg upgraded them (2026-11-20 06:12)"),
        ("/var/log/dnf.rpm.log", _DNF, "", "dnf upgraded them (2026-11-20 06:12)"),
        ("/var/log/dnf5.log", _DNF5, "", "dnf installed them (2026-11-20 06:12)"),
        ("/var/log/zypp/history", _ZYPPER, "", "zypper installed them (2026-11-20 06:12)"),
        ("/var/log/nvidia-installer.log",
         f"nvidia-installer log file '/x'\ncreation time: Fri Nov 20 06:12:44 2026\ninstaller version: {NEW}\n", "",
         "NVIDIA's installer wrote them (Fri Nov 20 06:12:44 2026)"),
    ],
)  # fmt: skip
def test_a_log_says_who_and_when(host: FakeHost, path: str, line: str, other: str, said: str) -> None:
    for one in filter(None, (path, other)):
        host.make_directory(one.rpartition("/")[0])
        host.write(one, line.encode())
    assert since(host, NEW) == f" since {said}"
    # Of any other version it says nothing, nor of a longer number.
    assert since(host, "550.163.01") == since(host, NEW[:-1]) == since(host, "") == ""


def test_without_a_log_nothing_is_said(host: FakeHost) -> None:
    assert (package_change(host), since(host, NEW)) == ((), "")


def test_one_sentence_says_versions_and_the_way_out(host: FakeHost) -> None:
    driver = DriverFacts(kernel_version="550.163.01", library_version=NEW)
    assert version_difference(host, driver) == (
        f"the driver's files are {NEW}, the loaded module is 550.163.01: "
        "run `gpuprov install -e gpuprov_driver_version=550.163.01`: the module belongs to the container host"
    )
    for files, module in ((NEW, NEW), (NEW, ""), ("", NEW)):
        assert version_difference(host, DriverFacts(kernel_version=module, library_version=files)) == ""
