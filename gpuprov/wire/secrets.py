"""Remove passwords from everything that gpuprov prints, logs and reports: in URLs, and the proxy's anywhere. Pure."""

from __future__ import annotations

import base64
import re
from dataclasses import fields, is_dataclass, replace
from typing import Any
from urllib.parse import unquote

from gpuprov.wire.events import Sink

_HIDDEN = "***"
# A shorter one is hidden where it stands with its user only: as a word of its own it would hide ordinary text.
_SHORTEST_ALONE = 6


def masked(text: str) -> str:
    """Return a URL, or a text with URLs in it, for messages: without passwords."""
    return re.sub(r"(//[^/\s:@]*):[^/\s]*@", rf"\1:{_HIDDEN}@", text)


def secret_free(sink: Sink, url: object) -> Sink:
    """Return a sink that hides the password of `url` in every text of an event, in each form that programs print."""
    found = re.match(r"\w+://([^/@:]*):(.*)@[^@]*\Z", url if isinstance(url, str) else "")
    if found is None or not found[2]:
        return sink
    forms = _forms(found[1], found[2])
    return lambda event: sink(_without(event, forms))


def _forms(user: str, password: str) -> tuple[tuple[str, str], ...]:
    """Return pairs of what to hide and what to show: percent-encoded, plain, and as HTTP sends it (RFC 7617)."""
    plain_user, plain = unquote(user), unquote(password)
    sent = base64.b64encode(f"{plain_user}:{plain}".encode()).decode()
    pairs = [(f"{user}:{password}", f"{user}:{_HIDDEN}"), (f"{plain_user}:{plain}", f"{user}:{_HIDDEN}")]
    alone = [word for word in (password, plain) if len(word) >= _SHORTEST_ALONE]
    return (*pairs, (sent, _HIDDEN), *((word, _HIDDEN) for word in alone))


def _without(value: Any, forms: tuple[tuple[str, str], ...]) -> Any:
    if isinstance(value, str):
        for hidden, shown in forms:
            value = value.replace(hidden, shown)
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{one.name: _without(getattr(value, one.name), forms) for one in fields(value)})
    if isinstance(value, (list, tuple)):
        return type(value)(_without(one, forms) for one in value)
    if isinstance(value, dict):
        return {key: _without(one, forms) for key, one in value.items()}
    return value
