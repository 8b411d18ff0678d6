"""What a Llama checkpoint's config.json says, checked field by field (host only, hashable)."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any, NoReturn

from multilora_jax.errors import ConfigError
from multilora_jax.memory.geometry import PoolGeometry, module_dims

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")

# Fields that change the computation in ways this package does not serve, with the values that switch them off.
_MUST_BE_OFF: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None, {}),
    "compression_config": (None, {}),
    "sliding_window": (None, False, 0),
    "partial_rotary_factor": (None, 1, 1.0),
    "rope_interleaved": (None, False),
    "no_rope_layers": (None, []),
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


def _refuse(field: str, value: Any, why: str) -> NoReturn:
    raise ConfigError(f"config.json: {field}={value!r} {why}", reason="unsupported_model_config", param=field)


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding; field names and meanings are transformers'.

    Attributes:
        rope_type: one of ROPE_TYPES.
        theta: base of the frequencies (`rope_theta`).
        factor: stretch of the context (linear, dynamic, llama3, yarn).
        original_max_position_embeddings: context length before stretching, in tokens (llama3, yarn).
        low_freq_factor, high_freq_factor: llama3's band of interpolation.
        attention_factor: yarn's factor on cos and sin; None derives it from factor and the mscales.
        beta_fast, beta_slow: rotations that bound yarn's ramp (YaRN paper, section 3.2).
        mscale, mscale_all_dim: yarn's weights of the derived attention factor; 0 means absent.
        truncate: whether yarn rounds the ends of its ramp to whole dimensions.
    """

    rope_type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True

    @classmethod
    def from_hf(cls, config: dict[str, Any], max_position_embeddings: int) -> RopeConfig:
        """Read `rope_scaling` + `rope_theta`, or the newer `rope_parameters`, of a config.json.

        Raises:
            ConfigError: an unknown rope type or key, or a value out of range.
        """
        where = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
        given = config.get(where) or {}
        if not isinstance(given, dict):
            _refuse(where, given, "must be an object")
        known = {f.name for f in fields(cls)} - {"theta"}
        known |= {"type", "rope_theta", "partial_rotary_factor", "finetuned"}
        for key in given:
            if key not in known:
                _refuse(f"{where}.{key}", given[key], "is not supported: no rotary embedding served here has this key")
        if given.get("partial_rotary_factor") not in _MUST_BE_OFF["partial_rotary_factor"]:
            _refuse(f"{where}.partial_rotary_factor", given["partial_rotary_factor"], "is not supported: only 1.0 is")
        rope_type = given.get("rope_type") or given.get("type") or "default"
        if rope_type not in ROPE_TYPES:
            _refuse(f"{where}.rope_type", rope_type, f"is not supported: known types are {', '.join(ROPE_TYPES)}")

        def number(key: str, default: float | None, low: float = 0.0) -> float:
            value = given.get(key)
            value = default if value is None else value
            if value is None:
                _refuse(f"{where}.{key}", None, f"is missing: rope type {rope_type!r} needs it")
            if isinstance(value, bool) or not isinstance(value, int | float) or not low < value < math.inf:
                _refuse(f"{where}.{key}", value, f"must be a number above {low:g}")
            return float(value)

        theta = given.get("rope_theta")
        theta = config.get("rope_theta") if theta is None else theta
        theta = 10000.0 if theta is None else theta
        if isinstance(theta, bool) or not isinstance(theta, int | float) or not 1.0 < theta < math.inf:
            _refuse("rope_theta", theta, "must be a number above 1")
        chosen: dict[str, Any] = {"rope_type": rope_type, "theta": float(theta)}
        if rope_type in ("llama3", "yarn"):
            original = config.get("original_max_position_embeddings") or given.get("original_max_position_embeddings")
            original = max_position_embeddings if original is None else original
            if isinstance(original, bool) or not isinstance(original, int) or original < 1:
                _refuse(f"{where}.original_max_position_embeddings", original, "must be a positive integer")
            chosen["original_max_position_embeddings"] = original
        if rope_type != "default":
            implied = None
            if rope_type == "yarn":
                implied = max_position_embeddings / chosen["original_max_position_embeddings"]
            chosen["factor"] = number("factor", implied)
        if rope_type == "llama3":
            low, high = number("low_freq_factor", None), number("high_freq_factor", None)
            if high <= low:
                _refuse(f"{where}.high_freq_factor", high, f"must be above low_freq_factor={low}")
            chosen |= {"low_freq_factor": low, "high_freq_factor": high}
        if rope_type == "yarn":
            if given.get("attention_factor") is not None:
                chosen["attention_factor"] = number("attention_factor", None)
            for key, default in (("beta_fast", 32.0), ("beta_slow", 1.0)):
                chosen[key] = number(key, default) if given.get(key) else default
            for key in ("mscale", "mscale_all_dim"):
                chosen[key] = number(key, 0.0, low=-math.inf)
            chosen["truncate"] = bool(given.get("truncate", True))
        return cls(**chosen)


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and options of a Llama model; a static argument of jit.

    Attributes:
        name: for display.
        vocab_size, hidden_size, num_layers: V, D, L.
        num_heads, num_kv_heads, head_dim: N, K, H; N*H need not be D.
        ffn_size: F.
        rms_norm_eps: added to the mean square before the root.
        rope: rotary embedding.
        max_position_embeddings: context length in tokens.
        tie_word_embeddings: the head is the embedding.
        attention_bias: q, k, v and o have biases; mlp_bias: gate, up and down have.
        bos_token_id: first token of a prompt, None where the model has none.
        eos_token_ids: tokens that end a text: config.json's and generation_config.json's joined.
    """

    name: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def from_hf(cls, config: dict[str, Any], name: str, generation_config: dict[str, Any] | None = None) -> ModelConfig:
        """Read a Hugging Face config.json; absent optional fields take LlamaConfig's defaults.

        Args:
            config: the parsed config.json.
            name: for display.
            generation_config: the parsed generation_config.json; its eos_token_id list is joined.

        Raises:
            ConfigError: anything this package does not serve exactly, named with its value.
        """
        architectures = config.get("architectures") or []
        model_type = config.get("model_type") or ("llama" if architectures == ["LlamaForCausalLM"] else None)
        if model_type != "llama":
            _refuse("model_type", model_type, "is not supported: only 'llama' is")
        if architectures and architectures != ["LlamaForCausalLM"]:
            _refuse("architectures", architectures, "is not supported: only ['LlamaForCausalLM'] is")
        if config.get("hidden_act", "silu") != "silu":
            _refuse("hidden_act", config["hidden_act"], "is not supported: only 'silu' is")
        for field, allowed in _MUST_BE_OFF.items():
            if field in config and config[field] not in allowed:
                _refuse(field, config[field], "is not supported: the model would be computed wrongly")
        layer_types = config.get("layer_types") or []
        if any(kind != "full_attention" for kind in layer_types):
            _refuse("layer_types", layer_types, "is not supported: only 'full_attention' is")

        hidden, num_heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
        if config.get("head_dim") is None and hidden % num_heads:
            _refuse("num_attention_heads", num_heads, f"does not divide hidden_size={hidden}, and head_dim is absent")
        head_dim = _size(config, "head_dim", hidden // num_heads)
        if head_dim % 2:
            _refuse("head_dim", head_dim, "must be even: rotary embedding turns pairs")
        num_kv_heads = _size(config, "num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            _refuse("num_key_value_heads", num_kv_heads, f"does not divide num_attention_heads={num_heads}")
        eps = config.get("rms_norm_eps", 1e-6)
        if isinstance(eps, bool) or not isinstance(eps, int | float) or not 0 < eps < 1:
            _refuse("rms_norm_eps", eps, "must be a small positive number")
        max_positions = _size(config, "max_position_embeddings", 2048)
        vocab_size = _size(config, "vocab_size")
        generation = generation_config or {}
        bos = _token_ids(config, "bos_token_id", vocab_size, 1) or _token_ids(generation, "bos_token_id", vocab_size)
        eos = _token_ids(config, "eos_token_id", vocab_size, 2) + _token_ids(generation, "eos_token_id", vocab_size)
        return cls(
            name=name,
            vocab_size=vocab_size,
            hidden_size=hidden,
            num_layers=_size(config, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            ffn_size=_size(config, "intermediate_size"),
            rms_norm_eps=float(eps),
            rope=RopeConfig.from_hf(config, max_positions),
            max_position_embeddings=max_positions,
            tie_word_embeddings=_flag(config, "tie_word_embeddings"),
            attention_bias=_flag(config, "attention_bias"),
            mlp_bias=_flag(config, "mlp_bias"),
            bos_token_id=bos[0] if bos else None,
            eos_token_ids=tuple(dict.fromkeys(eos)),
        )

    @property
    def q_dim(self) -> int:
        """N*H: width of the queries."""
        return self.num_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """K*H: width of the keys, and of the values."""
        return self.num_kv_heads * self.head_dim

    def module_dims(self, module: str) -> tuple[int, int]:
        """(in_dim, out_dim) of one of memory.geometry.MODULES."""
        return module_dims(module, hidden=self.hidden_size, q_dim=self.q_dim, kv_dim=self.kv_dim, ffn=self.ffn_size)

    @property
    def num_parameters(self) -> int:
        """Weights and biases, a tied head counted once."""
        D, F, Q, KV = self.hidden_size, self.ffn_size, self.q_dim, self.kv_dim
        layer = 2 * D + 2 * D * Q + 2 * D * KV + 3 * D * F
        layer += (Q + 2 * KV + D) * self.attention_bias + (2 * F + D) * self.mlp_bias
        return self.num_layers * layer + D + self.vocab_size * D * (1 if self.tie_word_embeddings else 2)

    def weight_bytes(self, itemsize: int, quantization: str | None = None, unread_rows: int = 0) -> int:
        """Bytes of the weights.

        Args:
            itemsize: bytes of an element of the compute type.
            quantization: "int8": one byte for each element of a projection, the embedding and the head, and a float32
                scale for each of their outputs.
            unread_rows: rows of the vocabulary that do not count.
        """
        elements = self.num_parameters - unread_rows * self.hidden_size
        if quantization is None:
            return elements * itemsize
        outputs = self.num_layers * (self.q_dim + 2 * self.kv_dim + 2 * self.ffn_size + 2 * self.hidden_size)
        outputs += self.vocab_size * (1 if self.tie_word_embeddings else 2) - unread_rows
        D, F, Q, KV = self.hidden_size, self.ffn_size, self.q_dim, self.kv_dim
        vectors = (2 * self.num_layers + 1) * D
        vectors += self.num_layers * ((Q + 2 * KV + D) * self.attention_bias + (2 * F + D) * self.mlp_bias)
        return elements - vectors + vectors * itemsize + 4 * outputs

    def geometry(
        self, num_pages: int, page_tokens: int, tp: int = 1, dtype: str = "float32", extra_vocab: int = 0
    ) -> PoolGeometry:
        """The pool's shape for this model; see PoolGeometry for the arguments and what is refused.

        `extra_vocab` is the least room for tokens that adapters add; it is rounded up to whole units. Where the model
        has fewer KV heads than there are shards, each head is held by a group of neighbouring shards.
        """
        self._check_divides(tp)
        repeat = max(1, tp // self.num_kv_heads)
        geometry = PoolGeometry(
            num_layers=self.num_layers,
            num_pages=num_pages,
            page_tokens=page_tokens,
            hidden=self.hidden_size,
            q_dim=self.q_dim,
            kv_dim=self.kv_dim * repeat,
            ffn=self.ffn_size,
            num_kv_heads=self.num_kv_heads * repeat,
            head_dim=self.head_dim,
            tp=tp,
            dtype=dtype,
            kv_repeat=repeat,
        )
        units = -(-(self.vocab_size + extra_vocab) // geometry.unit)
        return replace(geometry, vocab_rows=units * geometry.unit)

    def _check_divides(self, tp: int) -> None:
        sizes = (
            ("num_attention_heads", self.num_heads), ("hidden_size", self.hidden_size),
            ("intermediate_size", self.ffn_size),
        )  # fmt: skip

        def fits(tp: int) -> bool:
            heads = self.num_kv_heads
            return not (heads % tp and tp % heads) and all(size % tp == 0 for _, size in sizes)

        if fits(tp):
            return
        name, size = next(((n, s) for n, s in sizes if s % tp), ("num_key_value_heads", self.num_kv_heads))
        verb = "does not divide" if name != "num_key_value_heads" else "neither divides nor is a multiple of"
        possible = ", ".join(str(n) for n in range(1, self.num_heads + 1) if fits(n))
        raise ConfigError(
            f"tensor_parallel_size {tp} {verb} the model's {name} {size}: use one of {possible}",
            reason="tensor_parallel_size", param="tensor_parallel_size",
        )  # fmt: skip


def _size(config: dict[str, Any], field: str, default: int | None = None) -> int:
    value = config.get(field)
    value = default if value is None else value
    if value is None:
        _refuse(field, None, "is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        _refuse(field, value, "must be a positive integer")
    return value


def _flag(config: dict[str, Any], field: str) -> bool:
    value = config.get(field)
    if value not in (None, True, False):
        _refuse(field, value, "must be true or false")
    return bool(value)


def _token_ids(config: dict[str, Any], field: str, vocab_size: int, default: int | None = None) -> tuple[int, ...]:
    value = config.get(field, default)
    values = value if isinstance(value, list) else [] if value is None else [value]
    for token in values:
        if isinstance(token, bool) or not isinstance(token, int):
            _refuse(field, value, "must be a token id or a list of them")
    # Old configs write -1, or an id past the vocabulary, for "none".
    return tuple(token for token in values if 0 <= token < vocab_size)
