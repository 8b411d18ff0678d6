"""Which replica a request goes to."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from multilora_jax.engine.metrics import EngineStats
from multilora_jax.engine.placement import Placement
from multilora_jax.engine.replica_stats import merge_stats


def test_an_adapter_stays_where_it_is():
    placement = Placement(3, seats=4)
    assert placement.choose(["a"], [0, 0, 0]) == 0
    assert placement.choose(["b"], [1, 0, 0]) == 1
    assert placement.choose(["c"], [1, 1, 0]) == 2
    assert placement.choose(["b"], [0, 3, 0]) == 1
    assert placement.homes("b") == [1]


def test_an_adapter_moves_on_where_its_replica_is_full_and_another_is_not():
    placement = Placement(2, seats=2)
    assert placement.choose(["a"], [0, 0]) == 0
    assert placement.choose(["a"], [2, 1]) == 1
    assert placement.homes("a") == [0, 1]
    assert placement.choose(["a"], [1, 2]) == 0  # either has it now
    placement = Placement(2, seats=2)
    placement.settle("a", 0)
    assert placement.choose(["a"], [3, 2]) == 0  # no seat anywhere: no second copy either


def test_the_base_and_new_adapters_go_where_least_is():
    placement = Placement(2, seats=8)
    assert placement.choose([], [3, 1]) == 1
    placement.settle("a", 0)
    assert placement.choose(["b"], [1, 1]) == 1  # it has fewer adapters


def test_a_mix_goes_where_most_of_it_is():
    placement = Placement(2, seats=8)
    for name, replica in (("a", 0), ("b", 1), ("c", 1)):
        placement.settle(name, replica)
    assert placement.choose(["a", "b", "c"], [0, 5]) == 1
    assert placement.homes("a") == [0, 1]


def test_what_was_withdrawn_or_not_used_for_long_is_forgotten():
    placement = Placement(2, seats=8, max_homes=2)
    for name in ("a", "b", "a", "c"):
        placement.settle(name, 0)
    assert [placement.homes(name) for name in "abc"] == [[0], [], [0]]
    placement.forget("a")
    assert placement.homes("a") == []


@given(st.lists(st.tuples(st.sets(st.sampled_from("abcdef"), max_size=2), st.integers(0, 3)), max_size=40))
def test_nobody_waits_while_another_replica_has_a_seat(requests):
    placement, loads = Placement(3, seats=2), [0, 0, 0]
    for names, ended in requests:
        chosen = placement.choose(sorted(names), loads)
        assert loads[chosen] < 2 or min(loads) >= 2
        assert all(chosen in placement.homes(name) for name in names)
        loads[chosen] += 1
        if ended < 3:
            loads[ended] = max(0, loads[ended] - 1)


def test_figures_of_replicas_add_up():
    one = EngineStats(
        num_running=1, running_by_adapter={"a": 1}, pages_total=8, registered_adapters=3, refused={"queue_full": 2},
        tiers=[("a", 8, "resident", True), ("b", 4, "host", False)], step_seconds=0.5,
    )  # fmt: skip
    two = EngineStats(
        num_running=2, running_by_adapter={"a": 1, "b": 1}, pages_total=8, registered_adapters=3,
        tiers=[("a", 8, "host", False), ("b", 4, "loading", False)],
    )  # fmt: skip
    both = merge_stats([one, two])
    assert (both.num_running, both.pages_total, both.registered_adapters, both.step_seconds) == (3, 16, 3, 0.5)
    assert (both.running_by_adapter, both.refused) == ({"a": 2, "b": 1}, {"queue_full": 2})
    assert both.tiers == [("a", 8, "resident", True), ("b", 4, "loading", False)]
    assert both.replicas == [one, two]
