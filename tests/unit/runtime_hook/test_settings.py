"""The runtime's settings: NVIDIA's names and defaults; a mistake is named."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprov.runtime_hook import driver_files
from gpuprov.runtime_hook.errors import Refused
from gpuprov.runtime_hook.settings import SETTINGS_PATH, SPECIFICATION_PATH, parse_settings


def test_without_a_word_nvidias_defaults_hold() -> None:
    found = parse_settings("{}")
    assert found.accept_envvar_when_unprivileged
    assert not found.accept_volume_mounts
    assert not found.disable_require
    assert found.specification == SPECIFICATION_PATH
    assert found.supported_capabilities == driver_files.ALL
    assert found.swarm_resources == []


def test_every_key_is_heard() -> None:
    found = parse_settings(
        json.dumps(
            {
                "accept-nvidia-visible-devices-envvar-when-unprivileged": False,
                "accept-nvidia-visible-devices-as-volume-mounts": True,
                "disable-require": True,
                "supported-driver-capabilities": "utility, compute,compute,",
                "swarm-resource": " DOCKER_RESOURCE_GPU ,, B",
                "specification": "/run/cdi/x.json",
            }
        )
    )
    assert not found.accept_envvar_when_unprivileged
    assert found.accept_volume_mounts
    assert found.disable_require
    assert found.specification == "/run/cdi/x.json"
    assert found.supported_capabilities == ("compute", "utility")
    assert found.swarm_resources == ["DOCKER_RESOURCE_GPU", "B"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", f"{SETTINGS_PATH} is not valid JSON"),
        ("{", f"{SETTINGS_PATH} is not valid JSON"),
        ("{} {}", f"{SETTINGS_PATH} is not valid JSON"),
        ("[]", f"{SETTINGS_PATH} does not hold an object"),
        ("null", f"{SETTINGS_PATH} does not hold an object"),
        ('{"typo": 1}', "has no key 'typo'; known are accept-nvidia-visible-devices-envvar-when-unprivileged,"),
        ('{"disable-require": "yes"}', "disable-require must be true or false"),
        ('{"disable-require": 1}', "disable-require must be true or false"),
        ('{"swarm-resource": ["A"]}', "swarm-resource must be text"),
        ('{"specification": null}', "specification must be text"),
        ('{"supported-driver-capabilities": "compute,magic"}', "there is no driver capability 'magic'"),
    ],
)
def test_a_mistake_is_named(text: str, says: str) -> None:
    with pytest.raises(Refused) as caught:
        parse_settings(text)
    assert says in str(caught.value)


@given(st.text() | st.dictionaries(st.sampled_from(["disable-require", "swarm-resource"]), st.text()).map(json.dumps))
def test_no_text_raises_anything_but_a_refusal(text: str) -> None:
    try:
        found = parse_settings(text)
    except Refused as refused:
        assert SETTINGS_PATH in str(refused)
    else:
        assert found.specification
