"""`gpuprov`, and `python -m gpuprov`: Ctrl-C while the first modules load ends it without a word."""

import signal

signal.signal(signal.SIGINT, signal.SIG_DFL)

from gpuprov.cli.main import main as _main  # noqa: E402


def main() -> None:
    """Run the command line, in which Ctrl-C is an exception again."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _main()


if __name__ == "__main__":
    main()
