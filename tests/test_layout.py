"""The shape of the code: imports go one way, host parts need no jax, only the server needs server packages."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import multilora_jax

ROOT = Path(__file__).parent.parent
PACKAGES = ("pallas_kernels", "multilora_jax")

LEVELS = {
    "pallas_kernels": 0,
    "multilora_jax.errors": 1,
    "multilora_jax.config_values": 2,
    "multilora_jax.config_rules": 2,
    "multilora_jax.config_api": 2,
    "multilora_jax.config_scheduling": 2,
    "multilora_jax.config_server": 2,
    "multilora_jax.key_file": 2,
    "multilora_jax.config_model": 2,
    "multilora_jax.config_serving": 2,
    "multilora_jax.config_parallel": 2,
    "multilora_jax.config": 2,
    "multilora_jax.request": 2,
    "multilora_jax.sampling_params": 2,
    "multilora_jax.chat_template": 2,
    "multilora_jax.template_limits": 2,
    "multilora_jax.template_sandbox": 2,
    "multilora_jax.encoding": 1,
    "multilora_jax.tokenizer": 2,
    "multilora_jax.detokenizer": 2,
    "multilora_jax.flags": 2,
    "multilora_jax.safetensors_file": 2,
    "multilora_jax.stored_tensors": 2,
    "multilora_jax.zarr_array": 2,
    "multilora_jax.torch_file": 2,
    "multilora_jax.torch_pickle": 2,
    "multilora_jax.memory": 2,
    "multilora_jax.models": 3,
    "multilora_jax.bench.mixes": 2,
    "multilora_jax.lora": 4,
    "multilora_jax.engine.step_plan": 5,
    "multilora_jax.engine.rank_rows": 5,
    "multilora_jax.engine.batch": 5,
    "multilora_jax.engine.edits": 5,
    "multilora_jax.engine.grammars": 5,
    "multilora_jax.engine.sampling_state": 5,
    "multilora_jax.engine.vocab_tables": 5,
    "multilora_jax.engine.row_buffers": 5,
    "multilora_jax.engine.in_place_rows": 5,
    "multilora_jax.engine.lora_plans": 5,
    "multilora_jax.engine.step_functions": 5,
    "multilora_jax.engine.host_memory": 5,
    "multilora_jax.engine.wire": 5,
    "multilora_jax.engine.host_meeting": 5,
    "multilora_jax.engine.program_keys": 5,
    "multilora_jax.engine.hosts": 5,
    "multilora_jax.engine.programs": 5,
    "multilora_jax.engine.own_rows": 5,
    "multilora_jax.engine.warm_up": 5,
    "multilora_jax.engine.model_runner": 5,
    "multilora_jax.engine": 6,
    "multilora_jax.llm": 7,
    "multilora_jax.adapter_calls": 7,
    "multilora_jax.async_engine": 7,
    "multilora_jax.engine_vitals": 7,
    "multilora_jax.replicas": 7,
    "multilora_jax.request_stream": 7,
    "multilora_jax.loop_turns": 7,
    "multilora_jax.server": 8,
    "multilora_jax": 9,  # serve, bench and every later command
}
"""A module imports from its own level or from a lower number; the longest prefix of its name decides."""

HOST = (
    "multilora_jax.errors",
    "multilora_jax.request",
    "multilora_jax.sampling_params",
    "multilora_jax.config",
    "multilora_jax.config_values",
    "multilora_jax.config_rules",
    "multilora_jax.config_api",
    "multilora_jax.config_scheduling",
    "multilora_jax.config_server",
    "multilora_jax.key_file",
    "multilora_jax.keys",
    "multilora_jax.logs",
    "multilora_jax.config_model",
    "multilora_jax.config_serving",
    "multilora_jax.config_parallel",
    "multilora_jax.flags",
    "multilora_jax.chat_template",
    "multilora_jax.template_limits",
    "multilora_jax.template_sandbox",
    "multilora_jax.encoding",
    "multilora_jax.tokenizer",
    "multilora_jax.detokenizer",
    "multilora_jax.safetensors_file",
    "multilora_jax.stored_tensors",
    "multilora_jax.zarr_array",
    "multilora_jax.torch_file",
    "multilora_jax.torch_pickle",
    "multilora_jax.memory",
    "multilora_jax.models.config",
    "multilora_jax.models.rope_config",
    "multilora_jax.models.families",
    "multilora_jax.models.rope",
    "multilora_jax.models.checkpoint",
    "multilora_jax.lora",
    "multilora_jax.engine.step_plan",
    "multilora_jax.engine.kv_manager",
    "multilora_jax.engine.admission",
    "multilora_jax.engine.entrance",
    "multilora_jax.engine.policies",
    "multilora_jax.engine.waiting",
    "multilora_jax.engine.transfers",
    "multilora_jax.engine.scheduler",
    "multilora_jax.engine.scheduler_books",
    "multilora_jax.engine.cache_check",
    "multilora_jax.engine.quarantine",
    "multilora_jax.engine.recovery",
    "multilora_jax.engine_vitals",
    "multilora_jax.engine.simulation",
    "multilora_jax.engine.metrics",
    "multilora_jax.engine.pool_view",
    "multilora_jax.engine.placement",
    "multilora_jax.engine.replica_stats",
    "multilora_jax.engine.wire",
    "multilora_jax.engine.host_meeting",
    "multilora_jax.engine.rank_rows",
    "multilora_jax.engine.host_memory",
    "multilora_jax.engine.inputs",
    "multilora_jax.engine.grammars",
    "multilora_jax.engine.sampling_plans",
    "multilora_jax.engine.sampling_state",
    "multilora_jax.engine.interrupts",
    "multilora_jax.engine.describe",
    "multilora_jax.engine.adapter_manager",
    "multilora_jax.engine.adapter_text",
    "multilora_jax.engine.adapter_tiers",
    "multilora_jax.engine.output",
    "multilora_jax.engine.fanout",
    "multilora_jax.server",
    "multilora_jax.adapters",
    "multilora_jax.bench.extras",
    "multilora_jax.bench.feature_panels",
    "multilora_jax.bench.figure",
    "multilora_jax.bench.floors",
    "multilora_jax.bench.hf_folder",
    "multilora_jax.bench.hf_worker",
    "multilora_jax.bench.llama_server",
    "multilora_jax.bench.mixes",
    "multilora_jax.bench.overhead_client",
    "multilora_jax.bench.panels",
    "multilora_jax.bench.peer_process",
    "multilora_jax.bench.plot",
    "multilora_jax.bench.pool_use",
    "multilora_jax.bench.report",
    "multilora_jax.bench.raw_http",
    "multilora_jax.bench.serve",
    "multilora_jax.bench.soak_clients",
    "multilora_jax.bench.serve_client",
    "multilora_jax.bench.serve_load",
    "multilora_jax.bench.serve_report",
    "multilora_jax.bench.summary",
    "multilora_jax.bench.texts",
    "multilora_jax.bench.trace_cases",
    "multilora_jax.bench.trace_dummy",
    "multilora_jax.bench.trace_flood",
    "multilora_jax.bench.trace_load",
    "multilora_jax.bench.trace_oracle",
    "multilora_jax.bench.trace_panels",
    "multilora_jax.bench.trace_report",
    "multilora_jax.bench.trace_run",
    "multilora_jax.plan.arithmetic",
    "multilora_jax.plan.collectives",
    "multilora_jax.pool_map",
    "multilora_jax.config_reference",
)
"""Modules and packages that work, and are tested in milliseconds, without jax."""

NOT_HOST = ("multilora_jax.memory.pool",)
"""The device array itself."""

SERVER_PACKAGES = {"fastapi", "uvicorn", "starlette"}
"""Imported by multilora_jax.server and multilora_jax.serve alone."""

MAX_LINES = 350
LONG_FILES: dict[str, str] = {}
"""Path to the reason why the file is better in one piece."""


def python_files(*folders: str) -> Iterator[Path]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "data" not in path.relative_to(ROOT).parts:
                yield path


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(tree: ast.AST, module: str, is_package: bool, known: set[str]) -> Iterator[tuple[str, int]]:
    """(imported module, line) of every import statement, those inside functions and TYPE_CHECKING too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".") if is_package else module.split(".")[:-1]
                base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [base])])
            for alias in node.names:
                name = f"{base}.{alias.name}"
                if name == "multilora_jax.__version__":
                    continue  # a constant of the façade, there before anything is imported
                yield (name if name in known else base), node.lineno


