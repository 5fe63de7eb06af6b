"""Checkpoints: what a run can be continued from, written so that it is either whole or absent.

No module here imports torch while it is imported itself, so a checkpoint can be verified before any weight is
loaded.
"""
