"""The command line: parse, call, print.

Only click is imported here; each command loads the modules that it needs, so that `--help` and shell completion are
fast.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from typing import Any

import click

from gpuprov import __version__
from gpuprov.cli import reference, run
from gpuprov.cli.advisories import advisories
from gpuprov.cli.bundle import bundle
from gpuprov.cli.cdi import cdi
from gpuprov.cli.cuda import cuda
from gpuprov.cli.health import accept, health
from gpuprov.cli.hook import hook
from gpuprov.cli.playbooks import playbooks
from gpuprov.cli.runtime import docker_args, runtime
from gpuprov.fleet import options as run_options
from gpuprov.fleet.options import AS_JSON, FILE, named_options, options_of, require_whole_program, text_option
from gpuprov.fleet.standard_streams import say, say_text
from gpuprov.protocol.errors import ExitCode, GpuprovError, os_errors
from gpuprov.protocol.words import counted

# As Kubernetes has label keys and values.
_LABEL = re.compile(r"((?:[a-z0-9.-]{1,253}/)?[A-Za-z0-9][A-Za-z0-9_.-]{0,62})=([A-Za-z0-9_.-]{0,63})")


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="gpuprov")
def cli() -> None:
    """Make Linux machines run containers on NVIDIA GPUs, and prove that they do.

    \b
    Examples:
      sudo gpuprov install                                        this machine
      gpuprov install --hosts inventory.ini --check --diff        what would change on all hosts
      gpuprov install --hosts inventory.ini
      gpuprov verify --hosts inventory.ini
      gpuprov doctor --hosts inventory.ini                        why it fails, and what to type

    \b
    Exit codes, the worst first (docs/fleets.md):
      143, 129, 130  SIGTERM, SIGHUP or Ctrl-C ended the run
      2  the call or the inventory is wrong    1  a host failed    7  a host is unfit (health)
      4  a host is unreachable    3  a host needs a reboot    6  a host is degraded (health)
      5  something would change (install --check --detailed-exitcode)    0  done
    """


@cli.command(short_help="Bring hosts to what the inventory says.")
@click.option("--reboot", type=click.Choice(["never", "if-needed"]), help="Reboot a host that needs it, "
              "then continue. Default: gpuprov_reboot.")  # fmt: skip
@options_of("install")
def install(reboot: str | None, **options: Any) -> None:
    """Bring driver, docker and container toolkit to what the inventory says.

    Run twice, it changes nothing the second time; interrupted, the next run resumes it.

    \b
    Examples:
      sudo gpuprov install
      sudo gpuprov install --upgrade
      gpuprov install --hosts inventory.ini --check --diff
      gpuprov install --hosts inventory.ini --limit 'gpu:!lab-b' -e @site.yml -K
      gpuprov install --hosts inventory.ini --canary 1 --serial 10% --rollback-on-failure
      gpuprov install --hosts inventory.ini --serial 10% --window 'Sat 02:00-06:00 Europe/Berlin'
      sudo gpuprov install --image -e gpuprov_driver_version=580.178.04 -e gpuprov_image_gpus=ampere
      sudo gpuprov install --root /mnt/image -e @image.yml
    """
    run("install", options, reboot=reboot)


@cli.command(short_help="Compare what containers see with what the host has.")
@text_option("--image", metavar="IMAGE", help="Run nvidia-smi in this image. Default: one made of the "
              "host's files; with --kubernetes, ubuntu:22.04.")  # fmt: skip
@text_option("--torch-image", metavar="IMAGE", help="Also check PyTorch in this image.")
@text_option("--tensorflow-image", metavar="IMAGE", help="Also check TensorFlow in this image.")
@click.option("--kubernetes", "on_kubernetes", is_flag=True,
              help="Verify a cluster's nodes with a pod on each, by your own kubectl.")  # fmt: skip
@text_option("--context", metavar="NAME", help="With --kubernetes: the kubeconfig's context.")
@text_option("--kubeconfig", metavar="FILE", type=FILE, help="With --kubernetes: the kubeconfig.")
@text_option("--namespace", metavar="NAME", help="With --kubernetes: the pods' namespace. Default: default.")
@click.option("--pod-timeout", metavar="SECONDS", type=click.FloatRange(1, 3600), default=300.0, show_default=True,
              help="With --kubernetes: how long pods may take.")  # fmt: skip
@options_of("verify")
def verify(
    image: str, torch_image: str, tensorflow_image: str, on_kubernetes: bool, context: str, kubeconfig: str,
    namespace: str, pod_timeout: float, **options: Any,
) -> None:  # fmt: skip
    """Compare what containers see with what the host has; a table of checks.

    \b
    Examples:
      sudo gpuprov verify
      gpuprov verify --hosts inventory.ini
      gpuprov verify --hosts inventory.ini --torch-image pytorch/pytorch --json
      gpuprov verify --kubernetes --context prod
      gpuprov verify --kubernetes --hosts inventory.ini --limit gpu07
    """
    if on_kubernetes:
        if options["remember"]:
            raise click.UsageError("--remember is for hosts: leave out --kubernetes")
        from gpuprov.kubernetes.cluster import Kubectl
        from gpuprov.kubernetes.verify import Wanted, verify_cluster

        if torch_image or tensorflow_image:
            raise click.UsageError("--torch-image and --tensorflow-image are not for --kubernetes")
        made = run_options.made_options("verify", options)
        wanted = Wanted(image, namespace or "default", pod_timeout)
        raise SystemExit(int(verify_cluster(made, Kubectl(context, kubeconfig), wanted)))
    if context or kubeconfig or namespace:
        raise click.UsageError("--context, --kubeconfig and --namespace need --kubernetes")
    run("verify", options, verify_image=image, torch_image=torch_image, tensorflow_image=tensorflow_image)


@cli.command(short_help="Diagnose why containers see no GPUs; suggest commands.")
@text_option("--explain", metavar="NAME", shell_complete=reference.complete, help="Explain one cause; examine no host.")
@options_of("doctor")
def doctor(explain: str, **options: Any) -> None:
    """Diagnose why containers do not see the GPUs: causes, evidence and commands, the one to fix first at the top.

    Without --fix it changes nothing. Exit code 0: nothing is wrong (any more); 1: a cause is left.

    \b
    Examples:
      sudo gpuprov doctor
      sudo gpuprov doctor --fix --check --diff
      gpuprov doctor --hosts inventory.ini --limit gpu07
      gpuprov doctor --hosts inventory.ini --json
      gpuprov doctor --explain gpu-nouveau
    """
    if explain:
        if options["hosts"] or options["root"] or options["fix"]:
            raise click.UsageError("--explain examines no host: leave out --hosts, --root and --fix")
        say_text(reference.explain(explain, as_json=options["json"]))
        return
    run("doctor", options)


@cli.command(short_help="Show what hosts are; changes nothing.")
@options_of("facts")
def facts(**options: Any) -> None:
    """Show what hosts are: distribution, kernel, GPUs, driver, docker. Changes nothing.

    \b
    Examples:
      gpuprov facts
      gpuprov facts --hosts inventory.ini --limit lab-a -v   every fact
      gpuprov facts --hosts inventory.ini --json             for programs
    """
    run("facts", options)


@cli.command()
@options_of("rollback")
def rollback(**options: Any) -> None:
    """Undo the last run on each host, back to the byte.

    \b
    Examples:
      sudo gpuprov rollback --check --diff
      gpuprov rollback --hosts inventory.ini --limit lab-a
    """
    run("rollback", options)


@cli.command(short_help="Undo all runs, and remove what is left of gpuprov.")
@options_of("uninstall")
def uninstall(**options: Any) -> None:
    """Undo all runs on each host, the newest first, and remove what is left of gpuprov.

    What can't be brought back is listed before anything is done: --check shows it.

    \b
    Examples:
      sudo gpuprov uninstall --check --diff
      gpuprov uninstall --hosts inventory.ini --limit lab-a
    """
    run("uninstall", options)


@cli.command(short_help="Write an inventory by asking what it needs.")
@click.argument("file", type=FILE, default="inventory.yml")
@text_option("--hosts", metavar="HOSTS", help="Names with commas between, a range gpu[01:16], ssh-config or "
             "known-hosts.")  # fmt: skip
@text_option("--user", metavar="NAME", help="The user for SSH. Default: as your SSH configuration says.")
@click.option("--driver", type=click.Choice(run_options.DRIVERS), help="The driver's source: gpuprov_driver.")
@text_option("--driver-version", metavar="VERSION", help="gpuprov_driver_version.")
@text_option("--engines", metavar="NAMES", help="Engines besides docker, with commas between: gpuprov_engines.")
@click.option("--look/--no-look", default=True, help="Look at the hosts over SSH, and leave out those without a GPU.")
@click.option("--yes", "-y", is_flag=True, help="Ask nothing: take the flags, and proposals for the rest.")
@click.option("--force", is_flag=True, help="Replace an existing file.")
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
@named_options(*run_options.CONNECTION_FIELDS, passwords=True)
def init(file: str, yes: bool, force: bool, as_json: bool, **given: Any) -> None:
    """Write an inventory, FILE (default: inventory.yml), by asking what it needs.

    It looks at the hosts and proposes what fits them; Enter takes a proposal. It changes no host, and Ctrl-C writes
    nothing.

    \b
    Examples:
      gpuprov init
      gpuprov init --hosts 'gpu[01:16].example.org' --user ops -K
      gpuprov init site.yml --hosts known-hosts --driver packages --driver-version 580 --yes --json
    """
    from gpuprov.fleet.first_inventory import write_inventory

    require_whole_program("`gpuprov init`")
    write_inventory(file, given, silent=yes, force=force, as_json=as_json)


@cli.command("options")
@click.option("--json", "form", flag_value="json", help="As JSON.")
@click.option("--markdown", "form", flag_value="markdown", help="As a Markdown table.")
@text_option("--write", metavar="FILE", type=FILE, help="Write what is chosen as YAML for group_vars, with comments.")
@click.option("--force", is_flag=True, help="With --write: replace an existing file.")
@named_options(*run_options.INVENTORY_FIELDS, hosts="With --write: what all these hosts have in common is chosen.")
def list_options(form: str | None, write: str, force: bool, **inventory: Any) -> None:
    """List every inventory variable with its default and meaning.

    --write chooses what -e and the inventory say, and the driver's version that the last installation of these hosts
    left. Values with a password are left out.

    \b
    Examples:
      gpuprov options
      gpuprov options --markdown
      gpuprov options --hosts inventory.ini --write inventory/group_vars/gpu_hosts.yml
    """
    if write:
        from gpuprov.fleet.first_inventory import chosen_variables, write_new

        write_new(write, reference.as_yaml(chosen_variables(inventory)), force=force)
        say(f"wrote {write}")
        return
    if force or any(inventory.values()):
        raise click.UsageError("--force, --hosts, --limit, -e and --vault-password-file need --write")
    if form == "json":
        text = json.dumps(reference.variables(), indent=2, ensure_ascii=False)
    elif form == "markdown":
        text = reference.as_markdown()
    else:
        text = reference.as_text(shutil.get_terminal_size().columns if sys.stdout and sys.stdout.isatty() else 0)
    say_text(text)


@cli.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script that completes gpuprov's words in a shell.

    \b
    Examples:
      eval "$(gpuprov completion bash)"                                    in ~/.bashrc
      eval "$(gpuprov completion zsh)"                                     in ~/.zshrc
      gpuprov completion fish > ~/.config/fish/completions/gpuprov.fish
    """
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None
    say_text(found(cli, {}, "gpuprov", "_GPUPROV_COMPLETE").source())


