"""Engines, and collect: prompts in, scored groups out."""
