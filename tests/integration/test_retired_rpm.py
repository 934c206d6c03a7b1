"""nvidia-docker's repositories, key and packages before a real dnf and a real zypper: they go, and come back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpuprov.core.changes import Change
from gpuprov.facts.host import HostFacts, gather
from gpuprov.packages import retired
from gpuprov.packages.interface import COPIES
from gpuprov.packages.keys import gather_keys
from gpuprov.packages.rpm import RemoveRpms
from gpuprov.protocol.spec import HostSpec
from tests.integration.rpm_host import RpmHost
from tests.integration.rpm_repositories import (
    NEEDS,
    Repository,
    configure,
    host,
    install,
    manager,
    refresh,
    repository,
    tell,
    template,
)
from tests.lab.rpm_repository import TOOLS

__all__ = ["host", "repository", "template"]
pytestmark = [*NEEDS, pytest.mark.slow]
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


def rpms(host: RpmHost) -> set[str]:
    return set(host.run(("rpm", "-qa")).stdout.split())


def test_packages_come_back_from_copies(host: RpmHost, repository: Repository) -> None:
    configure(host, repository.spec)
    refresh(host)
    install(host, TOOLS.name)
    before_all = rpms(host)
    change = RemoveRpms(manager(host), _NAMES)
    before = change.capture(host)
    change.apply(host, tell)
    assert {name.rsplit("-", 2)[0] for name in before_all - rpms(host)} == set(_NAMES)
    # The repository is not needed any more.
    for path in repository.folder.rglob("*.rpm"):
        path.unlink()
    assert change.irreversible(host, before, {}, ()) == ()
    change.undo(host, before, {})
    change.undo(host, before, {})
    assert rpms(host) == before_all
    assert host.status(COPIES) is None


def test_what_no_repository_has_any_more_is_told(host: RpmHost, repository: Repository) -> None:
    configure(host, repository.spec)
    refresh(host)
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


def test_another_package_keeps_what_it_needs(host: RpmHost, repository: Repository) -> None:
    configure(host, repository.spec)
    refresh(host)
    install(host, TOOLS.name)
    assert manager(host).needed_by(host, ("site-gpu-library",)) == {"site-gpu-library": (TOOLS.name,)}
    assert manager(host).needed_by(host, _NAMES) == {}


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
