"""Adapters that come from memory, and mixes of them."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load_file

from multilora_jax.errors import UserError
from multilora_jax.request import LoRARequest
from tests.tiny_engine import Request, greedy, make_adapter, run_all, tiny_engine, tokens_of

PROMPT = "Hello there"


@pytest.fixture
def engine():
    return tiny_engine(max_cpu_loras=3)


def test_adapters_from_memory_answer_as_those_from_files(engine, tmp_path):
    lora = make_adapter(tmp_path / "file", engine, 8, 3, lora_alpha=12.0)
    arrays = load_file(tmp_path / "file" / "adapter_model.safetensors")
    config = {"r": 8, "lora_alpha": 12.0}
    added = engine.add_adapter("memory", arrays, config)
    from_file, from_memory = run_all(
        engine, [Request(PROMPT, greedy(8), lora), Request(PROMPT, greedy(8), LoRARequest("memory", added.int_id))]
    )
    assert tokens_of([from_memory]) == tokens_of([from_file])
    assert from_memory.adapter_digest == added.digest
    with pytest.raises(UserError) as twice:
        engine.add_adapter("memory", arrays, config)
    assert twice.value.reason == "adapter_exists"
    scaled = {name: array * np.float32(0.5) for name, array in arrays.items()}
    swapped = engine.add_adapter("memory", scaled, config, load_inplace=True)
    assert swapped.digest != added.digest
    # It has no files to be read from again, so nothing evicts its host copy.
    run_all(engine, [Request(PROMPT, greedy(1), make_adapter(tmp_path / f"b{i}", engine, 4, 10 + i)) for i in range(5)])
    engine.cache.order.evict(list(engine.cache.order))
    (again,) = run_all(engine, [Request(PROMPT, greedy(2), LoRARequest("memory", added.int_id))])
    assert again.adapter_digest == swapped.digest
    engine.remove_lora("memory")
    assert "memory" not in [adapter.name for adapter in engine.adapters.host.adapters()]


def test_a_mix_of_one_adapter_with_itself_scaled_is_its_scale(engine, tmp_path):
    lora = make_adapter(tmp_path / "a", engine, 8, 3)
    config = {"r": 8, "lora_alpha": 16}  # twice what it was saved with
    arrays = load_file(tmp_path / "a" / "adapter_model.safetensors")
    twice = LoRARequest("twice", engine.add_adapter("twice", arrays, config).int_id)
    scaled = LoRARequest(lora.lora_name, lora.lora_int_id, lora.lora_path, scale=2.0)
    one, other = run_all(engine, [Request(PROMPT, greedy(8), scaled), Request(PROMPT, greedy(8), twice)])
    assert tokens_of([one]) == tokens_of([other])
    with pytest.raises(UserError) as refused:
        engine.add_request("twice", PROMPT, greedy(2), [lora, scaled])
    assert refused.value.reason == "bad_lora_request"
    nothing = LoRARequest(lora.lora_name, lora.lora_int_id, lora.lora_path, scale=0.0)
    zero, base = run_all(engine, [Request(PROMPT, greedy(8), nothing), Request(PROMPT, greedy(8))])
    assert tokens_of([zero]) == tokens_of([base])


def test_what_cannot_be_an_adapter_is_refused_and_leaves_nothing(engine, tmp_path):
    make_adapter(tmp_path / "a", engine, 8, 3)
    arrays = load_file(tmp_path / "a" / "adapter_model.safetensors")
    config = {"r": 8, "lora_alpha": 16}
    cyclic: dict = {}
    cyclic["a"] = cyclic
    cases = [
        (5, arrays, config, "bad_lora_name"),
        (None, arrays, config, "bad_lora_name"),
        (b"a", arrays, config, "bad_lora_name"),
        ("a", arrays, "x", "bad_adapter_config"),
        ("a", arrays, [1], "bad_adapter_config"),
        ("a", cyclic, config, "bad_arrays"),
    ]
    for name, tree, settings, reason in cases:
        with pytest.raises(UserError) as caught:
            engine.add_adapter(name, tree, settings)
        assert caught.value.reason == reason
    assert len(engine.adapters.registry) == len(engine.adapters.host.adapters()) == 0
