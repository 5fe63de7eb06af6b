"""The engine in this process, on the learner's own weights."""
