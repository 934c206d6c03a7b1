"""Collecting a bundle by the real apt and dpkg from a signed repository; what apt refuses, and what is said then."""

import dataclasses
import hashlib
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuprov.bundle.manifest import BundlePackage
from gpuprov.bundle_create.recipe import Recipe, RunFile
from gpuprov.machine.distros import find_distribution
from gpuprov.packages.keys import fingerprints
from gpuprov.protocol.errors import GpuprovError
from gpuprov.protocol.tables import PACKAGED
from tests import simgpu
from tests.integration.opened_bundle import collected, opened
from tests.lab.repository import PACKAGE, build_package, build_repository, sign, stand_in
from tests.unit.fake_host import write_runfile

pytestmark = pytest.mark.needs("apt-get")
DEB = f"repository/{PACKAGE}_1.0_all.deb"


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    build_repository(folder / "www", folder / "gnupg")
    return folder / "www"


@pytest.fixture
def mirror(template: Path, tmp_path: Path) -> Path:
    shutil.copytree(template, tmp_path / "www")
    return tmp_path / "www"


def recipe(mirror: Path, *packages: str) -> Recipe:
    line = f"deb [signed-by={mirror}/key.asc] file:{mirror} ./"
    return Recipe("debian", "12", "x86_64", packages or (PACKAGE,), (line,), ())


def refusal(recipe: Recipe, folder: Path) -> str:
    with pytest.raises(GpuprovError) as caught:
        collected(recipe, folder)
    problem = caught.value.problems[0]
    assert problem.what and problem.evidence and problem.next_step
    return str(caught.value)


def test_packages_and_an_index_that_names_them(mirror: Path, tmp_path: Path) -> None:
    found = collected(recipe(mirror), tmp_path)
    assert found.manifest.packages == (BundlePackage(PACKAGE, "1.0", "all", DEB),)
    assert [one.path for one in found.manifest.files] == [
        "agent/gpuprov-agent.pyz", "repository/InRelease", "repository/Packages", "repository/key.gpg", DEB,
    ]  # fmt: skip
    packages = Path(found.places["repository/Packages"]).read_text()
    digest = hashlib.sha256((mirror / f"{PACKAGE}_1.0_all.deb").read_bytes()).hexdigest()
    assert f"Filename: ./{PACKAGE}_1.0_all.deb\n" in packages
    assert f"SHA256: {digest}\n" in packages
    release, key = (Path(found.places[f"repository/{name}"]) for name in ("InRelease", "key.gpg"))
    assert hashlib.sha256(packages.encode()).hexdigest() in release.read_text()
    assert fingerprints(key.read_bytes()) == (found.manifest.repository_key,)
    subprocess.run(("gpgv", "--keyring", key, release), check=True)
    assert not (tmp_path / "work/gnupg").exists(), "the secret half of the key is to be forgotten"


def test_a_package_of_a_long_name_has_a_short_one_in_the_bundle(template: Path, mirror: Path, tmp_path: Path) -> None:
    """A tar header holds a hundred bytes; Ubuntu's compiled modules of the driver need more."""
    name, version = "linux-modules-nvidia-580-server-open-6.14.0-1015-nvidia-64k", "6.14.0-1015.15~24.04.1+2"
    build_package(mirror, stand_in(name, version), {})
    sign(mirror, template.parent / "gnupg")
    found = collected(recipe(mirror, name), tmp_path)
    (package,) = opened(found).manifest.packages
    assert (package.name, package.version) == (name, version)
    assert f"Filename: ./{package.file.rpartition('/')[2]}\n" in Path(found.places["repository/Packages"]).read_text()


def test_nothing_is_asked_of_apt_without_packages(mirror: Path, tmp_path: Path) -> None:
    found = collected(dataclasses.replace(recipe(mirror), packages=()), tmp_path)
    assert [one.path for one in found.manifest.files] == ["agent/gpuprov-agent.pyz"]


def tamper_with_the_package(mirror: Path) -> None:
    path = mirror / f"{PACKAGE}_1.0_all.deb"
    path.write_bytes(path.read_bytes()[:-1] + b"!")


def tamper_with_the_index(mirror: Path) -> None:
    path = mirror / "Packages"
    path.write_text(path.read_text().replace("Version: 1.0", "Version: 6.6"))


def remove_the_signature(mirror: Path) -> None:
    (mirror / "InRelease").unlink()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (tamper_with_the_package, "the packages can't be had"),
        (tamper_with_the_index, "the repositories' lists can't be had"),
        (remove_the_signature, "the repositories' lists can't be had"),
    ],
)
def test_tampered_mirror_is_refused(mirror: Path, tmp_path: Path, damage: Callable[[Path], None], says: str) -> None:
    damage(mirror)
    assert says in refusal(recipe(mirror), tmp_path)


def test_a_package_that_nobody_has_is_told(mirror: Path, tmp_path: Path) -> None:
    said = refusal(recipe(mirror, "no-such-package"), tmp_path)
    assert "the packages can't be had" in said
    assert "no-such-package" in said


def test_key_missing_on_this_machine_is_named(mirror: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpuprov.bundle_create.recipe import ARCHIVES, default_sources, mirror_at

    archive = dataclasses.replace(ARCHIVES["debian"], keyring="/usr/share/keyrings/no-such-key.gpg")
    monkeypatch.setitem(ARCHIVES, "debian", archive)
    row = find_distribution("debian", "12")
    assert row is not None
    sources = default_sources(row, "x86_64", mirror_at("http://mirror.example/debian"), PACKAGED)
    wanted = dataclasses.replace(recipe(mirror), sources=sources)
    assert "apt-get install debian-archive-keyring" in refusal(wanted, tmp_path)


def driver_recipe(mirror: Path, file: Path, version: str = simgpu.DRIVER_VERSION, sha256: str = "") -> Recipe:
    return dataclasses.replace(recipe(mirror), packages=(), driver=RunFile(version, str(file), sha256))


def test_the_driver_is_taken_by_its_published_digest_and_kept_for_the_next_bundle(mirror: Path, tmp_path: Path) -> None:
    file = tmp_path / "driver.run"
    write_runfile(file)
    assert "SHA-256 is not known" in refusal(driver_recipe(mirror, file), tmp_path)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    (tmp_path / "driver.run.sha256sum").write_text(f"{digest}  driver.run\n")
    (tmp_path / "first").mkdir()
    found = collected(driver_recipe(mirror, file), tmp_path / "first")
    assert found.manifest.driver_file == f"driver/NVIDIA-Linux-x86_64-{simgpu.DRIVER_VERSION}.run"
    assert found.manifest.file(found.manifest.driver_file).sha256 == digest
    (tmp_path / "second").mkdir()
    said = refusal(driver_recipe(mirror, file, sha256="0" * 64), tmp_path / "second")
    assert "is not the file that was asked for" in said


def test_a_driver_of_another_version_is_refused(mirror: Path, tmp_path: Path) -> None:
    file = tmp_path / "driver.run"
    write_runfile(file)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    said = refusal(driver_recipe(mirror, file, "535.261.03", digest), tmp_path)
    assert f"the driver file is {simgpu.DRIVER_VERSION} for x86_64, asked for is 535.261.03" in said
