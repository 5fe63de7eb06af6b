"""Looks up the facts of the rollout servers, and judges them."""
