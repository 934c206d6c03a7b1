"""Whether docker reads CDI specifications (`docker run --device nvidia.com/gpu=all`), and how to enable it. Pure.

docker 25 to 28.1 reads them if its file sets features.cdi, 28.2 and later unless it disables it. Older releases can't
(docs.docker.com, dockerd, "Enable CDI devices").
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from gpuprov.engines.docker_unit import DockerUnit, flag_values
from gpuprov.protocol.versions import version_numbers

_FIRST = (25,)
_FIRST_BY_ITSELF = (28, 2)
FEATURES = "25 to 28.1"


class Docker(Protocol):
    """The docker facts used here (docker.DockerFacts)."""

    @property
    def active(self) -> bool: ...
    @property
    def version(self) -> str: ...
    @property
    def config(self) -> Mapping[str, Any]: ...
    @property
    def config_path(self) -> str: ...
    @property
    def unit(self) -> DockerUnit: ...
    @property
    def cdi(self) -> bool: ...
    @property
    def live_restore(self) -> bool: ...
    @property
    def running_containers(self) -> tuple[str, ...]: ...


def knows_cdi(version: str) -> bool:
    """Say whether a docker of that version can read CDI specifications."""
    return version_numbers(version) >= _FIRST


def needs_feature(version: str) -> bool:
    """Say whether a docker of that version needs features.cdi to read them."""
    return _FIRST <= version_numbers(version) < _FIRST_BY_ITSELF


def setting(config: Mapping[str, Any]) -> object:
    """Return the configuration's features.cdi, None if it is not set."""
    features = config.get("features")
    return features.get("cdi") if isinstance(features, dict) else None


def switched_off(facts: Docker) -> str:
    """Return how a user switched CDI off in docker's file, "" if not. gpuprov keeps that setting."""
    if setting(facts.config) is False:
        return f"features.cdi is false in {facts.config_path}"
    folders = facts.config.get("cdi-spec-dirs")
    if isinstance(folders, list) and not any(folders):
        return f"cdi-spec-dirs is empty in {facts.config_path}"
    return ""


def is_to_be_set(facts: Docker) -> bool:
    """Say whether features.cdi is missing in docker's file."""
    # dockerd does not start with the same directive as a flag and in its file.
    by_flag = flag_values(facts.unit.arguments, "--feature")
    missing = needs_feature(facts.version) and setting(facts.config) is None
    return missing and not by_flag and not switched_off(facts)


def waits_for_restart(facts: Docker) -> bool:
    """Say whether docker reads CDI specifications after a restart with its file, or with features.cdi added."""
    is_set = setting(facts.config) is True and not switched_off(facts)
    return facts.active and not facts.cdi and needs_feature(facts.version) and (is_set or is_to_be_set(facts))


def waits_for_containers(facts: Docker) -> bool:
    """Say whether features.cdi is set but docker was not restarted since, because that would stop containers."""
    restarts = facts.live_restore or not facts.running_containers
    return waits_for_restart(facts) and not is_to_be_set(facts) and not restarts


def is_off(facts: Docker) -> str:
    """Return why the running docker reads no CDI specifications, "" if it does."""
    if facts.cdi:
        return ""
    if not knows_cdi(facts.version):
        return f"docker {facts.version} has no CDI: it comes with docker 25"
    if is_to_be_set(facts):
        return f"features.cdi is not set in {facts.config_path}, which docker {facts.version} needs"
    if waits_for_restart(facts):
        return "docker has not been restarted since features.cdi was set"
    return switched_off(facts) or "docker info has no CDISpecDirs"
