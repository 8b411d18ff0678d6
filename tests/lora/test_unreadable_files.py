"""What is wrong with an adapter's files reaches the caller as a refusal of the adapter, with its reason."""

from __future__ import annotations

import json
import os

import pytest

from multilora_jax.errors import AdapterError, NotFoundError
from multilora_jax.lora.weights import load_adapter

LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
F64_HEADER = json.dumps({"a": {"dtype": "F64", "shape": [1], "data_offsets": [0, 8]}}).encode()
F64_FILE = len(F64_HEADER).to_bytes(8, "little") + F64_HEADER + bytes(8)


@pytest.mark.parametrize(
    ("content", "error", "reason", "message"),
    [
        (None, NotFoundError, "adapter_file_not_found", "cannot open {path}: No such file"),
        ("folder", AdapterError, "corrupt_weights", "{name}: not a regular file"),
        ("pipe", AdapterError, "corrupt_weights", "{name}: not a regular file"),
        (LFS_POINTER, AdapterError, "lfs_pointer", "{name}: this is a Git LFS pointer"),
    ],
    ids=["missing", "folder", "pipe", "pointer"],
)
@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_d06_either_file(model_config, peft_folder, name, content, error, reason, message):
    folder = peft_folder("a")
    path = folder / name
    path.unlink()
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        (os.mkfifo if content == "pipe" else os.mkdir)(path)
    with pytest.raises(error) as caught:
        load_adapter(str(folder), model_config, max_lora_rank=16)
    assert (caught.value.reason, caught.value.param) == (reason, "lora_path")
    assert caught.value.message.startswith(message.format(name=name, path=path))


@pytest.mark.parametrize(
    ("content", "reason", "message"),
    [
        (b"\xff" * 50, "corrupt_weights", "adapter_model.safetensors is damaged: cut off"),
        (F64_FILE, "unsupported_dtype", "adapter_model.safetensors: tensor a is stored as F64"),
    ],
    ids=["cut", "dtype"],
)
def test_d06_weights(model_config, peft_folder, content, reason, message):
    folder = peft_folder("a")
    (folder / "adapter_model.safetensors").write_bytes(content)
    with pytest.raises(AdapterError) as caught:
        load_adapter(str(folder), model_config, max_lora_rank=16)
    assert (caught.value.reason, caught.value.param) == (reason, "lora_path")
    assert caught.value.message.startswith(message)
