"""The `covey` command: one file per verb."""
