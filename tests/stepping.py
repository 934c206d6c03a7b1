"""A run on a host that stops at each write of its journal until it is told to go on: faults are put in between.

python -m tests.stepping      a request on the first line of stdin; a line of JSON out for each stop, a line in for
                              "go on"; the last line out is the Finished event
"""

import json
import sys

from gpuprov.agent.run import run_request
from gpuprov.core.system import System
from gpuprov.protocol.events import Event, Finished, to_line
from gpuprov.protocol.request import request_from_line


class SteppingSystem(System):
    """Stops behind each line that the journal has got, and before it waits for the disk."""

    def append(self, path: str, content: bytes) -> None:
        super().append(path, content)
        _stop(json.loads(content))

    def sync(self) -> None:
        _stop({"sync": True})
        super().sync()


def _stop(words: dict[str, object]) -> None:
    print(json.dumps(words), flush=True)
    sys.stdin.readline()


def _tell(event: Event) -> None:
    if isinstance(event, Finished):
        print(to_line(event), flush=True)


if __name__ == "__main__":
    run_request(request_from_line(sys.stdin.readline()), _tell, SteppingSystem())
