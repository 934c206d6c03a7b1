"""Our keys, repositories and packages before a real dnf and a real zypper, over a repository that is tampered with."""

import re
import shutil
import socket
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable

import pytest

from gpuprov.core.changes import Change, RemoveFile
from gpuprov.core.places import COPIES
from gpuprov.facts.host import HostFacts, gather
from gpuprov.machine.distros import distribution_of, kernel_headers
from gpuprov.packages import known_repositories, retired
from gpuprov.packages.keys import InstallRpmKey, gather_keys
from gpuprov.packages.rpm import InstallRpmPackages, RefreshRpmIndex, RemoveRpms, rpm_lock_holder
from gpuprov.packages.zypper import ZYPPER
from gpuprov.protocol.errors import GpuprovError
from gpuprov.protocol.spec import HostSpec
from gpuprov.protocol.tables import PACKAGED
from gpuprov.repos import RpmRepository
from tests.integration.rpm_host import RpmHost
from tests.integration.rpm_repositories import (
    HOSTS,
    NEEDS,
    Repository,
    configure,
    facts_of,
    host,
    install,
    manager,
    plan_repositories,
    refresh,
    repository,
    set_up,
    stranger,
    tamper,
    template,
)
from tests.lab.rpm_repository import TOOLS, RpmPackage, index, sign_index, sign_package
from tests.loopback import LOGIN_IN_URL, PASSWORD, LoginHandler, served
from tests.runs import tell

__all__ = ["host", "repository", "stranger", "template"]
pytestmark = NEEDS


def refusal(action: Callable[[], object]) -> str:
    with pytest.raises(GpuprovError) as caught:
        action()
    return str(caught.value)


def installed_files(host: RpmHost) -> set[str]:
    """Return the packages whose files are there, the base system left out."""
    return {path.parent.name for path in host.path("/opt").rglob("version-*")} - {"base-system"}


def rpm_list(host: RpmHost) -> set[str]:
    return set(host.run(("rpm", "-qa")).stdout.split())


def test_packages_come_from_our_repository_and_go_again(host: RpmHost, repository: Repository) -> None:
    before_all = rpm_list(host)
    set_up(host, repository.spec)
    change, before, outcome = install(host, TOOLS.name)
    assert installed_files(host) == {TOOLS.name, "site-gpu-library"}
    assert outcome["added"] == ["site-gpu-library-1.0-1.noarch", "site-gpu-tools-1.0-1.noarch"]
    packages = facts_of(host).packages
    assert packages.installed[TOOLS.name] == "1.0-1.noarch"
    wanted = (TOOLS.name, f"{TOOLS.name}=1.0", f"{TOOLS.name}=1.0-1", "site-gpu-abi")
    assert manager(host).missing(packages, (*wanted, f"{TOOLS.name}=1.1")) == (f"{TOOLS.name}=1.1",)
    change.undo(host, before, outcome)
    change.undo(host, before, outcome)
    assert rpm_list(host) - before_all == {name for name in rpm_list(host) if name.startswith("gpg-pubkey-")}
    assert installed_files(host) == set()


# A user's own format of `rpm -qa`, and colors in each output.
_APPEARANCE = {
    "/root/.rpmmacros": "%_query_all_fmt %%{name} %%{vendor}\n",
    "/etc/dnf/dnf.conf": "[main]\ncolor=always\n",
    "/etc/zypp/zypper.conf": "[color]\nuseColors = always\n",
}


def test_how_a_user_likes_output_to_look_changes_nothing(host: RpmHost, repository: Repository) -> None:
    for path, text in _APPEARANCE.items():
        host.write(path, text.encode())
    configure(host, repository.spec)
    assert manager(host).offered(host, (TOOLS.name,), ())[TOOLS.name]
    change, before, outcome = install(host, TOOLS.name)
    assert outcome["added"] == ["site-gpu-library-1.0-1.noarch", "site-gpu-tools-1.0-1.noarch"]
    change.undo(host, before, outcome)
    assert installed_files(host) == set()


def test_a_login_is_used_and_only_root_can_read_it(host: RpmHost, repository: Repository) -> None:
    with served(repository.folder, LoginHandler) as url:
        (own,) = repository.spec.repositories
        spec = HostSpec(repositories=(replace(own, uri=url.replace("//", f"//{LOGIN_IN_URL}@")),))
        changes = plan_repositories(facts_of(host), spec)
        shown = "".join(change.summary() + change.diff(host) for change in changes)
        assert PASSWORD not in shown and LOGIN_IN_URL not in shown
        assert manager(host).offered(host, (TOOLS.name,), changes)[TOOLS.name]
        set_up(host, spec)
        install(host, TOOLS.name)
    assert TOOLS.name in installed_files(host)
    status = host.status(f"{manager(host).repository_directory}/gpuprov-site.repo")
    assert status is not None and status.mode == 0o600


