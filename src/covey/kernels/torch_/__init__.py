"""The plain truth: what torch and the model's own modules compute, on any device."""
