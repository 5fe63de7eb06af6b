"""How gradients and weights are held: one process or DDP."""