def test_an_interrupted_installation_is_undone_by_what_was_there_before(host: RpmHost, repository: Repository) -> None:
    set_up(host, repository.spec)
    change, before, _ = install(host, TOOLS.name)
    change.undo(host, before, None)
    assert rpm_list(host) - {name for name in rpm_list(host) if name.startswith("gpg-")} == {"base-system-1.0-1.noarch"}


def test_requested_version_is_installed_and_an_upgraded_package_kept(host: RpmHost, repository: Repository) -> None:
    repository.add(RpmPackage("site-gpu-library", "2.0"))
    repository.add(RpmPackage("newer", requires="site-gpu-library >= 2.0"))
    set_up(host, repository.spec)
    install(host, "site-gpu-library=1.0")
    assert "site-gpu-library-1.0-1.noarch" in rpm_list(host)
    change, before, outcome = install(host, "newer")
    assert outcome["added"] == ["newer-1.0-1.noarch"]
    change.undo(host, before, outcome)
    assert "site-gpu-library-2.0-1.noarch" in rpm_list(host) and "newer-1.0-1.noarch" not in rpm_list(host)


def test_what_others_need_by_now_is_not_taken_away(host: RpmHost, repository: Repository) -> None:
    set_up(host, repository.spec)
    change, before, outcome = install(host, "site-gpu-library")
    install(host, TOOLS.name)
    said = refusal(lambda: change.undo(host, before, outcome))
    assert "site-gpu-library-1.0-1.noarch could not be removed: the packages do not fit together" in said
    assert "is needed by (installed) site-gpu-tools-1.0-1.noarch" in said


def test_a_wrong_key_is_refused_before_it_is_trusted(host: RpmHost, repository: Repository, stranger: Path) -> None:
    shutil.copy(stranger / "www/key.asc", repository.folder)
    said = refusal(lambda: configure(host, repository.spec))
    assert (stranger / "www/fingerprint").read_text() in said and repository.fingerprint in said
    assert gather_keys(host) == {} and host.list_directory("/etc/pki") == ()


def test_a_key_that_lies_there_is_not_yet_trusted(host: RpmHost, repository: Repository) -> None:
    configure(host, repository.spec)
    (package,) = gather_keys(host).values()
    assert host.run(("rpm", "-e", package)).ok
    (change,) = plan_repositories(facts_of(host), repository.spec)
    assert isinstance(change, InstallRpmKey)
    configure(host, repository.spec)


def test_undo_removes_key_and_trust_and_keeps_earlier_trust(host: RpmHost, repository: Repository) -> None:
    one = RpmRepository("site", repository.url, f"{repository.url}/key.asc", repository.fingerprint, manager(host))
    change = InstallRpmKey(one.key_path, one.key_url, one.key_fingerprint)
    before = change.capture(host)
    change.apply(host, tell)
    assert list(gather_keys(host)) == [repository.fingerprint]
    InstallRpmKey.undo(host, change.capture(host), None)
    assert list(gather_keys(host)) == [repository.fingerprint]
    InstallRpmKey.undo(host, before, None)
    assert gather_keys(host) == {}
    assert host.status("/etc/pki") is None


def test_a_second_definition_of_the_same_repository_is_removed(host: RpmHost, repository: Repository) -> None:
    place = "/etc/zypp/repos.d" if manager(host) is ZYPPER else "/etc/yum.repos.d"
    host.write(f"{place}/old.repo", f"[old]\nname=old\nbaseurl={repository.url}/\ngpgcheck=0\n".encode())
    assert any(isinstance(change, RemoveFile) for change in plan_repositories(facts_of(host), repository.spec))
    configure(host, repository.spec)
    assert host.list_directory(place) == ("gpuprov-site.repo",)
    refresh(host)


def rewrite(host: RpmHost, repository: Repository, **changed: Any) -> None:
    """Write the repository's definition with these fields in place of its own."""
    url, fingerprint = repository.url, repository.fingerprint
    one = replace(RpmRepository("site", url, f"{url}/key.asc", fingerprint, manager(host)), **changed)
    host.write(one.file_path, str(one).encode())


def remove_signature(repository: Repository) -> None:
    (repository.folder / "repodata/repomd.xml.asc").unlink()


def tamper_with_metadata(repository: Repository) -> None:
    tamper(repository.folder / "repodata/repomd.xml", b"<revision>", b"<revision>1")


