"""What make_golden_peft.py makes: adapters, mixes and prompts."""

from __future__ import annotations

from typing import Any

import torch

PROMPTS = [[1], [5, 17, 200, 31, 7, 99, 250], [(37 * i + 11) % 256 for i in range(8)]]
NEW_PROMPTS = [[257], [5, 256, 200, 258, 7, 260, 259], [(37 * i + 225) % 261 for i in range(8)]]
"""Of the adapters whose vocabulary has 5 more tokens than the base's 256."""
NEW_VOCAB, NEW_TOKENS = 261, 24
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
QV = ["q_proj", "v_proj"]


def lora(**arguments: Any) -> dict[str, Any]:
    return {"r": 4, "lora_alpha": 8, "target_modules": QV} | arguments


MIN_MARGIN = 0.006
"""Least distance of a greedy token's logit from the next: three times the error that an implementation may have."""
RESIZED = {"vocab": NEW_VOCAB}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "tokens_tied": ("tied", lora(trainable_token_indices=[5, 31, 250]), {}),
    "tokens_both_untied": ("untied", lora(trainable_token_indices={"embed_tokens": [250, 5], "lm_head": [7, 5]}), {}),
    "tokens_both_tied": ("tied", lora(trainable_token_indices={"embed_tokens": [5, 31], "lm_head": [7, 250]}), {}),
    "saved_embed_tied": ("tied", lora(modules_to_save=["embed_tokens"]), {}),
    "saved_embed_tied_ensured": ("tied", lora(modules_to_save=["embed_tokens"], ensure_weight_tying=True), {}),
    "embed_tied_ensured": ("tied", lora(target_modules=["q_proj", "embed_tokens"], ensure_weight_tying=True), {}),
    "resized_tied": ("tied", lora(), RESIZED),
    "resized_untied": ("untied", lora(), RESIZED),
    "resized_vocab_lora_tied": ("tied", lora(target_modules=["q_proj", "embed_tokens", "lm_head"]), RESIZED),
    "resized_vocab_lora_untied": ("untied", lora(target_modules=["q_proj", "embed_tokens", "lm_head"]), RESIZED),
    "resized_saved_tied": (
        "tied", lora(modules_to_save=["embed_tokens", "lm_head"]), RESIZED | {"dtype": torch.float16},
    ),
    "resized_saved_untied": (
        "untied", lora(modules_to_save=["embed_tokens", "lm_head"]), RESIZED | {"dtype": torch.bfloat16},
    ),
    "resized_tokens_tied": ("tied", lora(trainable_token_indices=[5, 256, 257, 258, 259, 260]), RESIZED),
    "dora_head_untied": ("untied", lora(target_modules=["q_proj", "lm_head"], use_dora=True), {}),
    "dora_head_tied": ("tied", lora(target_modules=["lm_head"], use_dora=True), {"dtype": torch.float16}),
    "dora_embed_tied": ("tied", lora(target_modules=["v_proj", "embed_tokens"], use_dora=True), {}),
    "dora_resized_untied": ("untied", lora(target_modules=["embed_tokens", "lm_head"], use_dora=True), RESIZED),
    "dora_everything": (
        "untied",
        lora(
            target_modules=[*ALL, "embed_tokens", "lm_head"], use_dora=True, use_rslora=True,
            rank_pattern={"k_proj": 2, "layers.1.mlp.up_proj": 6, "lm_head": 3}, alpha_pattern={"embed_tokens": 5},
        ),
        {},
    ),
    "lora_bias_head": ("untied", lora(target_modules=["q_proj", "lm_head"], lora_bias=True), {}),
    "bias_all_without_biases": ("tied", lora(bias="all"), {}),
    "sharded": ("tied", lora(target_modules=ALL), {"shards": 3}),
}  # fmt: skip
"""Name to (base, arguments of LoraConfig, options)."""

PEFTS, TINYS = "cases/", "../golden_tiny/cases/"
MIXES: dict[str, tuple[str, list[tuple[str, float]], str]] = {
    "two_lora": ("tied", [(TINYS + "all_linear", 0.5), (TINYS + "qv", 0.75)], "cat"),
    "three_lora": (
        "tied",
        [(TINYS + "rank_alpha_pattern", 0.5), (TINYS + "rslora", -0.25), (PEFTS + "sharded", 1.5)],
        "sum",
    ),
    "two_with_vocabulary": ("untied", [(TINYS + "embed_lm_head", 0.5), (PEFTS + "dora_everything", 0.75)], "sum"),
    "features_untied": (
        "untied",
        [(TINYS + "dora_qv_rslora", 0.5), (TINYS + "modules_to_save_lm_head", 0.5), (TINYS + "trainable_tokens", 0.25)],
        "sum",
    ),
    "features_tied": ("tied", [(TINYS + "dora", 0.5), (TINYS + "modules_to_save_norm", 0.75)], "sum"),
    "biases": (
        "biased",
        [(TINYS + "dora_biased", 0.5), (TINYS + "bias_all", 1.0), (TINYS + "lora_bias", 0.5)],
        "sum",
    ),
    "resized": ("untied", [(PEFTS + "resized_saved_untied", 0.5), (TINYS + "embed_untied", 0.75)], "sum"),
}
"""Name to (base, adapters with their factors, how PEFT is asked)."""

BFLOAT16 = [
    *(TINYS + name for name in ("all_linear_string", "dora_qv_rslora", "embed_untied", "modules_to_save_embed")),
    *(TINYS + name for name in ("modules_to_save_norm", "dora_biased", "bias_all", "trainable_tokens")),
    *(PEFTS + name for name in ("dora_head_untied", "dora_embed_tied", "dora_everything", "tokens_tied")),
    *(PEFTS + name for name in ("resized_vocab_lora_untied", "saved_embed_tied_ensured")),
]
"""Cases that are also computed in bfloat16."""
