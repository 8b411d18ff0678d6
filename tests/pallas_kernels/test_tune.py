"""The tuner runs end to end in the interpreter, writes what the kernels look up, and leaves wrong candidates out."""

from __future__ import annotations

import dataclasses
import json

import jax.numpy as jnp
import numpy as np

from pallas_kernels import tune, tune_attention, tuning
from pallas_kernels.paged_attention import triton_config
from pallas_kernels.segmented_lora import SegmentShape, blocks
from pallas_kernels.segmented_lora.arg_specs import MODELS, draw


def test_without_a_gpu_it_says_so(capsys):
    assert tune.main([]) == 2
    assert "need an NVIDIA GPU" in capsys.readouterr().err
    assert tune.main(["--interpret", "--models", "gpt-5"]) == 2
    assert "unknown model 'gpt-5'" in capsys.readouterr().err


def test_what_it_writes_is_looked_up(tmp_path):
    arguments = ["--interpret", "--models", "smollm2-135m", "--groups", "o", "--tokens", "2", "--most", "1"]
    arguments += ["--ops", "lora"]
    assert tune.main([*arguments, "--out", str(tmp_path)]) == 0
    path = tuning.tuned_file(blocks.OP, "cpu", tmp_path)
    entries = json.loads(path.read_text())["entries"]
    assert [entry["key"]["op"] for entry in entries] == ["shrink", "expand"]
    args = draw(MODELS["smollm2-135m"], "o", np.arange(2), [16, 16], (SegmentShape(2, 2),), jnp.bfloat16)
    [part] = args.plan
    key = blocks.shrink_key(part, 576, 1, 192, "bfloat16")
    found = tuning.lookup(blocks.OP, key, blocks.ShrinkBlocks(16, 1, 1, 1), tmp_path)
    assert found == blocks.ShrinkBlocks(**entries[0]["config"])


def test_attention_is_tuned_too(tmp_path, capsys, monkeypatch):
    options = ["--interpret", "--models", "smollm2-135m", "--ops", "attention", "--tokens", "2", "--queries", "1"]
    options += ["--contexts", "20", "--slots", "64", "--most", "1", "--dtypes", "float32", "--out", str(tmp_path)]
    assert tune.main(options) == 0
    [entry] = json.loads(tuning.tuned_file("paged_attention", "cpu", tmp_path).read_text())["entries"]
    key = triton_config.tuning_key(2, 1, 3, 3, 64, "float32", 64)
    assert entry["key"] == key
    default = triton_config.heuristic_config(2, 1, 3, 3, 64, 4, 64)
    assert tuning.lookup("paged_attention", key, dataclasses.replace(default, lanes=128), tmp_path) == default
    monkeypatch.setattr(tune_attention, "paged_attention_triton", lambda q, *_, **__: q)
    assert tune.main(options) == 1
    assert "wrong by" in capsys.readouterr().err
    assert tune.main(["--interpret", "--ops", "attn"]) == 2


def test_a_wrong_candidate_is_left_out(monkeypatch, capsys):
    args = draw(MODELS["smollm2-135m"], "o", np.arange(2), [4, 4], (SegmentShape(2, 2),), jnp.float32)
    right = tune.pallas_triton.expand
    monkeypatch.setattr(tune.pallas_triton, "expand", lambda *a, **k: right(*a, **k) * 1.5)
    options = tune.Options(layers=1, repeats=1, interpret=True)
    assert tune.best(args, [(None, None)], options) is None
    assert "wrong by" in capsys.readouterr().err


def test_heuristics_divide_what_they_share_out():
    for model in MODELS.values():
        for group in ("qkv", "o", "gate_up", "down"):
            in_dim, out_dims = model.group(group)
            for tokens, shape in ((64, SegmentShape(64, 64)), (8, SegmentShape(8, 8, 64, 32))):
                args = draw(MODELS["smollm2-135m"], "o", np.full(tokens, -1), [1], (shape,), jnp.float32)
                [part] = args.plan
                for dtype in ("bfloat16", "float32"):
                    shrink = blocks.shrink_blocks(part, in_dim, len(out_dims), model.unit, dtype)
                    expand = blocks.expand_blocks(part, out_dims, model.unit, dtype)
                    assert model.unit % shrink.chunk == 0 == model.unit % expand.chunk
                    assert in_dim // shrink.chunk % shrink.splits == 0
                    assert sum(out_dims) // expand.chunk % expand.steps == 0
