"""What an option of the specification is made of: the checks of its text, how its field is written down, its errors."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, field, fields
from typing import Any, ClassVar

from marshmallow import Schema, ValidationError, post_load, validate
from marshmallow import fields as schema_fields

from gpuprov.protocol.errors import Problem, UsageError
from gpuprov.protocol.secrets import masked
from gpuprov.protocol.tables import PACKAGED, packaged

PREFIX = "gpuprov_"


def form(pattern: str, error: str) -> validate.Regexp:
    """Return the check of a text that the pattern matches as a whole."""
    return validate.Regexp(rf"(?:{pattern})\Z", error=error)


VERSION = form(
    r"\d{3,4}(\.\d{1,4}){0,3}|latest|recommended",
    f"is not a driver version such as 580.178.04, nor a branch ({', '.join(PACKAGED.branches())}), nor latest or "
    "recommended",
)
SHA256 = form(r"[0-9a-f]{64}", "is not a SHA-256 digest (64 hexadecimal digits, lower case)")
URL_OR_PATH = form(
    r"(https?|file)://[^\s'\"`$;|&<>\\]+|/[^\s'\"`$;|&<>\\]*",
    "is neither a URL (http, https, file) nor an absolute path",
)
PATH = form(r"/[A-Za-z0-9._/+@-]*", "is not an absolute path (letters, digits and ._/+@- alone)")
HTTP_URL = form(r"https?://[^\s'\"`$;|&<>\\]+", "is not an http or https URL")
# What a URL's user and password may be without percent-encoding, less what a shell or a configuration file might read.
_LOGIN = r"[A-Za-z0-9._~!*+=%-]+"
_PORT = r"([1-5]?\d{1,4}|6[0-4]\d{3}|65[0-4]\d\d|655[0-2]\d|6553[0-5])"
PROXY = form(
    rf"https?://({_LOGIN}(:{_LOGIN})?@)?([A-Za-z0-9][A-Za-z0-9.-]*|\[[0-9a-fA-F:]+\])(:{_PORT})?/?",
    "is not a proxy's URL such as http://USER:PASSWORD@proxy.example.org:3128 (percent-encode other characters "
    "than letters, digits and ._~!*+=- in user and password)",
)
NO_PROXY = form(
    r"[A-Za-z0-9.*:/_\[\]-]+(,[A-Za-z0-9.*:/_\[\]-]+)*",
    "is not a list of hosts with commas between, such as localhost,10.0.0.0/8,.example.org",
)
NAME = form(r"[a-z0-9][a-z0-9_.-]{0,63}", "is not a name of small letters, digits, '.', '_' and '-'")
PACKAGE = form(r"[A-Za-z0-9][A-Za-z0-9+._-]*(:[a-z0-9-]+)?(=[A-Za-z0-9.+:~_-]+)?", "is not a package name")
PACKAGE_VERSION = form(r"[A-Za-z0-9][A-Za-z0-9.+:~_-]*", "is not the version of a package, such as 1.19.1-1")
FINGERPRINT = form(r"[0-9A-F]{40}|[0-9A-F]{64}", "is not a full key fingerprint (40 hexadecimal digits, capitals)")
MIG_LAYOUT = form(
    r"disabled|all-\d+g\.\d+gb(\+[a-z.]+)?|\d+g\.\d+gb(\+[a-z.]+)?(,\d+g\.\d+gb(\+[a-z.]+)?)*",
    "is neither disabled, nor all-PROFILE, nor profiles with commas between, such as 3g.40gb,2g.20gb,2g.20gb",
)
MIG_CONFIG = form(r"[A-Za-z0-9][A-Za-z0-9+_.-]{0,63}", "is not a name of letters, digits, '+', '.', '_' and '-'")
IMEX_NODE = form(
    r"[0-9A-Fa-f.:]+(%[A-Za-z0-9._-]+)?( [A-Za-z0-9_][A-Za-z0-9_.:%-]{0,252})?",
    "is not an address, or an address and a host's name, such as '10.0.0.1 gpu1'",
)
# Not those that are gpuprov's: the list of nodes, the quorum, and how the unit runs.
IMEX_SETTING = form(
    r"(?!(IMEX_NODE_CONFIG_FILE|IMEX_WAIT_FOR_QUORUM|DAEMONIZE)=)[A-Z][A-Z0-9_]{1,63}=[A-Za-z0-9._/:@%+-]*",
    "is not KEY=VALUE as in nvidia-imex's config.cfg; list of nodes and quorum have options of their own",
)
IMAGE = form(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*", "is not an image reference")
LINE = form(r"[^\x00-\x1f\x7f-\x9f]{0,4000}", "is not one line of at most 4000 characters")
TOKEN = form(r"[A-Za-z0-9._=-]{1,32000}", "is not the content of a client configuration token")
SERVER = form(r"[A-Za-z0-9][A-Za-z0-9.-]*(:\d{1,5})?", "is not a host name or address, with or without :PORT")
MPS_MEMORY = form(r"\d{1,3}=\d{1,9}[GM](,\d{1,3}=\d{1,9}[GM])*", "is not a list of limits by GPU, such as 0=10G,1=512M")
# Those of protocol/engines.json.
ENGINES = tuple(packaged("engines"))
WORDS = form(r"[A-Za-z0-9./_-]+( [A-Za-z0-9./_-]+)*", "is not a list of plain words")
# Not even a wrong value of these is printed.
_SECRET = ("proxy", "vgpu")
_NESTED = ("name", "uri", "suite", "components", "key_url", "key_fingerprint", "image", "command", "expect",
           "feature", "token", "server")  # fmt: skip


class Text(schema_fields.String):
    """A text, or a whole number, which YAML, INI and JSON make of a text such as 580; no other number."""

    def _deserialize(self, value: Any, attr: str | None, data: Any, **kwargs: Any) -> str:
        if isinstance(value, float):
            raise self.make_error("invalid")
        whole = isinstance(value, int) and not isinstance(value, bool)
        return str(super()._deserialize(str(value) if whole else value, attr, data, **kwargs))


class Word(schema_fields.String):
    """One of some words, among them `off`, of which YAML makes false."""

    def _deserialize(self, value: Any, attr: str | None, data: Any, **kwargs: Any) -> str:
        return str(super()._deserialize("off" if value is False else value, attr, data, **kwargs))


def or_empty(check: validate.Validator) -> Callable[[Any], Any]:
    """Return a check that the empty text passes too."""
    return lambda value: value if value == "" else check(value)


def option(check: Any, default: Any = MISSING, choices: tuple[str, ...] = ()) -> Any:
    """Return the dataclass field of an option."""
    return field(default=default, metadata={"check": check, "choices": choices})


def required(check: validate.Validator, words: validate.Validator | None = None) -> Any:
    """Return the field of a text that must be given; with `words`, of a list of texts, each of which passes that."""
    if words is None:
        return option(schema_fields.String(required=True, validate=check))
    return option(schema_fields.List(Text(validate=words), required=True, validate=check))


class _Rows(Schema):
    """What makes a dataclass of a mapping; each field of the dataclass says how its value is checked."""

    kind: ClassVar[type[Any]]

    @post_load
    def _make(self, data: dict[str, Any], **_: Any) -> Any:
        return self.kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in data.items()})


def schema_of(kind: type[Any]) -> type[Schema]:
    """Return the schema of a dataclass of options."""
    made = _Rows.from_dict({one.name: one.metadata["check"] for one in fields(kind)})
    made.kind = kind  # type: ignore[attr-defined]
    return made


def rows_of(kind: type[Any], **settings: Any) -> Any:
    """Return the check of a list of mappings, each of which becomes this dataclass."""
    return schema_fields.List(schema_fields.Nested(schema_of(kind)), **settings)


def text(*checks: validate.Validator, default: str = "") -> Any:
    """Return the field of a text that passes all checks; the empty text always means that it is not given."""
    return option(Text(validate=[or_empty(check) for check in checks]), default)


def one_of(*words: str) -> validate.Validator:
    """Return the check of one of some words."""
    return validate.OneOf(words, error="is not one of {choices}")


def choice(*choices: str) -> Any:
    """Return the field of one of some words, the first by default."""
    kind = Word if "off" in choices else schema_fields.String
    return option(kind(validate=one_of(*choices)), choices[0], choices)


def flag(*, default: bool = False) -> Any:
    """Return the field of a yes or no."""
    return option(StrictBoolean(), default)


def number(*, default: int, largest: int) -> Any:
    """Return the field of a whole number from 0 to `largest`."""
    check = validate.Range(0, largest, error="is not a whole number from {min} to {max}")
    return option(schema_fields.Integer(validate=check), default)


def several(check: Any) -> Any:
    """Return the field of a list, empty by default."""
    return option(check, ())


class TextOrList(schema_fields.Raw):
    """One text, or a list of texts; either becomes a tuple."""

    def __init__(self, check: validate.Validator, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._check = check

    def _deserialize(self, value: Any, attr: str | None, data: Any, **kwargs: Any) -> list[str]:
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise ValidationError("must be text or a list of texts")
        return [self._check(text) for text in texts if len(texts) > 1 or text]


class StrictBoolean(schema_fields.Boolean):
    """A boolean as YAML and Ansible's `-e` write it, and nothing else: no 1, no "on the"."""

    truthy = {True, "true", "True", "yes", "Yes"}  # noqa: RUF012 (marshmallow's own interface)
    falsy = {False, "false", "False", "no", "No"}  # noqa: RUF012

    def _deserialize(self, value: Any, attr: str | None, data: Any, **kwargs: Any) -> bool:
        if not isinstance(value, (bool, str)):
            raise self.make_error("invalid", input=value)
        return bool(super()._deserialize(value, attr, data, **kwargs))  # type: ignore[no-untyped-call,unused-ignore]