def tamper_with_packages_list(repository: Repository) -> None:
    (path,) = repository.folder.glob("repodata/*-primary.xml.gz")
    path.write_bytes(path.read_bytes()[:-1] + b"!")


def remove_all(repository: Repository) -> None:
    shutil.rmtree(repository.folder / "repodata")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (remove_signature, "is not signed with a key that this host trusts"),
        (tamper_with_metadata, "a repository's signature is wrong, or its key has expired"),
        (tamper_with_packages_list, "a repository delivered a damaged file"),
        (remove_all, "there is no repository at that address"),
    ],
    ids=["unsigned", "tampered-metadata", "tampered-list", "gone"],
)
def test_a_damaged_repository_is_refused_and_we_say_why(
    host: RpmHost, repository: Repository, damage: Callable[[Repository], None], says: str
) -> None:
    configure(host, repository.spec)
    damage(repository)
    said = refusal(lambda: refresh(host))
    assert "the package index could not be refreshed: " in said and says in said


def test_a_repository_signed_by_another_key_is_refused(host: RpmHost, repository: Repository, stranger: Path) -> None:
    configure(host, repository.spec)
    sign_index(repository.folder, stranger / "gnupg")
    said = refusal(lambda: refresh(host))
    # dnf says "Bad GPG signature" of a stranger's signature too.
    says = {"dnf": "a repository's signature is wrong", "zypper": "not signed with a key that this host trusts"}
    assert says[manager(host).name] in said


# What a person may have set for a machine that others install on; last, flags that are refused.
_SETTINGS = {
    "dnf": ("/etc/dnf/dnf.conf", ("assumeno=1", "cacheonly=1", "downloadonly=1", "tsflags=nodocs"),
            ("test", "justdb", "noscripts")),
    "zypper": ("/etc/zypp/zypp.conf", ("commit.downloadMode = DownloadOnly", "solver.onlyRequires = true"), ()),
}  # fmt: skip


def test_settings_of_a_site_do_not_change_what_is_done(host: RpmHost, repository: Repository) -> None:
    set_up(host, repository.spec)
    path, harmless, fatal = _SETTINGS[manager(host).name]
    for setting in harmless:
        host.write(path, f"[main]\n{setting}\n".encode())
        refresh(host)
        change, before, outcome = install(host, TOOLS.name)
        assert installed_files(host) == {TOOLS.name, "site-gpu-library"}, setting
        change.undo(host, before, outcome)
    for flag in fatal:
        host.write(path, f"[main]\ntsflags=nodocs, {flag}\n".encode())
        said = refusal(lambda: install(host, TOOLS.name))
        assert "has installed nothing" in said or "installs packages without their " in said
        assert f"grep tsflags {path}; remove `{flag}`" in said
    assert not installed_files(host)


@pytest.mark.parametrize("host", ["opensuse-tumbleweed"], indirect=True)
def test_a_lock_of_zypper_is_named(host: RpmHost, repository: Repository) -> None:
    set_up(host, repository.spec)
    for locked in (TOOLS.name, "site-gpu-library"):
        assert host.run(("zypper", "-n", "addlock", locked)).ok
        said = refusal(lambda: install(host, TOOLS.name))
        assert "a lock hides a package" in said and locked in said and "zypper removelock" in said
        assert host.run(("zypper", "-n", "removelock", locked)).ok


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("http://127.0.0.1:9/rpm", "a repository can't be reached"),
        ("http://no-such-host.invalid/rpm", "a repository's name is not known"),
    ],
)
def test_a_repository_out_of_reach_is_told(host: RpmHost, repository: Repository, uri: str, says: str) -> None:
    configure(host, repository.spec)
    rewrite(host, repository, uri=uri)
    said = refusal(lambda: refresh(host))
    assert says in said and uri.split("/")[2] in said


def test_another_repository_out_of_reach_is_named_with_its_file(host: RpmHost, repository: Repository) -> None:
    set_up(host, repository.spec)
    place = manager(host).repository_directory
    host.write("/etc/dnf/dnf.conf", b"[main]\n")
    for uri in ("http://127.0.0.1:9/rpm", "http://no-such-host.invalid/rpm"):
        text = f"[corp-tools]\nname=Corp tools\nbaseurl={uri}\nenabled=1\n"
        host.write(f"{place}/corp.repo", text.encode())
        said = refusal(lambda: refresh(host))
        # zypper names it by its title.
        name, quoted = ("Corp tools", "'Corp tools'") if manager(host) is ZYPPER else ("corp-tools", "corp-tools")
        assert f"repository {name}: " in said and f"grep -rlF {quoted} {place}" in said, said


