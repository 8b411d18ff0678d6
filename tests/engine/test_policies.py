"""Each policy by itself: orders, counters, who is given up."""

from __future__ import annotations

import pytest

from multilora_jax.engine.policies import Entry, Lcfs, Load, Policy, PolicyConfig, make_policy
from multilora_jax.engine.policies.abort import Abort
from multilora_jax.engine.policies.cluster import Cluster
from multilora_jax.engine.policies.deadline import Deadline
from multilora_jax.engine.policies.fair import Fair
from multilora_jax.engine.step_plan import ScheduledStep
from multilora_jax.errors import ConfigError
from multilora_jax.request import SamplingParams, Sequence
from tests.lora.fake_adapter import FakeAdapter

ADAPTERS = {name: FakeAdapter(name) for name in "abc"}
PARAMS = SamplingParams()


class Line:
    """Entries as the queue hands them to a policy."""

    def __init__(self, policy: Policy, **load: object):
        self.policy, self.load, self.entries = policy, Load(**load), list[Entry]()  # type: ignore[arg-type]

    def add(self, name: str, prompt: int = 10, output: int = 10, adapter: str = "", tenant: str = "") -> Entry:
        adapters = (ADAPTERS[adapter],) if adapter else ()
        seq = Sequence(
            name, [1] * prompt, prompt, PARAMS, adapters, arrival_time=self.load.now, tenant=tenant,
            max_total_tokens=prompt + output,
        )  # fmt: skip
        entry = Entry(seq, len(self.entries))
        self.policy.joined(entry, self.load)
        self.entries.append(entry)
        return entry

    def order(self) -> str:
        return "".join(entry.seq.request_id for entry in self.policy.order(self.entries, self.load))

    def admit(self, name: str) -> None:
        entry = self.take(name)
        entry.running = True
        self.policy.admitted(entry, self.load)
        self.load.running = {**self.load.running, name: entry}

    def take(self, name: str) -> Entry:
        [entry] = [entry for entry in self.entries if entry.seq.request_id == name]
        self.entries.remove(entry)
        return entry

    def given_up(self) -> str:
        return "".join(entry.seq.request_id for entry, _ in self.policy.give_up(self.entries, self.load))

    def plan(self, *decodes: str) -> None:
        self.policy.planned(ScheduledStep([self.load.running[name].seq for name in decodes]), self.load)


def test_first_and_last_come():
    entries = [Line(Policy()).add(name) for name in "xyz"]
    assert [Policy().place(Entry(e.seq, i)) for i, e in enumerate(entries)] == [0, 1, 2]
    assert [Lcfs().place(Entry(e.seq, i)) for i, e in enumerate(entries)] == [0, -1, -2]


def test_a_policy_that_needs_an_objective_says_so():
    for name in ("abort", "deadline"):
        with pytest.raises(ConfigError, match=f"scheduling_policy {name} needs first_token_objective_s") as info:
            make_policy(PolicyConfig(name))
        assert info.value.param == "first_token_objective_s"


class TestCluster:
    def line(self, **changes: object) -> Line:
        arguments = {"num_adapters": 2, "max_overtakes": 2, **changes}
        line = Line(Cluster(**arguments))  # type: ignore[arg-type]
        for name, adapter in zip("xyzw", "cacb", strict=True):
            line.add(name, adapter=adapter)
        return line

    def test_below_d_adapters_it_is_first_come(self):
        line = self.line()
        line.load.users = {ADAPTERS["a"]: 1}
        assert line.order() == "xyzw"

    def test_from_d_adapters_on_those_in_the_batch_go_first(self):
        line = self.line()
        line.load.users = {ADAPTERS["a"]: 1, ADAPTERS["b"]: 3}
        assert line.order() == "ywxz"
        line.add("v")  # the base needs no adapter
        assert line.order() == "ywvxz"

    def test_the_oldest_is_passed_so_often_and_no_more(self):
        line = self.line()
        line.load.users = {ADAPTERS["a"]: 1, ADAPTERS["b"]: 3}
        line.admit("y")
        assert line.order() == "wxz"
        line.admit("w")
        line.add("u", adapter="a")
        assert line.order() == "xzu"
        line.admit("x")
        assert line.order() == "uz"  # the next oldest has not been passed yet

    def test_the_oldest_is_passed_for_so_long_and_no_more(self):
        line = self.line(max_overtakes=99, max_overtake_s=3.0)
        line.load.users = {ADAPTERS["a"]: 1, ADAPTERS["b"]: 3}
        line.load.now = 50.0
        assert line.order() == "ywxz"  # long waits alone do not count
        line.admit("y")
        line.load.now = 52.9
        assert line.order() == "wxz"
        line.load.now = 53.0
        assert line.order() == "xzw"

    def test_priorities_that_nobody_waits_with_are_forgotten(self):
        line = Line(Cluster(1, 3))
        for i in range(10):
            entry = Entry(Sequence(str(i), [1], 1, PARAMS, (), priority=i), i)
            line.policy.joined(entry, line.load)
            line.policy.admitted(entry, line.load)
            line.policy.left(entry, line.load)
        assert not line.policy._lines  # type: ignore[attr-defined]


