"""A run as one HTML page: no script, nothing from elsewhere, no word from a host that is not escaped. Renders only."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Sequence

from gpuprov.fleet.causes import causes
from gpuprov.fleet.history import Run
from gpuprov.fleet.result import HostResult
from gpuprov.fleet.text import counted, listed, plain, shortened
from gpuprov.fleet.versions import spreads

# Colour never stands alone: every cell has its word or sign as well.
_STYLE = """
:root{color-scheme:light dark;--bg:#fff;--fg:#1c1c1c;--dim:#5f6368;--line:#d8dadd;--head:#f3f4f5;
--good:#126b2e;--bad:#b3141d;--warn:#8a5a00}
@media(prefers-color-scheme:dark){:root{--bg:#16181a;--fg:#e6e6e6;--dim:#a0a4a8;--line:#3a3d40;--head:#22252a;
--good:#6fce8a;--bad:#ff8a8a;--warn:#f0c060}}
*{box-sizing:border-box}
body{margin:0 auto;padding:1rem;max-width:90rem;
background:var(--bg);color:var(--fg);font:16px/1.45 system-ui,sans-serif}
h1{font-size:1.3rem;margin:0 0 .3rem}h2{font-size:1.1rem;margin:1.6rem 0 .5rem}
p{margin:.2rem 0}.dim{color:var(--dim)}
.good{color:var(--good)}.bad{color:var(--bad)}.warn{color:var(--warn)}
.counts{display:flex;flex-wrap:wrap;gap:.4rem 1.4rem;font-size:1.1rem;margin:.7rem 0}
.wide{overflow:auto;max-height:85vh;border:1px solid var(--line);border-radius:6px}
table{border-collapse:separate;border-spacing:0;font-size:.88rem;width:100%}
th,td{padding:.3rem .6rem;border-bottom:1px solid var(--line);text-align:left;vertical-align:top;white-space:nowrap}
td.text{white-space:normal;min-width:min(20rem,70vw);overflow-wrap:anywhere}
thead th{position:sticky;top:0;background:var(--head);z-index:1}
tbody th{position:sticky;left:0;background:var(--bg);font-weight:600}
@media(max-width:40rem){tbody th{white-space:normal;overflow-wrap:anywhere;min-width:7rem;max-width:35vw}}
.number{text-align:right;font-variant-numeric:tabular-nums}th.number{text-align:right}
details,.cause{border:1px solid var(--line);border-radius:6px;padding:.5rem .8rem;margin:.5rem 0}
summary{cursor:pointer}
pre{margin:.4rem 0;white-space:pre-wrap;overflow-wrap:anywhere;font-size:.85rem}
"""
_HEAD = (
    '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
    '<meta name="referrer" content="no-referrer">\n'
)
_CLASSES = {"done": "good", "reboot needed": "warn", "not run": "warn", "ok": "good", "skipped": "warn"}
_VERSION_NAMES = ("driver", "gpus", "docker", "kernel", "os")
# Columns of numbers, aligned to the right with their heads.
_NUMBERS = frozenset(("hosts", "changes", "time"))
_MOST_NAMED = 30


def render(run: Run) -> str:
    """Return the page; the same run gives the same bytes."""
    title = f"gpuprov {run.command}{' --check' if run.check else ''}"
    body = (
        *_top(run, title),
        *_causes(run.results),
        *_versions(run.results),
        *_hosts(run.results),
        *_details(run.results),
    )
    lines = (f"{_HEAD}<title>{_text(title)}: {_text(run.identifier)}</title>", f"<style>{_STYLE}</style>", "</head>",
             "<body>", *body, "</body>", "</html>")  # fmt: skip
    return "\n".join(lines) + "\n"


def _text(value: object) -> str:
    """Return what may stand between tags and within quotes: no control characters, no markup, and not without end."""
    return html.escape(shortened(plain(value)), quote=True)


def _top(run: Run, title: str) -> Iterator[str]:
    yield f"<h1>{_text(title)}</h1>"
    where = ", ".join(run.inventory) or "this machine"
    limit = f", limited to {run.limit}" if run.limit else ""
    yield f'<p class="dim">{_text(run.began.replace("T", " "))} · {_duration(run.seconds)} · {_text(where + limit)}</p>'
    counts: dict[str, int] = {}
    for result in run.results:
        counts[result.word] = counts.get(result.word, 0) + 1
    words = (f'<span class="{_class(word)}"><b>{number}</b> {_text(word)}</span>' for word, number in counts.items())
    yield f'<p class="counts"><span><b>{counted(len(run.results), "host")}</b></span> {" ".join(words)}</p>'


def _causes(results: Sequence[HostResult]) -> Iterator[str]:
    found = causes(results)
    if found:
        yield "<h2>What failed, by cause</h2>"
    for cause in found:
        yield f'<div class="cause"><p class="bad"><b>{counted(len(cause.hosts), "host")}:</b> {_text(cause.what)}</p>'
        yield f"<p>{_text(listed(cause.hosts, _MOST_NAMED))}</p>"
        yield from (f"<pre>{_text(evidence)}</pre>" for evidence in cause.evidence)
        if cause.next_step:
            yield f"<p><b>next:</b> {_text(cause.next_step)}</p>"
        yield "</div>"


def _versions(results: Sequence[HostResult]) -> Iterator[str]:
    rows = [
        (_row_head(spread.name), _cell(spread.usual), _cell(str(spread.count), "number"),
         _cell("; ".join(f"{version}: {listed(hosts, _MOST_NAMED)}" for version, hosts in spread.others), "text warn"))
        for spread in spreads(results)
    ]  # fmt: skip
    if rows:
        yield "<h2>Versions</h2>"
        yield from _table(("", "on most hosts", "hosts", "the odd ones out"), rows)


def _hosts(results: Sequence[HostResult]) -> Iterator[str]:
    """Yield the table of hosts: outcome, one column for each check, or for each step of the work, then versions."""
    versions = [name for name in _VERSION_NAMES if any(result.versions.get(name) for result in results)]
    checks = list(dict.fromkeys(check.name for result in results for check in result.checks))
    steps = list(dict.fromkeys(step for result in results for step in _steps(result)))
    rows = (
        (_row_head(result.host), _cell(result.word, _class(result.word)),
         # Beside the outcome, where it is seen without scrolling.
         _cell(result.reason, "text"), _cell(str(result.changed), "number"),
         _cell(_duration(result.seconds), "number"), *(_check_cell(result, name) for name in checks),
         *(_step_cell(result, step) for step in steps), *(_cell(result.versions.get(name, "")) for name in versions))
        for result in results
    )  # fmt: skip
    yield "<h2>Hosts</h2>"
    yield from _table(("host", "result", "reason", "changes", "time", *checks, *steps, *versions), rows)


def _steps(result: HostResult) -> dict[str, None]:
    return dict.fromkeys([change.step for change in result.plan] + [made.step for made in result.made])


def _step_cell(result: HostResult, step: str) -> str:
    """Return how far a host came with a step: changes made of those planned, and how long they took."""
    planned = sum(change.step == step for change in result.plan)
    made = [change for change in result.made if change.step == step]
    ended = [change.seconds for change in made if change.seconds is not None]
    if not planned and not made:
        return _cell("–", "dim")
    total = max(planned, len(made))
    time = f" in {_duration(sum(ended))}" if ended else ""
    return _cell(f"{len(ended)} of {total}{time}", "bad" if len(ended) < len(made) else "good" if ended else "")


def _check_cell(result: HostResult, name: str) -> str:
    found = next((check for check in result.checks if check.name == name), None)
    if found is None:
        return _cell("–", "dim")
    shown = found.reason or found.container or found.host
    return _cell(f"{found.status} {shown}", f"text {_class(found.status)}" if len(shown) > 30 else _class(found.status))


def _details(results: Sequence[HostResult]) -> Iterator[str]:
    """Yield what each host that failed had to say, folded away."""
    for result in results:
        if not result.has_failed or not result.begun:
            continue
        yield f'<details><summary><b>{_text(result.host)}</b> <span class="bad">{_text(result.reason)}</span></summary>'
        for made in result.made:
            took = "not finished" if made.seconds is None else _duration(made.seconds)
            yield f'<p>{_text(made.summary)} <span class="dim">{took}</span></p>'
        yield from (f"<pre>{_text(problem)}</pre>" for problem in result.problems)
        yield "</details>"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield '<div class="wide"><table>'
    yield f"<thead><tr>{''.join(map(_column_head, header))}</tr></thead>"
    yield "<tbody>"
    yield from (f"<tr>{''.join(row)}</tr>" for row in rows)
    yield "</tbody></table></div>"


def _column_head(name: str) -> str:
    kind = ' class="number"' if name in _NUMBERS else ""
    return f'<th scope="col"{kind}>{_text(name)}</th>'


def _row_head(name: str) -> str:
    return f'<th scope="row">{_text(name)}</th>'


def _cell(text: str, kind: str = "") -> str:
    return f'<td class="{kind}">{_text(text)}</td>' if kind else f"<td>{_text(text)}</td>"


def _class(word: str) -> str:
    return _CLASSES.get(word, "bad")


def _duration(seconds: float) -> str:
    """Return `4.2 s`, `3 min 20 s`."""
    return f"{seconds:.1f} s" if seconds < 60 else f"{int(seconds) // 60} min {int(seconds) % 60} s"
