"""Adapters where memory is short, files go too early or values overflow: nobody waits for ever, nobody else suffers."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from multilora_jax.errors import UserError
from multilora_jax.request import LoRARequest
from tests.tiny_engine import Request, greedy, make_adapter, make_engine, run_all, tiny_engine, tokens_of

PROMPT = list(range(1, 12))


def run_out(engine, limit=500):
    """Finished outputs by request id; fails where requests are stuck."""
    done = {}
    for _ in range(limit):
        if not engine.has_unfinished_requests():
            engine.check_integrity()
            return done
        done |= {output.request_id: output for output in engine.step() if output.finished}
    raise AssertionError(f"{engine.stats().num_waiting} requests wait for ever")


@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("limit", [{"max_cpu_loras": 1}, {"max_cpu_loras": 2}, {"max_cpu_lora_gib": 1e-6}])
def test_mixes_that_each_hold_what_others_lack_are_served_with_a_tiny_host_tier(tmp_path, limit, prefetch):
    """Each waiting mix has one adapter in the pool, which nobody may take while it is wanted, and lacks another."""
    engine = tiny_engine(pool_pages=50, adapter_prefetch=prefetch, **limit)
    loras = {
        name: make_adapter(tmp_path / name, engine, 16 if name in "uvw" else 8, i) for i, name in enumerate("uvwxyz")
    }
    for name in "xyzuvw":
        engine.add_lora(loras[name])
    for name in "uvw":
        run_all(engine, [Request(PROMPT, greedy(2), loras[name])])
    for mix in ("ux", "vy", "wz"):
        engine.add_request(mix, PROMPT, greedy(4), [loras[name] for name in mix])
    assert set(run_out(engine)) == {"ux", "vy", "wz"}
    assert engine.stats().host_evictions < 40  # a copy is not read again and again while there is no room for it


@pytest.mark.parametrize("how", ["swapped", "unloaded"])
@pytest.mark.parametrize("where", ["waiting", "running"])
def test_an_old_version_outlives_its_files_with_no_room_in_the_host_tier(tmp_path, how, where):
    engine = tiny_engine(max_cpu_loras=1)
    old, new, other = (make_adapter(tmp_path / name, engine, 8, i) for i, name in enumerate(("old", "new", "other")))
    (wanted,) = tokens_of(run_all(engine, [Request(PROMPT, greedy(12), old)]))
    folder = tmp_path / "folder"
    shutil.copytree(tmp_path / "old", folder)
    by_name = LoRARequest("x", 50, str(folder))
    engine.add_lora(by_name)
    engine.add_request("mine", PROMPT, greedy(12), by_name)
    if where == "running":
        while not engine.stats().num_running:
            engine.step()
    engine.add_lora(other)  # takes the only place in host memory
    if how == "swapped":
        engine.add_lora(LoRARequest("x", 50, new.lora_path, load_inplace=True))
    else:
        engine.remove_lora("x")
    shutil.rmtree(folder)
    if where == "running":  # it loses its seat and its pages, and begins again
        with engine._books:
            (entry,) = engine.scheduler._running.values()
            engine.scheduler._stop_running(entry)
            entry.seq.num_computed_tokens = 0
            engine.scheduler._waiting.push(entry, preempted=True)
    engine.cache.order.evict(list(engine.cache.order))
    output = run_out(engine)["mine"]
    assert tokens_of([output]) == [wanted]
    if how == "unloaded":
        engine.remove_lora("other")
        engine.remove_lora("old")
        assert engine.stats().host_adapter_bytes == 0


def test_a_failed_swap_leaves_the_old_host_copy_evictable(tmp_path):
    engine = tiny_engine(max_cpu_loras=1)
    lora, other = (make_adapter(tmp_path / name, engine, 8, i) for i, name in enumerate(("lora", "other")))
    engine.add_lora(lora)
    engine.add_request("mine", PROMPT, greedy(40), lora)
    engine.step()
    (tmp_path / "bad").mkdir()
    with pytest.raises(UserError, match="is empty"):
        engine.add_lora(LoRARequest("lora", lora.lora_int_id, str(tmp_path / "bad"), load_inplace=True))
    engine.add_lora(other)
    assert [adapter.name for adapter in engine.adapters.host.adapters()] == ["other"]
    run_out(engine)


@pytest.mark.parametrize(
    ("case", "part"),
    [
        ("lm_head_untied", "lm_head.lora_A"),
        ("embed_untied", "lora_embedding_A"),
        ("modules_to_save_lm_head", "lm_head.weight"),
        ("modules_to_save_embed", "embed_tokens.weight"),
        ("trainable_tokens", "trainable_tokens_delta"),
    ],
)
def test_an_adapter_that_overflows_in_the_vocabulary_spoils_nobody_else(golden_tiny, huge_engine, tmp_path, case, part):
    engine, requests, wanted = huge_engine
    folder = tmp_path / "huge"
    shutil.copytree(golden_tiny / "cases" / case, folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file(
        {k: np.full_like(x, 3e38) if part in k else x for k, x in tensors.items()}, folder / "adapter_model.safetensors"
    )
    huge = LoRARequest("huge", 99, str(folder))
    outputs = run_all(engine, [*requests, Request(PROMPT, greedy(8), huge)])
    assert tokens_of(outputs[:-1]) == wanted
    assert tokens_of(run_all(engine, requests)) == wanted
    engine.remove_lora("huge")


@pytest.fixture(scope="module")
def huge_engine(golden_tiny):
    """An engine, requests for the base, a plain adapter and one of the head, and their answers."""
    engine = make_engine(golden_tiny / "bases" / "untied")
    names = ("all_linear_string", "lm_head_untied")
    loras = [None, *(LoRARequest(name, i, str(golden_tiny / "cases" / name)) for i, name in enumerate(names, 1))]
    requests = [Request(PROMPT, greedy(8), lora) for lora in loras]
    return engine, requests, tokens_of(run_all(engine, requests))
