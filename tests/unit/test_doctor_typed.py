"""Each rule of the doctor is typed on a host, by a test that asserts that it was, or has an excuse of a known kind."""

from gpuprov.doctor.examine import RULES
from tests.integration.test_doctor import GROUPS, TROUBLES
from tests.unit.doctor.rows_containers import CONTAINER_EXCUSES
from tests.unit.doctor.rows_driver import DRIVER_EXCUSES
from tests.unit.doctor.rows_engines import ENGINE_EXCUSES
from tests.unit.doctor.rows_kernel import KERNEL_EXCUSES

# Kind of reason why no test types the command of a rule → what it is.
KINDS = {
    "firmware": "needs what a machine's firmware does: Secure Boot and its keys, the reset of a real GPU",
    "switches": "needs NVSwitches, and NVIDIA's own fabric manager, which no public package source has",
    "system": "needs another system than a lab's: SELinux, WSL, snap, a rootless docker, podman, kata",
    "toolkit": "only NVIDIA's own nvidia-container-cli says it, which no public package source has",
    "release": "advises a newer release than any package source of that system has",
    "container host": "the command is for the machine around a system container, whose kernel has no NVIDIA module",
    "hardware": "needs virtual GPUs with their driver, RDMA adapters, confidential computing, or MPS on a GPU",
    "kernel": "needs a kernel of its own that takes modules: a virtual machine could have it",
}
EXCUSES = (CONTAINER_EXCUSES, DRIVER_EXCUSES, ENGINE_EXCUSES, KERNEL_EXCUSES)


def test_each_rule_is_typed_or_has_one_excuse_of_a_known_kind() -> None:
    typed = {rule for group in GROUPS for rule in group.typed} | {trouble.rule for trouble in TROUBLES}
    excused = [rule for kinds in EXCUSES for rules in kinds.values() for rule in rules]
    assert {kind for kinds in EXCUSES for kind in kinds} == set(KINDS)
    assert len(excused) == len(set(excused))
    unmatched = ({rule.name for rule in RULES} - typed) ^ set(excused)
    assert not unmatched, "next: for each, a group or an excuse in one of tests/unit/doctor/rows_*.py"


def test_the_groups_have_names_of_their_own() -> None:
    names = [group.name for group in GROUPS]
    assert len(names) == len(set(names))
