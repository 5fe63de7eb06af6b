"""Looks up the facts of Ray, and judges them."""
