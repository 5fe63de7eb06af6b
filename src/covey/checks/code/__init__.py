"""Looks up the facts of programs of completions, and judges them."""
