"""Looks up the facts of measured pass rates, and judges them."""
