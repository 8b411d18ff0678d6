"""Compiles kernels, and whole programs, for an NVIDIA GPU on a machine without one, and holds them to limits."""

from pallas_kernels.gpu_check.case import Case, shaped

__all__ = ["Case", "shaped"]
