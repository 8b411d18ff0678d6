"""Interrupts, failed steps and values at the edge: the engine goes on, or says that it cannot."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest

from multilora_jax import LLM, LoRARequest, SamplingParams
from multilora_jax.errors import ConfigError, UnavailableError, UserError

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPT = [5, 17, 200]


@pytest.fixture
def make(golden_tiny):
    def build(**options) -> LLM:
        defaults = {
            "dtype": "float32", "pool_pages": 64, "max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 64,
            "max_rank_rows": 64, "warm_up": False, "progress": False,
        }  # fmt: skip
        return LLM(str(golden_tiny / "bases" / "tied"), **defaults | options)

    return build


@pytest.fixture
def lora(golden_tiny) -> LoRARequest:
    return LoRARequest("qv", 1, str(golden_tiny / "cases" / "qv"))


def tokens(llm: LLM, *args, **kwargs) -> list[int]:
    return list(llm.generate(PROMPT, GREEDY, *args, use_tqdm=False, **kwargs)[0].outputs[0].token_ids)


@pytest.fixture
def interruptible():
    """Ctrl-C means what it means in a terminal; shells start background jobs with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("place", ["write_page", "rows", "insert", "layers", "finish"])
def test_an_interrupt_inside_a_step_waits_for_its_end_and_loses_nothing(make, lora, place):
    wanted = tokens(make(), lora_request=lora)
    llm = make()
    get, sent = llm.engine.runner.programs.get, []

    def interrupted(*key):
        if key[0] == place and not sent:
            sent.append(key)
            os.kill(os.getpid(), signal.SIGINT)
        return get(*key)

    llm.engine.runner.programs.get = interrupted  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(KeyboardInterrupt):
        tokens(llm, lora_request=lora)
    assert sent
    assert not llm.engine.has_unfinished_requests()
    assert tokens(llm, lora_request=lora) == wanted
    llm.engine.check_integrity()
    assert llm.engine.stats().pages_kv == 0


def test_after_a_failed_step_the_engine_says_so_instead_of_serving_on(make, lora, monkeypatch):
    llm = make()
    monkeypatch.setattr(llm.engine.runner, "write_pages", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        tokens(llm, lora_request=lora)
    with pytest.raises(UnavailableError, match="ZeroDivisionError") as caught:
        tokens(llm)
    assert caught.value.reason == "engine_failed"


@pytest.mark.parametrize("top_k", [2**31 - 1, 2**31, 2**63, 10**400])
def test_any_top_k_from_the_vocabulary_up_keeps_every_token(make, top_k):
    llm = make()
    wide = SamplingParams(temperature=1, top_k=top_k, seed=3, max_tokens=6)
    plain = SamplingParams(temperature=1, seed=3, max_tokens=6)
    first, second = llm.generate([PROMPT, PROMPT], [wide, plain], use_tqdm=False)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


def test_a_huge_temperature_is_served_and_one_that_is_no_number_refused(make):
    llm = make()
    (output,) = llm.generate(PROMPT, SamplingParams(temperature=1e39, seed=1), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 16
    for value in (10**400, float("inf"), float("nan"), "1", None, True):
        with pytest.raises(UserError):
            SamplingParams(temperature=value)  # pyright: ignore[reportArgumentType]


def test_numpy_integers_are_integers(make):
    options: dict[str, Any] = {"max_tokens": np.int64(3), "seed": np.int32(1), "stop_token_ids": [np.int64(0)]}
    params = SamplingParams(temperature=0, ignore_eos=True, **options)
    (output,) = make().generate(np.array(PROMPT), params, use_tqdm=False)  # pyright: ignore[reportArgumentType]
    assert output.prompt_token_ids == PROMPT


@pytest.mark.parametrize("priority", [["x", 0], [None, 1], [0.5, 1]])
def test_a_bad_priority_is_refused_and_changes_nothing(make, priority):
    llm = make()
    with pytest.raises(UserError, match="priority"):
        llm.generate([PROMPT, PROMPT], GREEDY, priority=priority, use_tqdm=False)
    llm.engine.check_integrity()
    assert len(tokens(llm)) == 6


@pytest.mark.parametrize(
    ("prompts", "options"),
    [
        (None, {}), (7, {}), (["\ud800"], {}), ([PROMPT], {"sampling_params": {"temperature": 0}}),
        ([PROMPT], {"sampling_params": [None]}), ([PROMPT], {"lora_request": "qv"}),
    ],
)  # fmt: skip
def test_misuse_of_generate_is_a_user_error(make, prompts, options):
    with pytest.raises(UserError):
        make().generate(prompts, use_tqdm=False, **options)


def test_a_generator_of_prompts_is_a_list_of_them(make):
    outputs = make().generate((PROMPT for _ in range(2)), GREEDY, use_tqdm=False)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [6, 6]


def test_load_inplace_loads_once_for_a_whole_batch(make, lora, monkeypatch):
    llm = make()
    loads, add = [], llm.engine.add_lora
    monkeypatch.setattr(llm.engine, "add_lora", lambda request: loads.append(request) or add(request))
    again = LoRARequest("qv", 1, lora.lora_path, load_inplace=True)
    llm.generate([PROMPT] * 3, GREEDY, lora_request=again, use_tqdm=False)
    assert len(loads) == 1
    assert llm.engine.stats().adapter_loads == 1


def test_a_context_beyond_the_model_s_own_is_refused(make):
    with pytest.raises(ConfigError, match="max_position_embeddings 512") as caught:
        make(max_model_len=513)
    assert caught.value.param == "max_model_len"


def test_a_pool_that_no_device_holds_is_refused(make):
    with pytest.raises(ConfigError, match="GiB") as caught:
        make(pool_pages=10**9)
    assert caught.value.param == "pool_pages"


def test_a_path_object_is_a_path(golden_tiny, make):
    request = LoRARequest("qv", 1, golden_tiny / "cases" / "qv")
    assert tokens(make(), lora_request=request)
    with pytest.raises(UserError, match="lora_path"):
        LoRARequest("qv", 1, 7)  # pyright: ignore[reportArgumentType]