def test_a_package_that_nobody_has_is_told(host: RpmHost, repository: Repository) -> None:
    set_up(host, repository.spec)
    for name in ("no-such-package", f"{TOOLS.name}=9.9"):
        said = refusal(lambda name=name: install(host, name))  # type: ignore[misc]
        assert f"{name} could not be installed: no repository has such a package" in said


@pytest.mark.parametrize(
    ("os_release", "kernel"),
    [("rocky-9.5", "5.14.0-427.13.1.el9_4.x86_64"), ("opensuse-tumbleweed", "6.17.1-1-default")],
)
def test_missing_headers_have_a_next_step(tmp_path: Path, repository: Repository, os_release: str, kernel: str) -> None:
    host = RpmHost(tmp_path / "root", os_release, HOSTS[os_release])
    configure(host, repository.spec)
    row = distribution_of(facts_of(host).os)
    found = known_repositories.advice(row, kernel, "x86_64", PACKAGED)
    change = InstallRpmPackages(manager(host), kernel_headers(row, kernel), advice=found)
    assert found is not None and found.next_step in refusal(lambda: change.apply(host, tell))


def test_a_package_that_lacks_another_is_told(host: RpmHost, repository: Repository) -> None:
    set_up(host, repository.spec)
    said = refusal(lambda: install(host, "incomplete"))
    assert "the packages do not fit together" in said and "nobody-has-this >= 2" in said


@pytest.mark.parametrize("length", ["same", "longer"])
def test_a_package_that_was_tampered_with_is_refused(host: RpmHost, repository: Repository, length: str) -> None:
    set_up(host, repository.spec)
    package = repository.folder / TOOLS.file_name
    content = package.read_bytes()
    package.write_bytes(content[:-1] + b"!" if length == "same" else content + b"!")
    # zypper looks at a package's signature before its digest.
    zypper = manager(host) is ZYPPER and length == "same"
    says = "a repository's signature is wrong" if zypper else "a repository delivered a damaged file"
    assert says in refusal(lambda: install(host, TOOLS.name))
    assert installed_files(host) == set()


def test_an_unsigned_package_in_a_signed_repository_is_refused(host: RpmHost, repository: Repository) -> None:
    repository.add(RpmPackage("unsigned"), signed=False)
    set_up(host, repository.spec)
    assert "not signed with a key that this host trusts" in refusal(lambda: install(host, "unsigned"))
    assert installed_files(host) == set()


def test_a_package_signed_by_another_key_is_refused(host: RpmHost, repository: Repository, stranger: Path) -> None:
    file = repository.folder / TOOLS.file_name
    sign_package(file, stranger / "gnupg", (stranger / "www/fingerprint").read_text())
    index(repository.folder, repository.gnupg)
    set_up(host, repository.spec)
    assert "not signed with a key that this host trusts" in refusal(lambda: install(host, TOOLS.name))
    assert installed_files(host) == set()


def test_signed_metadata_alone_allows_unsigned_not_tampered_packages(host: RpmHost, repository: Repository) -> None:
    """NVIDIA's container toolkit comes so: the signed metadata holds each package's digest."""
    repository.add(RpmPackage("unsigned"), signed=False)
    configure(host, repository.spec)
    rewrite(host, repository, signed_packages=False)
    refresh(host)
    file = repository.folder / RpmPackage("unsigned").file_name
    good = file.read_bytes()
    file.write_bytes(good[:-1] + b"!")
    assert "a repository delivered a damaged file" in refusal(lambda: install(host, "unsigned"))
    file.write_bytes(good)
    install(host, "unsigned")
    assert installed_files(host) == {"unsigned"}


# Docker has no repository for SUSE.
@pytest.mark.only(host=("rocky-9.5", "fedora-38"))
def test_signed_packages_alone_need_no_signed_metadata(host: RpmHost, repository: Repository) -> None:
    """Docker's own repository comes so."""
    repository.add(RpmPackage("unsigned"), signed=False)
    remove_signature(repository)
    configure(host, repository.spec)
    rewrite(host, repository, signed_metadata=False)
    refresh(host)
    assert "is not signed" in refusal(lambda: install(host, "unsigned"))
    install(host, TOOLS.name)
    assert TOOLS.name in installed_files(host)


