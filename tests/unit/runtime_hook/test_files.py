"""What a host's path must be to be mounted into a container though it is not the driver's: root's, without links."""

import os
import socket
from pathlib import Path

import pytest

from gpuprov.runtime_hook.files import is_trusted

pytestmark = pytest.mark.root


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder as /tmp is."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def test_roots_own_folder_is_trusted(shared: Path) -> None:
    (shared / "nvidia-mps").mkdir()
    assert is_trusted(str(shared / "nvidia-mps"))


@pytest.mark.parametrize("what", ["nothing", "a user's folder", "a user's link", "root's link"])
def test_what_a_user_may_have_made_is_not(shared: Path, tmp_path: Path, what: str) -> None:
    place = shared / "nvidia-mps"
    if what == "a user's folder":
        place.mkdir()
    elif what != "nothing":
        place.symlink_to(tmp_path)
    if what.startswith("a user's"):
        os.chown(place, 1000, 1000, follow_symlinks=False)
    assert not is_trusted(str(place))


def test_a_link_on_the_way_counts_if_it_is_roots_where_nobody_else_writes(shared: Path, tmp_path: Path) -> None:
    (tmp_path / "run/service").mkdir(parents=True)
    (tmp_path / "var").symlink_to("run")
    (shared / "var").symlink_to(tmp_path / "run")
    assert is_trusted(f"{tmp_path}/var/service")
    assert not is_trusted(f"{shared}/var/service")
    (tmp_path / "loop").symlink_to("loop")
    assert not is_trusted(f"{tmp_path}/loop/service")
    os.chown(tmp_path / "var", 1000, 1000, follow_symlinks=False)
    assert not is_trusted(f"{tmp_path}/var/service")


@pytest.mark.parametrize(
    ("folder_owner", "owner", "trusted"), [(0, 0, True), (120, 120, True), (0, 120, True), (120, 121, False),
    (1000, 1000, False), (1000, 0, False)],
)  # fmt: skip
def test_persistenced_account_may_own_socket(tmp_path: Path, folder_owner: int, owner: int, trusted: bool) -> None:
    folder = tmp_path / "run/nvidia-persistenced"
    folder.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(folder / "socket"))
    os.chown(folder, folder_owner, folder_owner)
    os.chown(folder / "socket", owner, owner)
    assert is_trusted(str(folder / "socket")) is trusted


@pytest.mark.parametrize("name", ["nvidia-fabricmanager/socket", "nvidia-mps/socket", "nvidia-persistenced/other"])
def test_no_other_services_socket_may(tmp_path: Path, name: str) -> None:
    place = tmp_path / "run" / name
    place.parent.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(place))
    assert is_trusted(str(place))
    os.chown(place, 120, 120)
    assert not is_trusted(str(place))


@pytest.mark.parametrize("what", ["a file", "a folder"])
def test_a_services_account_has_no_say_over_anything_but_its_socket(tmp_path: Path, what: str) -> None:
    place = tmp_path / "run/nvidia-persistenced/socket"
    place.parent.mkdir(parents=True)
    if what == "a file":
        place.write_text("a file")
    else:
        place.mkdir()
    os.chown(place, 120, 120)
    assert not is_trusted(str(place))