@cli.group()
def agent() -> None:
    """The program that runs on the hosts.

    \b
    Example:
      gpuprov agent build -o agent.pyz
    """


@agent.command()
@click.option("--output", "-o", metavar="FILE", required=True, type=click.Path(dir_okay=False, writable=True),
              help="The file to write.")  # fmt: skip
def build(output: str) -> None:
    """Write the agent as one file that runs on Python 3.9 and later.

    \b
    Example:
      gpuprov agent build -o agent.pyz
      echo '{"command": "facts"}' | sudo python3 -I agent.pyz
    """
    from pathlib import Path

    from gpuprov.fleet.agent_file import build_agent

    require_whole_program("`gpuprov agent build`")
    made = build_agent()
    with os_errors(f"the agent {output} can't be written", "name another file with -o"):
        Path(output).write_bytes(made.content)
    say(f"{output}: {counted(len(made.content), 'byte')}, SHA-256 {made.digest}")


@cli.command()
@click.option("--list", "as_list", is_flag=True, help="One line for each run that is kept; the last 50 are.")
@text_option("--run", "identifier", metavar="ID", help="This run, by its name in the list or the "
              "beginning of it. Default: the last.")  # fmt: skip
@AS_JSON
@text_option("--html", type=FILE, help="Write it as one HTML page instead.")
@click.option("--verbose", "-v", is_flag=True, help="Every host, however many there are.")
def report(as_list: bool, identifier: str, as_json: bool, html: str, verbose: bool) -> None:
    """Show again what came of a run.

    \b
    Examples:
      gpuprov report
      gpuprov report --list
      gpuprov report --run 20261121T0815 --html report.html
    """
    from gpuprov.fleet import report as reports
    from gpuprov.fleet.command import make_console
    from gpuprov.fleet.history import load

    if as_list and (identifier or html):
        raise click.UsageError("--list names all runs: leave out --run and --html")
    if as_list:
        reports.show_list(make_console(), as_json=as_json)
    elif html:
        reports.write_page(load(identifier), html)
    else:
        reports.show_run(make_console(), load(identifier), as_json=as_json, verbose=verbose)


