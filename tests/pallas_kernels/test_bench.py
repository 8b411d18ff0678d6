"""`python -m pallas_kernels.bench` on a CPU: everything runs in the interpreter, is right, and is written down."""

from __future__ import annotations

import json
import re
import time

import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels.bench.__main__ as bench
from pallas_kernels.bench import attention_times, correctness, decode_step, lora_times, xla_methods
from pallas_kernels.bench.__main__ import main
from pallas_kernels.bench.decode_step import LLAMA_3_8B
from pallas_kernels.bench.loras import make_batch, tokens_of_adapters
from pallas_kernels.bench.report import Result, markdown
from pallas_kernels.bench.timing import Clock
from pallas_kernels.segmented_lora import api as lora_api


@pytest.mark.slow
def test_the_whole_script(tmp_path, capsys):
    files = ["--json", str(tmp_path / "out.json"), "--markdown", str(tmp_path / "out.md")]
    assert main(["--device", "cpu", *files]) == 0
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["platform"] == "cpu"
    by_section = {}
    for row in report["results"]:
        assert row["right"], row
        assert not row["note"], row
        by_section.setdefault(row["section"], set()).add(row["implementation"])
    ours = {"triton", "xla"}
    assert ours < by_section["correct"]
    assert by_section["lora, one layer"] >= ours | {"xla gather-BMM", "xla ragged_dot", "xla one-hot", "xla loop"}
    assert by_section["attention, one layer"] >= ours | {"jax.nn.dot_product_attention, xla"}
    assert len([row for row in report["results"] if row["section"] == "decode step"]) == 2
    table = (tmp_path / "out.md").read_text()
    assert table in capsys.readouterr().out
    assert "| yes | triton | attention, smollm2-135m, bfloat16 |" in table
    assert "say nothing of any device" in table


def test_a_wrong_kernel_is_reported(monkeypatch, capsys):
    monkeypatch.setitem(correctness.LIMITS, "bfloat16", 1e-9)
    assert main(["--device", "cpu", "--sections", "correct"]) == 1
    captured = capsys.readouterr()
    assert "**NO**" in captured.out
    assert "WRONG: triton, attention" in captured.err


@pytest.mark.slow
def test_a_kernel_that_fails_is_reported_and_the_rest_runs(monkeypatch, capsys):
    """Every section: a compiler's refusal and a device's fault are findings, and no end of the report."""

    def fail(*_, **__):
        raise RuntimeError("ptxas: no registers left\nand more")

    def refuse(*_, **__):
        raise NotImplementedError("not this shape")

    monkeypatch.setitem(lora_api.BACKENDS, "triton", fail)
    monkeypatch.setitem(lora_api.BACKENDS, "xla", refuse)
    monkeypatch.setattr(attention_times.api, "ragged_paged_attention", fail)
    monkeypatch.setattr(decode_step, "lora_delta", fail)
    assert main(["--device", "cpu"]) == 1
    captured = capsys.readouterr()
    for case in ("lora_delta, distinct, 1 tokens", "distinct, 4 tokens", "2 decodes, 40 slots", "distinct, all seven"):
        assert re.search(f"WRONG: triton, {case}.*: RuntimeError: ptxas: no registers left\n", captured.err), case
    assert re.search(
        r"\| not checked \| xla \| lora_delta, distinct, 1 .*: not implemented: .*not this shape", captured.out
    )
    assert "| distinct, 4 tokens, rank 16, 64 to 128 | xla gather-BMM |" in captured.out


def test_a_failed_program_leaves_the_clock_usable():
    clock = Clock(1 << 16, 1, 1, deadline=0.0)

    def fail(_):
        clock._buffer.delete()
        raise RuntimeError("a fault")

    with pytest.raises(RuntimeError, match="a fault"):
        clock._seconds(lambda *_: fail(_), (None,))
    assert clock.microseconds(lambda x: x + 1, jnp.zeros(8)) >= 0


def test_sections_leave_each_other_time(monkeypatch):
    """What is left of a section's share when time runs out is the next one's; the last one has all."""
    seen = {}
    monkeypatch.setattr(bench, "all_checks", lambda *args: seen.update(correct=args[-1]) or [])
    for module, name in ((lora_times, "lora_times"), (attention_times, "attention_times"), (decode_step, "step_times")):
        monkeypatch.setattr(module, name, lambda clock, *_, name=name: seen.update({name: clock.deadline}) or [])
    begin = time.monotonic()
    list(bench.sections(list(bench.SECTIONS), begin + 100, small=True))
    assert {name: round((end - begin) / 10) for name, end in seen.items()} == {
        "correct": 4, "lora_times": 6, "attention_times": 8, "step_times": 10
    }  # fmt: skip
    list(bench.sections(["correct", "lora"], begin + 100, small=True))
    assert round(seen["lora_times"] - begin) == 100
    assert correct_notes(deadline=begin) == {"no time left"}


