"""Headers of a kernel that left the repositories: what is said, for whom, and what is added where it is asked for."""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import gpuprov
from gpuprov.agent.site_tables import checked_tables, for_request
from gpuprov.bundle_create.recipe import rpm_sources
from gpuprov.core.changes import FileFact, WriteFile
from gpuprov.core.commands import Completed
from gpuprov.driver.kernel import offer_problems
from gpuprov.facts.host import HostFacts, gather
from gpuprov.machine.distros import ROWS
from gpuprov.machine.machine import OperatingSystem
from gpuprov.packages.failures import Advice, finish_apt, finish_rpm
from gpuprov.packages.interface import PackageFacts
from gpuprov.packages.keys import InstallRpmKey
from gpuprov.packages.known_repositories import advice, past_releases
from gpuprov.packages.managers import Offers
from gpuprov.plan import software
from gpuprov.plan.context import source_of
from gpuprov.plan.steps import make_plan
from gpuprov.protocol import tables
from gpuprov.protocol.errors import UsageError
from gpuprov.protocol.spec import HostSpec, parse_spec
from gpuprov.protocol.tables import PACKAGED
from tests.unit.fake_host import FakeHost
from tests.unit.refused import refused
from tests.unit.test_distros import row


def said(name: str, version: str, kernel: str, architecture: str = "x86_64") -> Advice:
    found = advice(row(name, version), kernel, architecture, PACKAGED)
    assert found is not None
    return found


