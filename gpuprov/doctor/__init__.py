"""Diagnose why containers do not see the GPUs: symptoms, their causes, and commands. Changes nothing."""

from __future__ import annotations

from gpuprov.doctor.examine import examine

__all__ = ["examine"]
