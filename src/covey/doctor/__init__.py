"""What a run directory says of its run: read only, without torch and without a network."""
