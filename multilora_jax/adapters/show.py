"""Adapters in few words: what `adapters validate` and `adapters list` print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

LABEL_WIDTH = 11


def printable(text: str) -> str:
    """A stranger's text in one line, what moves a terminal's cursor or is no character at all as an escape."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def columns(lines: Sequence[Sequence[str]]) -> str:
    """Lines of cells, aligned left."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def number_ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers in short: "0-3, 7"."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def modules_line(modules: Mapping[str, Sequence[int]], num_layers: int) -> str:
    """Modules with their layers, those of equal layers together: "q_proj, v_proj x 30 layers; down_proj x layers 0-3".

    Args:
        modules: module to its ascending layers, none for a module outside the layers.
        num_layers: of the model.
    """
    groups: dict[tuple[int, ...], list[str]] = {}
    for module, layers in modules.items():
        groups.setdefault(tuple(layers), []).append(module)
    parts = []
    for layers, names in groups.items():
        if not layers:
            where = ""
        elif len(layers) == num_layers:
            where = f" x {num_layers} layers"
        else:
            where = f" x layer{'s' if len(layers) > 1 else ''} {number_ranges(layers)}"
        parts.append(", ".join(names) + where)
    return "; ".join(parts) or "-"


def range_line(ranges: Mapping[str, Sequence[float]]) -> str:
    """(least, most) of each module, once where all have the same: "8" or "q_proj 8, v_proj 4-16"."""
    texts = {name: f"{low:.6g}" if low == high else f"{low:.6g}-{high:.6g}" for name, (low, high) in ranges.items()}
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return ", ".join(f"{name} {text}" for name, text in texts.items()) or "-"


_FEATURES = {
    "dora": "DoRA on {} module",
    "replaced_biases": "{} bias replaced",
    "lora_biases": "{} LoRA bias",
    "norms": "{} norm changed",
    "embed_rows": "{} row of embed_tokens changed",
    "head_rows": "{} row of lm_head changed",
    "extra_tokens": "{} token added",
}
_PLURALS = {"module": "modules", "bias": "biases", "norm": "norms", "row": "rows", "token": "tokens"}


def features_line(features: Mapping[str, Any]) -> str:
    """What the adapter has beyond A and B of projections, in words."""
    words = [_counted(text, features[name]) for name, text in _FEATURES.items() if features[name]]
    words += ["own tokenizer"] * features["tokenizer"] + ["own chat template"] * features["chat_template"]
    return ", ".join(words) or "-"


def _counted(text: str, count: int) -> str:
    words = text.format(count).split(" ")
    return " ".join(words if count == 1 else [_PLURALS.get(word, word) for word in words])


def adapter_block(report: Mapping[str, Any], num_layers: int) -> str:
    """The lines about one adapter; see `validate.check` for the report."""

    def line(label: str, text: str) -> str:
        return f"  {label:{LABEL_WIDTH}}{text}"

    path = printable(report["path"])
    if report["reason"] is not None:
        return f"{path}\n" + line("refused", printable(f"{report['reason']}: {report['message']}"))
    lines = [
        path,
        line("base", printable(" ".join((report["base_model"] or "-").split())[:200])),
        line("modules", modules_line(report["modules"], num_layers)),
        line("rank", range_line(report["ranks"])),
        line("scaling", range_line(report["scaling"])),
        line("features", features_line(report["features"])),
        line("memory", _memory(report)),
        line("digest", report["digest"]),
    ]
    lines += [line("warning", printable(warning)) for warning in report["warnings"]]
    return "\n".join(lines)


def _memory(report: Mapping[str, Any]) -> str:
    size, files = report["bytes"] / 2**20, report["file_bytes"] / 2**20
    rows = f"{report['rank_rows']} rank rows of a step"
    return f"{report['pages']} pages, {size:.2f} MiB as {report['dtype']} (files {files:.2f} MiB), {rows}"
