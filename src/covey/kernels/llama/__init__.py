"""Decoding steps of the Llama family in few calls of torch, for CPUs and GPUs."""
