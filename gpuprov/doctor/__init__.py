"""Diagnose why containers do not see the GPUs: symptoms, their causes, and commands. Changes nothing."""
