"""What a checkpoint's config.json says, checked field by field (host only, hashable)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from multilora_jax.errors import ConfigError
from multilora_jax.memory.geometry import MODULES, NUM_ATTENTION, PoolGeometry, module_dims
from multilora_jax.models.families import family_of, window_of
from multilora_jax.models.rope_config import ROPE_TYPES, RopeConfig, refuse

__all__ = ["ROPE_TYPES", "ModelConfig", "RopeConfig"]


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and options of a model of Llama's kind; a static argument of jit.

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
        qkv_bias: q, k and v have biases, whatever o has.
        qk_norm: each head of q and of k is normed before it is turned, with weights of its own per layer.
        sliding_window: the most tokens that a token attends to, itself included; None for all before it.
        model_type: the family's, see models.families.
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
    qkv_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    model_type: str = "llama"

    @classmethod
    def from_hf(cls, config: dict[str, Any], name: str, generation_config: dict[str, Any] | None = None) -> ModelConfig:
        """Read a Hugging Face config.json; absent optional fields take the defaults of the family's own class.

        Args:
            config: the parsed config.json.
            name: for display.
            generation_config: the parsed generation_config.json; its eos_token_id list is joined.

        Raises:
            ConfigError: anything this package does not serve exactly, named with its value.
        """
        family = family_of(config)
        config = {**family.defaults, **config}
        hidden, num_heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
        if config.get("head_dim") is None and hidden % num_heads:
            refuse("num_attention_heads", num_heads, f"does not divide hidden_size={hidden}, and head_dim is absent")
        head_dim = _size(config, "head_dim", hidden // num_heads)
        if head_dim % 2:
            refuse("head_dim", head_dim, "must be even: rotary embedding turns pairs")
        num_kv_heads = _size(config, "num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            refuse("num_key_value_heads", num_kv_heads, f"does not divide num_attention_heads={num_heads}")
        eps = config.get("rms_norm_eps", 1e-6)
        if isinstance(eps, bool) or not isinstance(eps, int | float) or not 0 < eps < 1:
            refuse("rms_norm_eps", eps, "must be a small positive number")
        max_positions = _size(config, "max_position_embeddings", 2048)
        vocab_size = _size(config, "vocab_size")
        generation = generation_config or {}
        bos = _token_ids(config, "bos_token_id", vocab_size) or _token_ids(generation, "bos_token_id", vocab_size)
        eos = _token_ids(config, "eos_token_id", vocab_size) + _token_ids(generation, "eos_token_id", vocab_size)
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
            qkv_bias=family.qkv_bias,
            qk_norm=family.qk_norm,
            sliding_window=window_of(config, family),
            model_type=family.model_type,
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
    def biased_modules(self) -> tuple[str, ...]:
        """Those of MODULES that have biases."""
        qkv, o = MODULES[: NUM_ATTENTION - 1], MODULES[NUM_ATTENTION - 1 : NUM_ATTENTION]
        return (
            qkv * (self.attention_bias or self.qkv_bias) + o * self.attention_bias
            + MODULES[NUM_ATTENTION:] * self.mlp_bias
        )  # fmt: skip

    @property
    def vector_elements(self) -> int:
        """Elements of a layer's norms and biases."""
        biases = sum(self.module_dims(module)[1] for module in self.biased_modules)
        return 2 * self.hidden_size + 2 * self.head_dim * self.qk_norm + biases

    @property
    def num_parameters(self) -> int:
        """Weights and biases, a tied head counted once."""
        D, F, Q, KV = self.hidden_size, self.ffn_size, self.q_dim, self.kv_dim
        layer = self.vector_elements + 2 * D * Q + 2 * D * KV + 3 * D * F
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
        vectors = self.num_layers * self.vector_elements + self.hidden_size
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
        refuse(field, None, "is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        refuse(field, value, "must be a positive integer")
    return value


def _flag(config: dict[str, Any], field: str) -> bool:
    value = config.get(field)
    if value not in (None, True, False):
        refuse(field, value, "must be true or false")
    return bool(value)


def _token_ids(config: dict[str, Any], field: str, vocab_size: int) -> tuple[int, ...]:
    value = config.get(field)
    values = value if isinstance(value, list) else [] if value is None else [value]
    for token in values:
        if isinstance(token, bool) or not isinstance(token, int):
            refuse(field, value, "must be a token id or a list of them")
    # Old configs write -1, or an id past the vocabulary, for "none".
    return tuple(token for token in values if 0 <= token < vocab_size)
