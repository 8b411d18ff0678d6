"""Descriptions of GPUs to compile for, and whether this Python can."""

from __future__ import annotations

from importlib import metadata

from pallas_kernels.gpu_check.reports import find_ptxas

# Only fields that the oldest jax in use knows: one it does not makes it refuse the whole text.
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024  threads_per_warp: 32
  shared_memory_per_block: 49152  shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048  core_count: 132  fpus_per_core: 128
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000  l2_cache_size: 52428800  clock_rate_ghz: 1.98
  device_memory_size: 151397597184
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H200"
"""
"""An NVIDIA H200 as XLA's compiler sees it."""


def missing() -> str | None:
    """Why nothing can be compiled for a GPU here; None if it can. Starts no backend."""
    need = "install the extra gpu-check"
    jaxlib = metadata.version("jaxlib")
    for package in ("jax-cuda13-plugin", "jax-cuda13-pjrt"):
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            return f"{package} is not installed: {need}"
        if version != jaxlib:
            return f"{package} {version} is not of jaxlib {jaxlib}: {need} of that version"
    return None if find_ptxas() else f"ptxas is not installed (wheel nvidia-cuda-nvcc): {need}"
