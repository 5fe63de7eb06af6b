"""Looks up the facts of LoRA, and judges them."""
