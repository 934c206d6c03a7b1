"""NVIDIA's security bulletins as CSAF 2.0 documents (github.com/NVIDIA/product-security), read into advisories. Pure.

A product id names platform, product and version: `linuxr580_tesla_all_driver_versions_prior_to_580_178_04` is affected,
`linuxr580_tesla_580_178_04` is fixed. Other platforms and products of a bulletin are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from gpuprov.protocol.advisories import DRIVER, TOOLKIT, Advisory
from gpuprov.protocol.errors import GpuprovError
from gpuprov.protocol.versions import version_numbers

# The same release serves all three; data-centre rows count where a bulletin has them.
_SERIES = ("tesla", "nvidia_rtx_quadro_nvs", "geforce")
_DRIVER = re.compile(rf"linuxr(?P<branch>\d{{3,4}})_(?P<series>{'|'.join(_SERIES)})_(?P<rest>.+)")
_TOOLKIT = re.compile(r"linux_nvidia_container_toolkit_(?P<rest>.+)")
_VERSION = re.compile(r"\d+(?:_\d+)+")
_BEFORE = re.compile(r".*prior_to_(?P<version>\d+(?:_\d+)+)")


def is_csaf(data: Any) -> bool:
    """Say whether JSON is a CSAF document: the folders of bulletins have records of single CVEs beside it."""
    return isinstance(data, dict) and isinstance(data.get("document"), dict) and "csaf_version" in data["document"]


def parse_csaf(content: bytes, origin: str) -> tuple[Advisory, ...]:
    """Return the advisories of a document; none if it is about other products.

    Raises GpuprovError that names the document if it is malformed, cut off, or lacks what a row needs.
    """
    try:
        data = json.loads(content)
        if not is_csaf(data):
            raise ValueError("it is no CSAF document")
        tracking = data["document"]["tracking"]
        published = str(tracking["current_release_date"])[:10]
        bulletin = f"{str(tracking['initial_release_date'])[:4]}/{tracking['id']}"
        found: dict[tuple[str, str, str], list[tuple[str, float, str]]] = {}
        for one in data["vulnerabilities"]:
            for key, fixed_in in _rows(one):
                found.setdefault(key, []).append((fixed_in, _score(one), str(one["cve"])))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else str(error)
        raise GpuprovError(
            f"the advisory {origin} can't be read, so nothing was changed", reason[:200],
            "get the document again: it is malformed or cut off",
        ) from None  # fmt: skip
    return tuple(_advisory(bulletin, published, key, rows) for key, rows in _preferred(found).items())


def _rows(vulnerability: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str, str], str]]:
    """Yield (product, branch, series) and the first fixed release for each product that one CVE affects."""
    status = vulnerability["product_status"]
    fixed: dict[tuple[str, str, str], list[str]] = {}
    for name in status.get("fixed", ()):
        key, rest = _key(str(name))
        if key and _VERSION.fullmatch(rest):
            fixed.setdefault(key, []).append(rest.replace("_", "."))
    for name in dict.fromkeys(map(str, status.get("known_affected", ()))):
        key, rest = _key(name)
        if not key:
            continue
        before = _BEFORE.fullmatch(rest)
        releases = fixed.get(key, [])
        if not releases and before is None:
            raise ValueError(f"{name}: no release fixes it")
        yield (
            key,
            min(releases, key=version_numbers) if releases else str(before and before["version"]).replace("_", "."),
        )


def _key(name: str) -> tuple[tuple[str, str, str] | None, str]:
    if found := _DRIVER.fullmatch(name):
        return (DRIVER, found["branch"], found["series"]), found["rest"]
    if found := _TOOLKIT.fullmatch(name):
        return (TOOLKIT, "", ""), found["rest"]
    return None, ""


def _score(vulnerability: Mapping[str, Any]) -> float:
    scores = [
        float(one[kind]["baseScore"])
        for one in vulnerability["scores"]
        for kind in ("cvss_v3", "cvss_v4")
        if kind in one
    ]
    return max(scores)


def _preferred(found: Mapping[tuple[str, str, str], list[tuple[str, float, str]]]) -> dict[tuple[str, str], Any]:
    """Return one list of rows for each product and branch, of the first series that the bulletin has."""
    ordered = sorted(found, key=lambda key: _SERIES.index(key[2]) if key[2] else 0)
    chosen: dict[tuple[str, str], Any] = {}
    for product, branch, series in ordered:
        chosen.setdefault((product, branch), found[product, branch, series])
    return chosen


def _advisory(bulletin: str, published: str, key: tuple[str, str], rows: list[tuple[str, float, str]]) -> Advisory:
    fixed_in = max((fixed for fixed, _, _ in rows), key=version_numbers)
    cves = tuple(sorted({cve for _, _, cve in rows}))
    return Advisory(bulletin, published, key[0], key[1], fixed_in, max(score for _, score, _ in rows), cves)
