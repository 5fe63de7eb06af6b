"""Looks up the facts of the rewards, and judges them."""
