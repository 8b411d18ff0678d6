"""GGUF files made from the tiny bases: names, layout, metadata, tokenizer, damage."""

from __future__ import annotations

import json
import math
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from multilora_jax.errors import ConfigError
from multilora_jax.models.checkpoint import open_checkpoint
from multilora_jax.models.checkpoint.gguf_tokenizer import build_tokenizer

Q = gguf.GGMLQuantizationType
NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
GLOBAL = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def interleave(data: np.ndarray, num_heads: int) -> np.ndarray:
    """Row i of a head's first half beside row i of its second half, spelt out row by row."""
    head_dim = data.shape[0] // num_heads
    rows = []
    for head in range(num_heads):
        for i in range(head_dim // 2):
            rows += [data[head * head_dim + i], data[head * head_dim + head_dim // 2 + i]]
    return np.stack(rows)


def write(path: Path, base: Path, *, arch="llama", kind=Q.F32, keys=None, extra=None, drop=()) -> Path:
    config = json.loads((base / "config.json").read_text())
    writer = gguf.GGUFWriter(path, arch)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    for key, value in (keys or {}).items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32, bool: writer.add_bool}
        add[type(value)](key, value)
    for name, data in load_file(base / "model.safetensors").items():
        stem, _, suffix = name.rpartition(".")
        if stem in GLOBAL:
            gguf_name = f"{GLOBAL[stem]}.{suffix}"
        else:
            _, _, layer, module = stem.split(".", 3)
            gguf_name = f"blk.{layer}.{NAMES[module]}.{suffix}"
            if module == "self_attn.q_proj":
                data = interleave(data, heads)
            elif module == "self_attn.k_proj":
                data = interleave(data, kv_heads)
        if gguf_name in drop:
            continue
        if data.ndim == 2 and kind is not Q.F32:
            writer.add_tensor(gguf_name, gguf.quants.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name, np.ascontiguousarray(data))
    for name, data in (extra or {}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", ["untied", "tied", "biased", "headdim32", "mha"])
def test_file_equals_the_folder_it_was_made_from(golden_tiny, tmp_path, name):
    base = golden_tiny / "bases" / name
    folder = open_checkpoint(base)
    checkpoint = open_checkpoint(write(tmp_path / "model.gguf", base))
    assert sorted(checkpoint.names()) == sorted(folder.names())
    for tensor in folder.names():
        np.testing.assert_array_equal(checkpoint.tensor(tensor), folder.tensor(tensor), err_msg=tensor)
    for field in ("vocab_size", "num_heads", "num_kv_heads", "head_dim", "ffn_size", "rms_norm_eps", "rope",
                  "max_position_embeddings", "tie_word_embeddings", "attention_bias", "mlp_bias"):  # fmt: skip
        assert getattr(checkpoint.config, field) == getattr(folder.config, field), field
    assert checkpoint.config.name == "model"


@pytest.mark.parametrize(("kind", "error"), [(Q.F16, 1e-3), (Q.BF16, 8e-3), (Q.Q8_0, 2e-2), (Q.Q4_1, 0.15)])
def test_quantised_tensors_become_float32(golden_tiny, tmp_path, kind, error, monkeypatch):
    # Blocks of a few rows, so that tensors are read in several.
    monkeypatch.setattr("multilora_jax.models.checkpoint.gguf_file._BLOCK_BYTES", 1000)
    base = golden_tiny / "bases" / "tied"
    checkpoint = open_checkpoint(write(tmp_path / "model.gguf", base, kind=kind))
    folder = open_checkpoint(base)
    for name in folder.names():
        tensor, exact = checkpoint.tensor(name), folder.tensor(name)
        assert tensor.dtype == np.float32
        assert np.abs(tensor - exact).max() <= error * np.abs(exact).max()


def test_linear_and_yarn_scaling_are_read(golden_tiny, tmp_path):
    base = golden_tiny / "bases" / "tied"
    keys = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    rope = open_checkpoint(write(tmp_path / "a.gguf", base, keys=keys)).config.rope
    assert (rope.rope_type, rope.factor) == ("linear", 4.0)
    keys |= {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.original_context_length": 128}
    rope = open_checkpoint(write(tmp_path / "b.gguf", base, keys=keys)).config.rope
    assert (rope.rope_type, rope.factor, rope.original_max_position_embeddings) == ("yarn", 4.0, 128)
    rope = open_checkpoint(write(tmp_path / "c.gguf", base, keys={"llama.rope.scale_linear": 2.0})).config.rope
    assert (rope.rope_type, rope.factor) == ("linear", 2.0)


def llama3_divisors(theta: float, head_dim: int, factor: float, original: float) -> np.ndarray:
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (i / head_dim)
        if wavelength < original / 4:
            divisors.append(1.0)
        elif wavelength > original:
            divisors.append(factor)
        else:
            blend = (original / wavelength - 1) / 3
            divisors.append(1 / ((1 - blend) / factor + blend))
    return np.array(divisors, np.float32)


def test_d11_llama3_divisors_become_llama3_scaling(golden_tiny, tmp_path):
    base = golden_tiny / "bases" / "llama3rope"
    extra = {"rope_freqs.weight": llama3_divisors(500000.0, 16, 32.0, 8192.0)}
    rope = open_checkpoint(write(tmp_path / "a.gguf", base, extra=extra)).config.rope
    assert (rope.rope_type, rope.factor, rope.original_max_position_embeddings) == ("llama3", 32.0, 8192)
    assert (rope.low_freq_factor, rope.high_freq_factor, rope.theta) == (1.0, 4.0, 500000.0)
    extra = {"rope_freqs.weight": llama3_divisors(500000.0, 16, 32.0, 4096.0)}
    with pytest.raises(ConfigError, match="rope_freqs.weight"):
        open_checkpoint(write(tmp_path / "b.gguf", base, extra=extra))


@pytest.mark.parametrize(
    "keys",
    [
        {"llama.expert_count": 8},
        {"llama.attention.sliding_window": 4096},
        {"llama.rope.dimension_count": 8},
        {"llama.rope.scaling.type": "longrope"},
        {"llama.logit_scale": 2.0},
        {"llama.rope.scaling.attn_factor": 1.5},
    ],
)
def test_unsupported_metadata_is_refused_by_key_and_value(golden_tiny, tmp_path, keys):
    path = write(tmp_path / "model.gguf", golden_tiny / "bases" / "tied", keys=keys)
    [(key, value)] = keys.items()
    with pytest.raises(ConfigError, match=f"{key}={value!r}"):
        open_checkpoint(path)


def test_other_architecture_is_refused(golden_tiny, tmp_path):
    path = write(tmp_path / "model.gguf", golden_tiny / "bases" / "tied", arch="qwen2")
    with pytest.raises(ConfigError, match="general.architecture='qwen2'"):
        open_checkpoint(path)


def test_missing_and_unexpected_tensors_are_named(golden_tiny, tmp_path):
    base = golden_tiny / "bases" / "tied"
    with pytest.raises(ConfigError, match="missing model.layers.1.mlp.up_proj.weight"):
        open_checkpoint(write(tmp_path / "a.gguf", base, drop=("blk.1.ffn_up.weight",)))
    extra = {"blk.0.attn_sinks.weight": np.ones(4, np.float32)}
    with pytest.raises(ConfigError, match="unexpected blk.0.attn_sinks.weight"):
        open_checkpoint(write(tmp_path / "b.gguf", base, extra=extra))


def test_damaged_file_is_refused(golden_tiny, tmp_path):
    path = write(tmp_path / "model.gguf", golden_tiny / "bases" / "tied")
    data = path.read_bytes()
    for length, message in ((2, "not a GGUF"), (20, "corrupt"), (200, "corrupt"), (len(data) - 200, "cut off")):
        path.write_bytes(data[:length])
        with pytest.raises(ConfigError, match=message):
            open_checkpoint(path)
    path.write_bytes(data[:4] + (9).to_bytes(4, "little") + data[8:])
    with pytest.raises(ConfigError, match="version 9"):
        open_checkpoint(path)
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 3\n")
    with pytest.raises(ConfigError, match="Git LFS pointer"):
        open_checkpoint(path)


def test_file_without_tokenizer_gives_none(golden_tiny, tmp_path):
    assert open_checkpoint(write(tmp_path / "model.gguf", golden_tiny / "bases" / "tied")).load_tokenizer() is None


def spm() -> tuple[dict, list]:
    golden = json.loads((Path(__file__).parent.parent / "data" / "spm_golden.json").read_text())
    return golden["metadata"], golden["texts"]


def test_sentencepiece_tokenizer_equals_sentencepiece():
    metadata, texts = spm()
    tokenizer = build_tokenizer(metadata, "test")
    assert tokenizer is not None
    for text, ids, decoded in texts:
        assert tokenizer.encode(text, add_special_tokens=False) == ids
        assert tokenizer.encode(text) == [metadata["tokenizer.ggml.bos_token_id"], *ids]
        assert tokenizer.decode(ids) == decoded


def test_bos_of_a_file_follows_its_key():
    metadata, _ = spm()
    tokenizer = build_tokenizer(metadata | {"tokenizer.ggml.add_bos_token": False}, "test")
    assert tokenizer is not None
    assert tokenizer.encode("the")[0] != tokenizer.bos_token_id


def byte_bpe(pre: str, **more) -> dict:
    words = [*"helo1234!", "\u0120", "he", "ll", "llo", "12", "123", "234", "hello"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": ["<s>", "<e>", *words],
        "tokenizer.ggml.token_type": [3, 3] + [1] * len(words),
        "tokenizer.ggml.merges": ["1 2", "12 3", "h e", "l l", "ll o"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        **more,
    }


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["he", "llo", "\u0120", "1", "2", "3", "4", "!"]),
        ("gpt-2", ["he", "llo", "\u0120", "123", "4", "!"]),
        ("llama-bpe", ["<s>", "hello", "\u0120", "123", "4", "!"]),
    ],
)
def test_pre_tokenizers_split_as_their_models_do(pre, pieces):
    tokenizer = build_tokenizer(byte_bpe(pre), "test")
    assert tokenizer is not None
    # "hello" is in the vocabulary and no merge makes it: llama-bpe takes whole words of the vocabulary first.
    ids = tokenizer.encode("hello 1234!")
    assert [tokenizer.id_to_token(i) for i in ids] == pieces
    assert tokenizer.decode(ids) == "hello 1234!"
    assert tokenizer.eos_token_ids == (1,)


def test_chat_templates_of_a_file_are_taken():
    more = {"tokenizer.chat_template": "a", "tokenizer.chat_templates": ["other"], "tokenizer.chat_template.other": "b"}
    tokenizer = build_tokenizer(byte_bpe("gpt-2", **more), "test")
    assert tokenizer is not None
    assert tokenizer.chat_template == "a"
    assert tokenizer.apply_chat_template([{"role": "user", "content": ""}], chat_template="other") == "b"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.pre": "default"}, "tokenizer.ggml.pre='default'"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model='bert'"),
        ({"tokenizer.ggml.merges": []}, "tokenizer.ggml.merges"),
        ({"tokenizer.ggml.merges": ["h zz"]}, "tables are damaged"),
    ],
)
def test_tokenizer_that_cannot_be_rebuilt_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        build_tokenizer(byte_bpe("gpt-2") | change, "test")
