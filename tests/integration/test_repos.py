"""Our keys and sources before a real apt, over a signed repository that is then tampered with."""

import re
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable

import pytest

from gpuprov.core.changes import WriteFile
from gpuprov.core.commands import Completed
from gpuprov.core.system import System
from gpuprov.driver.distribution import PREFERENCES_TEXT
from gpuprov.facts.host import PREFERENCES, gather_files
from gpuprov.packages.apt_changes import InstallPackages, RefreshPackageIndex
from gpuprov.packages.keys import InstallKey
from gpuprov.protocol.errors import GpuprovError
from gpuprov.protocol.spec import HostSpec
from gpuprov.repos import AptRepository
from tests.apt_host import plan_repositories
from tests.integration.rpm_repositories import tamper
from tests.integration.served_repository import ServedRepository, served_copy
from tests.lab.repository import PACKAGE, build_package, build_repository, sign, stand_in
from tests.lab.shell import run
from tests.loopback import LOGIN_IN_URL, PASSWORD, LoginHandler, QuietHandler, served
from tests.runs import tell

pytestmark = [pytest.mark.root, pytest.mark.needs("apt-get")]

# apt's own places, in a mount namespace: $1 is the root that they come from, the rest the command.
_PLACES = ("etc/apt", "var/lib/apt", "var/lib/dpkg", "var/cache/apt")
_SCRIPT = " && ".join(f'mount --bind "$1/{place}" /{place}' for place in _PLACES) + ' && shift && exec "$@"'


class AptHost(System):
    """A machine below a folder with nothing installed, whose apt is this machine's; `patience` is for servers."""

    patience = 60

    def __init__(self, root: Path) -> None:
        super().__init__(str(root))
        for place in (*_PLACES, "etc/apt/sources.list.d", "etc/apt/keyrings", "var/lib/dpkg/updates"):
            (root / place).mkdir(parents=True, exist_ok=True)
        (root / "var/lib/dpkg/status").touch()

    def which(self, program: str) -> str | None:
        return System().which(program)

    def run(self, argv: Sequence[str], **more: Any) -> Completed:
        # Attempts that only lengthen the test are left out.
        hasty = ("Acquire::Retries=0", "-o", f"Acquire::http::Timeout={self.patience}")
        argv = tuple(new for word in argv for new in (hasty if word == "Acquire::Retries=3" else (word,)))
        command = ("unshare", "--mount", "sh", "-c", _SCRIPT, "sh", str(self.root), *argv)
        return replace(super().run(command, **more), argv=argv)


class Repository(ServedRepository):
    """One whose Release is signed with other fields."""

    def sign(self, **fields: str) -> None:
        """Sign the Release again, with these fields in place of its own."""
        lines = [
            line for line in (self.folder / "Release").read_text().splitlines() if line.partition(":")[0] not in fields
        ]
        added = [f"{name.replace('_', '-')}: {value}" for name, value in fields.items()]
        (self.folder / "Release").write_text("\n".join([*added, *lines]) + "\n")
        target, source = str(self.folder / "InRelease"), str(self.folder / "Release")
        run(("gpg", "--homedir", str(self.gnupg), "--batch", "--yes", "--clearsign", "--output", target, source))


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository that each test gets a copy of, in `www`, and its key in `gnupg`."""
    folder = tmp_path_factory.mktemp("repository")
    build_repository(folder / "www", folder / "gnupg")
    return folder


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of the same content, with another key: its folder."""
    folder = tmp_path_factory.mktemp("stranger")
    build_repository(folder / "www", folder / "gnupg")
    return folder / "www"


@pytest.fixture
def repository(template: Path, tmp_path: Path) -> Iterator[Repository]:
    with served_copy(template, tmp_path) as places:
        yield Repository(*places)


@pytest.fixture
def host(tmp_path: Path) -> AptHost:
    return AptHost(tmp_path / "root")


