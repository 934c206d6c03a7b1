"""The checks of `gpuprov verify`: what the GPUs are in the host's own eyes and in a container's."""
