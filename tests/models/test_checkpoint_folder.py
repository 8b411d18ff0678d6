"""Hugging Face folders: tensors bit for bit, damaged files refused by name, memory bounded."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from multilora_jax.errors import ConfigError, NotFoundError
from multilora_jax.models.checkpoint import expected_shapes, open_checkpoint, read_config

BASES = ["bf16file", "biased", "fp16file", "headdim32", "linearrope", "llama3rope", "mha", "sharded", "tied", "untied"]


@pytest.fixture
def tied(golden_tiny, tmp_path) -> Path:
    """A writable copy of the tied base."""
    return shutil.copytree(golden_tiny / "bases" / "tied", tmp_path / "tied")


def rewrite(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("name", BASES)
def test_every_tensor_is_read_exactly(golden_tiny, name):
    folder = golden_tiny / "bases" / name
    checkpoint = open_checkpoint(str(folder))
    stored = {}
    for path in folder.glob("model*.safetensors"):
        stored |= load_file(path)
    assert sorted(checkpoint.names()) == sorted(expected_shapes(checkpoint.config))
    for tensor_name in checkpoint.names():
        tensor = checkpoint.tensor(tensor_name)
        assert tensor.dtype == stored[tensor_name].dtype
        assert tensor.shape == checkpoint.shape(tensor_name)
        np.testing.assert_array_equal(tensor.view(np.uint8), stored[tensor_name].view(np.uint8))
    assert checkpoint.config.name == name
    assert checkpoint.source == str(folder)
    assert checkpoint.load_tokenizer() is None


def test_stored_types_are_kept(golden_tiny):
    for name, dtype in (("bf16file", ml_dtypes.bfloat16), ("fp16file", np.float16), ("tied", np.float32)):
        checkpoint = open_checkpoint(golden_tiny / "bases" / name)
        assert checkpoint.tensor("model.norm.weight").dtype == dtype


def test_generation_config_is_joined(tied):
    (tied / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    assert open_checkpoint(tied).config.eos_token_ids == (2, 7)
    assert read_config(tied).eos_token_ids == (2, 7)


def test_known_extra_tensors_are_ignored(tied):
    def change(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)

    rewrite(tied, change)
    assert not any("lm_head" in name or "inv_freq" in name for name in open_checkpoint(tied).names())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), r"missing model.layers.1.mlp.up_proj.weight \[96, 64\]"),
        (lambda t: t.update({"model.extra": np.ones(3, np.float32)}), r"unexpected model.extra \[3\]"),
        (
            lambda t: t.update({"model.norm.weight": np.ones(3, np.float32)}),
            r"model.norm.weight has shape \[3\].*\[64\]",
        ),
        (lambda t: t.update({"model.layers.0.mlp.up_proj.bias": np.ones(96, np.float32)}), "unexpected .*up_proj.bias"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(tied, change, message):
    rewrite(tied, change)
    with pytest.raises(ConfigError, match=message):
        open_checkpoint(tied)


def test_untied_model_without_head_is_refused(golden_tiny, tmp_path):
    folder = shutil.copytree(golden_tiny / "bases" / "untied", tmp_path / "untied")
    rewrite(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ConfigError, match="missing lm_head.weight"):
        open_checkpoint(folder)


def test_unsupported_storage_type_is_named(tied):
    rewrite(tied, lambda tensors: tensors.update({"model.norm.weight": np.ones(64, np.int8)}))
    with pytest.raises(ConfigError, match="model.norm.weight is stored as I8"):
        open_checkpoint(tied).tensor("model.norm.weight")


def test_truncated_file_is_refused(tied):
    path = tied / "model.safetensors"
    data = path.read_bytes()
    for length in (0, 5, 100, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(ConfigError, match="cut off"):
            open_checkpoint(tied)


def test_corrupt_header_is_refused(tied):
    (tied / "model.safetensors").write_bytes((8).to_bytes(8, "little") + b"[]      ")
    with pytest.raises(ConfigError, match=r"model.safetensors: the safetensors header is corrupt") as caught:
        open_checkpoint(tied)
    assert (caught.value.reason, caught.value.param) == ("bad_checkpoint", "model")


def test_a_file_that_changes_under_an_open_checkpoint_is_refused(tied):
    checkpoint = open_checkpoint(tied)
    rewrite(tied, lambda tensors: tensors.pop("model.layers.0.mlp.up_proj.weight"))
    with pytest.raises(ConfigError, match=r"model.safetensors: it has changed") as caught:
        checkpoint.tensor("model.norm.weight")
    assert (caught.value.reason, caught.value.param) == ("bad_checkpoint", "model")


def test_lfs_pointer_is_recognised(tied):
    (tied / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 3\n")
    with pytest.raises(ConfigError, match="Git LFS pointer"):
        open_checkpoint(tied)


def test_missing_shard_and_misplaced_tensor_are_named(golden_tiny, tmp_path):
    folder = shutil.copytree(golden_tiny / "bases" / "sharded", tmp_path / "sharded")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    name = "model.norm.weight"
    other = next(shard for shard in index["weight_map"].values() if shard != index["weight_map"][name])
    index["weight_map"][name] = other
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=f"{other}: {name} is missing here"):
        open_checkpoint(folder)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ConfigError, match="model-00002-of-00003.safetensors: this shard is missing"):
        open_checkpoint(folder)


def test_folder_without_safetensors_says_what_it_has(tied):
    (tied / "model.safetensors").rename(tied / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"it has pytorch_model.bin\. Only safetensors"):
        open_checkpoint(tied)


def test_broken_or_missing_config_is_refused(tied):
    (tied / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="config.json: not valid JSON"):
        open_checkpoint(tied)
    (tied / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="must hold a JSON object"):
        open_checkpoint(tied)
    (tied / "config.json").unlink()
    with pytest.raises(ConfigError, match="config.json: this file is missing"):
        open_checkpoint(tied)


def test_paths_that_are_no_model_are_refused(tmp_path):
    with pytest.raises(NotFoundError, match="no such file or folder"):
        open_checkpoint(str(tmp_path / "nothing"))
    with pytest.raises(NotFoundError, match="no such file or folder"):
        open_checkpoint("nothing")
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"is a file but no .gguf"):
        open_checkpoint(tmp_path / "weights.bin")


def test_unreachable_hub_id_names_the_alternatives(monkeypatch):
    huggingface_hub = pytest.importorskip("huggingface_hub")

    def offline(*args, **kwargs):
        raise OSError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(NotFoundError, match=r"no folder or file here, and as a hub id .*no route to host.*pypi:"):
        open_checkpoint("someorg/some-model")


def test_hub_id_opens_the_downloaded_folder(monkeypatch, golden_tiny, tmp_path):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    asked = {}

    def download(repo_id, *, allow_patterns, cache_dir):
        asked.update(repo_id=repo_id, patterns=allow_patterns, cache_dir=cache_dir)
        return str(golden_tiny / "bases" / "tied")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    checkpoint = open_checkpoint("someorg/some-model", cache_dir=tmp_path)
    assert checkpoint.source == checkpoint.config.name == "someorg/some-model"
    assert asked["repo_id"] == "someorg/some-model"
    assert asked["cache_dir"] == tmp_path / "hub"
    assert "*.safetensors" in asked["patterns"]
    assert not any(pattern.endswith(".bin") for pattern in asked["patterns"])


_MEASURE = """
import resource, sys
import numpy as np
from multilora_jax.models.checkpoint import open_checkpoint
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
start = peak()
checkpoint = open_checkpoint(sys.argv[1])
weights = {name: checkpoint.tensor(name) for name in checkpoint.names()}
print((peak() - start) / sum(w.nbytes for w in weights.values()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in other units elsewhere")
def test_loading_holds_the_weights_once(tmp_path):
    config = {
        "model_type": "llama", "vocab_size": 4096, "hidden_size": 1024, "intermediate_size": 2048,
        "num_hidden_layers": 10, "num_attention_heads": 8, "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    shapes = expected_shapes(read_config(tmp_path))
    save_file({name: np.ones(shape, np.float16) for name, shape in shapes.items()}, tmp_path / "model.safetensors")
    result = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(tmp_path)], capture_output=True, text=True, check=True, timeout=120
    )
    assert float(result.stdout) < 1.15


def test_a_config_that_is_no_file_of_text_is_refused_without_waiting(tied):
    path = tied / "config.json"
    kept = path.read_text()
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ConfigError, match=r"config\.json: not a regular file"):
        open_checkpoint(tied)
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match=r"config\.json: not a regular file"):
        open_checkpoint(tied)
    path.unlink()
    path.write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="not valid JSON"):
        open_checkpoint(tied)
    path.write_text(" " * ((64 << 20) + 1))
    with pytest.raises(ConfigError, match="larger than 64 MiB"):
        open_checkpoint(tied)
    path.write_text(kept)
    (tied / "model.safetensors").unlink()
    index = tied / "model.safetensors.index.json"
    for shard in (5, None, [], "a\0b"):
        index.write_text(json.dumps({"weight_map": {"a": shard, "b": "model.safetensors"}}))
        with pytest.raises(ConfigError, match="names files by what is no name"):
            open_checkpoint(tied)


WITHOUT_RIGHTS = (
    "setpriv",
    "--bounding-set=-dac_override,-dac_read_search",
    "--inh-caps=-dac_override,-dac_read_search",
)


@pytest.mark.skipif(os.getuid() == 0 and shutil.which("setpriv") is None, reason="root may read everything")
def test_folders_that_may_not_be_read_are_no_traceback(tied):
    closed = tied / "lost+found"
    closed.mkdir()
    closed.chmod(0)
    code = (
        "import sys; from multilora_jax.errors import ConfigError\n"
        "from multilora_jax.models.checkpoint import open_checkpoint\n"
        "try: print(len(open_checkpoint(sys.argv[1]).names()) > 0)\n"
        "except ConfigError as error: print(error)\n"
    )
    command = [*(WITHOUT_RIGHTS if os.getuid() == 0 else ()), sys.executable, "-c", code, str(tied)]
    run = {"capture_output": True, "text": True, "check": True, "cwd": Path(__file__).parents[2]}
    assert subprocess.run(command, **run).stdout == "True\n"
    (tied / "config.json").chmod(0)
    assert subprocess.run(command, **run).stdout == f"{tied}/config.json: Permission denied\n"
