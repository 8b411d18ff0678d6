"""Adapters as Orbax checkpoints: digest and numbers stay, and what is not whole is refused."""

from __future__ import annotations

import shutil

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from multilora_jax import checkpoints
from multilora_jax.errors import AdapterError, UserError
from multilora_jax.lora.adapter_files import weight_files
from multilora_jax.lora.folders import AllowedFolders, check_files
from multilora_jax.lora.weights import load_adapter
from multilora_jax.models.checkpoint import open_checkpoint
from multilora_jax.stored_tensors import UNFINISHED_FILE
from tests.converted import edit, tied_adapter
from tests.torch_files import write_arrays


@pytest.fixture
def adapter(golden_tiny):
    return tied_adapter(golden_tiny)


@pytest.fixture
def load(golden_tiny):
    config = open_checkpoint(golden_tiny / "bases" / "tied").config
    return lambda folder: load_adapter(str(folder), config, max_lora_rank=64)


@pytest.mark.parametrize("form", ["safetensors", "bin", "bfloat16"])
def test_an_adapter_keeps_its_digest_and_its_numbers(adapter, load, tmp_path, form):
    folder = shutil.copytree(adapter, tmp_path / "mine")
    weights = load_file(folder / "adapter_model.safetensors")
    if form == "bin":
        (folder / "adapter_model.safetensors").unlink()
        write_arrays(folder / "adapter_model.bin", weights)
    elif form == "bfloat16":
        cast = {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in weights.items()}
        save_file(cast, folder / "adapter_model.safetensors")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    checkpoints.save_adapter(folder, tmp_path / "orbax")
    one, other = load(folder), load(tmp_path / "orbax")
    assert one.digest == other.digest
    assert one.scale == other.scale
    assert other.chat_template == "{{ messages }}"
    for key in one.a:
        np.testing.assert_array_equal(one.a[key], other.a[key])
        np.testing.assert_array_equal(one.b[key], other.b[key])


def test_bad_ones_are_refused(adapter, load, tmp_path):
    checkpoints.save_adapter(adapter, tmp_path / "good")
    check_files(str(tmp_path / "good"), "good", "good")
    load(tmp_path / "good")

    def refused(change, error=AdapterError):
        folder = shutil.copytree(tmp_path / "good", tmp_path / "bad")
        change(folder)
        with pytest.raises(error) as caught:
            load(folder)
        shutil.rmtree(folder)
        return caught.value.reason, caught.value.message

    def chunk(folder):
        return next(path for path in sorted((folder / "weights").rglob("*")) if path.name in ("0.0", "0"))

    assert refused(lambda f: chunk(f).unlink())[0] == "corrupt_weights"
    assert "bytes instead of" in refused(lambda f: chunk(f).write_bytes(b"1"))[1]
    assert "adapter" in refused(lambda f: edit(f, lambda m: m.update(kind="model")))[1]
    reason, message = refused(lambda f: edit(f, lambda m: m["hashed"].pop()))
    assert (reason, "does not list each tensor once" in message) == ("corrupt_weights", True)
    assert "digest is made of" in refused(lambda f: edit(f, lambda m: m.update(hashed=[["?", "x"]])))[1]
    assert "interrupted" in refused(lambda f: (f / UNFINISHED_FILE).touch())[1]
    changed = shutil.copytree(tmp_path / "good", tmp_path / "changed")
    data = bytearray(chunk(changed).read_bytes())
    data[1] ^= 1
    chunk(changed).write_bytes(data)
    assert load(changed).digest != load(tmp_path / "good").digest


def test_roots_bind_every_file_of_it(adapter, tmp_path):
    checkpoints.save_adapter(adapter, tmp_path / "roots" / "good")
    folder = tmp_path / "roots" / "good"
    allowed = AllowedFolders([str(tmp_path / "roots")])
    allowed.check_inside(str(folder), "good")
    listed = weight_files(str(folder))
    assert {str(p) for p in (folder / "weights").rglob("*") if p.is_file()} <= set(listed)
    victim = next(path for path in sorted((folder / "weights" / "0000").iterdir()) if path.is_dir())
    shutil.move(victim, tmp_path / "outside")
    victim.symlink_to(tmp_path / "outside")
    with pytest.raises(UserError, match="leads outside"):
        allowed.check_inside(str(folder), "good")
