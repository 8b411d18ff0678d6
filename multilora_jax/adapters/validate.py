"""`adapters validate`: what a server would say of adapters, without a device."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from absl import flags as absl_flags
from tqdm import tqdm

from multilora_jax import flags
from multilora_jax.adapters.host_base import HostBase, open_base
from multilora_jax.adapters.show import adapter_block
from multilora_jax.config import EngineConfig
from multilora_jax.engine.admission import AdmissionLimits
from multilora_jax.engine.kv_manager import KVManager
from multilora_jax.engine.step_plan import SchedulerConfig
from multilora_jax.errors import UserError
from multilora_jax.lora.adapter import Adapter, AdapterVersion
from multilora_jax.lora.adapter_files import CONFIG_FILE
from multilora_jax.lora.builder import SharedTokenizers, delta_warnings, own_template, tokenizer_warnings
from multilora_jax.lora.cache import AdapterCache
from multilora_jax.lora.deltas import AdapterDeltas, to_deltas
from multilora_jax.lora.folders import check_size
from multilora_jax.lora.packing import pack
from multilora_jax.lora.tensor_names import EMBED, HEAD
from multilora_jax.lora.weights import AdapterWeights, load_adapter
from multilora_jax.memory.allocator import PageAllocator
from multilora_jax.memory.geometry import MODULES

# The flags count as those of the program that asks for them, so that its --help lists them.
absl_flags.disclaim_key_flags()

ARGUMENTS = "[PATH...]"
EXAMPLE = "python -m multilora_jax.adapters validate configs/adapters --config configs/smollm2.yaml"
ABOUT = """Reads adapters as a server of this configuration would, and says what it would make of them: the modules
bound, ranks, the scaling in force, further features, pool pages and bytes, the digest, and warnings. Exits with 1 if it
would refuse any. No device is used; dtype auto counts as float32 here. A PATH is an adapter's folder, or a folder of
such folders, which stands for all of them; without any, lora_modules of the configuration are read."""


def define_flags(flag_values: absl_flags.FlagValues = absl_flags.FLAGS) -> None:
    """Defines this command's flags: those of the configuration, and --json."""
    flags.define_flags(flag_values)
    absl_flags.DEFINE_boolean("json", False, "Print JSON instead of text.", flag_values=flag_values)


def main(words: list[str], flag_values: absl_flags.FlagValues = absl_flags.FLAGS) -> int:
    """Runs the command from parsed flags on the paths in `words`."""
    config = flags.config_from_flags(flag_values)
    paths = adapter_folders(words or config.lora_modules.values())
    if not paths:
        raise UserError("name one or more adapter folders, or a folder of them", reason="bad_argument")
    base = open_base(config)
    checker = Checker(config, base)
    bar = tqdm(paths, desc="Reading", unit="adapter", disable=None if len(paths) > 1 else True)
    reports = [checker.check(path) for path in bar]
    refused = sum(report["reason"] is not None for report in reports)
    if flag_values.json:
        body = {"model": config.model, "dtype": base.geometry.dtype, "refused": refused, "adapters": reports}
        print(json.dumps(body, indent=2, allow_nan=False))
    else:
        print("\n\n".join(adapter_block(report, base.model_config.num_layers) for report in reports))
        print(f"\n{len(paths)} adapter{'s' * (len(paths) > 1)}: {len(paths) - refused} served, {refused} refused")
    return 1 if refused else 0


def adapter_folders(paths: Iterable[str]) -> list[str]:
    """The paths, each once and with ~ expanded; a folder that is no adapter but holds some stands for those, in their
    natural order."""
    found: dict[str, None] = {}
    for path in map(os.path.expanduser, paths):
        inside: list[str] = []
        if os.path.isdir(path) and not _is_adapter(path):
            inside = [os.path.join(path, name) for name in sorted(os.listdir(path), key=_natural)]
        found.update(dict.fromkeys(filter(_is_adapter, inside)) or {path: None})
    return list(found)


def _is_adapter(path: str) -> bool:
    return os.path.lexists(os.path.join(path, CONFIG_FILE))


