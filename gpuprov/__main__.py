"""`gpuprov`, and `python -m gpuprov`: Ctrl-C while the first modules load ends it without a word."""

import gc
import signal

signal.signal(signal.SIGINT, signal.SIG_DFL)

from gpuprov.core.commands import lift_memory_limit  # noqa: E402
from gpuprov.protocol.errors import GpuprovError  # noqa: E402

# Measured: a run over one host needs 150 MB.
_ADDRESSES = 192 << 20


def _leave(number: int, frame: object) -> None:
    """End with the code that a shell has for a signal: files are closed, a password's terminal echoes again."""
    raise SystemExit(128 + number)


def main() -> None:
    """Run the command line, from which a signal is the way out until a run over hosts handles it."""
    try:
        lift_memory_limit(_ADDRESSES)
    except GpuprovError as error:
        raise SystemExit(str(error)) from None
    # Imports leave no garbage: with Python's defaults, to look for it takes a fifth of a short run.
    gc.set_threshold(50_000, 20, 20)
    # Imported here: it takes most of the memory.
    from gpuprov.cli.main import main as run

    # nohup ignores one of these.
    handled = [one for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) != signal.SIG_IGN]
    for number in handled:
        signal.signal(number, _leave)
    try:
        run()
    finally:
        gc.freeze()  # nor does the end
        # Python would print a traceback for one that comes while it ends.
        for number in handled:
            signal.signal(number, signal.SIG_DFL)


if __name__ == "__main__":
    main()