def configure(host: AptHost, spec: HostSpec) -> None:
    """Apply what is planned; a second plan is empty."""
    for change in plan_repositories(gather_files(host), spec, "x86_64"):
        change.apply(host, tell)
    assert plan_repositories(gather_files(host), spec, "x86_64") == ()


def refresh(host: AptHost) -> None:
    RefreshPackageIndex().apply(host, tell)


def set_up(host: AptHost, spec: HostSpec) -> None:
    configure(host, spec)
    refresh(host)


def refusal(host: AptHost) -> str:
    with pytest.raises(GpuprovError) as caught:
        refresh(host)
    return str(caught.value)


def test_apt_accepts_our_key_and_source(host: AptHost, repository: Repository) -> None:
    set_up(host, repository.spec)
    policy = host.run(("apt-cache", "policy", PACKAGE)).stdout
    assert "Candidate: 1.0" in policy and repository.url in policy


def test_a_login_is_used_and_only_root_can_read_it(host: AptHost, repository: Repository) -> None:
    with served(repository.folder, LoginHandler) as url:
        (own,) = repository.spec.repositories
        spec = HostSpec(repositories=(replace(own, uri=url.replace("//", f"//{LOGIN_IN_URL}@")),))
        changes = plan_repositories(gather_files(host), spec, "x86_64")
        assert PASSWORD not in "".join(change.summary() + change.diff(host) for change in changes)
        set_up(host, spec)
        assert f"1.0 500\n        500 {url}" in host.run(("apt-cache", "policy", PACKAGE)).stdout
    files = [path for path in (host.root / "etc/apt").rglob("*") if path.is_file()]
    (kept,) = [path for path in files if PASSWORD in path.read_bytes().decode("latin-1")]
    assert (kept.name, kept.stat().st_mode & 0o777) == ("gpuprov-site.conf", 0o600)
    assert not any(LOGIN_IN_URL in path.read_bytes().decode("latin-1") for path in files)
    for change in plan_repositories(gather_files(host), HostSpec(), "x86_64"):
        assert PASSWORD not in change.diff(host)
        change.apply(host, tell)
    assert not kept.exists()


def candidates(host: AptHost, *names: str) -> dict[str, str]:
    """Return the version that apt would install of each package."""
    shown = host.run(("apt-cache", "policy", *names)).stdout
    return dict(re.findall(r"^(\S+):\n  Installed: .*\n  Candidate: (\S+)", shown, re.MULTILINE))


def test_nvidia_repository_keeps_distribution_driver(host: AptHost, repository: Repository, tmp_path: Path) -> None:
    """Its own pin prefers all that it has; the toolkit and the fabric manager shall still come from there."""
    own, theirs, gnupg = tmp_path / "distribution", repository.folder, repository.gnupg
    shutil.copytree(theirs, own)
    for folder, version in ((own, "550.163.01-2"), (theirs, "580.178.04-1")):
        for name in ("libcuda1", "nvidia-smi"):
            build_package(folder, stand_in(name, version), {})
    others = {"nvidia-fabricmanager-550": "550.163.01-1", "cuda-toolkit-12-4": "12.4.1-1"}
    for name, version in others.items():
        build_package(theirs, stand_in(name, version), {})
    for folder in (own, theirs):
        sign(folder, gnupg)
    repository.sign(Origin="NVIDIA")
    pin = b"Package: *\nPin: release o=NVIDIA\nPin-Priority: 600\n"
    host.make_directory("/etc/apt/preferences.d")
    host.write("/etc/apt/preferences.d/cuda-repository-pin-600", pin)
    (site,) = repository.spec.repositories
    with served(own) as url:
        set_up(host, HostSpec(repositories=(site, replace(site, name="own", uri=url))))
        wanted = ("libcuda1", "nvidia-smi", *others)
        newer = dict.fromkeys(wanted[:2], "580.178.04-1")
        assert candidates(host, *wanted) == {**newer, **others}
        host.write(PREFERENCES, PREFERENCES_TEXT.encode())
        assert candidates(host, *wanted) == {**dict.fromkeys(wanted[:2], "550.163.01-2"), **others}