def _natural(name: str) -> list[tuple[int, str]]:
    """Orders "a-10" behind "a-9"."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


class Checker:
    """Checks adapters for one base and one configuration.

    Args:
        config: limits on sizes of files, ranks, rows, pages and added tokens.
        base: what the adapters must fit.
    """

    def __init__(self, config: EngineConfig, base: HostBase):
        self._config, self._base = config, base
        self._tokenizers = SharedTokenizers(base.tokenizer)

    def check(self, path: str) -> dict[str, Any]:
        """What a server would make of one adapter.

        Returns:
            "path", "reason" and "message" (None where it is served); and then "digest", "base_model" (what it names),
            "modules" (module to its layers), "ranks" and "scaling" (module to the least and the most), "features",
            "rank_rows", "pages", "bytes" (of the pages), "dtype", "file_bytes", "warnings".
        """
        try:
            return {"path": path, "reason": None, "message": None, **self._read(path)}
        except UserError as error:
            return {"path": path, "reason": error.reason, "message": error.message}

    def _read(self, path: str) -> dict[str, Any]:
        base, config = self._base, self._config
        check_size(path, int(config.max_adapter_mib * 2**20))
        weights = load_adapter(
            path, base.model_config, max_lora_rank=config.max_lora_rank, max_extra_vocab=config.max_extra_vocab,
            base_name=base.name,
        )  # fmt: skip
        geometry = base.geometry
        deltas = to_deltas(weights, base.model_config, base.tensors, geometry.vocab_rows, geometry.dtype)
        packed = pack(deltas, geometry)
        tokenizer = None
        if weights.tokenizer_folder is not None:
            tokenizer = self._tokenizers.of_folder(weights.tokenizer_folder)
        base_template = None if base.tokenizer is None else base.tokenizer.chat_template
        template = own_template(weights.chat_template, base_template)
        version = AdapterVersion(weights.digest, packed.layout, weights.config.base_model_name_or_path)
        self._check_limits(Adapter(os.path.basename(path), 1, path, path, version=version))
        warnings = [*weights.warnings, *delta_warnings(deltas)]
        if tokenizer is not None:
            warnings.append("its tokenizer differs from the base's: text of its requests goes through its own")
        warnings += tokenizer_warnings(tokenizer, weights.vocab_size)
        ranks = {key: len(a) for key, a in deltas.a.items()}
        return {
            "digest": weights.digest,
            "base_model": version.base_model,
            "modules": _modules(deltas),
            "ranks": _ranges(ranks, deltas, lambda part: len(part.a)),
            "scaling": _ranges(deltas.scale, deltas, lambda part: part.scale),
            "features": {
                **_features(weights, deltas),
                "tokenizer": tokenizer is not None,
                "chat_template": template is not None,
            },
            "rank_rows": packed.layout.num_rows,
            "pages": packed.layout.num_pages,
            "bytes": packed.pages.nbytes,
            "dtype": geometry.dtype,
            "file_bytes": sum(entry.stat().st_size for entry in os.scandir(path) if entry.is_file()),
            "warnings": warnings,
        }

    def _check_limits(self, adapter: Adapter) -> None:
        """Raises AdapterError where no step, or not the whole pool, could hold the adapter."""
        config, geometry = self._config, self._base.geometry
        # A pool whose size only the device decides is taken to be large enough.
        num_pages = self._base.num_pages or adapter.num_pages + 1
        allocator = PageAllocator(max(2, num_pages))
        cache: AdapterCache[Adapter] = AdapterCache(allocator, config.max_adapter_pages)
        budgets = SchedulerConfig(
            config.max_num_seqs, config.max_num_batched_tokens, config.prefill_block, config.max_rank_rows,
            max_loras=config.max_loras,
        )  # fmt: skip
        AdmissionLimits(budgets, allocator, KVManager(allocator, geometry, cache), cache).check_adapter(adapter)


def _vocab_parts(deltas: AdapterDeltas) -> dict[str, Any]:
    """The modules of the vocabulary that have A and B."""
    parts = {EMBED: deltas.embed, HEAD: deltas.head}
    return {name: part for name, part in parts.items() if part is not None and part.a is not None}


def _modules(deltas: AdapterDeltas) -> dict[str, list[int]]:
    """Module to the layers in which it has A and B; no layers for those of the vocabulary."""
    layers = {module: sorted(layer for layer, name in deltas.a if name == module) for module in MODULES}
    return {module: found for module, found in layers.items() if found} | {name: [] for name in _vocab_parts(deltas)}


def _ranges(values: Mapping[tuple[int, str], float], deltas: AdapterDeltas, of_vocab: Any) -> dict[str, list[float]]:
    """Module to [least, most] over the layers."""
    found = {module: [value for (_, name), value in values.items() if name == module] for module in MODULES}
    found |= {name: [of_vocab(part)] for name, part in _vocab_parts(deltas).items()}
    return {module: [min(numbers), max(numbers)] for module, numbers in found.items() if numbers}


def _features(weights: AdapterWeights, deltas: AdapterDeltas) -> dict[str, int]:
    """How many of each there are; of replaced rows and norms those that differ from the base's."""
    vocab = [part for part in (weights.embed, weights.head) if part is not None]
    embed, head = deltas.embed, deltas.head
    return {
        "dora": len(weights.magnitude) + sum(part.magnitude is not None for part in vocab),
        "replaced_biases": len(weights.bias),
        "lora_biases": len(weights.lora_bias) + sum(part.lora_bias is not None for part in vocab),
        "norms": len(deltas.norms) + (deltas.final_norm is not None),
        "embed_rows": 0 if embed is None else len(embed.row_ids),
        "head_rows": 0 if head is None else len(head.row_ids),
        "extra_tokens": deltas.extra_tokens,
    }