@cli.group()
def kubernetes() -> None:
    """Print what a Kubernetes cluster needs for nodes with GPUs.

    \b
    Examples:
      gpuprov kubernetes manifest | kubectl apply -f -
      gpuprov verify --kubernetes
    """


@kubernetes.command()
@click.option("--mode", type=click.Choice(["plugin", "dra"]), default="plugin", show_default=True,
              help="Print NVIDIA's device plugin, or DRA claims (Kubernetes 1.34).")  # fmt: skip
@click.option("--strategy", type=click.Choice(["environment", "cdi"]), default="environment",
              show_default=True, help="Give devices by the runtime nvidia, or by CDI.")  # fmt: skip
@text_option("--namespace", metavar="NAME", help="Default: kube-system, or dra-driver-nvidia-gpu.")
@click.option("--mig", type=click.Choice(["none", "single", "mixed"]), default="none", show_default=True,
              help="How MIG devices become resources.")  # fmt: skip
@click.option("--node-selector", "selectors", metavar="KEY=VALUE", multiple=True, help="Nodes for the device plugin. "
              "Default: nvidia.com/gpu.present=true, or Node Feature Discovery's.")  # fmt: skip
@click.option("--no-test-pod", is_flag=True, help="Leave out the pod that runs nvidia-smi -L.")
@click.option("--json", "as_json", is_flag=True, help="Print a List as JSON.")
def manifest(
    mode: str, strategy: str, namespace: str, mig: str, selectors: tuple[str, ...], no_test_pod: bool, as_json: bool
) -> None:
    """Print YAML for a cluster whose nodes gpuprov provisions. Comments say what to type.

    docs/kubernetes.md has the whole way, and the GPU operator's.

    \b
    Examples:
      gpuprov kubernetes manifest | kubectl apply -f -
      gpuprov kubernetes manifest --strategy cdi --namespace gpu
      gpuprov kubernetes manifest --mode dra > claims.yaml
    """
    from gpuprov.kubernetes.manifest import Choice, manifest

    if mode == "dra" and (strategy != "environment" or mig != "none" or selectors):
        raise click.UsageError("--strategy, --mig and --node-selector are for the device plugin: leave out --mode dra")
    chosen = run_options.pairs("--node-selector", selectors, _LABEL, "KEY=VALUE, such as pool=gpu")
    made = manifest(Choice(mode, strategy, namespace, mig, chosen, not no_test_pod))
    say_text(made.as_json() if as_json else made.as_yaml(), nl=as_json)


