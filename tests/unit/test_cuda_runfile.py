"""The CUDA toolkit from its .run: installed once, linked, proved, taken away again; whatever fails leaves nothing."""

import hashlib
import os
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable

import pytest

from gpuprov.core.changes import Change, parent_of
from gpuprov.core.commands import Completed
from gpuprov.core.places import CACHE_DIRECTORY, FOLDER
from gpuprov.driver import cuda_repository, cuda_toolkit
from gpuprov.driver.cuda_toolkit import InstallCudaToolkit, LinkCudaToolkit
from gpuprov.driver.run_files import FetchRunfile
from gpuprov.facts.driver import PROFILE
from gpuprov.facts.host import HostFacts, gather
from gpuprov.packages.interface import PackageFacts
from gpuprov.plan.context import source_of
from gpuprov.plan.refusals import refusals
from gpuprov.protocol.errors import ExitCode, GpuprovError, Problem
from gpuprov.protocol.events import Finished
from gpuprov.protocol.request import Request
from gpuprov.protocol.spec import HostSpec, parse_spec, spec_to_json
from tests import simgpu
from tests.runs import undo_last
from tests.simgpu.cuda_run import build_cuda_run
from tests.unit.ask import ask
from tests.unit.fake_host import FakeHost
from tests.unit.refused import refused
from tests.unit.scripted import Answer, Scripted

pytestmark = pytest.mark.root
PREFIX = "/usr/local/cuda-12.4"


