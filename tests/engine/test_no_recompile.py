"""After warm-up nothing compiles, whatever requests and adapters come and go."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from multilora_jax.lora.layout import Reach
from multilora_jax.request import LoRARequest, SamplingParams
from tests.tiny_engine import Request, greedy, make_adapter, make_engine, run_all, tiny_engine, tokens_of

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


@pytest.fixture
def compiles():
    """Grows by one entry with every program that XLA compiles or loads from its cache."""
    events: list[str] = []

    def listen(event: str, duration_secs: float, **_: object) -> None:
        if event == COMPILE_EVENT:
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture(scope="module")
def engine():
    """Room for two sequences, 32 pages for their KV and the adapters, two sizes of row buffers; warmed up."""
    engine = tiny_engine(
        narrow=False, max_num_seqs=2, max_num_batched_tokens=16, pool_pages=33, max_model_len=512, max_rank_rows=64,
        max_lora_rank=32,
    )  # fmt: skip
    engine.warm_up()
    return engine


def test_the_listener_hears(compiles):
    jax.jit(lambda x: x * 3 + len(compiles))(jnp.zeros(7)).block_until_ready()
    assert compiles


def test_traffic_compiles_nothing(engine, compiles, tmp_path):
    prompt, long = "Hello", "a long prompt " * 12
    loras = [make_adapter(tmp_path / f"rank{rank}", engine, rank, rank) for rank in (1, 8, 3, 16)]
    few = {"modules": ("q_proj", "v_proj")}  # small enough to share the pool, with more rows than the small buffers
    loras += [make_adapter(tmp_path / f"rank{rank}", engine, rank, rank, **few) for rank in (30, 12, 24)]
    options = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=5, max_tokens=6, ignore_eos=True)
    first = run_all(engine, [Request(prompt, greedy(4), lora) for lora in loras])
    run_all(engine, [Request(prompt, greedy(4), lora) for lora in [None, loras[0], None, loras[2], loras[1]]])
    run_all(engine, [Request(prompt, options, lora) for lora in [*loras, None]])
    run_all(engine, [Request(prompt, greedy(4, logprobs=20), loras[1]), Request(prompt, greedy(4))])
    run_all(engine, [Request(long, greedy(4, prompt_logprobs=5), lora) for lora in [None, loras[3]]])
    edits: dict[str, Any] = {"repetition_penalty": 1.2, "min_tokens": 2, "logit_bias": {65: 3.0}}
    shape: dict[str, Any] = {"structured_outputs": {"regex": "[a-z]{6}"}}
    run_all(engine, [Request(prompt, greedy(4, **edits), loras[0]), Request(prompt, SamplingParams(**shape))])
    run_all(engine, [Request(long, SamplingParams(seed=1, **shape)), Request(prompt, options, loras[1])])
    assert engine.stats().adapter_evictions > 0
    # Two texts of up to 19 pages each in a pool of 32.
    run_all(engine, [Request([7] * 220, greedy(70)), Request([9] * 220, greedy(70))])
    assert engine.stats().num_preemptions > 0
    engine.remove_lora("rank8")
    engine.add_request("gone", long, greedy(4), loras[0])
    engine.step()
    assert engine.abort_request("gone")
    again = run_all(engine, [Request(prompt, greedy(4), lora) for lora in loras])

    assert tokens_of(again) == tokens_of(first)
    assert engine.runner.rows.rank_rows.bucket == 64  # both sizes were used
    assert engine.stats().compilations == 0
    assert compiles == []


def test_steps_of_attention_adapters_run_without_rows_of_the_mlp(engine, compiles, tmp_path, monkeypatch):
    attention = make_adapter(tmp_path / "attention", engine, 4, 101, modules=("q_proj", "o_proj"))
    whole = make_adapter(tmp_path / "whole", engine, 4, 102)
    keys, get = [], engine.runner.programs.get
    monkeypatch.setattr(engine.runner.programs, "get", lambda *key: keys.append(key) or get(*key))
    alone = run_all(engine, [Request("Hello", greedy(6), attention), Request("Hello", greedy(6))])
    assert {key[3] for key in keys if key[0] == "layers"} == {Reach.ATTENTION}
    keys.clear()
    mixed = run_all(engine, [Request("Hello", greedy(6), attention), Request("Hello", greedy(6), whole)])
    assert Reach.PROJECTIONS in {key[3] for key in keys if key[0] == "layers"}
    keys.clear()
    again = run_all(engine, [Request("Hello", greedy(6), attention)])  # beside idle rows of the other
    assert {key[3] for key in keys if key[0] == "layers"} == {Reach.ATTENTION}
    assert tokens_of(alone)[0] == tokens_of(mixed)[0] == tokens_of(again)[0] != tokens_of(alone)[1]
    assert compiles == []


def test_every_feature_of_peft_and_mixes_compile_nothing(golden_tiny, compiles, tmp_path):
    engine = make_engine(golden_tiny / "bases" / "untied", narrow=False, max_num_seqs=2, max_rank_rows=64)
    engine.warm_up()
    names = ["dora_qv_rslora", "embed_lm_head", "modules_to_save_embed", "trainable_tokens", "all_linear_string"]
    loras = [LoRARequest(name, i, str(golden_tiny / "cases" / name)) for i, name in enumerate(names, 1)]
    plain = make_adapter(tmp_path / "plain", engine, 8, 7)
    for lora in loras:
        engine.add_lora(lora)
    compiles.clear()
    prompt, long = [5, 17, 200], [(11 + 37 * i) % 254 + 2 for i in range(40)]
    run_all(engine, [Request(prompt, greedy(4), plain), Request(prompt, greedy(4))])
    run_all(engine, [Request(prompt, greedy(4), lora) for lora in [*loras, None, plain]])
    run_all(engine, [Request(long, greedy(3, prompt_logprobs=3, logprobs=2), lora) for lora in loras])
    run_all(engine, [Request(prompt, greedy(4), [loras[0], loras[1]]), Request(long, greedy(4), [loras[2], plain])])
    engine.remove_lora("embed_lm_head")
    run_all(engine, [Request(prompt, greedy(4), loras[1])])
    assert engine.stats().compilations == 0
    assert compiles == []


def test_a_forgotten_program_is_counted(engine, compiles):
    """What the test above would see if warm-up left something out."""
    before = engine.stats().compilations
    engine.runner.programs.get("rows", 8)
    assert engine.stats().compilations == before + 1
    assert len(compiles) == 1
