"""A machine whose commands are not run: a test answers them, and they are kept."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Union

from gpuprov.core.commands import Completed
from gpuprov.core.system import System

# What a command prints; or its exit code, its output and its errors.
Answer = Union[str, tuple[int, str], tuple[int, str, str]]


class Scripted(System):
    """A machine below a folder that has every program; `asked` are the commands, `timeouts` their limits.

    A command answers what `answers` has for words that are in it; others answer nothing.
    """

    def __init__(self, root: Path | str = "/nowhere", answers: Mapping[str, Answer] | None = None) -> None:
        super().__init__(str(root))
        self.replies = answers or {}
        self.asked: list[tuple[str, ...]] = []
        self.timeouts: list[object] = []

    def which(self, program: str) -> str | None:
        return f"/usr/bin/{program}"

    def answer(self, argv: tuple[str, ...]) -> Answer:
        """Return what a command answers."""
        return next((said for words, said in self.replies.items() if {*words.split()} <= {*argv}), "")

    def run(self, argv: Sequence[str], **more: Any) -> Completed:
        self.asked.append(tuple(argv))
        self.timeouts.append(more.get("timeout"))
        said = self.answer(tuple(argv))
        return Completed(tuple(argv), *((0, said) if isinstance(said, str) else said))


class Recorded(System):
    """A machine that has some packages and every program, and whose package manager answers as recorded."""

    def __init__(self, root: Path, answer: tuple[int, str, str]) -> None:
        super().__init__(str(root))
        self.answer = answer
        self.packages: list[str] = []
        self.installs: tuple[str, ...] = ()
        self.asked: list[tuple[str, ...]] = []

    def which(self, program: str) -> str | None:
        return f"/usr/bin/{program}"

    def recorded(self, argv: tuple[str, ...], *, changes: bool = True, **more: Any) -> Completed:
        """Give the answer, line by line too; a success installs the packages."""
        self.asked.append(argv)
        if changes and self.answer[0] == 0:
            self.packages += self.installs
        on_line = more.get("on_line")
        for line in self.answer[1].splitlines():
            assert on_line is None or on_line(line) is None
        return Completed(argv, *self.answer)