EL9, EL8 = "5.14.0-427.13.1.el9_4.x86_64", "4.18.0-477.10.1.el8_8.x86_64"
# Distribution, version, kernel; what the advice must hold: which package of which place, and the command.
CASES = [
    ("debian", "12", "6.1.0-13-amd64", ["linux-headers-6.1.0-13-amd64", "snapshot.debian.org/package/linux",
     "apt-get install linux-image-amd64 linux-headers-amd64 && reboot"]),
    ("debian", "13", "6.12.43+deb13-cloud-arm64", ["linux-image-cloud-arm64"]),
    ("ubuntu", "22.04", "6.8.0-1021-aws", ["linux-headers-6.8.0-1021-aws", "launchpad.net/ubuntu/+source/linux",
     "apt-get install linux-image-aws linux-headers-aws"]),
    ("rhel", "9", EL9, ["subscription-manager release --set 9.4", "--enable rhel-9-for-x86_64-baseos-eus-rpms",
     "--enable rhel-9-for-x86_64-appstream-eus-rpms", f"in AppStream: kernel-devel-{EL9};"]),
    ("rhel", "8", EL8, ["release --set 8.8", f"in BaseOS: kernel-devel-{EL8} kernel-headers-{EL8};"]),
    ("rocky", "9", EL9, ["gpuprov_kernel_archive: true", "https://dl.rockylinux.org/vault/rocky/9.4/", "in AppStream"]),
    ("rocky", "8", EL8, ["https://dl.rockylinux.org/vault/rocky/8.8/", "in BaseOS"]),
    ("rocky", "8", "4.18.0-553.el8_10.x86_64", ["vault/rocky/8.10/"]),
    ("almalinux", "9", EL9, ["https://repo.almalinux.org/vault/9.4/"]),
    ("almalinux", "8", EL8, ["vault/8.8/BaseOS/x86_64/os/", f"take kernel-devel-{EL8}"]),
    ("centos", "9", "5.14.0-503.el9.x86_64", ["kojihub.stream.centos.org", "kernel-devel-5.14.0-503.el9.x86_64"]),
    ("fedora", "43", "6.14.2-300.fc43.x86_64", ["fedora-repos-archive",
     "--enablerepo=updates-archive install kernel-devel-6.14.2-300.fc43.x86_64"]),
    ("ol", "9", "5.15.0-209.161.7.2.el9uek.x86_64", ["ol9_UEKR7", "kernel-uek-devel-5.15.0"]),
    ("ol", "9", "6.12.0-100.28.2.el9uek.x86_64", ["--enable ol9_UEKR8;", "kernel-uek-devel-6.12.0"]),
    ("ol", "8", "5.4.17-2136.338.4.2.el8uek.x86_64", ["--enable ol8_UEKR6;"]),
    ("ol", "9", EL9, ["ol9_appstream"]),
    ("amzn", "2023", "6.1.94-99.176.amzn2023.x86_64", ["--releasever=latest install kernel-devel-6.1.94"]),
    ("sles", "15", "6.4.0-150600.23.30-default", ["zypper search -s --match-exact kernel-default-devel"]),
    ("sles", "15", "6.4.0-150600.8.5-azure", ["zypper update kernel-azure"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "version", "kernel", "held"), CASES)
def test_advice_names_package_place_and_command(name: str, version: str, kernel: str, held: list[str]) -> None:
    found = said(name, version, kernel)
    assert [words for words in held if words not in found.next_step] == []
    assert kernel in found.meaning
    assert "{" not in found.next_step


def test_every_distribution_has_a_next_command() -> None:
    kernels = ("5.14.0-427.13.1.el9_4.x86_64", "6.4.0-150600.23.30-default")
    for one in ROWS:
        assert any(advice(one, kernel, "x86_64", PACKAGED) for kernel in kernels), one.name


@pytest.mark.parametrize(
    ("name", "version", "kernel", "uris"),
    [
        ("rocky", "9", EL9, ["https://dl.rockylinux.org/vault/rocky/9.4/BaseOS/aarch64/os/",
                             "https://dl.rockylinux.org/vault/rocky/9.4/AppStream/aarch64/os/"]),
        ("almalinux", "8", EL8, []), ("rhel", "9", EL9, []), ("debian", "12", "6.1.0-13-amd64", []),
        # A kernel of somebody else's, ELRepo's say.
        ("rocky", "9", "6.9.8-1.elrepo.x86_64", []),
    ],
)  # fmt: skip
def test_archives_that_anybody_may_read(name: str, version: str, kernel: str, uris: list[str]) -> None:
    found = past_releases(row(name, version), kernel, "aarch64", PACKAGED)
    assert [one.uri for one in found] == uris
    assert all(re.fullmatch(r"[0-9A-F]{40}", one.key_fingerprint) for one in found)
    assert len({one.name for one in found}) == len(found)


# -- in a plan -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rocky(tmp_path_factory: pytest.TempPathFactory) -> HostFacts:
    found = gather(FakeHost(tmp_path_factory.mktemp("host") / "root", metal=True))
    os = OperatingSystem("rocky", "9.4", "", ("rhel",), "Rocky Linux 9.4")
    kernel = replace(found.kernel, release=EL9, takes_modules=True)
    return replace(found, os=os, kernel=kernel, packages=PackageFacts("dnf", {"kernel-core": EL9}))


def planned(facts: HostFacts, **options: object) -> list[str]:
    plan = make_plan(facts, parse_spec({"driver_version": "550.163.01", **options}))
    assert plan.problems == ()
    changes = [item.change for item in plan.changes]
    return [one.path for one in changes if isinstance(one, (WriteFile, InstallRpmKey)) and "past-" in one.path]


def test_no_archive_is_added_by_default(rocky: HostFacts) -> None:
    assert planned(rocky) == []
    assert planned(rocky, kernel_archive=True) == [
        "/etc/pki/rpm-gpg/RPM-GPG-KEY-gpuprov-past-baseos", "/etc/yum.repos.d/gpuprov-past-baseos.repo",
        "/etc/pki/rpm-gpg/RPM-GPG-KEY-gpuprov-past-appstream", "/etc/yum.repos.d/gpuprov-past-appstream.repo",
    ]  # fmt: skip
    # A host that builds nothing needs no headers.
    asked = parse_spec({"kernel_archive": True, "driver": "preinstalled"})
    assert software.past_releases(source_of(rocky, asked)) == ()


def test_an_archive_that_there_is_not_is_told(rocky: HostFacts) -> None:
    rhel = replace(rocky, os=replace(rocky.os, id="rhel", name="Red Hat Enterprise Linux 9.4"))
    plan = make_plan(rhel, parse_spec({"driver_version": "550.163.01", "kernel_archive": True}))
    (problem,) = [one for one in plan.problems if "archive" in one.what]
    assert "appstream-eus-rpms" in problem.next_step


@pytest.mark.parametrize(
    ("release", "step"),
    [(EL9, said("rhel", "9", EL9, "aarch64").next_step), ("5.14.0-own", "boot the distribution's own kernel, or add ")],
)
def test_headers_that_no_repository_offers_are_a_problem(rocky: HostFacts, release: str, step: str) -> None:
    machine = replace(rocky, os=replace(rocky.os, id="rhel"), kernel=replace(rocky.kernel, release=release))
    (problem,) = offer_problems(
        source_of(replace(machine, architecture="aarch64", offers=Offers("dnf")), parse_spec({"driver_version": "580"}))
    )
    assert problem.what == f"no repository of this host has the headers of the running kernel {release}"
    assert problem.evidence == f"dnf was asked for kernel-devel={release}, kernel-headers"
    assert problem.next_step.startswith(step)


@pytest.mark.parametrize("place", ["/etc/dnf/dnf.conf", "/etc/yum.repos.d/rocky.repo"])
def test_headers_that_the_hosts_own_exclude_hides_are_told_so(rocky: HostFacts, place: str) -> None:
    """`exclude=kernel*` is how sites keep their kernels; dnf takes what is excluded for unknown."""
    file = FileFact(b"[main]\nbest=True\nexclude = nvidia* kernel*,gcc\n", 0o644, 0, 0)
    machine = replace(rocky, files={**rocky.files, place: file}, offers=Offers("dnf"))
    (problem,) = offer_problems(source_of(machine, parse_spec({"driver_version": "580"})))
    assert problem.what == f"an exclude hides the headers of the running kernel {EL9}"
    assert f"{place}: exclude = nvidia* kernel*,gcc\n" in problem.evidence
    wanted = f"kernel-devel-{EL9} kernel-headers"
    assert problem.next_step == f"dnf '--setopt=disable_excludes=all,*' install {wanted}"


# -- when it fails ---------------------------------------------------------------------------------------------------

SAID = {
    "apt-get": ("debian", "12", "6.1.0-13-amd64", "E: Unable to locate package docker.io\n"
                "E: Unable to locate package linux-headers-6.1.0-13-amd64\n"),
    "dnf": ("rocky", "9", EL9, f"No match for argument: kernel-devel-{EL9}\nError: Unable to find a match: a"),
    "zypper": ("sles", "15", "6.4.0-150600.23.30-default",
               "No provider of 'kernel-default-devel = 6.4.0-150600.23.30' found."),
}  # fmt: skip


def failure(program: str, output: str, found: Advice) -> str:
    finish = finish_apt if program == "apt-get" else finish_rpm
    done = Completed((program, "install"), 1, "", output)
    return str(refused(lambda: finish(done, "headers could not be installed", advice=found)))


@pytest.mark.parametrize("program", SAID)
def test_a_package_manager_without_the_headers_is_answered_with_the_advice(program: str) -> None:
    name, version, kernel, output = SAID[program]
    found = said(name, version, kernel)
    text = failure(program, output, found)
    assert f"no repository of this host has the headers of the running kernel {kernel}" in text
    assert found.next_step in text
    other = output.replace(found.needle, "9.9.9").replace("linux-headers", "other")
    assert found.next_step not in failure(program, other, found)


def test_the_plan_hands_the_advice_on(rocky: HostFacts, tmp_path: Path) -> None:
    wanted = parse_spec({"driver_version": "550.163.01"})
    changes = [item.change for item in make_plan(rocky, wanted).changes]
    (found,) = [one.advice for one in changes if hasattr(one, "advice")]
    assert found == said("rocky", "9", EL9)


@pytest.fixture
def servers(tmp_path: Path) -> Callable[[object], HostSpec]:
    """Return what gives a specification that names a table of servers with this content."""

    def made(content: object) -> HostSpec:
        file = tmp_path / "servers.json"
        file.write_text(json.dumps(content))
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        return parse_spec({"servers": str(file), "servers_sha256": digest})

    return made


def test_a_site_has_its_own_servers(servers: Callable[[object], HostSpec], rocky: HostFacts) -> None:
    mirrors = {"rocky": "https://mirror.example/rocky/", "rocky-vault": "https://mirror.example/vault"}
    spec = servers({"format": 1, "servers": mirrors})
    own = checked_tables(json.loads(json.dumps(for_request(spec))))
    asked = parse_spec({"kernel_archive": True, "driver_version": "550.163.01"})
    (found, _) = software.past_releases(source_of(replace(rocky, tables=own), asked))
    assert found.uri.startswith("https://mirror.example/vault/9.")
    assert found.key_url == "https://mirror.example/rocky/RPM-GPG-KEY-Rocky-9"
    (source, _) = rpm_sources("rocky", "9", "x86_64", (), own)
    assert source.uri == "https://mirror.example/rocky/9/BaseOS/x86_64/os/"
    # A server that the table does not name is the packaged one.
    assert own.server("epel") == tables.packaged(tables.SERVERS)["servers"]["epel"]


@pytest.mark.parametrize(
    "content",
    [[], {"format": 0, "servers": {}}, {"format": 1}, {"format": 1, "servers": ["epel"]},
     {"format": 1, "servers": {"epl": "https://a"}}, {"format": 1, "servers": {"epel": "ftp://a"}},
     {"format": 1, "servers": {"epel": "https://a {major}"}}],
)  # fmt: skip
def test_wrong_table_of_servers_is_refused(servers: Callable[[object], HostSpec], content: object) -> None:
    with pytest.raises(UsageError, match="table of servers is not valid"):
        for_request(servers(content))


def test_no_code_names_a_server_of_a_distribution() -> None:
    urls = tables.packaged(tables.SERVERS)["servers"].values()
    named = re.compile("|".join({re.escape("//" + url.split("/")[2]) for url in urls}))
    root = Path(gpuprov.__file__).parent
    assert [str(path) for path in root.rglob("*.py") if named.search(path.read_text("utf-8"))] == []
