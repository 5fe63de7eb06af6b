"""Guards: each file checks a run for what no healthy one has. torch and numpy are imported within the
checks, because `covey explain` reads the codes of these files."""