class CudaHost(FakeHost):
    """A host with a driver, on which the toolkit's .run is really run, below the root prefix."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        simgpu.install_tree(root)
        (root / "usr/local").mkdir()
        (root / "etc/profile.d").mkdir()
        self.file = build_cuda_run(root)

    def run(self, argv: Sequence[str], **more: Any) -> Completed:
        words = tuple(argv)
        if words[0] == "sh" or words[0].endswith("cuda-uninstaller"):
            real = [str(self.path(word)) if word.startswith("/") else word for word in words]
            environment = {**os.environ, "ROOT": str(self.root)}
            done = subprocess.run(real, capture_output=True, text=True, env=environment, check=False)
            return Completed(words, done.returncode, done.stdout, done.stderr)
        if words[0] == "ldconfig":
            return Completed(words, 0)
        return super().run(argv, **more)


@pytest.fixture
def host(tmp_path: Path) -> CudaHost:
    return CudaHost(tmp_path / "root")


def spec(host: CudaHost, **values: Any) -> HostSpec:
    defaults = {"driver": "preinstalled", "cuda": "12.4", "cuda_url": f"/{host.file.name}"}
    return parse_spec({**defaults, **values})


def install(host: CudaHost, wanted: HostSpec) -> Finished:
    return ask(host, Request("install", spec_to_json(wanted), steps=("download", "packages", "driver")))[0]


def planned(facts: HostFacts, wanted: HostSpec) -> list[Change]:
    return [*cuda_toolkit.plan_download(facts, wanted), *cuda_toolkit.plan(facts, wanted)]


def test_it_is_installed_linked_and_on_peoples_paths_once(host: CudaHost) -> None:
    wanted = spec(host, cuda_sha256=hashlib.sha256(host.file.read_bytes()).hexdigest())
    finished = install(host, wanted)
    assert (finished.exit_code, finished.changed) == (ExitCode.DONE, 2), finished.problems
    assert gather(host).cuda.toolkits == {PREFIX: "12.4.1"}
    assert gather(host).cuda.link == PREFIX
    assert "/usr/local/cuda/bin" in (host.read_text(PROFILE) or "")
    assert install(host, wanted).changed == 0
    assert cuda_repository.repositories(source_of(gather(host), wanted)) == ()
    assert cuda_toolkit.toolkit_packages(wanted) == ()


def test_a_roll_back_leaves_nothing_of_it(host: CudaHost) -> None:
    before = host.tree()
    install(host, spec(host))
    undo_last(host)
    left = {path for path in {*before, *host.tree()} if before.get(path) != host.tree().get(path)}
    # Folders that the installer made for its menu entry.
    assert left <= {"/usr/share/applications", "/etc/ld.so.conf.d"}


def test_another_version_takes_the_link_and_a_roll_back_gives_it_back(host: CudaHost) -> None:
    install(host, spec(host))
    newer = build_cuda_run(host.root, "12.6.0")
    assert install(host, spec(host, cuda="12.6", cuda_url=f"/{newer.name}")).exit_code == ExitCode.DONE
    assert gather(host).cuda.link == "/usr/local/cuda-12.6"
    (change,) = cuda_toolkit.plan(gather(host), spec(host))
    assert change == LinkCudaToolkit(PREFIX)
    before = change.capture(host)
    change.apply(host, lambda *words: None)
    assert gather(host).cuda.link == PREFIX
    LinkCudaToolkit.undo(host, before, {})
    undo_last(host)
    assert (gather(host).cuda.link, list(gather(host).cuda.toolkits)) == (PREFIX, [PREFIX])


def test_what_fails_is_told_with_the_logs_line_and_leaves_nothing(host: CudaHost) -> None:
    (host.root / "etc/simrun.fail").write_text("cuda\n")
    (host.root / "usr/share/applications").mkdir(parents=True)
    (host.root / "etc/ld.so.conf.d").mkdir()
    before = host.tree()
    (problem,) = install(host, spec(host)).problems
    assert problem.what == "the CUDA toolkit 12.4 was not installed"
    assert "No space left on device" in problem.evidence
    after = host.tree()
    # The step before has done its own work, which stands.
    assert {path for path in {*before, *after} if before.get(path) != after.get(path)} == {PROFILE}


FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "another version": (lambda path: build_cuda_run(path.parent, "12.6.1").replace(path), "brought the CUDA toolkit"),
    "a web page": (lambda path: path.write_text(f"<html>{'x' * 80}"), "this is no CUDA .run file"),
    "a compressed file": (lambda path: path.write_bytes(b"\x1f\x8b\x08\xff"), "this is no CUDA .run file"),
    "nothing": (lambda path: path.unlink(), "there is no file"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_wrong_file_is_refused(host: CudaHost, name: str) -> None:
    change, what = FILES[name]
    change(host.file)
    (problem,) = install(host, spec(host)).problems
    assert what in problem.what and "gpuprov_cuda_url" in problem.next_step
    assert (problem.next_step == "check gpuprov_cuda_url") is ("brought" not in what)
    assert (host.file.name in problem.evidence) is (".run file" in what)
    assert (problem.evidence == f"/{host.file.name} begins with {'<html>' + 'x' * 74!r}") is (name == "a web page")
    assert gather(host).cuda.toolkits == {}


def test_another_digest_is_refused_before_anything_is_run(host: CudaHost) -> None:
    with pytest.raises(
        GpuprovError, match=r"CUDA toolkit's file is not the one that was asked for(.|\n)*, gpuprov_cuda_sha256 is 0"
    ):
        InstallCudaToolkit("12.4", f"/{host.file.name}", "0" * 64).apply(host, lambda *words: None)
    assert not host.exists("/var/log/cuda-installer.log")


NVCC, VERSION_FILE, UNINSTALLER = f"{PREFIX}/bin/nvcc", f"{PREFIX}/version.json", f"{PREFIX}/bin/cuda-uninstaller"
LOG, TEMPORARY = "/var/log/cuda-installer.log", f"{CACHE_DIRECTORY}/cuda"
INSTALLED = {NVCC: "", UNINSTALLER: "", VERSION_FILE: '{"cuda": {"version": "12.4.1"}}'}
ERRORS = "[INFO]: begun\n  [ERROR]: no space left\nERROR: nothing done\n"


class Installer(Scripted):
    """A machine with a toolkit's .run, which leaves these files and ends with `code`."""

    def __init__(self, root: Path, path: str, files: dict[str, str], code: int = 0) -> None:
        super().__init__(root)
        self.files, self.code, self.full = files, code, ""
        self.temporary: tuple[int, tuple[str, ...]] = (0, ("",))
        for name in ("/usr/local", "/var/log", parent_of(path), TEMPORARY):
            self.make_directory(name)
        self.write(path, b"#!/bin/sh\n")
        self.write(f"{TEMPORARY}/of-a-run-before", b"")

    def free_bytes(self, path: str) -> int:
        return 0 if path == self.full else 1 << 30

    def answer(self, argv: tuple[str, ...]) -> Answer:
        if argv[0] != "sh":
            return ""
        there = self.status(TEMPORARY)
        assert there is not None
        self.temporary = there.mode, (*self.list_directory(TEMPORARY),)
        for path, text in {**self.files, LOG: ERRORS}.items():
            self.make_directory(parent_of(path))
            self.write(path, text.encode())
        return self.code, "", "it ends"


