"""Why containers do not see the GPUs: symptoms, their causes, and what to type. Changes nothing."""

from __future__ import annotations

from gpuprov.doctor.examine import examine

__all__ = ["examine"]