def test_a_real_package_manager_at_work_is_named_and_waited_for(host: RpmHost, repository: Repository) -> None:
    configure(host, repository.spec)
    place = f"{manager(host).repository_directory}/slow.repo"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        host.write(place, f"[slow]\nname=slow\nbaseurl={uri}\n".encode())
        silent.settimeout(300)
        with subprocess.Popen(host.entered(manager(host).refresh), stdout=subprocess.PIPE) as other:
            client, _ = silent.accept()
            assert rpm_lock_holder(host)
            host.remove(place)
            told: list[str] = []

            def end_the_wait(message: str, *_: object) -> None:
                told.append(message)
                silent.close()
                client.close()

            RefreshRpmIndex(manager(host)).apply(host, end_the_wait)
            other.communicate(timeout=60)
    assert re.fullmatch(r"waiting up to 300 s for .* \(pid \d+.*\), which holds the package manager's lock", told[0])
    assert f"(pid {other.pid})" in told[0]


# -- the repositories, the key and the packages of nvidia-docker -------------------------------------------------------
_NAMES = (TOOLS.name, "site-gpu-library")
_RETIRED = """\
[nvidia-docker]
name=nvidia-docker
baseurl=https://nvidia.github.io/nvidia-docker/centos7/$basearch
[libnvidia-container]
name=libnvidia-container
baseurl=https://nvidia.github.io/libnvidia-container/stable/rhel7.6/$basearch
"""


def plan_retired(facts: HostFacts, spec: HostSpec) -> tuple[Change, ...]:
    return retired.plan(facts.files, facts.packages.trusted_keys, spec)


@pytest.mark.slow
def test_packages_come_back_from_copies(host: RpmHost, repository: Repository) -> None:
    set_up(host, repository.spec)
    install(host, TOOLS.name)
    before_all = rpm_list(host)
    change = RemoveRpms(manager(host), _NAMES)
    before = change.capture(host)
    change.apply(host, tell)
    assert {name.rsplit("-", 2)[0] for name in before_all - rpm_list(host)} == set(_NAMES)
    # The repository is not needed any more.
    for path in repository.folder.rglob("*.rpm"):
        path.unlink()
    assert change.irreversible(host, before, {}, ()) == ()
    change.undo(host, before, {})
    change.undo(host, before, {})
    assert rpm_list(host) == before_all
    assert host.status(COPIES) is None


@pytest.mark.slow
def test_what_no_repository_has_any_more_is_told(host: RpmHost, repository: Repository) -> None:
    set_up(host, repository.spec)
    install(host, TOOLS.name)
    for path in repository.folder.rglob("*.rpm"):
        path.unlink()
    for folder in ("var/cache/dnf", "var/cache/libdnf5", "var/cache/zypp/packages"):
        host.remove_tree(f"/{folder}")
    change = RemoveRpms(manager(host), _NAMES)
    before = change.capture(host)
    change.apply(host, tell)
    assert [line.rpartition(" is not restored")[0] for line in change.irreversible(host, before, {}, ())] == [
        f"package {one}" for one in before["packages"]
    ]
    change.undo(host, before, {})


@pytest.mark.slow
def test_another_package_keeps_what_it_needs(host: RpmHost, repository: Repository) -> None:
    set_up(host, repository.spec)
    install(host, TOOLS.name)
    assert manager(host).needed_by(host, ("site-gpu-library",)) == {"site-gpu-library": (TOOLS.name,)}
    assert manager(host).needed_by(host, _NAMES) == {}


@pytest.mark.slow
def test_retired_repositories_and_their_key_go_and_come_back(host: RpmHost, repository: Repository) -> None:
    configure(host, repository.spec)
    folder = manager(host).repository_directory
    fingerprint = repository.fingerprint
    host.write(f"{folder}/nvidia-docker.repo", _RETIRED.encode())
    # The site's own repository, with which the key came, is gone.
    host.remove(f"{folder}/gpuprov-site.repo")
    before = (host.read_bytes(f"{folder}/nvidia-docker.repo"), gather_keys(host))
    spec = HostSpec(migrate_nvidia_docker=True, toolkit_key_fingerprint=fingerprint)
    changes: tuple[Change, ...] = plan_retired(gather(host), spec)
    assert [type(one).__name__ for one in changes] == ["RemoveFile", "RemoveRpmKey"]
    captured = [(one, one.capture(host), one.apply(host, tell) or {}) for one in changes]
    assert fingerprint not in gather_keys(host)
    assert plan_retired(gather(host), spec) == ()
    # gpuprov's own source of NVIDIA's toolkit needs the key.
    assert plan_retired(gather(host), replace(spec, toolkit="nvidia")) == ()
    for one, image, outcome in reversed(captured):
        one.undo(host, image, outcome)
        one.undo(host, image, outcome)
    assert (host.read_bytes(f"{folder}/nvidia-docker.repo"), set(gather_keys(host))) == (before[0], set(before[1]))
