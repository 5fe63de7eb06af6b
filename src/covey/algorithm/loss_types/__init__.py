"""Losses, each declared in a file of its own; nothing here imports torch or numpy before a loss is used."""
