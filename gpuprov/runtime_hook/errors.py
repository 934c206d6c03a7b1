"""What a container that can't have its GPUs is told."""


class Refused(Exception):  # noqa: N818 (it is an answer, not a fault)
    """The container asked for what it can't get; the message is docker's error line, so one line."""
