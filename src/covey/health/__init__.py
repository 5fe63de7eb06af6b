"""Invariants that hold on every healthy step."""
