"""Each rule of the doctor is typed on a host, by a test that asserts that it was, or has an excuse of a known kind."""

from gpuprov.doctor.examine import RULES
from tests.integration.doctor_excuses import EXCUSES, KINDS
from tests.integration.test_doctor import GROUPS, TROUBLES


def test_each_rule_is_typed_or_has_one_excuse_of_a_known_kind() -> None:
    typed = {rule for group in GROUPS for rule in group.typed} | {trouble.rule for trouble in TROUBLES}
    excused = [rule for rules in EXCUSES.values() for rule in rules]
    assert set(EXCUSES) == set(KINDS)
    assert len(excused) == len(set(excused))
    unmatched = ({rule.name for rule in RULES} - typed) ^ set(excused)
    place = "tests/integration/doctor_cases.py, doctor_gpu_cases.py or doctor_excuses.py"
    assert not unmatched, f"next: exactly one entry for each in {place}"


def test_the_groups_have_names_of_their_own() -> None:
    names = [group.name for group in GROUPS]
    assert len(names) == len(set(names))