@pytest.mark.parametrize("path", ["/root/cuda.run", f"{CACHE_DIRECTORY}/cuda.run"])
def test_the_installer_has_a_private_folder_and_a_download_goes(tmp_path: Path, path: str) -> None:
    host, told = Installer(tmp_path, path, INSTALLED), list[tuple[Any, ...]]()
    InstallCudaToolkit("12.4", path).apply(host, lambda *words: told.append(words))
    words = ("--silent", "--toolkit", f"--toolkitpath={PREFIX}", "--override", f"--tmpdir={TEMPORARY}")
    assert host.asked == [("sh", path, *words)]
    assert host.timeouts == [3600]
    assert host.temporary == (0o700, ()) and not host.exists(TEMPORARY)
    assert host.exists(path) is path.startswith("/root")
    assert (tmp_path / "usr/local/cuda").readlink() == Path(PREFIX)
    ((text, *progress),) = told
    assert PREFIX in text and progress == [0, 0]


@pytest.mark.parametrize("full", [CACHE_DIRECTORY, "/usr/local"])
def test_a_full_file_system_is_named_before_the_installer_runs(tmp_path: Path, full: str) -> None:
    host = Installer(tmp_path, "/root/cuda.run", INSTALLED)
    host.full = full
    with pytest.raises(GpuprovError, match=rf"not enough room on the file system of {full} .*CUDA"):
        InstallCudaToolkit("12.4", "/root/cuda.run").apply(host, lambda *_: None)
    assert host.asked == []


UNPROVED: dict[str, tuple[int, dict[str, str], str]] = {
    "it fails": (1, INSTALLED, "12.4 was not installed"),
    "no compiler": (0, {VERSION_FILE: INSTALLED[VERSION_FILE]}, "12.4 was not installed"),
    "no version": (0, {NVCC: ""}, "brought the CUDA toolkit (unknown)"),
    "a longer version": (0, {NVCC: "", VERSION_FILE: '{"cuda": {"version": "12.40.1"}}'}, "CUDA toolkit 12.40.1"),
}


@pytest.mark.parametrize("name", UNPROVED)
def test_an_installation_is_proved_and_not_believed(tmp_path: Path, name: str) -> None:
    code, files, what = UNPROVED[name]
    path = f"{CACHE_DIRECTORY}/cuda.run"
    host = Installer(tmp_path, path, files, code)
    problem = refused(InstallCudaToolkit("12.4", path).apply, host, lambda *_: None)
    assert what in problem.what and problem.next_step
    if "not installed" in what:
        assert problem.evidence.splitlines()[-1] == f"{LOG}: [ERROR]: no space left"
        assert code == 0 or "it ends" in problem.evidence
    else:
        assert problem.evidence == VERSION_FILE
    assert not host.exists(TEMPORARY) and host.exists(path) and host.status("/usr/local/cuda") is None


@pytest.mark.parametrize("existed", [True, False])
@pytest.mark.parametrize("uninstaller", [True, False])
def test_the_undo_removes_what_is_new_alone(tmp_path: Path, existed: bool, uninstaller: bool) -> None:
    files = {path: text for path, text in INSTALLED.items() if uninstaller or path != UNINSTALLER}
    host, change = Installer(tmp_path, "/root/cuda.run", files), InstallCudaToolkit("12.4", "/root/cuda.run")
    loader = "/etc/ld.so.conf.d/cuda-12-4.conf"
    host.files[loader] = PREFIX
    if existed:
        host.make_directory(PREFIX)
        host.write(LOG, b"older")
    before = change.capture(host)
    change.apply(host, lambda *_: None)
    host.asked.clear()
    host.timeouts.clear()
    InstallCudaToolkit.undo(host, before, None)
    removes = uninstaller and not existed
    assert host.asked == [*([(UNINSTALLER, "--silent")] if removes else []), ("ldconfig",)]
    assert host.timeouts == [*([3600] if removes else []), 120]
    assert (host.exists(NVCC), host.exists(LOG)) == (existed, existed)
    assert not host.exists(loader) and host.status("/usr/local/cuda") is None
    stays = InstallCudaToolkit.irreversible(host, before, None, ())
    assert [sentence.startswith(f"{PREFIX} ") for sentence in stays] == [True] * existed


