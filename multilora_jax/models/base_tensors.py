"""The served parameters under their checkpoint names, for what is computed against them on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from multilora_jax.models.layers import LlamaSpec
from multilora_jax.models.loader import MODEL_AXIS, ParamRecord, layer_records, top_records
from multilora_jax.models.quantised import QuantWeight, dequantise


class BaseTensors:
    """Reads single tensors back from the device, as they were rounded when loaded. Safe to use from any thread.

    Args:
        spec: of the model.
        params: Llama.params(); never donated, so that they can be read at any time.
        fetch: brings an array to the host, whole; by default without a copy that is kept beside the parameter.
    """

    def __init__(
        self, spec: LlamaSpec, params: dict[str, Any], fetch: Callable[[jax.Array], Any] | None = None
    ):  # fmt: skip
        self._fetch = fetch or (lambda array: jax.device_put(array, jax.local_devices(backend="cpu")[0]))
        self._spec = spec
        self._vocab_size = spec.config.vocab_size
        self._places: dict[str, tuple[ParamRecord, Any]] = {}
        groups = [(top_records(spec), params["top"])]
        groups += [(layer_records(spec, layer), arrays) for layer, arrays in enumerate(params["layers"])]
        for records, arrays in groups:
            for record in records:
                for source in record.sources:
                    self._places[source] = (record, arrays[record.name])
        self._places.setdefault("lm_head.weight", self._places["model.embed_tokens.weight"])

    def tensor(self, name: str) -> np.ndarray | None:
        """One tensor by its checkpoint name, float32, whole; None where the model has none (a bias).

        "lm_head.weight" is the embedding where the two are tied. The result may share memory with the parameter: do
        not write to it.
        """
        if name not in self._places:
            return None
        record, array = self._places[name]
        array = jax.tree.map(self._fetch, array)
        host = dequantise(array) if isinstance(array, QuantWeight) else np.asarray(array)
        if len(record.sources) == 1:
            vocabulary = record.shape[0] == self._spec.geometry.vocab_rows and record.name in ("embed", "lm_head")
            return (host[: self._vocab_size] if vocabulary else host).astype(np.float32, copy=False)
        tp = self._spec.geometry.tp if len(record.spec) and record.spec[0] == MODEL_AXIS else 1
        shards = host.reshape(tp, -1, *host.shape[1:])
        first, length = record.place_of(name, tp)
        part = shards[:, first : first + length]
        rows = part.reshape(-1, *host.shape[1:])
        module = name.split(".")[-2]
        return self._spec.geometry.single_heads(module, rows.T).T.astype(np.float32, copy=False)
