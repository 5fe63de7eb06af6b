"""Advantages, losses, KL and aggregation: pure functions of tensors."""
