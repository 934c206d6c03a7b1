"""What NVIDIA has retired: packages, repositories and key of nvidia-docker 1 and 2. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from gpuprov.core.changes import Change, RemoveFile, WriteFile
from gpuprov.packages.keys import RemoveRpmKey, fingerprints, without_key
from gpuprov.packages.sources import OURS, foreign_entries, text_of
from gpuprov.protocol.errors import GpuprovError
from gpuprov.protocol.spec import HostSpec
from gpuprov.protocol.versions import version_numbers

if TYPE_CHECKING:
    from gpuprov.core.changes import FileFact

# The command and docker's daemon.json (2), the command and the plugin (1).
WRAPPERS = ("nvidia-docker2", "nvidia-docker")
# What docker starts: until 3.5 the program itself, then a name for NVIDIA's toolkit.
RUNTIMES = ("nvidia-container-runtime", "nvidia-container-runtime-hook")
# What these need, of NVIDIA's toolkit.
TOOLKIT = (
    "nvidia-container-toolkit", "nvidia-container-toolkit-base", "libnvidia-container-tools", "libnvidia-container1",
)  # fmt: skip
# The first release after nvidia-docker2's last.
_FIRST_AFTER = (1, 14)
# NVIDIA's repositories for single distributions, and of nvidia-docker; the one for all has replaced them. Beside it
# they offer older packages of the same names, and mostly another Signed-By. Source: the toolkit's installation guide.
REPOSITORY = re.compile(
    r"https?://nvidia\.github\.io/"
    r"(nvidia-docker|nvidia-container-runtime|libnvidia-container/(?!(stable|experimental)/(deb|rpm)/))\b"
)
_ANY_OF_NVIDIAS = re.compile(r"https?://nvidia\.github\.io/")
TRUSTED = "/etc/apt/trusted.gpg"
# apt trusts it for every repository: a key that no repository needs should be removed.
_FOR_ALL = re.compile(r"/etc/apt/trusted\.gpg|/etc/apt/trusted\.gpg\.d/[A-Za-z0-9_.-]+\.(gpg|asc)")
# What the installation guides of these packages called their keys.
_NAMED = re.compile(
    rf"(/usr/share/keyrings|/etc/apt/keyrings)/(?!{OURS})"
    r"[\w.-]*(nvidia-docker|nvidia-container-runtime|libnvidia-container)[\w.-]*\.(gpg|asc)"
)
_REASON = "the key of NVIDIA's retired repositories"


def retired_packages(installed: Mapping[str, str]) -> tuple[str, ...]:
    """Return the installed packages of nvidia-docker 1 and 2, without NVIDIA's toolkit."""
    return tuple(name for name in (*WRAPPERS, *RUNTIMES) if name in installed)


def old_packages(installed: Mapping[str, str]) -> tuple[str, ...]:
    """Return these with the toolkit that they have brought: beside them, or as old as the last one that they did."""
    retired, found = retired_packages(installed), tuple(name for name in TOOLKIT if name in installed)
    is_old = any(version_numbers(installed[name]) < _FIRST_AFTER for name in found)
    return (*retired, *found) if retired or is_old else ()


def retired_sources(files: Mapping[str, FileFact]) -> tuple[str, ...]:
    """Return apt's sources, and .repo files, that name one of the retired repositories."""
    apt = [path for path, one in foreign_entries(files) if REPOSITORY.match(one.uri)]
    rpm = [path for path, sections in _repo_files(files) if any(is_gone for _, is_gone in sections)]
    return tuple(dict.fromkeys((*apt, *rpm)))


def key_files(files: Mapping[str, FileFact], fingerprint: str) -> tuple[str, ...]:
    """Return the keyrings with the key of the retired repositories that no other apt source needs."""
    keyrings = [path for path in files if _FOR_ALL.fullmatch(path) or _NAMED.fullmatch(path)]
    holding = [path for path in keyrings if fingerprint in _fingerprints(files[path].content)]
    others = (one for _, one in foreign_entries(files) if not REPOSITORY.match(one.uri))
    left = [one.option("Signed-By") for one in others if _ANY_OF_NVIDIAS.match(one.uri)]
    if "" in left:
        # Such a source takes every key that apt trusts.
        return tuple(path for path in holding if not _FOR_ALL.fullmatch(path))
    named = {word for value in left for word in value.split()}
    return tuple(path for path in holding if path not in named)


def plan(files: Mapping[str, FileFact], trusted_keys: Collection[str], spec: HostSpec) -> tuple[Change, ...]:
    """Return the changes that remove what `repos.plan` leaves of the retired repositories and their key.

    `trusted_keys`: those of rpm.
    """
    fingerprint = spec.toolkit_key_fingerprint
    # A .repo file that stays, or one of gpuprov's, may name a repository of NVIDIA's that has this key.
    left = [text for _, sections in _repo_files(files, ours=True) for text, is_gone in sections if not is_gone]
    needs_key = any(_ANY_OF_NVIDIAS.search(text) or "nvidia-container-toolkit" in text for text in left)
    is_left = fingerprint in trusted_keys and spec.toolkit != "nvidia" and not needs_key
    from_rpm = (RemoveRpmKey(fingerprint),) if is_left else ()
    return (*plan_keys(files, fingerprint), *plan_repo_files(files), *from_rpm)


def plan_keys(files: Mapping[str, FileFact], fingerprint: str) -> tuple[Change, ...]:
    """Return the changes that remove the key from these keyrings; a keyring without another key is removed."""
    found = ((path, files[path]) for path in key_files(files, fingerprint))
    return tuple(
        RemoveFile(path, _REASON) if set(_fingerprints(file.content)) == {fingerprint}
        else WriteFile(path, without_key(file.content, fingerprint), file.mode)
        for path, file in found
    )  # fmt: skip


def _fingerprints(content: bytes) -> tuple[str, ...]:
    try:
        return fingerprints(content)
    except GpuprovError:
        return ()


def plan_repo_files(files: Mapping[str, FileFact]) -> tuple[Change, ...]:
    """Return the changes that take the retired repositories out of .repo files; a file that has no other goes."""
    changes: list[Change] = []
    for path, sections in _repo_files(files):
        left = [text for text, is_gone in sections if not is_gone]
        if not any(text.lstrip().startswith("[") for text in left) and len(left) < len(sections):
            changes.append(RemoveFile(path, "NVIDIA has retired this repository"))
        elif len(left) < len(sections):
            changes.append(WriteFile(path, "".join(left).encode("utf-8", "surrogateescape"), files[path].mode))
    return tuple(changes)


def _repo_files(
    files: Mapping[str, FileFact], *, ours: bool = False
) -> Iterator[tuple[str, Sequence[tuple[str, bool]]]]:
    """Yield the path of each .repo file and its sections, the text before the first too; True: retired."""
    pattern = re.compile(rf"/etc/(yum\.repos\.d|zypp/repos\.d)/{'' if ours else f'(?!{OURS})'}[^/]+\.repo")
    for path in filter(pattern.fullmatch, files):
        parts = re.split(r"(?m)^(?=\[)", text_of(files[path]))
        yield path, [(part, _is_retired(part)) for part in parts if part]


def _is_retired(section: str) -> bool:
    found = re.search(r"(?m)^\s*baseurl\s*=\s*(.*(?:\n[ \t]+.*)*)", section)
    words = re.split(r"[\s,]+", found[1].strip()) if found else []
    return bool(words) and all(REPOSITORY.match(word) for word in words)
