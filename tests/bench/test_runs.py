"""A batch of prompts through the engine."""

from __future__ import annotations

import itertools

import pytest

from multilora_jax.bench.runs import rank_rows_of, run_once
from tests.tiny_engine import make_adapter, tiny_engine


def test_a_backlog_is_kept_behind_a_full_batch(tmp_path):
    engine = tiny_engine(max_num_seqs=4)
    loras = [make_adapter(tmp_path / f"a-{n}", engine, 8, n) for n in range(2)]
    live: list[int] = []

    def watch(engine) -> None:
        stats = engine.stats()
        live.append(stats.num_running + stats.num_waiting)

    ids = (str(n) for n in itertools.count())
    prompts, chosen = [[1, 2, 3]] * 12, [loras[n % 2] for n in range(12)]
    run = run_once(engine, prompts, chosen, 4, ids, backlog=3, after_step=watch)
    assert max(live) == 4 + 3
    assert (run.new_tokens, len(run.first_token_s)) == (48, 12)
    assert all(0 < seconds <= run.seconds for seconds in run.first_token_s)
    assert (run.loads, run.hits + run.misses, run.preemptions) == (2, 12, 0)
    assert frozenset().union(*run.step_adapters) == {"a-0", "a-1"}
    live.clear()
    run_once(engine, prompts, chosen, 4, ids, after_step=watch)
    assert max(live) == 12  # without one all are queued at once
    engine.check_integrity()


@pytest.mark.parametrize(
    ("num_adapters", "rank", "most", "rows"), [(4, 12, 8, 64), (1, 8, 64, 64), (3, 1, 1, 24), (16, 64, 64, 1024)]
)
def test_rank_rows(num_adapters, rank, most, rows):
    assert rank_rows_of(num_adapters, rank, most) == rows
