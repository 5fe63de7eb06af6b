"""Tools, environments, and how the model is told of them."""
