"""What a container that can't have its GPUs is told."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .request import Request


class Refused(Exception):  # noqa: N818 (it is an answer, not a fault)
    """The container asked for what it can't get; the message is docker's error line, so one line.

    `request` is what is known of its request by then, None if nothing is.
    """

    request: Request | None = None
