"""How a tutorial is read, and that a page which shows what is not printed is found."""

import pytest

from tests.tutorials import Step, differs, files, steps

PAGE = """
```ini
# inventory.ini
[all]
gpu01
```

```console
$ gpuprov facts
…
facts of 2 hosts
$ true
```
"""


def test_files_and_commands_are_found() -> None:
    assert files(PAGE) == {"inventory.ini": "# inventory.ini\n[all]\ngpu01\n"}
    assert list(steps(PAGE)) == [Step("gpuprov facts", ("…", "facts of 2 hosts")), Step("true", ())]


@pytest.mark.parametrize(
    ("shown", "printed", "wrong"),
    [
        ("facts of 2 hosts", "facts of 16 hosts", "facts of 2 hosts"),
        ("facts of … hosts", "facts of 16 hosts", ""),
        ("driver  ok 550.163.01", "driver ok 550.163.01, CUDA", "driver  ok 550.163.01"),
        ("driver  ok 550.163.01", "x\ndriver     ok 550.163.01\ny", ""),
        ("   1. download …", "1. download http://a/b", ""),
        ("gpu01: failed", "gpu02: failed", "gpu01: failed"),
        ("second", "", "second"),
    ],
)
def test_a_line_that_is_not_printed_is_found(shown: str, printed: str, wrong: str) -> None:
    assert differs(Step("gpuprov", (shown,)), printed) == wrong


def test_the_order_counts() -> None:
    assert differs(Step("gpuprov", ("first", "second")), "second\nfirst") == "second"
