"""The options of a run, each declared once."""
