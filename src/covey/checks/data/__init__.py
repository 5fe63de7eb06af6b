"""Looks up the facts of the data, and judges them."""
