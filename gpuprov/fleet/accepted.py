"""Results of `gpuprov accept` over hosts: compared, kept as one JSON file a host, signed.

There is no table of speeds: a figure counts against the median of the same figure of the same GPU model in the fleet,
and against the last accepted result of the same GPU.
"""

from __future__ import annotations

import collections
import itertools
import json
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from gpuprov.agent.result import HostResult, machines
from gpuprov.checks.accept import PEER, SPEEDS
from gpuprov.checks.health import concluded
from gpuprov.core.files import make_user_folder, write_whole
from gpuprov.core.system import System
from gpuprov.fleet.history import Run, state_folder, stored, without_secrets
from gpuprov.protocol.dataclass import asdict, dataclass, replace
from gpuprov.protocol.errors import ExitCode
from gpuprov.protocol.events import GpuMeasured, HealthFound

# An outlier is beyond both below the median, or beyond the share below its own last result.
_SHARE, _DEVIATIONS, _LEAST = 0.05, 4, 3
_SLOW = "accept-slow"


@dataclass(frozen=True)
class AcceptRecord:
    """The file of a host: its last run, and `accepted`, the figures of the last one that found nothing."""

    host: str
    run: str
    began: str
    exit_code: int
    inventory: tuple[str, ...] = ()
    findings: tuple[HealthFound, ...] = ()
    measured: tuple[GpuMeasured, ...] = ()
    accepted: tuple[GpuMeasured, ...] = ()


def read_records() -> dict[Path, AcceptRecord]:
    """Return the files of hosts; broken ones are left out."""
    return dict(stored("accepted", AcceptRecord))


def compared(
    results: Sequence[HostResult], earlier: Mapping[Path, AcceptRecord], inventory: tuple[str, ...]
) -> tuple[HostResult, ...]:
    """Return the results with a finding for each outlier; a host that has one is degraded.

    Hosts of the same inventory that are not in this run count with their kept figures.
    """
    here = {one.host: one.measured for one in machines(results)}
    before = {one.host: one.accepted for one in earlier.values() if one.inventory == inventory}
    slow = _slow({**before, **here}, before)
    found = []
    for result in results:
        outliers = slow.get(result.host, ())
        if outliers and result.exit_code in (ExitCode.DONE, ExitCode.DEGRADED, ExitCode.UNFIT):
            health = (*result.health, *outliers)
            ended = concluded(health, "")
            code = ExitCode.DEGRADED if result.exit_code == ExitCode.DONE else result.exit_code
            result = replace(result, health=health, problems=ended.problems, exit_code=code, summary=ended.summary)
        found.append(result)
    return tuple(found)


