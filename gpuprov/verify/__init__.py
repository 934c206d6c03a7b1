"""The proof: what the GPUs are in the host's own eyes and in a container's. Changes nothing but its own image."""

from __future__ import annotations

from gpuprov.verify.checks import known_holes, verify
from gpuprov.verify.outcome import Verdict
from gpuprov.verify.smi import compare, parse_smi

__all__ = ["Verdict", "compare", "known_holes", "parse_smi", "verify"]
