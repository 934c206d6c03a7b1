"""`gpuprov kubernetes`: print the manifests that a cluster needs for GPU nodes; touches no cluster."""

from __future__ import annotations

import re

import click

from gpuprov.fleet.options import pairs, text_option
from gpuprov.fleet.standard_streams import say_text

# As Kubernetes has label keys and values.
_PAIR = re.compile(r"((?:[a-z0-9.-]{1,253}/)?[A-Za-z0-9][A-Za-z0-9_.-]{0,62})=([A-Za-z0-9_.-]{0,63})")


@click.group("kubernetes")
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
@click.option(
    "--node-selector",
    "selectors",
    metavar="KEY=VALUE",
    multiple=True,
    help="Nodes for the device plugin. Default: nvidia.com/gpu.present=true, or Node Feature Discovery's.",
)
@click.option("--no-test-pod", is_flag=True, help="Leave out the pod that runs nvidia-smi -L.")
@click.option("--json", "as_json", is_flag=True, help="Print a List as JSON.")
def manifest(
    mode: str, strategy: str, namespace: str, mig: str, selectors: tuple[str, ...],
    no_test_pod: bool, as_json: bool,
) -> None:  # fmt: skip
    """Print YAML for a cluster whose nodes gpuprov provisions. Comments say what to type.

    docs/kubernetes.md has the whole way, and the GPU operator's.

    \b
    Examples:
      gpuprov kubernetes manifest | kubectl apply -f -
      gpuprov kubernetes manifest --strategy cdi --namespace gpu
      gpuprov kubernetes manifest --mode dra > claims.yaml
    """
    from gpuprov.kubernetes.manifest import Choice, manifest

    chosen = pairs("--node-selector", selectors, _PAIR, "KEY=VALUE, such as pool=gpu")
    made = manifest(Choice(mode, strategy, namespace, mig, chosen, not no_test_pod))
    say_text(made.as_json() if as_json else made.as_yaml(), nl=as_json)
