"""Pins that keep packages out: apt's own answer, recorded on Debian 12, and the records of preferences."""

from __future__ import annotations

import pytest

from gpuprov.packages.sources import PinnedOut, parse_policy, pin_problems, pins_on

# `apt-cache policy` of apt 2.6.1 on a host with the preferences below.
POLICY = """\
site-gpu-tools:
  Installed: (none)
  Candidate: (none)
  Version table:
     1.0 -1
        500 http://10.213.10.1:8000/apt ./ Packages
docker.io:
  Installed: (none)
  Candidate: 20.10.24+dfsg1-1+deb12u1+b4
  Version table:
     20.10.24+dfsg1-1+deb12u1+b4 500
        500 http://mirror.example.org/debian bookworm/main amd64 Packages
nowhere:
  Installed: (none)
  Candidate: (none)
  Version table:
containerd:
  Installed: 1.6.20~ds1-1+deb12u1
  Candidate: 1.6.20~ds1-1+deb12u1
  Version table:
 *** 1.6.20~ds1-1+deb12u1 100
        100 /var/lib/dpkg/status
"""
PREFERENCES = """\
# the site's own
Package: libtirpc3 site-*
Pin: release *
Pin-Priority: -1

Explanation: nothing of docker's
Package: /^docker/
Pin: origin "download.docker.com"
Pin-Priority: -10

Package: *
Pin: release o=Debian
Pin-Priority: 500
"""


def test_a_package_with_versions_and_no_candidate_is_pinned_out() -> None:
    assert parse_policy(POLICY) == {"site-gpu-tools": ("1.0",)}


@pytest.mark.parametrize(
    ("name", "places"),
    [
        ("site-gpu-tools", ("/etc/apt/preferences.d/site:2",)), ("libtirpc3", ("/etc/apt/preferences.d/site:2",)),
        ("docker-ce", ("/etc/apt/preferences.d/site:7",)), ("runc", ()),
    ],
)  # fmt: skip
def test_the_records_on_a_package_are_told_with_their_lines(name: str, places: tuple[str, ...]) -> None:
    assert pins_on({"/etc/apt/preferences.d/site": PREFERENCES}, name) == places


def test_the_problem_names_the_file_and_what_apt_says() -> None:
    (one,) = pin_problems((PinnedOut("site-gpu-tools", ("1.0",), ("/etc/apt/preferences.d/site:2",)),))
    assert one.what == "a pin in apt's preferences keeps site-gpu-tools out"
    assert "apt-cache policy site-gpu-tools: Candidate: (none), of 1.0" in one.evidence
    assert one.next_step.startswith("${EDITOR:-vi} +2 /etc/apt/preferences.d/site")
    (unknown,) = pin_problems((PinnedOut("x", ("1",), ()),))
    assert unknown.next_step.startswith("grep -rn")
