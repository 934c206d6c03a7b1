"""What the controller needs for a thousand hosts: memory, threads, time against hosts × time / forks, and lost events.

    python -m benchmarks.thousand_hosts [--hosts 1000] [--forks 100] [--seconds 20] [--latency 0.05] [--healthy]

The hosts are played by a process of its own (tests/integration/fake_hosts.py) that answers every packet 50 ms late; of
a hundred hosts ten are in trouble: refuse, hang, drop the connection, answer garbage. The agent there works for
`--seconds`. Beside the server only this machine's CPU sets a limit, and the server takes a part of it.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from tests.integration.fake_hosts import playing

_SAMPLES_PER_SECOND = 10


def main() -> None:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=1000)
    parser.add_argument("--forks", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--latency", type=float, default=0.05)
    parser.add_argument("--healthy", action="store_true", help="no host in trouble")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gpuprov-bench-") as name:
        folder = Path(name)
        with playing(folder, *_options(given)):
            _measure(folder, given.forks)
        _compare(folder, given)


def _options(given: argparse.Namespace) -> tuple[str, ...]:
    words = ("--hosts", str(given.hosts), "--seconds", str(given.seconds), "--latency", str(given.latency))
    return (*words, "--kinds", ",".join(["works"] * given.hosts)) if given.healthy else words


def _measure(folder: Path, forks: int) -> None:
    """Run the controller; print what it took."""
    command = (
        str(Path(sys.executable).parent / "gpuprov"), "install", "--hosts", str(folder / "inventory.ini"), "--json",
        "--forks", str(forks), "--host-timeout", "30", "--report", str(folder / "report.html"),
    )  # fmt: skip
    environment = {**os.environ, "HOME": str(folder), "XDG_STATE_HOME": str(folder / "state")}
    begun = time.perf_counter()
    with (folder / "events.jsonl").open("wb") as events:
        process = subprocess.Popen(command, stdout=events, stderr=subprocess.DEVNULL, env=environment)
        peak: collections.Counter[str] = collections.Counter()
        done = threading.Event()
        watcher = threading.Thread(target=_watch, args=(process.pid, peak, done))
        watcher.start()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        done.set()
        watcher.join()
    (folder / "wall").write_text(str(time.perf_counter() - begun))
    print(f"exit code {process.returncode}; peak memory {usage.ru_maxrss / 1024:.0f} MiB; most threads "
          f"{peak['Threads']}; CPU {usage.ru_utime + usage.ru_stime:.1f} s")  # fmt: skip


def _watch(pid: int, peak: collections.Counter[str], done: threading.Event) -> None:
    while not done.wait(1 / _SAMPLES_PER_SECOND):
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{pid}/status").read_text()
            found = re.search(r"^Threads:\s+(\d+)", text, re.MULTILINE)
            peak["Threads"] = max(peak["Threads"], int(found.group(1)) if found else 0)


def _compare(folder: Path, given: argparse.Namespace) -> None:
    """Compare what the hosts sent with what the controller told, and the time with what it has to be."""
    told: collections.Counter[str] = collections.Counter()
    summary: dict[str, Any] = {}
    for line in (folder / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "Summary":
            summary = event
        elif event["event"] in _SENT_BY_HOSTS or (event["event"] == "Finished" and event["seconds"]):
            told[event["host"]] += 1
    sent = json.loads((folder / "sent.json").read_text())
    lost = {host: count - told[host] for host, count in sent.items() if count != told[host]}
    print(f"events sent {sum(sent.values())}, told {sum(told.values())}; hosts with a difference: {len(lost)} "
          f"{dict(list(lost.items())[:5])}")  # fmt: skip
    seconds = [float(host["seconds"]) for host in summary["hosts"]]
    wall = float((folder / "wall").read_text())
    least = given.hosts * given.seconds / given.forks
    print(f"wall {wall:.1f} s; hosts × {given.seconds:g} s / forks = {least:.1f} s: {wall / least:.2f} times; "
          f"by the hosts' own seconds {sum(seconds) / given.forks:.1f} s")  # fmt: skip
    for result, number in collections.Counter(str(host["result"]) for host in summary["hosts"]).most_common():
        print(f"  {number:5} {result}")
    for cause in summary["causes"]:
        print(f"  {len(cause['hosts']):5} {cause['what']}"[:110])
    report = folder / "report.html"
    if report.exists():
        print(f"report {report.stat().st_size / 1024:.0f} KiB")


_SENT_BY_HOSTS = ("Started", "Planned", "ChangeStarted", "ChangeProgress", "ChangeDone")

if __name__ == "__main__":
    main()
