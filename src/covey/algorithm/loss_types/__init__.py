"""Losses, each declared in a file of its own; nothing here imports torch before a loss is computed."""
