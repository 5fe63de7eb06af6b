"""Rows, chat templates, tokens, and the order of prompts."""
