"""Remove passwords from everything that gpuprov prints, logs and reports: in URLs, and the proxy's anywhere. Pure."""

from __future__ import annotations

import base64
import html
import json
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, quote_plus, unquote

from gpuprov.protocol.words import plain

if TYPE_CHECKING:
    from gpuprov.protocol.events import Sink

_HIDDEN = "***"
# Of .repo files, TOML, YAML, JSON and variables, whole though it may have spaces; and of apt_auth.conf(5).
_PASSWORD = re.compile(
    r"""((?:password|passwd|secret|token|auth)["']?[ \t]*[=:][ \t]*|\blogin \S+ password )"""
    r"""(?!(?:""|'')(?!["']))("(?:[^"\\\n]|\\.)*"|'[^'\n]*'|(?![\[{])\S.*)""",
    re.IGNORECASE,
)
# As GitLab, Azure (sig) and Amazon have them.
_IN_QUERY = re.compile(r"(?i)([?&](?:sig|[\w.-]{0,40}(?:token|secret|signature|passw|key)[\w.-]{0,40})=)[^&\s\"']+")
_FOR_URLS = str.maketrans("+/", "-_")  # base64url
# A shorter one is hidden where it stands with its user only: as a word of its own it would hide ordinary text.
_SHORTEST_ALONE = 6
# Of a password that a person typed or an inventory names.
_SHORTEST_PASSWORD = 4
Forms = tuple[tuple[str, str], ...]  # what to hide, and what to show instead


def masked(text: str) -> str:
    """Return a URL, or a text with URLs in it, for messages: without passwords, and without a login that is a token."""
    text = re.sub(r"(//[^/\s:@]*):[^/\s]*@", rf"\1:{_HIDDEN}@", text)
    return _IN_QUERY.sub(rf"\1{_HIDDEN}", re.sub(r"//[^/\s:@]+@", f"//{_HIDDEN}@", text))


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


def secret_free(sink: Sink, values: Any, passwords: Iterable[str] = ()) -> Sink:
    """Return a sink that hides secrets in each text of an event, as programs print them (secret_forms)."""
    forms = secret_forms(values, passwords)
    return lambda event: sink(hidden(event, forms))


def secret_forms(values: Any, passwords: Iterable[str] = ()) -> Forms:
    """Return pairs of what to hide and what to show: the logins of all URLs in `values`, and passwords in any text.

    A password is found percent-encoded, in JSON and HTML, and in the base64 of any text that holds it, such as
    user:password.
    """
    found = [form for url in _strings(values) for form in _forms_in(url)]
    licence = values.get("vgpu") if isinstance(values, dict) else None
    tokens = (str(licence.get("token", "")),) if isinstance(licence, dict) else ()
    for word in (*passwords, *tokens):
        if len(word) >= _SHORTEST_PASSWORD:
            found += [(form, _HIDDEN) for form in _written(word)]
    # A password may begin as another does: the longest first, or the rest of it would be shown.
    return tuple(sorted(dict.fromkeys(found), key=lambda pair: len(pair[0]), reverse=True))


def _written(word: str) -> Iterator[str]:
    """Yield a password in the forms in which programs write it."""
    encoded = quote(word, safe="")
    yield from (word, encoded, re.sub("%..", lambda one: one[0].lower(), encoded), quote_plus(word))
    yield from (json.dumps(word)[1:-1], json.dumps(word, ensure_ascii=False)[1:-1], html.escape(word))
    yield shlex.quote(word)
    # What all base64 of texts that hold the word has in common: three forms, by where in them it begins.
    for before, first in ((0, 0), (1, 2), (2, 3)):
        content = bytes(before) + word.encode()
        form = base64.b64encode(content).decode()[first : len(content) // 3 * 4]
        if len(form) >= _SHORTEST_ALONE:
            yield from (form, form.translate(_FOR_URLS))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ():
        yield from _strings(one)


def _forms_in(url: str) -> Forms:
    """Return pairs of what to hide and what to show of a URL's login."""
    found = re.match(r"\w+://([^/@:]*):(.*)@[^@]*\Z", url)
    if found is not None and found[2]:
        # Percent-encoded, plain, and as HTTP sends it (RFC 7617).
        user, password = found.groups()
        name, word = unquote(user), unquote(password)
        pairs = [(f"{user}:{password}", f"{user}:{_HIDDEN}"), (f"{name}:{word}", f"{user}:{_HIDDEN}")]
        sent = base64.b64encode(f"{name}:{word}".encode()).decode()
        words = (sent, *((password, *_written(word)) if len(word) >= _SHORTEST_ALONE else ()))
        return (*pairs, *((one, _HIDDEN) for one in words))
    token = re.match(r"\w+://([^/@:]+):?@", url)
    if token is None:
        return ()
    sent = base64.b64encode(f"{unquote(token[1])}:".encode()).decode()
    alone = (token[1], *_written(unquote(token[1]))) if len(token[1]) >= _SHORTEST_ALONE else ()
    return ((f"//{token[1]}@", f"//{_HIDDEN}@"), *((one, _HIDDEN) for one in (sent, *alone)))


def hidden(value: Any, forms: Forms) -> Any:
    """Return a value of dataclasses, lists, mappings and texts without these secrets, and without logins in URLs."""
    if isinstance(value, str):
        # A control sequence within a secret would hide it from here, and goes where the text is shown.
        value = plain(value)
        for secret, shown in forms:
            value = value.replace(secret, shown)
        return masked(value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{one.name: hidden(getattr(value, one.name), forms) for one in fields(value)})
    if isinstance(value, (list, tuple)):
        return type(value)(hidden(one, forms) for one in value)
    if isinstance(value, dict):
        return {hidden(key, forms): hidden(one, forms) for key, one in value.items()}
    return value
