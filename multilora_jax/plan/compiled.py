"""The real step compiled for a mesh: bytes and collectives as the compiler gives them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from multilora_jax.engine.batch import BatchShape
from multilora_jax.engine.programs import Programs, layers_key
from multilora_jax.lora.layout import Reach
from multilora_jax.plan.collectives import Collective, read_collectives
from multilora_jax.plan.target import nbytes_per_device


@dataclass(frozen=True)
class CompiledProgram:
    """One program of a step, bytes on one device.

    Attributes:
        name: "begin", "layers" or "finish".
        runs: how often it runs in a step.
        arguments, outputs, aliased, temporaries: bytes; aliased are the outputs that take the place of arguments.
        collectives: of one run.
    """

    name: str
    runs: int
    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    collectives: tuple[Collective, ...]

    @property
    def beside(self) -> int:
        """Bytes that a run takes beside its arguments."""
        return self.temporaries + self.outputs - self.aliased


@dataclass(frozen=True)
class CompiledStep:
    """The programs of a step, and what the device holds while they run.

    Attributes:
        programs: in the order of a step.
        resident: bytes of parameters, pool and rank rows on one device, from the sizes of the programs' arguments.
    """

    programs: tuple[CompiledProgram, ...]
    resident: int

    @property
    def peak(self) -> int:
        """Bytes of one device in use at the worst moment of the step."""
        return self.resident + max(program.beside for program in self.programs)


def compile_step(
    programs: Programs, shape: BatchShape, rows: int, tell: Callable[[str], None] = lambda _: None, own_rows: int = 0
) -> CompiledStep:
    """Compiles a step with so many rank rows (0: the base alone) and reads what it takes.

    Args:
        programs: from `target_programs`.
        tell: hears which program is being compiled.
        own_rows: see LlamaSpec.
    """
    reach = Reach.PROJECTIONS if rows else Reach.ATTENTION
    keys = [("begin", shape, rows, False), layers_key(shape, rows, reach, own_rows), ("finish", shape, False)]
    num_layers = programs.spec.config.num_layers
    found = []
    for key in keys:
        tell(f"compiling {key[0]} of {shape.num_tokens} tokens and {rows} rank rows")
        compiled = programs.get(*key)
        memory = compiled.memory_analysis()
        runs = num_layers // programs.layers_at_once(shape) if key[0] == "layers" else 1
        found.append(
            CompiledProgram(
                key[0], runs, memory.argument_size_in_bytes, memory.output_size_in_bytes,
                memory.alias_size_in_bytes, memory.temp_size_in_bytes, tuple(read_collectives(compiled.as_text())),
            )
        )  # fmt: skip
    return CompiledStep(tuple(found), _resident(programs, found, rows, programs.layers_at_once(shape)))


def _resident(programs: Programs, found: list[CompiledProgram], rows: int, num_layers: int) -> int:
    """Arguments of the programs, each counted once; so many layers stand for all."""
    begin, layers, finish = found
    once = nbytes_per_device(programs._pool)
    per_group = nbytes_per_device(programs._params["layers"][:num_layers])
    if rows and not programs.spec.in_place:
        per_group += nbytes_per_device(programs._row_buffers(rows)[:num_layers])
    tied = "lm_head" not in programs._params["top"]
    twice = nbytes_per_device(programs._params["top"]["embed"]) if tied else 0
    rest = layers.arguments - once - per_group  # activations and tables of the step
    total = begin.arguments + finish.arguments - twice + rest + once + layers.runs * per_group
    return total
