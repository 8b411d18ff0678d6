"""What the tests of converted models and adapters share."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from multilora_jax import checkpoints
from multilora_jax.stored_tensors import MANIFEST_FILE


def tied_adapter(golden_tiny: Path) -> Path:
    """A reference adapter of the tied base."""
    cases = json.loads((golden_tiny / "manifest.json").read_text())["cases"]
    return next(golden_tiny / "cases" / name for name, case in cases.items() if case["base"] == "tied")


def bits(model: Any, **options: Any) -> str:
    """Digest of a model's parameters on one device."""
    return checkpoints.digest(checkpoints.restore(model, **options).params())


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes a folder's manifest."""
    path = folder / MANIFEST_FILE
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))