def within(name: str, prefixes: tuple[str, ...] | set[str]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def level_of(name: str) -> int:
    parts = name.split(".")
    prefixes = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next(LEVELS[prefix] for prefix in prefixes if prefix in LEVELS)


def import_faults(sources: dict[str, tuple[str, bool]]) -> list[str]:
    """Every import that the rules above forbid, as a readable line.

    Args:
        sources: module name to (its text, whether it is a package's __init__).
    """
    faults = []
    known = set(sources)
    for module, (text, is_package) in sources.items():
        if module == "multilora_jax":
            continue  # the façade: it names everything and imports nothing until asked
        host = within(module, HOST) and not within(module, NOT_HOST)
        for name, line in imports_of(ast.parse(text), module, is_package, known):
            where = f"{module}:{line} imports {name}"
            top = name.split(".")[0]
            if top in PACKAGES:
                if level_of(name) > level_of(module):
                    faults.append(f"{where}: upward, level {level_of(module)} to {level_of(name)}")
            elif within(module, ("pallas_kernels",)) and top not in {"jax", "numpy", *sys.stdlib_module_names}:
                faults.append(f"{where}: pallas_kernels needs jax and numpy only")
            if host and top in {"jax", "jaxlib", "flax", "chex", "optax", "orbax"}:
                faults.append(f"{where}: a host module")
            if top in SERVER_PACKAGES and not within(module, ("multilora_jax.server", "multilora_jax.serve")):
                faults.append(f"{where}: only the server may")
    return faults


def project_sources() -> dict[str, tuple[str, bool]]:
    return {module_name(p): (p.read_text(encoding="utf-8"), p.name == "__init__.py") for p in python_files(*PACKAGES)}


def test_imports_go_one_way():
    assert import_faults(project_sources()) == []


@pytest.mark.parametrize(
    ("module", "text", "words"),
    [
        ("pallas_kernels.x", "from multilora_jax.errors import UserError", "upward, level 0 to 1"),
        ("pallas_kernels.x", "import absl", "jax and numpy only"),
        ("multilora_jax.lora.x", "import jax.numpy as jnp", "a host module"),
        ("multilora_jax.server.x", "def f():\n    from jax import jit", "a host module"),
        ("multilora_jax.lora.x", "from ..engine import scheduler", "upward, level 4 to 6"),
        ("multilora_jax.engine.model_runner", "from . import scheduler", "upward, level 5 to 6"),
        ("multilora_jax.engine.x", "import multilora_jax.llm", "upward, level 6 to 7"),
        ("multilora_jax.async_engine", "from multilora_jax.server.app import make", "upward, level 7 to 8"),
        ("multilora_jax.engine.x", "from multilora_jax import LLM", "upward, level 6 to 9"),
        ("multilora_jax.llm", "import uvicorn", "only the server may"),
    ],
)
def test_the_rules_catch(module, text, words):
    faults = import_faults({**project_sources(), module: (text, False)})
    assert len([fault for fault in faults if fault.startswith(module) and words in fault]) == 1, faults


def test_the_rules_allow():
    module = "multilora_jax.memory.pool"
    assert import_faults({module: ("import jax\nfrom multilora_jax.errors import UserError", False)}) == []


def host_modules() -> list[str]:
    return [name for name in project_sources() if within(name, HOST) and not within(name, NOT_HOST)]


def loaded_after(statement: str) -> set[str]:
    """Top-level modules in a fresh interpreter after `statement`."""
    code = f"import sys\n{statement}\nprint(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_host_parts_load_without_jax():
    names = host_modules()
    assert len(names) > 10
    assert not loaded_after("import " + ", ".join(names)) & {"jax", "jaxlib", "flax"}


def test_packages_load_without_the_server_s_dependencies():
    library = loaded_after("import multilora_jax, pallas_kernels\nfrom multilora_jax import LLM, forward")
    assert "jax" in library
    assert not library & SERVER_PACKAGES
    assert "jax" not in loaded_after("from multilora_jax import SamplingParams, EngineConfig")


def test_every_public_name_is_there():
    for name in multilora_jax.__all__:
        assert getattr(multilora_jax, name) is not None
    assert set(multilora_jax.__all__) <= set(dir(multilora_jax))
    with pytest.raises(AttributeError, match="no attribute 'LLMs'"):
        multilora_jax.LLMs  # noqa: B018


def test_files_are_short():
    long = {}
    for path in python_files(*PACKAGES, "tests"):
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > MAX_LINES and str(path.relative_to(ROOT)) not in LONG_FILES:
            long[str(path.relative_to(ROOT))] = lines
    assert long == {}
