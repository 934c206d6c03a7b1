"""IMEX domains: the hosts that share GPU memory over a rack's NVLink, from the variables of a whole inventory. Pure.

nvidia-imex compares its list of nodes with every other node's: content and order must agree (NVIDIA's IMEX guide,
Deployment). So the list is made where the whole inventory is known, and each host gets it with its specification.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Callable

from gpuprov.protocol.errors import Problem, UsageError

DOMAIN, ADDRESS, NODES = "gpuprov_imex_domain", "gpuprov_imex_address", "gpuprov_imex_nodes"
_MODE = "gpuprov_imex"
_ADDRESS = re.compile(r"[0-9.]+|[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*(%\w+)?")
_ADDRESSES = (ADDRESS, "ansible_host", "ansible_ssh_host")
# All that a domain's list depends on, of hosts too that a run leaves out.
VARIABLES = (DOMAIN, _MODE, *_ADDRESSES)
# A host with one of these has no domain. YAML makes false of `off`; with `dra` a cluster makes the domains.
_ALONE = (False, "False", "false", "off", "dra")

Hosts = Sequence[tuple[str, Mapping[str, Any]]]


def domain_nodes(domain: str, groups: Mapping[str, Sequence[str]], value: Callable[[str, str], Any]) -> tuple[str, ...]:
    """Return `ADDRESS NAME` of each node of a domain, in the order of the names.

    The nodes are the hosts that name the domain; if a group has its name, that group's hosts, all of which must name
    it. `value` returns a host's variable. Raises UsageError with all problems.
    """
    found: dict[str, str] = {}
    problems: list[Problem] = []
    for name in sorted(groups.get(domain, groups["all"])):
        # Hosts that no play has met lack the facts in their variables' templates: read only what is needed.
        joins = str(value(name, DOMAIN)) == domain
        if not (joins or domain in groups) or value(name, _MODE) in _ALONE:
            continue
        if not joins:
            step = f"set {DOMAIN}: {domain} for the whole group; or {_MODE}: off for {name}"
            what = f"{name} is in the group {domain} and does not name it as its IMEX domain"
            problems.append(Problem(what, "", step))
            continue
        address = str(next((one for key in _ADDRESSES if (one := value(name, key))), name))
        if not _ADDRESS.fullmatch(address) or address in found:
            what = f"the IMEX domain {domain} needs an address of {name} that is its own, and no name"
            used = f"; {found[address]} has it too" if address in found else ""
            problems.append(Problem(what, f"{address}{used}", f"set {ADDRESS} of {name}"))
        else:
            found[address] = name
    if problems:
        raise UsageError.several(tuple(problems))
    return tuple(f"{address} {name}" for address, name in found.items())


def with_nodes(own: str, variables: Mapping[str, Any], find: Callable[[str], tuple[str, ...]]) -> Mapping[str, Any]:
    """Return a host's variables with the nodes of its domain, which `find` returns; a list that is given stays.

    Raises UsageError for a host outside the group that has the domain's name.
    """
    domain = str(variables.get(DOMAIN) or "")
    if not domain or variables.get(NODES) or variables.get(_MODE) in _ALONE:
        return variables
    nodes = find(domain)
    if own not in _names(nodes):
        what = f"{own} names the IMEX domain {domain} and is not in the group {domain}"
        raise UsageError(what, f"nodes: {', '.join(_names(nodes))}", f"add it to the group {domain}")
    return {**variables, NODES: list(nodes)}


def with_lists(hosts: Hosts, groups: Mapping[str, Sequence[str]], read: Callable[[str], Mapping[str, Any]]) -> Hosts:
    """Return hosts and variables with the nodes of their domains; `read` returns the variables of any other host."""
    chosen = dict(hosts)
    variables = lru_cache(maxsize=None)(lambda name: chosen[name] if name in chosen else read(name))
    find = lru_cache(maxsize=None)(
        lambda domain: domain_nodes(domain, groups, lambda name, variable: variables(name).get(variable))
    )
    return [(name, with_nodes(name, values, find)) for name, values in hosts]


def split_problem(domain: str, nodes: Iterable[str], running: Collection[str]) -> Problem | None:
    """Return why a run over these hosts would change a part of a domain; None if it changes all of it."""
    outside = [name for name in _names(nodes) if name not in running]
    what = f"the IMEX domain {domain} must change as a whole, and this run leaves out {', '.join(outside)}"
    seen = "nodes with different drivers or lists refuse each other"
    step = f"run over all of them, in one batch; for a host that is gone: {_MODE}: off"
    return Problem(what, seen, step) if outside else None


def _names(nodes: Iterable[str]) -> tuple[str, ...]:
    """Return the nodes' names; a node that is given by its address alone has none."""
    return tuple(node.partition(" ")[2] for node in nodes if " " in node)
