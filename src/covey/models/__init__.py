"""The policy: a causal model of transformers, its head in chunks, attention over streams, and the probe."""
