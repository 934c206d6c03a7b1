"""The cluster's side of Kubernetes: manifests for it, and the proof that its pods have the GPUs. The controller's."""