def checked_python(named: str) -> str:
    """Return the interpreter that an inventory names, "" where it is to be found out. Raises UsageError."""
    if not re.fullmatch("[A-Za-z0-9/._+-]*", named):
        step = "a path such as /usr/bin/python3, or leave it out"
        raise UsageError("ansible_python_interpreter is not the path of a program", repr(named), step)
    return "" if named.startswith("auto") else named


def flat(messages: Any, path: str = "") -> list[tuple[str, str]]:
    """Return (path, reason) pairs from marshmallow's nested messages."""
    if isinstance(messages, Mapping):
        # What is no mapping at all has its reason below _schema.
        names = {key: ".".join(filter(None, (path, "" if key == "_schema" else str(key)))) for key in messages}
        return [pair for key, inner in messages.items() for pair in flat(inner, names[key])]
    return [(path, str(reason)) for reason in messages]


def problem_of(path: str, reason: str, values: Mapping[str, Any], origin: str, known: Sequence[str] = ()) -> Problem:
    """Return the problem of a wrong value, or of a name that is not among the `known` ones."""
    name = path.split(".")[0]
    where = f"in {origin}" if origin else ""
    if reason == "Unknown field.":
        own = path == name
        near = difflib.get_close_matches(path.rsplit(".", 1)[-1], known if own else _NESTED, n=1, cutoff=0.6)
        hint = f"did you mean {PREFIX if own else ''}{near[0]}?" if near else ""
        return Problem(f"there is no variable {PREFIX}{path}", where, hint or "`gpuprov options` lists all variables")
    value = values.get(name)
    hint = "`gpuprov options` lists what each variable takes"
    if isinstance(value, float):
        quoted = f"""{PREFIX}{name}: "{value}" (in INI files {PREFIX}{name}='"{value}"')"""
        hint = f"set {quoted}; without quotes 12.10 is 12.1"
    what = f"{PREFIX}{path} {packaged('options')['reasons'].get(reason, reason)}"
    shown = "a value that may hold a password is not shown" if name in _SECRET else masked(repr(value))
    return Problem(what, f"{where + ': ' if where else ''}{shown}", hint)
