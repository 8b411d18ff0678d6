"""Remakes rope_golden.json: tables of transformers' LlamaRotaryEmbedding for every supported kind of scaling.

Needs torch and transformers (made with 2.13.0 and 5.24.0): `python make_rope_golden.py`.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import LlamaConfig, __version__
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

BASE = {"hidden_size": 128, "num_attention_heads": 2, "head_dim": 64, "max_position_embeddings": 2048}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
CASES = {
    "default": ({"rope_theta": 10000.0}, 2048),
    "theta_100000": ({"rope_theta": 100000.0, "max_position_embeddings": 8192}, 8192),
    "head_dim_16": ({"rope_theta": 10000.0, "head_dim": 16}, 2048),
    "linear": ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 2048),
    "linear_old_key": ({"rope_scaling": {"type": "linear", "factor": 2.5}}, 2048),
    "dynamic_within": ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 2048),
    "dynamic_beyond": ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 5000),
    "llama3": (
        {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 512}, "rope_theta": 500000.0},
        2048,
    ),
    "llama3_2": ({"rope_scaling": LLAMA3 | {"factor": 32.0, "original_max_position_embeddings": 8192}}, 2048),
    "llama3_d11": (
        {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 32}, "max_position_embeddings": 256},
        256,
    ),
    "parameters_llama3": (
        {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 512, "rope_theta": 500000.0}},
        2048,
    ),
    "yarn": ({"rope_scaling": YARN}, 2048),
    "yarn_attention_factor": ({"rope_scaling": YARN | {"attention_factor": 0.75}}, 2048),
    "yarn_mscale": ({"rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.5}}, 2048),
    "yarn_mscale_alone": ({"rope_scaling": YARN | {"mscale": 0.707}}, 2048),
    "yarn_betas": ({"rope_scaling": YARN | {"beta_fast": 16.0, "beta_slow": 2.0}}, 2048),
    "yarn_untruncated": ({"rope_scaling": YARN | {"truncate": False}}, 2048),
    "yarn_one_beta": ({"rope_scaling": YARN | {"beta_fast": 8.0, "beta_slow": 8.0, "truncate": False}}, 2048),
    "yarn_other_factor": ({"rope_scaling": YARN | {"factor": 8.0}}, 2048),
    "yarn_without_original": ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 2048),
}


def shortest(row: torch.Tensor) -> list[float]:
    """The shortest decimals that read back as the same float32 values."""
    return [float(str(value)) for value in row.numpy()]


def main() -> None:
    result = {"torch": torch.__version__, "transformers": __version__, "cases": {}}
    for name, (options, length) in CASES.items():
        config = json.loads(json.dumps({**BASE, **options}))
        rotary = LlamaRotaryEmbedding(LlamaConfig(**json.loads(json.dumps(config))))
        cos, sin = rotary(torch.zeros(1), torch.arange(length)[None])
        half = cos.shape[-1] // 2
        positions = sorted({0, 1, 31, 200, length - 1})
        result["cases"][name] = {
            "config": config,
            "length": length,
            "positions": positions,
            "inv_freq": shortest(rotary.inv_freq),
            "attention_scaling": rotary.attention_scaling,
            "cos": [shortest(row) for row in cos[0, positions, :half]],
            "sin": [shortest(row) for row in sin[0, positions, :half]],
        }
    lines = [f"{json.dumps(name)}: {json.dumps(case)}" for name, case in result.pop("cases").items()]
    text = json.dumps(result)[:-1] + ', "cases": {\n' + ",\n".join(lines) + "\n}}\n"
    Path(__file__).with_name("rope_golden.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
