"""Tools and environments: what happens between two turns of the model."""
