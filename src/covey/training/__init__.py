"""The loop, and what builds every part of a run."""
