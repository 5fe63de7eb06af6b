"""Looks up the facts of the run and its machine, and judges them."""
