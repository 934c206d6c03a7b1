"""The collection as its users get it: built, installed without a network, run from any folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from gpuprov.fleet.agent_file import build_agent
from tests.lab.lab import REPOSITORY

_BIN = Path(sys.executable).parent

pytestmark = pytest.mark.slow


def run(*words: object, cwd: Path, **environment: str) -> str:
    """Run one of Ansible's programs and return what it prints. Fails with that if it fails."""
    argv = (str(_BIN / str(words[0])), *(str(word) for word in words[1:]))
    done = subprocess.run(
        argv, cwd=cwd, env={**os.environ, "ANSIBLE_NOCOLOR": "1", **environment}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


# Of ansible-test's sanity tests those that run without a network. The others make environments of their own with
# packages from PyPI (`make sanity` runs them all): ansible-doc, import, pep8, pylint, runtime-metadata,
# validate-modules, yamllint. Not here, as they look for files that a collection without them always passes: changelog,
# empty-init, pslint, shellcheck; and for idioms that ruff looks for already: no-get-exception, replace-urlopen,
# use-compat-six.
_SANITY = (
    "action-plugin-docs", "compile", "ignores", "line-endings", "no-assert", "no-illegal-filenames", "no-smart-quotes",
    "shebang", "symlinks", "use-argspec-type-path",
)  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that is built, where ansible-test wants it."""
    folder = tmp_path_factory.mktemp("source") / "ansible_collections/gpuprov/host"
    run("python", REPOSITORY / "playbooks/collection.py", folder, cwd=REPOSITORY)
    return folder


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, source: Path) -> Path:
    """A folder of collections with ours in it."""
    folder = tmp_path_factory.mktemp("collection")
    run("ansible-galaxy", "collection", "build", "--output-path", folder, source, cwd=folder)
    (archive,) = folder.glob("gpuprov-host-*.tar.gz")
    run("ansible-galaxy", "collection", "install", "--offline", "-p", folder / "collections", archive, cwd=folder)
    return folder / "collections"


def test_its_playbooks_run_by_name_and_push_the_agent_inside(installed: Path, tmp_path: Path) -> None:
    said = run(
        "ansible-playbook", "-i", "here,", "-c", "local", "gpuprov.host.facts",
        cwd=tmp_path, HOME=str(tmp_path), ANSIBLE_COLLECTIONS_PATH=str(installed),
    )  # fmt: skip
    assert "kernel" in said
    pushed = [path.name for path in (tmp_path / ".cache/gpuprov").glob("*.pyz")]
    assert pushed == [f"agent-{build_agent().digest}.pyz"]


@pytest.mark.root
def test_the_oldest_ansible_core_runs_it(installed: Path, tmp_path: Path) -> None:
    """The oldest release that meta/runtime.yml allows, from PyPI; a task without `become` takes another way."""
    declared = yaml.safe_load((installed / "ansible_collections/gpuprov/host/meta/runtime.yml").read_text())
    oldest = declared["requires_ansible"].replace(">=", "==")
    subprocess.run((sys.executable, "-m", "venv", tmp_path / "oldest"), check=True)
    pip = (tmp_path / "oldest/bin/pip", "install", "-q", "--disable-pip-version-check", f"ansible-core{oldest}")
    subprocess.run(pip, check=True)
    for method in ("sudo", "su"):
        said = run(
            tmp_path / "oldest/bin/ansible-playbook", "-i", "here,", "-c", "local", "gpuprov.host.facts",
            "-e", "ansible_become=true", "-e", f"ansible_become_method={method}",
            cwd=tmp_path, HOME=str(tmp_path), ANSIBLE_COLLECTIONS_PATH=str(installed),
        )  # fmt: skip
        assert "kernel" in said


def test_ansible_doc_shows_its_action(installed: Path, tmp_path: Path) -> None:
    said = run("ansible-doc", "gpuprov.host.agent", cwd=tmp_path, ANSIBLE_COLLECTIONS_PATH=str(installed))
    assert "ansible_local.gpuprov" in said


def test_ansible_test_finds_it_sane(source: Path, tmp_path: Path) -> None:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    words = [word for name in _SANITY for word in ("--test", name)]
    said = run("ansible-test", "sanity", "--python", version, *words, cwd=source, HOME=str(tmp_path))
    assert [name for name in _SANITY if f'Running sanity test "{name}"' not in said] == []