def side_by_side(results: Sequence[HostResult]) -> Iterator[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
    """Yield a table for each model: its name, the columns, and a row for each host, those with outliers first.

    A cell is the figure of the host's slowest GPU, in GB/s but for `rate`; the last one names the outliers.
    """
    models: dict[str, dict[str, dict[str, float]]] = {}
    slow: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
    for result in machines(results):
        for gpu in result.measured:
            row = models.setdefault(gpu.model, {}).setdefault(result.host, {})
            for name, exact, value in _figures(gpu):
                name = PEER.strip() if exact.startswith(PEER) else name
                row[name] = min(value, row.get(name, value))
            found = (one for one in result.health if one.rule == _SLOW and one.uuid == gpu.uuid)
            slow[gpu.model, result.host] += [f"GPU {one.gpu}: {one.what}" if one.gpu else one.what for one in found]
    for model, hosts in models.items():
        names = dict.fromkeys((*SPEEDS, PEER.strip(), *(name for row in hosts.values() for name in row)))
        known = [name for name in names if any(name in row for row in hosts.values())]
        middles = {name: statistics.median(row[name] for row in hosts.values() if name in row) for name in known}
        ordered = sorted(hosts.items(), key=lambda one: not slow[model, one[0]])
        rows = [(host, *_cells(row, known), "; ".join(slow[model, host])) for host, row in ordered]
        yield model, ("host", *known, "outliers"), [("(median)", *_cells(middles, known), ""), *rows]


def _cells(row: Mapping[str, float], names: Sequence[str]) -> Iterator[str]:
    """Yield the figures of a row, "-" for one that a host does not have."""
    for name in names:
        yield f"{row[name] / (1 if name == 'rate' else 1e9):.1f}" if name in row else "-"


def _slow(fleet: Mapping[str, Sequence[GpuMeasured]], before: Mapping[str, Sequence[GpuMeasured]]
          ) -> dict[str, list[HealthFound]]:  # fmt: skip
    """Return host → its outliers."""
    by_host: dict[tuple[str, str], dict[str, list[float]]] = collections.defaultdict(dict)
    for host, gpu in ((host, gpu) for host, gpus in fleet.items() for gpu in gpus):
        for name, _, value in _figures(gpu):
            by_host[gpu.model, name].setdefault(host, []).append(value)
    usual = {name: _usual(hosts.values()) for name, hosts in by_host.items()}
    found: dict[str, list[HealthFound]] = collections.defaultdict(list)
    for host, gpus in fleet.items():
        last = {(gpu.uuid, name): value for gpu in before.get(host, ()) for name, value in gpu.figures.items()}
        pairs: list[tuple[GpuMeasured, str, str]] = []
        for gpu in gpus:
            for name, exact, value in _figures(gpu):
                like = usual[gpu.model, name]
                # Of two hosts, one with a single GPU leaves too few of the other's.
                like = like if like[2] >= _LEAST else _usual([by_host[gpu.model, name][host]])
                seen = _fault(exact, value, *like, last.get((gpu.uuid, exact)))
                if seen and exact.startswith(PEER):
                    pairs.append((gpu, exact.removeprefix(PEER), seen))
                elif seen:
                    found[host].append(_finding(gpu, f"slower than its like: {exact}", seen))
        found[host] += _links(gpus, pairs)
    return found


def _usual(hosts: Collection[list[float]]) -> tuple[float, float, int]:
    """Return median, median absolute deviation and number of the figures of hosts.

    No host counts with more figures than most have, or one that lies would decide what is usual.
    """
    most = statistics.median_low(map(len, hosts))
    values = [value for of_host in hosts for value in of_host[:most]]
    middle = statistics.median(values)
    return middle, statistics.median(abs(one - middle) for one in values), len(values)


def _figures(gpu: GpuMeasured) -> Iterator[tuple[str, str, float]]:
    """Yield (name to compare, exact name, value): the fastest peer compares with the fastest peer of others."""
    figures = {name: value for name, value in gpu.figures.items() if value > 0}
    peers = sorted(((value, name) for name, value in figures.items() if name.startswith(PEER)), reverse=True)
    yield from ((f"{PEER}{number}", name, value) for number, (value, name) in enumerate(peers))
    for name, value in figures.items():
        # Beside the speeds of peers and the site's own figures; a clock, heat or power is no result.
        if name in SPEEDS or not gpu.uuid:
            yield name, name, value


def _fault(name: str, value: float, middle: float, spread: float, count: int, last: float | None) -> str:
    """Return why a figure is an outlier, "" if it is none."""
    outside = count >= _LEAST and middle - value > _DEVIATIONS * spread
    told = [(middle, f"the median of {count} of the same model")] if outside else []
    told += [(last, "its own last accepted result")] if last else []
    for wanted, what in told:
        if value < (1 - _SHARE) * wanted:
            return f"{name}: {value:.4g}, {100 * (1 - value / wanted):.0f} % below {wanted:.4g}, {what}"
    return ""


def _links(gpus: Sequence[GpuMeasured], pairs: list[tuple[GpuMeasured, str, str]]) -> Iterator[HealthFound]:
    """Yield the GPUs that all slow links have in common, each link once: one bad GPU slows the links of all others."""
    names = {gpu.uuid: gpu for gpu in gpus}
    while pairs:
        ends = collections.Counter(uuid for gpu, peer, _ in pairs for uuid in {gpu.uuid, peer} if uuid in names)
        worst = max(names, key=lambda uuid: ends[uuid])
        ours = [one for one in pairs if worst in (one[0].uuid, one[1])]
        other = sorted({names[uuid].gpu for gpu, peer, _ in ours for uuid in (gpu.uuid, peer) if uuid in names} -
                       {names[worst].gpu})  # fmt: skip
        yield _finding(names[worst], f"slow link to GPU {', '.join(other)}", "\n".join(seen for *_, seen in ours))
        pairs = [one for one in pairs if worst not in (one[0].uuid, one[1])]


def _finding(gpu: GpuMeasured, what: str, seen: str) -> HealthFound:
    step = "gpuprov health; nvidia-smi topo -m; nvidia-smi nvlink --status; nvidia-smi -q -d PERFORMANCE,CLOCK"
    return HealthFound("degraded", _SLOW, gpu.gpu, gpu.uuid, what, f"{gpu.uuid}: {seen}".lstrip(": "), step)


def write_records(run: Run, earlier: Mapping[Path, AcceptRecord], key: str, secrets: Sequence[str]) -> tuple[Path, ...]:
    """Write the file of each host that was measured, and with a `key` of the user's gpg its signature; return them.

    Hosts of the same name in several inventories have a file each.
    Raises OSError, or GpuprovError if gpg can't sign.
    """
    place = state_folder("accepted")
    make_user_folder(place)
    place.chmod(0o700)
    paths = []
    known = {one.host: path for path, one in earlier.items() if one.inventory == run.inventory}
    for one in (one for one in run.results if one.measured or one.health):
        names = (f"{quote(one.host, safe='')}{f'.{number}' if number else ''}.json" for number in itertools.count())
        path = known.get(one.host) or next(place / name for name in names if place / name not in earlier)
        former = earlier.get(path)
        accepted = one.measured if one.exit_code == ExitCode.DONE else former.accepted if former else ()
        data = AcceptRecord(
            one.host, run.identifier, run.began, int(one.exit_code), run.inventory, one.health, one.measured, accepted
        )
        text = json.dumps(without_secrets(asdict(data), secrets), ensure_ascii=False, indent=1) + "\n"
        content = text.encode("utf-8", "replace")
        signed = signature(content, key)
        beside = path.with_name(f"{path.name}.asc")
        beside.unlink(missing_ok=True)
        write_whole(path, content, 0o600, None)
        if signed:
            write_whole(beside, signed, 0o600, None)
        paths.append(path)
    return tuple(paths)


def signature(content: bytes, key: str) -> bytes:
    """Return the signature by a key of the user's gpg, b"" without a key. Raises GpuprovError if gpg can't sign."""
    if not key:
        return b""
    from gpuprov.bundle_create.create import sign, user_gpg

    return sign(System(), content, key, user_gpg())
