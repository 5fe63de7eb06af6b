"""Kernels for a GPU: decoding steps that are recorded as CUDA graphs."""
