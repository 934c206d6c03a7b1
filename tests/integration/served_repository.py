"""A signed repository that a server on loopback offers, and what a user writes of it into an inventory."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpuprov.protocol.spec import HostSpec, SiteRepository
from tests.loopback import served


class ServedRepository:
    """A folder with an index, a key and its fingerprint; where it is served; and the gpg home that signs it."""

    def __init__(self, folder: Path, gnupg: Path, url: str) -> None:
        self.folder, self.gnupg, self.url = folder, gnupg, url
        self.fingerprint = (folder / "fingerprint").read_text()

    @property
    def spec(self) -> HostSpec:
        return HostSpec(repositories=(SiteRepository("site", self.url, f"{self.url}/key.asc", self.fingerprint),))


@contextmanager
def served_directly(folder: Path) -> Iterator[str]:
    """Serve a folder to programs that use no proxy; give its URL."""
    with served(folder) as url, pytest.MonkeyPatch.context() as patch:
        for name in ("http_proxy", "HTTP_PROXY"):
            patch.delenv(name, raising=False)
        yield url


@contextmanager
def served_copy(template: Path, folder: Path) -> Iterator[tuple[Path, Path, str]]:
    """Serve a copy in `folder`/www of the repository in `template`/www; give folder, gpg home and URL."""
    shutil.copytree(template / "www", folder / "www")
    with served_directly(folder / "www") as url:
        yield folder / "www", template / "gnupg", url
