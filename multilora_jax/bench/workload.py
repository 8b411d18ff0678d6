"""Commands whose workload is a dataclass: each of its fields is a flag."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

from absl import flags as absl_flags

from multilora_jax import flags
from multilora_jax.bench.report import check_outputs, define_output_flags, write_outputs
from multilora_jax.config import EngineConfig

# The flags count as those of the program that asks for them, so that its --help lists them.
absl_flags.disclaim_key_flags()

W = TypeVar("W")


def option(default: int | float | tuple[str, ...], doc: str, least: int = 1) -> Any:
    """A field of a workload.

    Args:
        default: its value without the flag; a tuple takes words with commas between them.
        doc: what it is, for --help.
        least: the smallest number allowed.
    """
    return dataclasses.field(default=default, metadata={"doc": doc, "least": least})


def command(
    workload: type[W],
    measure: Callable[[EngineConfig, W], dict[str, Any]],
    show: Callable[[dict[str, Any]], str],
    *,
    num_seqs: int | None = None,
) -> tuple[Callable[..., None], Callable[..., int]]:
    """`define_flags` and `main` of a command (see flags.run_command), which has the configuration's flags too.

    Args:
        workload: a dataclass of options.
        measure: makes the report (see bench.report); where it has `failures`, the exit status is 1.
        show: what is printed of it.
        num_seqs: max_num_seqs, whatever the file says, unless its flag is given; None leaves it alone.
    """
    fields = dataclasses.fields(workload)  # pyright: ignore[reportArgumentType]

    def define_flags(flag_values: absl_flags.FlagValues = absl_flags.FLAGS) -> None:
        flags.define_flags(flag_values)
        for field in fields:
            name, doc = field.name, field.metadata["doc"]
            default: Any = field.default
            if isinstance(default, bool):
                absl_flags.DEFINE_boolean(name, default, doc, flag_values=flag_values)
            elif isinstance(default, tuple):
                absl_flags.DEFINE_list(name, list(default), doc, flag_values=flag_values)
            else:
                define = absl_flags.DEFINE_integer if isinstance(default, int) else absl_flags.DEFINE_float
                define(name, default, doc, lower_bound=field.metadata["least"], flag_values=flag_values)
        define_output_flags(flag_values)

    def main(words: list[str], flag_values: absl_flags.FlagValues = absl_flags.FLAGS) -> int:
        del words
        check_outputs(flag_values)
        config = flags.config_from_flags(flag_values)
        if num_seqs is not None and not flag_values["max_num_seqs"].present:
            config = dataclasses.replace(config, max_num_seqs=num_seqs)
        given = {field.name: flag_values[field.name].value for field in fields}
        work = workload(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})
        report = measure(config, work)
        print(show(report))
        write_outputs(flag_values, report)
        return 1 if report.get("failures") else 0

    return define_flags, main
