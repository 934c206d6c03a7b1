"""gpuprov turns bare Linux machines into hosts on which containers use NVIDIA GPUs, and proves that they do."""

__version__ = "0.1.0"
