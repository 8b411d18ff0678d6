"""Correctness and speed of every kernel: one command, at most six minutes on a GPU.

    python -m pallas_kernels.bench --device auto --json kernels.json --markdown kernels.md

Checks every kernel that the device can run against the float32 oracle, then times LoRA and attention beside the bytes
that they must move at the bandwidth of a copy measured on the device, beside what plain XLA offers, and last a decode
step of Llama-3-8B's shape. On a CPU the same runs in Pallas' interpreter at tiny sizes: a test of the script, whose
times mean nothing. The exit status is 1 where a kernel is wrong.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from pallas_kernels import dispatch
from pallas_kernels.bench import attention_times, decode_step, lora_times
from pallas_kernels.bench.correctness import all_checks
from pallas_kernels.bench.report import Result, markdown, write
from pallas_kernels.bench.timing import Clock

SECTIONS = {"correct": 0.4, "lora": 0.6, "attention": 0.75, "step": 1.0}
"""In this order; of the time, the share after which nothing more of a section is begun while others follow."""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.bench", description=__doc__)
    parser.add_argument("--device", choices=("auto", "gpu", "cpu"), default="auto", help="auto: a GPU if there is one")
    parser.add_argument("--sections", default=",".join(SECTIONS), help="which parts to run")
    parser.add_argument("--minutes", type=float, default=5.5, help="time after which nothing more is begun")
    parser.add_argument("--json", type=Path, help="write the report to this file")
    parser.add_argument("--markdown", type=Path, help="the same as a table; printed in any case")
    args = parser.parse_args(arguments)
    args.sections = args.sections.split(",")
    if unknown := set(args.sections) - set(SECTIONS):
        parser.error(f"no section {', '.join(sorted(unknown))}: use some of {', '.join(SECTIONS)}")
    return args


def sections(names: list[str], deadline: float, small: bool) -> Iterator[Result | dict[str, Any]]:
    """Results as they come, and once the head of the report."""
    device = dispatch.current_device()
    yield {"device": device.kind, "platform": device.platform, "jax": jax.__version__}
    begin = time.monotonic()
    last = [name for name in SECTIONS if name in names][-1]
    ends = {name: begin + (deadline - begin) * (1 if name == last else share) for name, share in SECTIONS.items()}
    if "correct" in names:
        dtypes = ("bfloat16",) if small else ("bfloat16", "float16", "float32")
        yield from all_checks(dtypes, small, small, ends["correct"])
    if names == ["correct"]:
        return
    clock = Clock(1 << 20, 1, 1, deadline) if small else Clock(1 << 30, 4, 5, deadline)
    if small:
        yield {"interpreted": "the times below say nothing of any device"}
    yield {"copy bandwidth, GB/s": round(clock.bandwidth / 1e9, 1)}
    if "lora" in names:
        clock.deadline = ends["lora"]
        yield from lora_times.lora_times(clock, lora_times.TINY if small else lora_times.Size(), small)
    if "attention" in names:
        clock.deadline = ends["attention"]
        size = attention_times.TINY if small else attention_times.Size()
        yield from attention_times.attention_times(clock, size, small)
    if "step" in names:
        clock.deadline = ends["step"]
        yield from decode_step.step_times(clock, decode_step.TINY if small else decode_step.LLAMA_3_8B, small)


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    args = parse(arguments)
    platform = jax.default_backend()
    if args.device == "gpu" and platform != "gpu":
        print(f"the default device is a {platform}: install the extra gpu on a machine with a GPU", file=sys.stderr)
        return 2
    small = args.device == "cpu" or platform != "gpu"
    device = jax.devices("cpu")[0] if small else jax.devices()[0]
    begin = time.monotonic()
    head: dict[str, Any] = {}
    results: list[Result] = []
    seen = dispatch.Device("cpu", device.device_kind) if small else dispatch.current_device()
    with jax.default_device(device), dispatch.assume_device(seen):
        for found in sections(args.sections, begin + 60 * args.minutes, small):
            if isinstance(found, dict):
                head.update(found)
                continue
            results.append(found)
            print(".", end="", file=sys.stderr, flush=True)
            if args.json:
                write(args.json, results, head)  # what was measured stays if the rest is cut off
    head["seconds"] = round(time.monotonic() - begin)
    text = markdown(results, head)
    print("\n" + text)
    if args.json:
        write(args.json, results, head)
    if args.markdown:
        args.markdown.write_text(text, encoding="utf-8")
    wrong = [result for result in results if not result.right]
    for result in wrong:
        what = result.note or f"error {result.error}"
        print(f"WRONG: {result.implementation}, {result.case}: {what}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
