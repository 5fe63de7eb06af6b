"""Annotate, update and the backends that run them."""
