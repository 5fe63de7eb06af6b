"""Looks up the facts of the tasks, and judges them."""