def correct_notes(deadline):
    return {result.note for result in correctness.all_checks(("bfloat16",), True, True, deadline)}


def test_a_gpu_is_asked_for_where_there_is_none(capsys):
    assert main(["--device", "gpu"]) == 2
    assert "the default device is a cpu" in capsys.readouterr().err


def test_unknown_sections_are_named(capsys):
    with pytest.raises(SystemExit):
        main(["--sections", "lora,speed"])
    assert "no section speed" in capsys.readouterr().err


def test_nothing_is_begun_after_the_deadline():
    clock = Clock(1 << 16, 1, 1, deadline=0.0)
    results = list(attention_times.attention_times(clock, attention_times.TINY, interpret=True))
    assert {result.note for result in results} == {"no time left"}


def test_nan_is_not_right():
    assert not Result("correct", "a", "triton", error=float("nan"), limit=1.0).right
    assert "**NO**" in markdown([Result("correct", "a", "triton", error=float("nan"), limit=1.0)], {})


@pytest.mark.parametrize(
    ("mix", "tokens", "adapters"),
    [("identical", 64, 1), ("uniform", 64, 8), ("skewed", 64, 9), ("distinct", 64, 64), ("uniform", 1, 1)],
)
def test_mixes(mix, tokens, adapters):
    adapter_T = tokens_of_adapters(mix, tokens)
    assert len(set(adapter_T.tolist())) == adapters
    assert sorted(adapter_T) == adapter_T.tolist()
    counts = np.bincount(adapter_T)
    assert (counts.max() == counts.min()) == (mix != "skewed")


def test_floors():
    """The bytes of 64 tokens of rank 16, 4096 to 4096, y as float32 read and written."""
    for mix, adapters in (("distinct", 64), ("uniform", 8), ("identical", 1)):
        batch = make_batch(tokens_of_adapters(mix, 64), (16,), 4096, 4096, 1024, layers=1, dtype=jnp.bfloat16)
        moved = 2 * (64 * (4096 + 16) + adapters * 4096 * 16 + 64 * 16 + adapters * 16 * 4096)
        assert batch.floor_bytes == moved + 2 * 4 * 64 * 4096
    assert LLAMA_3_8B.weight_bytes == 2 * (8_030_261_248 - 128256 * 4096 - 65 * 4096)


def test_the_methods_of_xla_agree(capsys):
    """Every method gives what lora_delta gives, else the command stops; the table says which of them it is."""
    options = ["--layers", "1", "--rounds", "1", "--in-dim", "32", "--out-dim", "64", "--rank", "4"]
    assert xla_methods.main([*options, "--sizes", "2/6,3/3", "--dtypes", "float32"]) == 0
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert [cell.strip() for cell in rows[0]][2:] == [
        "lora_delta", "active rows", "chunks", "ragged_dot", "the path is"
    ]  # fmt: skip
    assert [row[1].strip() for row in rows[2:]] == ["2/6", "3/3"]
    assert [row[-1].strip() for row in rows[2:]] == ["active rows"] * 2
    assert all(float(cell.split()[0]) > 0 for row in rows[2:] for cell in row[2:-1])


def test_a_faster_method_is_named(monkeypatch, capsys):
    """By its best round, its median and more paired rounds than chance gives; never from what it won now and then."""
    path = [10.0, 11.0, 12.0, 10.0, 13.0, 12.0, 11.0, 12.0, 11.0]
    faster, lucky = [t - 1 for t in path], [9.0, 12.0, 11.0, 9.0, 14.0, 10.0, 10.5, 13.0, 12.0]
    times = xla_methods.Times({"lora_delta": path, "active rows": faster, "chunks": lucky}, None)
    assert times.slower_than == ["active rows"]
    monkeypatch.setattr(xla_methods, "measure", lambda *_, **__: times)
    assert xla_methods.main(["--sizes", "2/6", "--dtypes", "float32"]) == 1
    assert "float32, 2/6: slower than active rows\n" in capsys.readouterr().out


def test_a_wrong_method_is_seen(monkeypatch):
    monkeypatch.setattr(xla_methods.xla_pool, "delta_by_tiles", lambda x, pools, rows, plan, y, units: y)
    with pytest.raises(AssertionError, match="chunks is off by"):
        xla_methods.measure(
            2, 4, rank=4, in_dim=32, out_dim=32, dtype="float32", layers=1, rounds=1
        )  # fmt: skip
