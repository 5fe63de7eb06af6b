"""Formats of tool calls, each declared in a file of its own."""
