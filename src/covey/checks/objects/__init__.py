"""Looks up the facts of the live objects of a program, and judges them."""
