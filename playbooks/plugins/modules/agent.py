"""Documentation of the action plugin of this name, for ansible-doc; no code of it runs on a host."""

from __future__ import annotations

DOCUMENTATION = r"""
module: agent
short_description: Runs gpuprov's agent on a host
description:
  - Pushes gpuprov's agent to the host, once per version.
  - The agent then makes or carries out a plan, verifies, tells facts, or rolls back.
  - The host needs Python 3.9 or later, and nothing else; C(gpuprov_play_bootstrap_python) installs it.
  - C(gpuprov_play_bundle) names a bundle to install from, C(gpuprov_play_bundle_key) the key that must have signed it.
  - C(become) is needed for all commands but C(facts), and C(cuda) for the host itself.
  - What the host shall be is read from the variables that begin with C(gpuprov_); C(gpuprov options) lists them.
options:
  command:
    description:
      - C(install) brings the host to what the variables say. C(plan) only tells what that would change.
      - C(verify) compares what containers see with what the host has. C(facts) sets C(ansible_local.gpuprov).
      - C(doctor) says why containers do not see the GPUs, and fails if it finds a cause.
      - Without C(fix) it changes nothing.
      - C(cuda) says which libcuda programs load, on the host or in I(container), and fails if it is a wrong one.
      - C(rollback) undoes the last run. All tasks of one C(ansible-playbook) are one run.
      - C(uninstall) takes everything away that gpuprov ever put there.
    type: str
    default: install
    choices: [plan, install, verify, facts, doctor, cuda, rollback, uninstall]
  steps:
    description:
      - Keeps C(plan) and C(install) to these steps, in the plan's own order. None means all.
      - C(download), C(repositories), C(packages), C(nouveau), C(reboot), C(driver), C(boot), C(device nodes),
        C(toolkit), C(cdi), C(docker), C(engines), C(images), C(watch).
    type: list
    elements: str
    default: []
  container:
    description: A container or an image of docker or podman, for C(cuda). Empty means the host itself.
    type: str
    default: ""
  fix:
    description:
      - C(doctor) does about the causes what gpuprov can do, and looks again. C(rollback) undoes it.
    type: bool
    default: false
  remember:
    description: C(verify) takes the GPUs that are there now as all that should be there.
    type: bool
    default: false
author:
  - gpuprov (@gpuprov)
attributes:
  check_mode:
    support: full
    description: Tells the plan, of a rollback and an uninstallation too. C(verify) is left out.
  diff_mode:
    support: full
    description: Shows the plan's diffs.
  async:
    support: partial
    description: Not with C(gpuprov_reboot=if-needed), for which the plugin itself waits.
"""

EXAMPLES = r"""
- name: Everything
  gpuprov.host.agent:
  become: true

- name: The engine alone
  gpuprov.host.agent:
    steps: [docker]
  become: true

- name: Facts, as ansible_local.gpuprov
  gpuprov.host.agent:
    command: facts
"""

RETURN = r"""
changes:
  description: The changes that were planned, each with C(step) and C(summary). Empty where the host is as it should be.
  returned: C(plan) and C(install)
  type: list
  elements: dict
disturbs:
  description: Whether containers, or processes on the GPUs, may stop by these changes.
  returned: C(plan), C(install), C(rollback) and C(uninstall)
  type: bool
checks:
  description: What was verified, each with C(name), C(status), C(host), C(container) and C(reason).
  returned: C(verify), C(doctor) and C(cuda)
  type: list
  elements: dict
cuda:
  description: Which libraries win and why, as C(gpuprov cuda --json) prints it.
  returned: C(cuda)
  type: dict
problems:
  description: What is wrong, each with C(what), C(evidence) and C(next_step). C(msg) is the same as text.
  returned: always
  type: list
  elements: dict
versions:
  description: The host's os, kernel, driver and docker, and how many GPUs it has.
  returned: C(plan) and C(install)
  type: dict
reboot_needed:
  description: Whether the host must reboot before containers see its GPUs.
  returned: always
  type: bool
"""
