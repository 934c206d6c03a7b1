"""The Kubernetes cluster: manifests for it, and the verification that its pods have the GPUs. Controller only."""
