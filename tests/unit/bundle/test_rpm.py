"""Bundles for dnf and zypper: where packages come from, what is asked for, and what a host is told."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gpuprov.bundle.manifest import BundleFacts, BundleFile, BundlePackage, Manifest
from gpuprov.bundle_create.recipe import Recipe, RpmSource, Wanted, make_recipe, rpm_sources
from gpuprov.bundle_create.repository import SIGNED_AT, new_key
from gpuprov.core.commands import Completed
from gpuprov.core.places import FOLDER
from gpuprov.core.system import System
from gpuprov.facts.host import HostFacts, gather
from gpuprov.machine.machine import OperatingSystem
from gpuprov.packages import rpm
from gpuprov.packages.dnf import DNF
from gpuprov.packages.interface import Installation, PackageFacts
from gpuprov.packages.keys import InstallRpmKey, plan_bundle_keys
from gpuprov.packages.rpm import RpmManager
from gpuprov.packages.zypper import ZYPPER
from gpuprov.plan import with_bundle
from gpuprov.protocol.errors import GpuprovError, UsageError
from gpuprov.protocol.spec import HostSpec
from gpuprov.protocol.tables import PACKAGED
from tests.unit.fake_host import FakeHost
from tests.unit.scripted import Scripted

KEY, OTHER = "A" * 40, "B" * 40
SOURCE = f"https://mirror.example/baseos https://mirror.example/key {KEY}"
KERNEL = "5.14.0-503.11.1.el9_5.x86_64"


PLAIN = HostSpec(docker="preinstalled")


def recipe(distro: str = "rocky-9", spec: HostSpec = PLAIN, **options: Any) -> Recipe:
    return make_recipe(Wanted(distro, "x86_64", **options), (spec,))


def test_the_distributions_own_servers_and_keys() -> None:
    found = recipe().rpm_sources
    assert [one.uri for one in found] == [
        "https://dl.rockylinux.org/pub/rocky/9/BaseOS/x86_64/os/",
        "https://dl.rockylinux.org/pub/rocky/9/AppStream/x86_64/os/",
    ]
    key = ("https://dl.rockylinux.org/pub/rocky/RPM-GPG-KEY-Rocky-9", "21CB256AE16FC54C6E652949702D426D350D275D")
    assert {one.keys for one in found} == {(key,)}
    assert all(one.signed_packages for one in found)
    assert "/pub/rocky/9.4/BaseOS/" in recipe("rocky-9.4").rpm_sources[0].uri
    assert "/updates/43/Everything/x86_64/" in recipe("fedora-43").rpm_sources[1].uri


def test_a_mirror_with_packages_of_two_signers() -> None:
    line = f"{SOURCE} /root/other.asc {OTHER}"
    keys = (("https://mirror.example/key", KEY), ("/root/other.asc", OTHER))
    assert rpm_sources("sles", "15.6", "x86_64", (line,), PACKAGED) == (
        RpmSource("source-1", "https://mirror.example/baseos", keys),
    )


@pytest.mark.parametrize(
    "line",
    ["", "https://mirror.example/baseos", f"https://mirror.example {KEY}", f"ftp://a /key {KEY}", "http://a /key AB",
     f"https://a /key {KEY} /key"],
)  # fmt: skip
def test_a_source_without_its_key_is_none(line: str) -> None:
    with pytest.raises(UsageError, match="URL KEY-URL FINGERPRINT"):
        rpm_sources("rhel", "9", "x86_64", (line,), PACKAGED)


@pytest.mark.parametrize("distro", ["rhel-9", "sles-15.6", "opensuse-leap-15.6", "opensuse-tumbleweed", "amzn-2023"])
def test_where_there_is_no_server_for_all_a_source_is_asked_for(distro: str) -> None:
    with pytest.raises(GpuprovError, match="must be said"):
        recipe(distro)
    found = recipe(distro, sources=(SOURCE,))
    assert (f"{found.distribution}-{found.version}".rstrip("-*"), len(found.rpm_sources)) == (distro, 1)


def test_headers_of_a_kernel_come_with_what_brings_the_next_ones() -> None:
    wanted = {
        f"kernel-devel={KERNEL}",
        f"kernel-devel-matched={KERNEL}",
        "kernel-headers",
        "gcc",
        "elfutils-libelf-devel",
    }
    assert wanted <= set(recipe(kernels=(KERNEL,)).packages)


def test_what_signs_its_metadata_alone_is_checked_by_that() -> None:
    toolkit = recipe(spec=HostSpec(docker="preinstalled", toolkit="nvidia")).rpm_sources[-1]
    assert (toolkit.name, toolkit.signed_metadata, toolkit.signed_packages) == ("nvidia-container-toolkit", True, False)


# -- on a host ------------------------------------------------------------------------------------------------------

MANIFEST = Manifest(
    "rocky", "9", "x86_64", "0.1.0", repository_key=OTHER,
    packages=(
        BundlePackage("kernel-devel", "5.14.0-503.11.1.el9_5", "x86_64", "repository/kernel-devel.rpm"),
        BundlePackage("tools", "1:1.0-2", "noarch", "repository/tools.rpm"),
    ),
    files=(BundleFile(f"keys/{KEY}.asc", 1, "0" * 64), BundleFile("keys/bundle.gpg", 1, "0" * 64)),
    inputs={"packages": ["libelf-devel"]},
)  # fmt: skip


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> HostFacts:
    return gather(FakeHost(tmp_path_factory.mktemp("host") / "root"))


def on_host(facts: HostFacts, version: str = "9.5", manifest: Manifest = MANIFEST) -> HostFacts:
    os = OperatingSystem("rocky", version, "", (), "Rocky Linux")
    return dataclasses.replace(facts, os=os, architecture="x86_64", bundle=BundleFacts(manifest))


def said(host: HostFacts, *packages: str) -> str:
    return "\n".join(str(one) for one in with_bundle.problems(host, HostSpec(), packages, installs_driver=False))


@pytest.mark.parametrize(
    ("made_for", "version", "fits"),
    [("9", "9.5", True), ("9", "10.0", False), ("9.4", "9.4", True), ("9.4", "9.5", False), ("9", "9", True),
     ("1", "10", False)],
)  # fmt: skip
def test_bundle_of_a_release_serves_minor_releases(facts: HostFacts, made_for: str, version: str, fits: bool) -> None:
    manifest = dataclasses.replace(MANIFEST, version=made_for)
    assert ("this host is another" not in said(on_host(facts, version, manifest))) is fits


@pytest.mark.parametrize(
    ("name", "held"),
    [(f"kernel-devel={KERNEL}", True), ("tools", True), ("tools=1.0", True), ("tools=1.0-2", True),
     ("tools=2.0", False), ("libelf-devel", True), ("emacs", False)],
)  # fmt: skip
def test_what_the_bundle_holds(facts: HostFacts, name: str, held: bool) -> None:
    assert ("lacks packages" not in said(on_host(facts), name)) is held


def test_the_makers_keys_are_trusted_where_they_are_not_yet() -> None:
    keys = BundleFacts(MANIFEST).vendor_keys
    assert plan_bundle_keys(keys, frozenset()) == (
        InstallRpmKey(f"{FOLDER}/trusted/{KEY}.asc", f"file://{FOLDER}/keys/{KEY}.asc", KEY),
    )
    assert plan_bundle_keys(keys, frozenset((KEY,))) == ()


@pytest.mark.parametrize(("manager", "packages_key"), [(DNF, "gpgcheck"), (ZYPPER, "pkg_gpgcheck")])
def test_both_signatures_are_asked_for_in_the_bundles_repository(manager: RpmManager, packages_key: str) -> None:
    text = rpm.bundle_source(manager.bundle_lines)
    assert f"\n{packages_key}=1\n" in text and "\nrepo_gpgcheck=1\n" in text
    assert f"\nbaseurl=file://{FOLDER}/repository\n" in text


@pytest.mark.parametrize(
    ("distribution", "version", "words"),
    [
        ("rocky", "9", ["dnf", f"--setopt=reposdir={FOLDER}/repos.d", f"--setopt=cachedir={FOLDER}/cache"]),
        ("sles", "15.6", ["zypper", "--reposd-dir", f"{FOLDER}/repos.d", "--cache-dir", f"{FOLDER}/cache"]),
    ],
)
def test_the_bundle_is_the_only_source(tmp_path: Path, distribution: str, version: str, words: list[str]) -> None:
    manifest = dataclasses.replace(MANIFEST, distribution=distribution, version=version)
    host = Scripted(str(tmp_path))
    manager = with_bundle.bundle_manager(manifest)
    wanted = Installation(("gcc",), bundle=BundleFacts(dataclasses.replace(manifest, files=())))
    for change in manager.plan_installation(PackageFacts(manager.name, {}), wanted):
        change.apply(host, lambda message, done, total: None)
    asked = [command for command in host.asked if command[0] == manager.name]
    assert [list(command[: len(words)]) for command in asked] == [words, words]


class Busy(System):
    """Where gpg needs seconds before it makes a key, which is then so much younger, unless gpg's clock stands still.

    As seen of a gpg that was stopped for two seconds right after its start.
    """

    def run(self, argv: Sequence[str], **how: Any) -> Completed:
        word = "20260101T000000"
        later = [one.replace(word, "20260101T000003") if one == word else one for one in argv]
        return super().run(later if "--quick-gen-key" in argv else argv, **how)


def test_a_key_is_not_in_the_future_for_the_next_gpg(tmp_path: Path) -> None:
    (tmp_path / "Release").write_text("Origin: a test\n")
    with new_key(Busy(), f"{tmp_path}/gnupg") as key:
        key.sign(f"{tmp_path}/Release", f"{tmp_path}/Release.gpg", "--detach-sign")
        found = System().run(("gpg", "--homedir", key.home, "--with-colons", "--list-secret-keys")).stdout
    created = next(line.split(":")[5] for line in found.splitlines() if line.startswith("sec:"))
    assert int(created) == SIGNED_AT
    assert (tmp_path / "Release.gpg").stat().st_size
