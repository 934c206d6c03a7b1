"""The options that make an unpacked bundle the only source of apt."""

from __future__ import annotations

from gpuprov.bundle.manifest import BundleFacts
from gpuprov.core.places import FOLDER, SOURCES_LIST


def apt_options(bundle: BundleFacts | None) -> tuple[str, ...]:
    """Return the words that make the unpacked bundle apt's only source, and keep its lists apart from the host's.

    Without a bundle there are none.
    """
    if bundle is None:
        return ()
    settings = {
        "Dir::Etc::sourcelist": SOURCES_LIST,
        "Dir::Etc::sourceparts": f"{FOLDER}/none",
        "Dir::State::lists": f"{FOLDER}/lists",
        "Dir::Cache::archives": f"{FOLDER}/archives",
        # The host's own would be rebuilt from the bundle's lists.
        "Dir::Cache::pkgcache": "",
        "Dir::Cache::srcpkgcache": "",
        "Acquire::Languages": "none",
        # Nothing is downloaded, and the folder is closed to apt's own user.
        "APT::Sandbox::User": "root",
    }
    return tuple(word for name, value in settings.items() for word in ("-o", f"{name}={value}"))
