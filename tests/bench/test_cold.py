"""`bench adapters --cold` on a tiny model."""

from __future__ import annotations

import json
import statistics
from typing import Any, ClassVar

import pytest

from multilora_jax.bench import cold, cold_bench
from multilora_jax.bench.cold_bench import Gaps, Results, Workload
from multilora_jax.lora.reader import SlowStorage
from tests.bench.test_adapters import bench

SMALL = (
    "--cold --max-num-seqs 2 --cold-requests 2 --cold-rank 16 --gap-steps 40 --num-prompts 4 --input-len 4 "
    "--output-len 3 --rounds 1"
)


class CountedStorage(SlowStorage):
    """Counts the reads of each engine."""

    reads: ClassVar[list[int]] = []

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.number = len(self.reads)
        self.reads.append(0)

    def __call__(self, num_bytes: int) -> float:
        self.reads[self.number] += 1
        return super().__call__(num_bytes)


@pytest.mark.slow
def test_command_measures_cold_adapters_with_prefetch_and_without(narrow_engines, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cold_bench, "SlowStorage", CountedStorage)
    monkeypatch.setattr(CountedStorage, "reads", [])
    out = tmp_path / "out.json"
    assert bench(*SMALL.split(), "--disk-mib-per-s", "1000", "--disk-latency-ms", "2", "--json", str(out)) == 0
    printed = capsys.readouterr().out
    header, on, off, *notes = printed.splitlines()
    assert header.split()[:3] == ["prefetch", "cold_ttft_p50_s", "warm_ttft_p50_s"]
    assert (on.split()[0], off.split()[0]) == ("on", "off")
    assert "EMULATED, the delay is made up: 1000 MiB/s and 2 ms for each adapter" in printed
    assert any("rank 16 on all modules" in note for note in notes)

    report = json.loads(out.read_text())
    assert report["command"] == "adapters --cold"
    assert report["config"]["num_prompts"] == 6  # a full batch, and two for each cold one
    on, off = report["rows"]
    for row in (on, off):
        assert row["cold_ttft_p50_s"] == statistics.median(row["cold_ttft_s"])
        assert row["warm_ttft_p50_s"] == statistics.median(row["warm_ttft_s"])
        assert row["cold_minus_warm_s"] == pytest.approx(row["cold_ttft_p50_s"] - row["warm_ttft_p50_s"])
        assert len(row["cold_ttft_s"]) == len(row["warm_ttft_s"]) == 2
    assert len(on["load_steps"]) == 1
    assert on["load_steps"][0] >= 1
    assert on["gap_ratio"] > 0
    assert on["load_s"] >= 0.002  # the emulated latency at least
    assert (off["gap_ratio"], off["load_steps"]) == (None, [])

    assert [engine.config.adapter_prefetch for engine in narrow_engines] == [True, False]
    # Both cold ones came from the disk in the warm run and in the timed one, and one of them beside streams.
    assert CountedStorage.reads == [2 * 2 + 1, 2 * 2]
    for engine in narrow_engines:
        stats = engine.stats()
        assert stats.registered_adapters == 4
        assert stats.adapter_loads >= 2 + 2 * 2 + (engine is narrow_engines[0])
        assert stats.compilations == 0
        engine.check_integrity()


@pytest.mark.parametrize(
    ("mib_per_s", "latency_ms", "words"),
    [
        (0.0, 0.0, "not throttled: this machine's own, which keeps files it has read in memory"),
        (0.0, 5.0, "EMULATED, the delay is made up: no limit of speed and 5 ms for each adapter"),
        (50.0, 0.0, "EMULATED, the delay is made up: 50 MiB/s and 0 ms for each adapter"),
    ],
)
def test_an_emulated_disk_is_called_so(mib_per_s, latency_ms, words):
    assert Workload(2, 16, 40, mib_per_s, latency_ms, 2, 6, 4, 3, 1).disk == words


def test_gaps_are_held_against_the_quiet_median():
    gaps = [Gaps([1.0, 1.0, 1.2, 1.0], [1.0, 1.5], 0.5), Gaps([2.0, 2.0, 9.0], [2.0, 8.0, 2.0], 0.7)]
    row = cold._row(True, Results([3.0, 5.0], [1.0, 2.0], gaps))
    assert row["gap_ratio_by_round"] == [1.5, 4.0]
    assert row["gap_ratio"] == 2.75
    assert row["gap_largest_s"] == 4.75
    assert row["gap_p50_s"] == 1.5
    assert row["quiet_gap_ratio"] == statistics.median([1.0, 4.5])  # of as many steps as the load took
    assert row["load_s"] == 0.6
    assert (row["cold_ttft_p50_s"], row["cold_minus_warm_s"]) == (4.0, 2.5)
