"""From scored groups to the micro-batches of optimizer steps."""
