"""The parts of `python bench/gpu.py`."""