@pytest.mark.parametrize(
    ("toolkits", "link", "kinds"),
    [
        ({}, "", [InstallCudaToolkit]), ({PREFIX: "12.4.1"}, "", [LinkCudaToolkit]), ({PREFIX: "12.4.1"}, PREFIX, []),
        ({PREFIX: "12.4.1"}, "/usr/local/cuda-12.6", [LinkCudaToolkit]),
        ({PREFIX: "12.40.1"}, PREFIX, [InstallCudaToolkit]), ({"/opt/cuda": "12.4.1"}, PREFIX, [InstallCudaToolkit]),
    ],
)  # fmt: skip
def test_the_plan_by_version_and_link(host: CudaHost, toolkits: dict[str, str], link: str, kinds: list[type]) -> None:
    facts = gather(host)
    facts = replace(facts, cuda=replace(facts.cuda, toolkits=toolkits, link=link))
    assert [type(one) for one in cuda_toolkit.plan(facts, spec(host))] == kinds
    assert cuda_toolkit.plan(facts, spec(host, cuda_url="")) == ()
    # A file that lies on the host, or in the cache with the digest, is not fetched.
    assert cuda_toolkit.plan_download(facts, spec(host)) == ()
    wanted = spec(host, cuda_url="https://example.com/cuda.run", cuda_sha256="a" * 64)
    fetches = kinds == [InstallCudaToolkit]
    place = f"{CACHE_DIRECTORY}/cuda.run"
    assert cuda_toolkit.plan_download(replace(facts, downloads={place: "a" * 64}), wanted) == ()
    installation = (InstallCudaToolkit("12.4", place, "a" * 64),)
    assert (cuda_toolkit.plan(facts, wanted) == installation) is fetches
    in_bundle = spec(host, cuda_url=f"{FOLDER}/cuda.run", cuda_sha256="a" * 64)
    assert (cuda_toolkit.unpacks(facts, in_bundle), cuda_toolkit.unpacks(facts, wanted)) == (fetches, False)
    found = cuda_toolkit.plan_download(replace(facts, downloads={place: "b" * 64}), wanted)
    assert found == ((FetchRunfile(wanted.cuda_url, place, "a" * 64),) if fetches else ())


def test_a_folder_in_the_links_place_is_told(host: CudaHost) -> None:
    (host.root / "usr/local/cuda").mkdir()
    with pytest.raises(GpuprovError, match="/usr/local/cuda is a folder, not a link") as raised:
        LinkCudaToolkit(PREFIX).apply(host, lambda *words: None)
    (problem,) = raised.value.problems
    assert problem.evidence.startswith("/usr/local/cuda/version.json")
    assert "mv /usr/local/cuda /usr/local/cuda-old" in problem.next_step
    # Before gigabytes are downloaded, too.
    assert [one.what for one in problems(gather(host), spec(host))] == [problem.what]


def problems(facts: HostFacts, spec: HostSpec) -> list[Problem]:
    return [one for one in refusals(source_of(facts, spec)) if "gpuprov_cuda" in one.next_step]


def test_a_download_needs_a_digest_and_packages_keep_their_place(host: CudaHost) -> None:
    facts, url = gather(host), "https://example.com/cuda_12.4.1_linux.run"
    (problem,) = problems(facts, spec(host, cuda_url=url))
    assert "SHA-256" in problem.what
    wanted = spec(host, cuda_url=url, cuda_sha256="a" * 64)
    assert problems(facts, wanted) == []
    assert [change.summary() for change in planned(facts, wanted)] == [
        f"download {url}", "install the CUDA toolkit 12.4 into /usr/local/cuda-12.4, link /usr/local/cuda to it",
    ]  # fmt: skip
    packaged = replace(facts, packages=PackageFacts("apt", {"cuda-toolkit-12-4": "12.4.1-1"}))
    assert "comes from packages" in problems(packaged, wanted)[0].what
    assert "which version" in problems(facts, spec(host, cuda=""))[0].what
