"""NVIDIA's own files for the tests: drivers from Debian's packages, CUDA's runtimes from PyPI.

Nothing of NVIDIA's is in the repository. The machine's own apt and pip fetch what a test asks for, into `.cache`.
"""

from .debian import BRANCHES, Driver, UnavailableError, driver
from .pypi import libcudart

__all__ = ["BRANCHES", "Driver", "UnavailableError", "driver", "libcudart"]
