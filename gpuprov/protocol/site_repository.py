"""A package repository of the site's own, as an inventory names it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from marshmallow import RAISE, Schema, post_load
from marshmallow import fields as schema_fields

from gpuprov.protocol.spec_fields import FINGERPRINT, HTTP_URL, NAME, WORDS, OrEmpty


class RepositorySchema(Schema):
    """One more package repository of the site's own."""

    class Meta:
        unknown = RAISE

    name = schema_fields.String(required=True, validate=NAME)
    uri = schema_fields.String(required=True, validate=HTTP_URL)
    suite = schema_fields.String(load_default="./", validate=WORDS)
    components = schema_fields.String(load_default="", validate=OrEmpty(WORDS))
    key_url = schema_fields.String(required=True, validate=HTTP_URL)
    key_fingerprint = schema_fields.String(required=True, validate=FINGERPRINT)

    @post_load
    def _make(self, data: dict[str, Any], **_: Any) -> SiteRepository:
        return SiteRepository(**data)


@dataclass(frozen=True)
class SiteRepository:
    """A signed package repository: the key at `key_url` counts only if it has the full `key_fingerprint`."""

    name: str
    uri: str
    key_url: str
    key_fingerprint: str
    suite: str = "./"
    components: str = ""
