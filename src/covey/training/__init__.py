"""The loop, and the one place that wires every part."""
