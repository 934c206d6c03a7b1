"""Documentation of the action plugin of this name, for ansible-doc; no code of it runs on a host."""

from __future__ import annotations

DOCUMENTATION = r"""
module: agent
short_description: Runs gpuprov's agent on a host
description:
  - Pushes gpuprov's agent to the host, once per version.
  - The agent then makes or carries out a plan, verifies, gathers facts, or rolls back.
  - The host needs only Python 3.9 or later; C(gpuprov_play_bootstrap_python) installs it.
  - C(gpuprov_play_bundle) names a bundle to install from, C(gpuprov_play_bundle_key) the key that must have signed it.
  - C(become) is needed for all commands but C(facts), C(health), and C(cuda) for the host itself.
  - Variables that begin with C(gpuprov_) specify the desired state; C(gpuprov options) lists them.
options:
  command:
    description:
      - C(install) brings the host to the desired state. C(plan) only reports what that would change.
      - C(verify) compares what containers see with what the host has. C(facts) sets C(ansible_local.gpuprov).
      - C(doctor) says why containers do not see the GPUs, and fails if it finds a cause.
      - Without C(fix) it changes nothing.
      - C(health) says whether each GPU is fit for work, and fails if one is unfit.
      - C(accept) loads each GPU for I(minutes) in a container, and fails if a GPU is unfit.
      - C(cuda) says which libcuda programs load, on the host or in I(container), and fails if it is a wrong one.
      - C(rollback) undoes the last run. All tasks of one C(ansible-playbook) are one run.
      - C(uninstall) removes everything that gpuprov has installed.
    type: str
    default: install
    choices: [plan, install, verify, health, accept, facts, doctor, cuda, rollback, uninstall]
  steps:
    description:
      - Limits C(plan) and C(install) to these steps, in the plan's own order. Empty means all.
      - C(download), C(repositories), C(packages), C(nouveau), C(reboot), C(driver), C(boot), C(device nodes),
        C(leftovers), C(toolkit), C(cdi), C(docker), C(engines), C(images), C(watch), C(clean image).
    type: list
    elements: str
    default: []
  container:
    description: A container or an image of docker or podman, for C(cuda). Empty means the host itself.
    type: str
    default: ""
  fix:
    description:
      - C(doctor) fixes the causes that gpuprov can fix, then checks again. C(rollback) undoes the fixes.
    type: bool
    default: false
  allow:
    description:
      - What C(doctor) with C(fix) may do to repair GPUs that C(health) finds ill. C(reset) resets them,
        and stops what uses them. C(reboot) reboots the host.
      - Drain the host before the task, and give it work again only if the task does not fail.
    type: list
    elements: str
    default: []
    choices: [reset, reboot]
  remember:
    description: C(verify) records the present GPUs as the expected ones.
    type: bool
    default: false
  this_run:
    description: C(rollback) undoes nothing but what this C(ansible-playbook) has changed.
    type: bool
    default: false
  window:
    description:
      - The task fails outside of this window, as C(Sat 02:00-06:00) or C(Mon-Fri 22:00-04:00 Europe/Berlin).
      - Without a zone the controller's counts. Check mode ignores it.
    type: str
    default: ""
  minutes:
    description: How long C(accept) may take.
    type: int
    default: 10
author:
  - gpuprov (@gpuprov)
attributes:
  check_mode:
    support: full
    description: Reports the plan, of C(rollback) and C(uninstall) too. C(verify) and C(accept) are skipped.
  diff_mode:
    support: full
    description: Shows the plan's diffs.
  async:
    support: partial
    description: >-
      Not if the task may reboot the host (C(gpuprov_reboot=if-needed), I(allow)), for which the plugin itself waits.
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
  description: The planned changes, each with C(step) and C(summary).
  returned: C(plan), C(install), C(uninstall), C(doctor) with C(fix), C(rollback) in check mode
  type: list
  elements: dict
disturbs:
  description: Whether containers, or processes on the GPUs, may stop by these changes.
  returned: with C(changes)
  type: bool
upgrades:
  description: >-
    Installed versions that the plan replaces, each with C(product), C(installed), C(wanted), C(stops), C(reboot)
    and C(way_back).
  returned: C(plan) and C(install), if there are any
  type: list
  elements: dict
choice:
  description: >-
    The driver that was chosen, with C(gpus), C(driver), C(version), C(why) and C(newer). Each host chooses for itself.
  returned: C(plan) and C(install), if the variables name no version
  type: dict
checks:
  description: What was verified, each with C(name), C(status), C(on_host), C(in_container), C(reason) and C(engine).
  returned: C(verify), C(health), C(accept), C(doctor) and C(cuda)
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
  description: The host's os, kernel, driver, docker, toolkit, number of GPUs and MIG layout.
  returned: C(plan) and C(install); in part C(verify), C(health) and C(accept)
  type: dict
reboot_needed:
  description: Whether the host must reboot before containers see its GPUs.
  returned: always
  type: bool
"""
