"""The refusal of a container that can't have its GPUs."""

from __future__ import annotations


class Refused(Exception):  # noqa: N818 (an expected refusal, not a bug)
    """The container asks for GPUs in a way that must not start; the message is docker's error line, so one line.

    `request` is the part of the container's DeviceRequest that was read before the refusal, or None. Its type is not
    named here: request.py imports this module.
    """

    request: object = None
