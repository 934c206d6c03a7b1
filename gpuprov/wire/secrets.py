"""Remove passwords from everything that gpuprov prints, logs and reports: in URLs, and the proxy's anywhere. Pure."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

if TYPE_CHECKING:
    from gpuprov.wire.events import Sink

_HIDDEN = "***"
# Of .repo files, TOML and JSON, and of apt_auth.conf(5).
_PASSWORD = re.compile(r"""(\bpassword"?[ \t]*[=:][ \t]*|\blogin \S+ password )\S+""")
# A shorter one is hidden where it stands with its user only: as a word of its own it would hide ordinary text.
_SHORTEST_ALONE = 6


def masked(text: str) -> str:
    """Return a URL, or a text with URLs in it, for messages: without passwords, and without a login that is a token."""
    text = re.sub(r"(//[^/\s:@]*):[^/\s]*@", rf"\1:{_HIDDEN}@", text)
    return re.sub(r"//[^/\s:@]+@", f"//{_HIDDEN}@", text)


def masked_settings(text: str) -> str:
    """Return a configuration file for a diff: without passwords in URLs and in settings."""
    return masked(_PASSWORD.sub(rf"\1{_HIDDEN}", text))


def split_login(url: str) -> tuple[str, str, str]:
    """Return a URL without its login, and user and password as plain text, "" for none."""
    scheme, _, rest = url.partition("://")
    place, slash, path = rest.partition("/")
    login, _, host = place.rpartition("@")
    user, _, password = login.partition(":")
    return f"{scheme}://{host}{slash}{path}" if scheme and rest else url, unquote(user), unquote(password)


def secret_free(sink: Sink, values: Any) -> Sink:
    """Return a sink that hides the logins of all URLs in `values` in each text of an event, as programs print them."""
    forms = tuple(dict.fromkeys(form for url in _strings(values) for form in _forms_in(url)))
    return (lambda event: sink(_without(event, forms))) if forms else sink


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _strings(one)
    elif isinstance(value, dict):
        yield from _strings(list(value.values()))


def _forms_in(url: str) -> tuple[tuple[str, str], ...]:
    found = re.match(r"\w+://([^/@:]*):(.*)@[^@]*\Z", url)
    if found is not None and found[2]:
        return _forms(found[1], found[2])
    token = re.match(r"\w+://([^/@:]+):?@", url)
    if token is None:
        return ()
    sent = base64.b64encode(f"{unquote(token[1])}:".encode()).decode()
    alone = ((token[1], _HIDDEN), (unquote(token[1]), _HIDDEN)) if len(token[1]) >= _SHORTEST_ALONE else ()
    return ((f"//{token[1]}@", f"//{_HIDDEN}@"), (sent, _HIDDEN), *alone)


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