def test_duplicate_source_of_a_repository_is_removed(host: AptHost, repository: Repository) -> None:
    host.write("/etc/apt/sources.list.d/old.list", f"deb [trusted=yes] {repository.url}/ ./\n".encode())
    configure(host, repository.spec)
    assert host.list_directory("/etc/apt/sources.list.d") == ("gpuprov-site.sources",)
    refresh(host)


def test_duplicate_source_with_a_variable_is_removed(host: AptHost, repository: Repository) -> None:
    """NVIDIA's own list is one: $(ARCH) in the URI, another path in Signed-By."""
    (repository.folder / "amd64").symlink_to(".")
    (one,) = repository.spec.repositories
    other = host.path("/etc/apt/keyrings/other.gpg")
    other.touch()
    old = f"deb [signed-by=/etc/apt/keyrings/other.gpg] {repository.url}/$(ARCH) ./\n"
    host.write("/etc/apt/sources.list.d/old.list", old.encode())
    wanted = HostSpec(repositories=(replace(one, uri=f"{repository.url}/amd64"),))
    for change in plan_repositories({}, wanted, "x86_64"):
        change.apply(host, tell)
    assert "two sources name the same repository, with different keys" in refusal(host)
    set_up(host, wanted)


def test_a_second_source_among_others_is_switched_off_and_comes_back(host: AptHost, repository: Repository) -> None:
    (repository.folder / "other").symlink_to(".")
    path = "/etc/apt/sources.list.d/old.list"
    both = f"deb [trusted=yes] {repository.url} other/\ndeb [trusted=yes] {repository.url} ./\n".encode()
    host.write(path, both)
    taken = plan_repositories(gather_files(host), repository.spec, "x86_64")
    (cleaning,) = (change for change in taken if isinstance(change, WriteFile) and change.path == path)
    before = cleaning.capture(host)
    set_up(host, repository.spec)
    assert "other/" in host.run(("apt-cache", "policy", PACKAGE)).stdout
    WriteFile.undo(host, before, {})
    assert host.read_bytes(path) == both
    assert "two sources name the same repository" in refusal(host)


def test_another_suite_of_the_same_mirror_stays_and_apt_is_content(host: AptHost, repository: Repository) -> None:
    (repository.folder / "other").symlink_to(".")
    distribution = f"deb [trusted=yes] {repository.url} other/\n".encode()
    host.write("/etc/apt/sources.list", distribution)
    configure(host, repository.spec)
    assert host.read_bytes("/etc/apt/sources.list") == distribution
    refresh(host)


def test_an_armored_or_unreadable_key_is_put_right(host: AptHost, repository: Repository) -> None:
    configure(host, repository.spec)
    path = "/etc/apt/keyrings/gpuprov-site.gpg"
    right = host.read_bytes(path)
    assert right is not None
    for content, mode in (((repository.folder / "key.asc").read_bytes(), 0o644), (right, 0o600)):
        host.write(path, content, mode=mode)
        assert "not signed with a key that this host trusts" in refusal(host)
        set_up(host, repository.spec)


def test_a_wrong_key_is_refused_before_it_is_trusted(host: AptHost, repository: Repository, stranger: Path) -> None:
    other = (stranger / "fingerprint").read_text()
    shutil.copy(stranger / "key.asc", repository.folder)
    with pytest.raises(GpuprovError) as caught:
        configure(host, repository.spec)
    assert other in str(caught.value) and repository.fingerprint in str(caught.value)
    assert host.list_directory("/etc/apt/keyrings") == ()


def remove_signatures(repository: Repository) -> None:
    (repository.folder / "InRelease").unlink()


def tamper_with_packages(repository: Repository) -> None:
    tamper(repository.folder / "Packages", b"Version: 1.0", b"Version: 6.6")


