"""What the command line and the playbooks do alike: the commands they send, what they say, the options they have."""

import pytest

from gpuprov.agent.probe import NOT_BOOTSTRAPPED
from gpuprov.agent.push import require
from gpuprov.core.commands import Completed
from gpuprov.protocol.errors import GpuprovError


def test_the_errors_of_a_command_that_had_a_terminal_are_in_its_output() -> None:
    """Ansible gives a terminal to a command that becomes root by su."""
    with pytest.raises(GpuprovError, match="Python cannot be installed") as caught:
        require(Completed((), 100, "Reading package lists...\nE: Unable to locate package\n"), *NOT_BOOTSTRAPPED)
    assert caught.value.problems[0].evidence.endswith("E: Unable to locate package")
