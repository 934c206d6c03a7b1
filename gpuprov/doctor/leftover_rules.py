"""Rules about remains of nvidia-docker 1 and 2: asides, because none prevents a container from using GPUs. Pure."""

from __future__ import annotations

from gpuprov.doctor import words
from gpuprov.doctor.examined import Examined
from gpuprov.doctor.finding import ASIDE, DOCKER, TOOLKIT, Finding, Rule
from gpuprov.facts.leftovers import FOLDER, PLUGIN, UNIT
from gpuprov.packages import retired
from gpuprov.plan.migration import VARIABLE
from gpuprov.protocol.words import counted
from gpuprov.runtime_hook.settings import NVIDIA_SETTINGS_PATH


def _migrate(x: Examined, comment: str = "") -> str:
    """Return the command that removes the remains; not the package manager's, which would also remove daemon.json."""
    install = words.gpuprov_install(x)
    return f"{install} -e {VARIABLE}=true" + (f"  # {comment}" if comment else "")


def _retired(x: Examined) -> Finding | None:
    found = retired.retired_packages(x.host.packages.installed)
    if not found:
        return None
    kept = "keeps daemon.json, which the package manager would remove with it" if found[0] == "nvidia-docker2" else ""
    return Finding(
        f"{found[0]} is retired, and its repository clashes with the toolkit's", f"package {found[0]} is installed",
        _migrate(x, kept), ASIDE,
    )  # fmt: skip


def _plugin(x: Examined) -> Finding | None:
    found = x.host.leftovers
    if not found.has_plugin or PLUGIN in x.host.packages.installed:
        return None
    account = f"/etc/passwd: user {PLUGIN}" if found.account else ""
    unit = f"systemctl is-active {UNIT}: {found.unit}" if found.unit else ""
    seen = (*found.files, FOLDER if found.folder else "", account, unit)
    return Finding("nvidia-docker 1's plugin is left", "\n".join(filter(None, seen)), _migrate(x), ASIDE)


def _volumes(x: Examined) -> Finding | None:
    found = x.host.leftovers.volumes or ()
    if not found:
        return None
    seen = [f"docker volume ls: {one.name}" + (f", used by {', '.join(one.containers)}" if one.containers else "")
            for one in found]  # fmt: skip
    used = any(one.containers for one in found)
    comment = "a volume that a container refers to stays" if used else ""
    what = f"nvidia-docker 1 has left {counted(len(found), 'volume')}"
    return Finding(what, "\n".join(seen), _migrate(x, comment), ASIDE)


def _repositories(x: Examined) -> Finding | None:
    found = retired.retired_sources(x.host.files)
    if not found:
        return None
    return Finding(
        "a repository that NVIDIA has retired is configured: it offers old packages of the toolkit's names",
        "\n".join(found), _migrate(x), ASIDE,
    )  # fmt: skip


def _key(x: Examined) -> Finding | None:
    found = retired.key_files(x.host.files, x.spec.toolkit_key_fingerprint)
    if not found or retired.retired_sources(x.host.files):
        return None
    return Finding(
        "apt trusts the key of NVIDIA's retired repositories, and no repository needs it", "\n".join(found),
        _migrate(x), ASIDE,
    )  # fmt: skip


def _runtimes(x: Examined) -> Finding | None:
    found, docker = x.host.leftovers.dead_runtimes, x.host.docker
    if not found:
        return None
    runtimes = docker.config.get("runtimes") or {}
    seen = [f"{docker.config_path}: runtime {name} is {runtimes[name].get('path')}, which is missing" for name in found]
    return Finding(
        f"docker has runtimes without a program: {', '.join(found)}", "\n".join(seen), _migrate(x), ASIDE
    )  # fmt: skip


def _settings(x: Examined) -> Finding | None:
    found = [path for path in x.host.leftovers.settings if path != NVIDIA_SETTINGS_PATH]
    if not found:
        return None
    return Finding("old copies of config.toml are left", "\n".join(found), _migrate(x), ASIDE)


RULES = (
    Rule("toolkit-retired", TOOLKIT, "nvidia-docker2 or a package older than it", _retired),
    Rule("nvidia-docker-plugin", TOOLKIT, "nvidia-docker 1's programs, unit, user or folder, of no package", _plugin),
    Rule("nvidia-docker-repository", TOOLKIT, "a source of packages names one of NVIDIA's retired repositories",
         _repositories),
    Rule("nvidia-docker-key", TOOLKIT, "their key is in apt's keyrings for all repositories", _key),
    Rule("nvidia-docker-settings", TOOLKIT, "/etc/nvidia-container-runtime has config.toml.dpkg-old and the like",
         _settings),
    Rule("nvidia-docker-volumes", DOCKER, "docker has volumes named nvidia_driver_VERSION", _volumes),
    Rule("nvidia-docker-runtimes", DOCKER, "daemon.json names a runtime of NVIDIA's, not `nvidia`, that is missing",
         _runtimes),
)  # fmt: skip
