"""Looks up the facts of the model, and judges them."""
