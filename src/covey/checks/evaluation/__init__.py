"""Looks up the facts of evaluations, and judges them."""