class TestFair:
    def test_parties_take_turns_by_what_they_cost(self):
        line = Line(Fair({}, output_cost=0.0))
        for name in "pqr":
            line.add(name, prompt=10, adapter="a")
        for name in "uvw":
            line.add(name, prompt=20, adapter="b")
        assert line.order() == "puqvrw"  # a: 0 10 20 30, b: 0 20 40; where they are equal, whoever has fewer

    def test_weights(self):
        line = Line(Fair({"b": 2.0}, output_cost=0.0))
        for name in "pqr":
            line.add(name, adapter="a")
        for name in "uvw":
            line.add(name, adapter="b")
        assert line.order() == "puvqwr"

    def test_a_tenant_goes_before_the_adapter(self):
        line = Line(Fair({}, output_cost=0.0))
        for name, tenant in zip("pqr", "ttu", strict=True):
            line.add(name, adapter="a", tenant=tenant)
        assert line.order() == "prq"

    def test_prompts_and_generated_tokens_are_charged(self):
        fair = Fair({"b": 2.0}, output_cost=3.0)
        line = Line(fair)
        line.add("p", prompt=10, adapter="a")
        line.add("q", prompt=10, adapter="b")
        line.admit("p")
        line.admit("q")
        assert fair.counters == {"a": 13.0, "b": 6.5}
        line.plan("p", "q")
        line.plan("q")
        assert fair.counters == {"a": 16.0, "b": 9.5}

    def test_one_that_was_preempted_pays_its_prompt_once(self):
        fair = Fair({}, output_cost=0.0)
        line = Line(fair)
        entry = line.add("p", adapter="a")
        line.admit("p")
        fair.admitted(entry, line.load)
        assert fair.counters == {"a": 10.0}

    def test_a_newcomer_starts_level_with_those_that_wait(self):
        fair = Fair({}, output_cost=0.0)
        line = Line(fair)
        for name in "pqrs":
            line.add(name, adapter="a")
        for name in "pqr":
            line.admit(name)
        line.add("u", adapter="b")
        assert fair.counters == {"a": 30.0, "b": 30.0}
        line.admit("s")
        line.admit("u")
        line.add("v", adapter="c")  # nobody waits: level with the last that did
        assert fair.counters["c"] == 40.0

    def test_the_last_seats_are_not_for_those_who_have_their_share(self):
        fair = Fair({}, output_cost=0.0, spare_seats=1)
        line = Line(fair, max_num_seqs=4, free_seats=4)
        for name in "pqrst":
            line.add(name, adapter="a")
        assert line.order() == "pqr"
        for name in "pqr":
            line.admit(name)
        line.load.free_seats = 1
        assert line.order() == ""
        line.add("u", adapter="b")
        line.add("v", adapter="b")
        assert line.order() == "uv"

    def test_a_crowd_is_who_has_its_share_beside_one_that_has_not(self):
        fair = Fair({}, output_cost=0.0)
        line = Line(fair, max_num_seqs=6)
        for name in "pqrs":
            line.add(name, adapter="a")
        for name in "pqr":
            line.admit(name)
        assert fair.crowd(line.load) == ()  # alone it may take all
        line.add("u", adapter="b")
        assert fair.crowd(line.load) == {"a"}  # three of six, and two are its share
        line.admit("u")
        assert fair.crowd(line.load) == {"a"}
        line.add("v", adapter="b")
        line.admit("v")
        assert fair.crowd(line.load) == ()  # nobody has less than is its due

    def test_counters_of_parties_long_gone_are_forgotten(self):
        fair = Fair({})
        line = Line(fair)
        for i in range(5000):
            entry = line.add(str(i), tenant=str(i))
            line.entries.clear()
            fair.left(entry, line.load)
        assert len(fair.counters) < 3000
        assert not fair._waiting