def remove_all(repository: Repository) -> None:
    for path in repository.folder.iterdir():
        path.unlink()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (remove_signatures, "a repository is not signed with a key that this host trusts"),
        (tamper_with_packages, "a repository delivered a damaged file"),
        (remove_all, "there is no repository at that address"),
        (lambda repository: repository.sign(Valid_Until="Sat, 01 Jan 2022 00:00:00 UTC"),
         "this host's clock and a repository's disagree"),
        (lambda repository: repository.sign(Date="Fri, 01 Jan 2100 00:00:00 UTC"),
         "this host's clock and a repository's disagree"),
    ],
    ids=["unsigned", "tampered-packages", "gone", "expired", "of-the-future"],
)  # fmt: skip
def test_apt_refuses_it_and_we_say_why(
    host: AptHost, repository: Repository, damage: Callable[[Repository], None], says: str
) -> None:
    configure(host, repository.spec)
    damage(repository)
    found = refusal(host)
    assert f"the package index could not be refreshed: {says}" in found
    assert repository.url in found


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("http://127.0.0.1:9/apt", "a repository can't be reached"),
        ("http://no-such-host.invalid/apt", "a repository's name is not known"),
    ],
)
def test_a_repository_out_of_reach_is_told(host: AptHost, repository: Repository, uri: str, says: str) -> None:
    sources_from(host, repository, uri)
    found = refusal(host)
    assert says in found and uri in found


class SlowHandler(QuietHandler):
    """Sends each file in a dozen pieces with a pause before each: a second and more for a repository's index."""

    def copyfile(self, source: Any, outputfile: Any) -> None:
        content = source.read()
        size = len(content) // 12 + 1
        for place in range(0, len(content), size):
            time.sleep(0.1)
            outputfile.write(content[place : place + size])
            outputfile.flush()


def sources_from(host: AptHost, repository: Repository, uri: str) -> None:
    """Let a host that trusts the repository's key have it from another address."""
    configure(host, repository.spec)
    key = (repository.spec.repositories[0].key_url, repository.fingerprint)
    source = AptRepository("site", uri, "./", "", *key, "amd64")
    host.write(source.source_path, str(source).encode())


def test_a_slow_repository_is_waited_for(host: AptHost, repository: Repository) -> None:
    with served(repository.folder, SlowHandler) as url:
        sources_from(host, repository, url)
        refresh(host)
    assert any("Packages" in name for name in host.list_directory("/var/lib/apt/lists"))


def test_a_repository_that_never_answers_is_told(host: AptHost, repository: Repository) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        sources_from(host, repository, uri)
        host.patience = 2
        found = refusal(host)
    assert "a repository can't be reached" in found and uri in found


def test_a_package_that_nobody_has_is_told(host: AptHost, repository: Repository) -> None:
    set_up(host, repository.spec)
    for name in ("no-such-package", f"{PACKAGE}=9.9"):
        with pytest.raises(GpuprovError, match=f"{name} could not be installed: no repository has such a package"):
            InstallPackages((name,)).apply(host, tell)


def test_a_package_that_was_tampered_with_is_told(host: AptHost, repository: Repository) -> None:
    set_up(host, repository.spec)
    package = repository.folder / f"{PACKAGE}_1.0_all.deb"
    package.write_bytes(package.read_bytes()[:-1] + b"!")
    with pytest.raises(GpuprovError, match="a repository delivered a damaged file"):
        InstallPackages((PACKAGE,)).apply(host, tell)


def test_undo_takes_the_key_away(host: AptHost, repository: Repository) -> None:
    one = repository.spec.repositories[0]
    change = InstallKey("/etc/apt/keyrings/gpuprov-site.gpg", one.key_url, one.key_fingerprint)
    before = change.capture(host)
    change.apply(host, tell)
    InstallKey.undo(host, before, None)
    assert host.list_directory("/etc/apt/keyrings") == ()
