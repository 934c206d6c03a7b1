"""`gpuprov`, and `python -m gpuprov`: Ctrl-C while the first modules load ends it without a word."""

import signal

signal.signal(signal.SIGINT, signal.SIG_DFL)

from gpuprov.cli.main import main as _main  # noqa: E402


def _leave(number: int, frame: object) -> None:
    """End with the code that a shell has for a signal: files are closed, a password's terminal echoes again."""
    raise SystemExit(128 + number)


def main() -> None:
    """Run the command line, from which Ctrl-C is the way out until a run over hosts handles it."""
    signal.signal(signal.SIGINT, _leave)
    try:
        _main()
    finally:
        # Python would print a traceback for one that comes while it ends.
        signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    main()
