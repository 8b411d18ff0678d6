"""Compiles the cases of some modules for an H200, with no GPU needed.

    python -m pallas_kernels.gpu_check pallas_kernels.gpu_check.controls pallas_kernels.segmented_lora.gpu_cases

A module of cases has `cases() -> dict[str, Case]`; the limits of its kernels lie in gpu_limits.csv beside it. Needs the
extra gpu-check; the exit status is 0 if every case passes, and 2 if nothing can be compiled here.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from pallas_kernels.gpu_check import compile as compiling
from pallas_kernels.gpu_check import limits as tables
from pallas_kernels.gpu_check.reports import find_ptxas, program_row
from pallas_kernels.gpu_check.targets import missing


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.gpu_check", description=__doc__)
    parser.add_argument("modules", nargs="+", help="modules of cases, dotted")
    parser.add_argument("--only", help="regular expression: the cases whose names it matches")
    parser.add_argument("--sweep", action="store_true", help="the modules' sweep() in place of their cases()")
    parser.add_argument("--json", type=Path, help="write everything found to this file")
    parser.add_argument("--table", type=Path, help="write memory, launches and collectives of the programs as CSV")
    parser.add_argument("--keep", type=Path, help="keep the compilers' files in this folder")
    parser.add_argument("--record", action="store_true", help="raise the recorded limits to what is seen now")
    parser.add_argument("--fresh", action="store_true", help="with --record: forget the limits recorded before")
    return parser.parse_args(arguments)


def _line(name: str, result: dict[str, Any], kernels_alone: bool) -> str:
    used = [
        f"{kernel} {found['registers']} registers, {found.get('shared', 0) + found.get('dynamic_smem', 0)} B shared"
        for kernel, found in result["kernels"].items()
        if "registers" in found
    ]
    if "memory" in result and not kernels_alone:
        used = [f"{key} {value}" for key, value in program_row(name, result).items() if key != "case"]
    return f"{'ok  ' if result['passed'] else 'FAIL'} {name}: {'; '.join([*result['problems'], *used])}"


def main(arguments: list[str] | None = None) -> int:
    """Runs the checks; returns the exit status."""
    args = parse(arguments)
    if reason := missing():
        print(reason, file=sys.stderr)
        return 2
    folder = (args.keep or Path(tempfile.mkdtemp(prefix="gpu_check_"))).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    compiling.prepare(folder)
    ptxas = find_ptxas() or ""
    results: dict[str, dict[str, Any]] = {}
    for module_name in args.modules:
        module = importlib.import_module(module_name)
        path = Path(str(module.__file__)).with_name("gpu_limits.csv")
        cases = module.sweep() if args.sweep else module.cases()
        limits = {} if args.fresh else tables.read(path)
        for name, case in cases.items():
            if args.only and not re.search(args.only, name):
                continue
            found = compiling.check(name, case, folder, ptxas, None if args.record else limits)
            if args.record and not case.must_fail:
                for kernel, used in found["kernels"].items():
                    if case.holds(kernel) and "registers" in used:
                        seen = tables.Limit.around(used)
                        limits[name, kernel] = seen.union(limits.get((name, kernel), seen))
            results[f"{module_name}:{name}"] = found
            print(_line(name, found, case.check_limits), flush=True)
        if args.record:
            known = {name for names in (module.cases, getattr(module, "sweep", dict)) for name in names()}
            tables.write(path, limits, known)
    if args.table:
        rows = [program_row(name.partition(":")[2], found) for name, found in results.items() if "memory" in found]
        tables.write_rows(args.table, rows)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    if not args.keep:
        shutil.rmtree(folder, ignore_errors=True)
    if not results:
        print("no case was compiled", file=sys.stderr)
        return 1
    return 0 if all(result["passed"] for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
