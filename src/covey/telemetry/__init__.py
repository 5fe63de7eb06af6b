"""Telemetry: what a run records, and the views that only read it.

The files of a run directory are the record. The terminal and the figure are drawn from the same records and
may fail without a run's noticing.
"""
