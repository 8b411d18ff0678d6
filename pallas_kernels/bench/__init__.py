"""Correctness and speed of every kernel on the device at hand: `python -m pallas_kernels.bench`."""