class TestAbort:
    def rounds(self, line: Line, *admitted: int, arriving: int) -> None:
        for n in admitted:
            for _ in range(arriving):
                line.add("n")
            for _ in range(n):
                line.policy.admitted(line.entries.pop(0), line.load)
            for _ in range(10):
                line.plan()

    def test_newest_first_while_the_queue_outgrows_the_batches(self):
        line = Line(Abort(6.0))
        line.load.running = {"r": line.add("r")}
        line.entries.clear()
        self.rounds(line, 2, 2, 2, arriving=9)
        line.add("z")
        assert line.order()[0] == "z"
        self.rounds(line, 8, 8, 8, arriving=4)
        line.add("y")
        assert line.order()[-1] == "y"

    def test_who_was_given_up_counts_among_those_that_came(self):
        """S-LoRA weighs the requests since the last batch, whatever has become of them by now."""
        line = Line(Abort(6.0))
        line.load.running = {"r": line.add("r")}
        for _ in range(3):
            for _ in range(9):
                line.add("n")
            line.entries = line.entries[-4:]  # the others waited for too long
            self.rounds(line, 2, arriving=0)
        line.add("z")
        assert line.order()[0] == "z"

    def test_rounds_without_an_admission_are_one(self):
        line = Line(Abort(6.0))
        line.load.running = {"r": line.add("r")}
        line.entries.clear()
        for _ in range(40):
            line.add("n")
        self.rounds(line, 8, 8, 8, 8, arriving=4)
        line.add("y")
        assert line.order()[-1] == "y"
        self.rounds(line, 0, 0, 0, arriving=4)  # twelve since eight were admitted
        line.add("z")
        assert line.order()[0] == "z"

    def test_one_that_was_preempted_is_not_admitted_twice(self):
        policy = Abort(6.0)
        line = Line(policy)
        entry = line.add("x")
        line.admit("x")
        entry.seq.first_scheduled_time = 0.0
        policy.admitted(entry, line.load)
        assert policy._admitted == 1

    def test_it_gives_up_earlier_where_first_tokens_take_longer_than_a_twelfth(self):
        line = Line(Abort(1.2))
        line.add("x")
        line.load.now = 1.05
        assert line.given_up() == ""
        for i in range(200):
            entry = line.add(f"r{i}")
            line.admit(f"r{i}")
            entry.seq.token_ids.append(2)
            entry.seq.first_scheduled_time = line.load.now - 0.4
            line.plan(f"r{i}")
        line.load.now = 0.79
        assert line.given_up() == ""
        line.load.now = 0.81
        assert line.given_up() == "x"

    def test_it_gives_up_a_twelfth_of_the_objective_early(self):
        line = Line(Abort(6.0))
        line.add("x")
        line.load.now = 1.0
        line.add("y")
        line.load.now = 5.49
        assert line.given_up() == ""
        line.load.now = 5.5
        assert line.given_up() == "x"
        [(_, error)] = line.policy.give_up(line.entries, line.load)
        assert (error.status, error.reason, error.retry_after_s) == (503, "first_token_objective", 6)
        assert "waited 5.50 s" in error.message
        assert "within 6 s" in error.message


class TestDeadline:
    def test_least_work_first(self):
        line = Line(Deadline(6.0, output_cost=4.0))
        line.add("x", prompt=10, output=100)
        line.add("y", prompt=100, output=10)
        line.add("z", prompt=100, output=9)
        assert line.order() == "zyx"

    def test_what_answers_took_before_is_what_they_are_taken_to_take(self):
        line = Line(Deadline(6.0))
        for name in "pq":
            entry = line.add(name, output=1000, adapter="a")
            line.admit(name)
            entry.seq.token_ids += [2] * 5
            entry.seq.first_token_time = 1.0
            line.policy.left(entry, line.load)
        line.add("x", output=900, adapter="b")
        line.add("y", output=1000, adapter="a")
        assert line.order() == "yx"

    def test_it_gives_up_when_the_first_token_would_come_too_late(self):
        line = Line(Deadline(6.0))
        line.add("x")
        line.load.now = 5.9
        assert line.given_up() == ""
        for i in range(200):  # first tokens come two seconds after the start
            entry = line.add(f"r{i}")
            line.admit(f"r{i}")
            entry.seq.token_ids.append(2)
            entry.seq.first_scheduled_time = line.load.now - 2.0
            line.plan(f"r{i}")
        line.load.now = 3.9
        assert line.given_up() == ""
        line.load.now = 4.1
        assert line.given_up() == "x"
