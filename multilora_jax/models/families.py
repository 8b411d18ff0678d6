"""The families of models that are served: what tells them apart, and what config.json leaves to their own classes.

All are Llama with something added, so one forward pass serves them by flags of ModelConfig. Whatever else a field asks
for is refused by its name: a model that is computed almost as it was trained gives worse texts, and nobody knows why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from multilora_jax.models.rope_config import WHOLE_HEAD, refuse

# Fields that change the computation in ways this package does not serve, with the values that switch them off.
_MUST_BE_OFF: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None, {}),
    "compression_config": (None, {}),
    "partial_rotary_factor": WHOLE_HEAD,
    "rope_interleaved": (None, False),
    "no_rope_layers": (None, []),
    "use_mrope": (None, False),
    "use_qk_norm": (None, False),
    "qk_norm": (None, False),
    "num_local_experts": (None, 0, 1),
    "num_experts": (None, 0, 1),
    "attn_logit_softcapping": (None, 0.0),
    "final_logit_softcapping": (None, 0.0),
    "logits_scaling": (None, 1, 1.0),
    "logit_scale": (None, 1, 1.0),
    "residual_multiplier": (None, 1, 1.0),
    "embedding_multiplier": (None, 1, 1.0),
    "attention_multiplier": (None,),
}
_NO = (None, False)
_NO_WINDOW = (None, False, 0)


@dataclass(frozen=True)
class Family:
    """One family.

    Attributes:
        model_type: what config.json calls it.
        architecture: the class that transformers computes it with.
        defaults: of fields that config.json may leave out.
        must_be_off: fields that this family's class does not know, with the values that switch them off.
        qkv_bias, qk_norm: see ModelConfig.
        window: whether it may have a sliding window, and what says so: "never", "sliding_window" (which is in use where
            it is given), "use_sliding_window" (which must be true besides).
    """

    model_type: str
    architecture: str
    defaults: Mapping[str, Any]
    must_be_off: Mapping[str, tuple[Any, ...]]
    qkv_bias: bool = False
    qk_norm: bool = False
    window: str = "never"


_QWEN: dict[str, Any] = {
    "max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096, "use_sliding_window": False,
    "max_window_layers": 28,
}  # fmt: skip

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family(
            "llama", "LlamaForCausalLM", {"bos_token_id": 1, "eos_token_id": 2}, {"sliding_window": _NO_WINDOW}
        ),
        Family(
            "mistral", "MistralForCausalLM",
            {
                "bos_token_id": 1, "eos_token_id": 2, "num_key_value_heads": 8, "sliding_window": 4096,
                "max_position_embeddings": 131072,
            },
            {"attention_bias": _NO, "mlp_bias": _NO}, window="sliding_window",
        ),
        Family(
            "qwen2", "Qwen2ForCausalLM", _QWEN, {"attention_bias": _NO, "mlp_bias": _NO}, qkv_bias=True,
            window="use_sliding_window",
        ),
        Family(
            "qwen3", "Qwen3ForCausalLM", {**_QWEN, "head_dim": 128}, {"mlp_bias": _NO}, qk_norm=True,
            window="use_sliding_window",
        ),
    )
}  # fmt: skip
"""By model_type; of each transformers 4.57 was read."""


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a config.json, whose fields ask for nothing that is not served.

    Raises:
        ConfigError: another family, or a field that changes the computation.
    """
    architectures, model_type = config.get("architectures") or [], config.get("model_type")
    served = ", ".join(f"{family.model_type} ({family.architecture})" for family in FAMILIES.values())
    if model_type is None:
        model_type = next((f.model_type for f in FAMILIES.values() if architectures == [f.architecture]), None)
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        if architectures:
            refuse("architectures", architectures, f"with model_type={model_type!r} is not supported: {served} are")
        refuse("model_type", model_type, f"is not supported: {served} are")
    if architectures and architectures != [family.architecture]:
        refuse("architectures", architectures, f"is not supported with {family.model_type!r}: {served} are")
    if config.get("hidden_act", "silu") != "silu":
        refuse("hidden_act", config["hidden_act"], "is not supported: only 'silu' is")
    for field, allowed in {**_MUST_BE_OFF, **family.must_be_off}.items():
        if field in config and config[field] not in allowed:
            refuse(field, config[field], "is not supported: the model would be computed wrongly")
    return family


def window_of(config: Mapping[str, Any], family: Family) -> int | None:
    """The sliding window of all layers, in tokens; None where there is none.

    Args:
        config: config.json with the family's defaults.

    Raises:
        ConfigError: no positive integer, or only some layers have one.
    """
    kinds, num_layers = config.get("layer_types") or [], config.get("num_hidden_layers")
    if family.window == "never":
        if any(kind != "full_attention" for kind in kinds):
            refuse("layer_types", kinds, "is not supported: only 'full_attention' is")
        return None
    window = config.get("sliding_window")
    if family.window == "use_sliding_window" and not config.get("use_sliding_window"):
        window = None
    if window in (None, False, 0):
        window = None
    elif isinstance(window, bool) or not isinstance(window, int) or window < 1:
        refuse("sliding_window", window, "must be a positive integer")
    if kinds:
        slides = [kind == "sliding_attention" for kind in kinds]
        if set(kinds) - {"full_attention", "sliding_attention"} or len(set(slides)) > 1:
            refuse("layer_types", kinds, "is not supported: all layers must be of one kind, full or sliding attention")
        if slides[0] and window is None:
            refuse("layer_types", kinds, "asks for a sliding window, and none is set")
        return window if slides[0] else None
    if window is not None and family.window == "use_sliding_window":
        first = config.get("max_window_layers")
        if not isinstance(first, int) or not isinstance(num_layers, int) or 0 < first < num_layers:
            refuse(
                "max_window_layers", first,
                f"is not supported: a sliding window of all {num_layers} layers (0) or of none is",
            )  # fmt: skip
        return window if first <= 0 else None
    return window
