"""The pod that proves a node: nvidia-smi -L with the devices that it asks for, as confined as a pod can be. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

from gpuprov.kubernetes.objects import RUNTIME_CLASS, Object, confined, confined_pod

CONTAINER = "nvidia-smi"
NAME = "gpuprov-verify"
INSTANCE = "app.kubernetes.io/instance"


def labels(run: str) -> dict[str, str]:
    """Return the labels of all that one verification creates; `run` is its random name."""
    return {"app.kubernetes.io/name": NAME, "app.kubernetes.io/managed-by": "gpuprov", INSTANCE: run}


def verification_pod(
    name: str, node: str, *, run: str, image: str, resources: Mapping[str, int], by_class: bool, seconds: float
) -> Object:
    """Return the pod for one node. It ends by itself after `seconds`, so that a lost one gives its GPUs back.

    `by_class`: the cluster has the runtime class. The scheduler places the pod, as it places a DaemonSet's: a node is
    never given more than it has. Every taint is tolerated, so that a cordoned node can be proved before it is used.
    """
    counts = {key: str(count) for key, count in resources.items() if count}
    place = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels(run)},
        "spec": {
            "restartPolicy": "Never",
            "activeDeadlineSeconds": math.ceil(seconds),
            "terminationGracePeriodSeconds": 5,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            **({"runtimeClassName": RUNTIME_CLASS} if by_class else {}),
            "securityContext": confined_pod(),
            "affinity": {
                "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [place]}}
            },
            "tolerations": [{"operator": "Exists"}],
            "containers": [
                {
                    "name": CONTAINER,
                    "image": image,
                    "imagePullPolicy": "IfNotPresent",
                    "command": ["nvidia-smi", "-L"],
                    # Namespaces with a quota take no pod that names none.
                    "resources": {
                        "requests": {"cpu": "50m", "memory": "64Mi"},
                        "limits": {"cpu": "1", "memory": "512Mi", **counts},
                    },
                    "securityContext": confined(),
                }
            ],
        },
    }
