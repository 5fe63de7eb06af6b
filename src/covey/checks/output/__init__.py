"""Looks up the facts of the output directory, and judges them."""
