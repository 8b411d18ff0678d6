"""A model as a Hugging Face folder, for engines that read nothing else (host only)."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from multilora_jax.models.checkpoint import expected_shapes, open_checkpoint
from multilora_jax.models.checkpoint.hf_config import write_hf_config
from multilora_jax.stored_tensors import is_stored


def hf_folder(model: str, out: str) -> str:
    """A folder with the model's config.json and weights.

    Args:
        model: as in the configuration. A folder is given back as it is, unless `convert` wrote it.
        out: folder to write any other one to, in float32; made where it is missing.

    Raises:
        ConfigError, NotFoundError: see open_checkpoint.
    """
    if Path(model).expanduser().is_dir() and not is_stored(Path(model).expanduser()):
        return str(Path(model).expanduser())
    checkpoint = open_checkpoint(model)
    tensors = {
        name: checkpoint.tensor(name).astype(np.float32, copy=False) for name in expected_shapes(checkpoint.config)
    }
    os.makedirs(out, exist_ok=True)
    save_file(tensors, os.path.join(out, "model.safetensors"), metadata={"format": "pt"})
    write_hf_config(checkpoint.config, Path(out))
    return out
