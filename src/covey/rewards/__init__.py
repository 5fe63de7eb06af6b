"""Reward functions and how they are called."""
