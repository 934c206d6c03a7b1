"""Driver releases that are known by their digest: the newest of each branch, so that a branch can be asked for. Pure.

Source: the SHA-256 table of Google's compute-gpu-installation (drivers_list.py), of .run files for x86_64; NVIDIA's own
.sha256sum files agree where both exist. A release that is not here is installed as well: by its full version.
"""

from __future__ import annotations

# Branch → (newest known release, SHA-256 of its .run for x86_64).
_NEWEST = {
    "510": ("510.108.03", "410a515e78df29c2cba4ac0b497889ce0ff1b04cfc711ff889e2dfc80f0da0d8"),
    "525": ("525.147.05", "435183ea545c7e12e3044d7986da07758a3369befe7ee519eb3b063d4af3fef1"),
    "535": ("535.309.01", "288b4902ea79b017b49a9226a84f7eaa3e6b49ca0146ae50277c2fe19dd39803"),
    "550": ("550.163.01", "ef8149f5b34595460145e9fbf82d3c92ee46735b856067aa94887b975cab9a2e"),
    "560": ("560.35.03", "f2932c92fadd43c5b2341be453fc4f73f0ad7185c26bb7a43fbde81ae29f1fe3"),
    "565": ("565.77", "0a7aa742c46bcf34d766982402d17b3db1fdb3bc1b89344d70cd123c1cb3147c"),
    "570": ("570.211.01", "6d038c4fb83448ea4a3d25bdab1556514d5ac1da43377859e0586219a25ff72b"),
    "575": ("575.64.05", "85f2b50f912261c1917a0b2cf7e1f9743affd008fdc0f209f4d5563f774d502d"),
    "580": ("580.159.04", "c1e66761b088d17b3adf6cb6979de9af38be2684d102b001a176dcfafabdca1e"),
    "590": ("590.48.01", "b9e2f80693781431cc87f4cd29109e133dcecb50a50d6b68d4b3bf2d696bd689"),
    "595": ("595.84", "99c404e52131bf27bca6da0268dcce3ebedc7a73ab174071a995cf1a6c5eba06"),
    "610": ("610.43.02", "3034a054bb4cdf7752ff8dc272564cb105513804bff53538945901b16ca77463"),
}
# Older releases that the same table has.
_OTHERS = {
    "580.95.05": "849ef0ef8e842b9806b2cde9f11c1303d54f1a9a769467e4e5d961b2fe1182a7",
    "595.71.05": "36203b8960b7e49c8a42f6ba1f5863cde34a05e93d2b24b798af06dd846f6b82",
}
# The branch that is supported longest (580 is the long-term one until June 2028) and serves Maxwell to Blackwell.
LONG_TERM_BRANCH = "580"


def branches() -> tuple[str, ...]:
    """Return the branches with a known release, oldest first."""
    return tuple(_NEWEST)


def resolved(version: str) -> str:
    """Return the release that is meant: `580` is the newest known of its branch, `latest` that of the long-term one.

    Anything else, and a branch that is not known, is returned as it is.
    """
    branch = LONG_TERM_BRANCH if version == "latest" else version
    return _NEWEST[branch][0] if branch in _NEWEST else version


def known_sha256(version: str, architecture: str) -> str:
    """Return the SHA-256 of a release's .run file, nothing if it is not known."""
    if architecture != "x86_64":
        return ""
    return {**_OTHERS, **dict(_NEWEST.values())}.get(version, "")
