"""Kernels for a CPU: in C where there is a compiler, and by oneDNN."""