@cli.command("serve", short_help="Answer nvidia-docker scripts on 127.0.0.1:3476.")
def serve_command() -> None:
    """Answer GET requests in the form of nvidia-docker-plugin 1.0, so that scripts that ask it work again.

    It listens on 127.0.0.1:3476 and, as root, on /run/gpuprov/serve.sock. It loads and changes nothing. For a service:
    gpuprov_serve. `gpuprov docker-args` is the safer way: no other program can answer in its place.

    \b
    Examples:
      sudo gpuprov serve
      docker run --rm $(curl -sf 'localhost:3476/docker/cli?dev=0+1') IMAGE nvidia-smi
      curl -s localhost:3476/gpu/status/json
    """
    from gpuprov.boot.serve import ADDRESS, serve
    from gpuprov.core.system import System

    say(f"serving {ADDRESS[0]}:{ADDRESS[1]} until Ctrl-C", err=True)
    serve(System())


for _command in (accept, advisories, bundle, cdi, cuda, docker_args, health, hook, playbooks, runtime):
    cli.add_command(_command)


def main() -> None:
    """Run the command line; every failure ends with a message, never with a traceback."""
    try:
        from gpuprov.fleet.standard_streams import protected_outputs

        if os.path.expanduser("~") == "~":  # noqa: PTH111 (no name, no HOME: Path raises)
            os.environ["HOME"] = "/"  # the same exit code as docker
        try:
            os.getcwd()  # noqa: PTH109
        except FileNotFoundError:  # Ansible and relative paths need a working directory that is there
            os.chdir("/")
            say("warning: the working directory was removed; relative paths count from /", err=True)
        with protected_outputs():
            cli.main(prog_name="gpuprov")
    except GpuprovError as error:
        say_text(error, err=True)
        sys.exit(int(error.exit_code))
    except Exception as error:  # the log keeps the traceback
        from gpuprov.fleet.history import write_log

        say_text(write_log(error), err=True)
        sys.exit(int(ExitCode.FAILED))
