"""Writes a folder of Orbax checkpoints and its manifest; `stored_tensors` reads it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Container
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from multilora_jax.errors import UserError
from multilora_jax.stored_tensors import FORMAT, MANIFEST_FILE, UNFINISHED_FILE, WEIGHTS_FOLDER, checked_name

_PARTS, _LEAST_PART = 16, 1 << 20
"""Tensors whose columns shards hold are stored in about so many parts, of at least so many bytes: Orbax halves the
longer side first, so that of eight shards each reads little more than its own. Any other tensor is one file, of which
rows are read as they are wanted: there the fewest files are the fastest."""


class FolderWriter:
    """Writes groups of tensors, each while the next one is read; use it in a `with` statement.

    The folder has the name OUT.partial until it is whole: what is called OUT is never half of something. An error, and
    an interrupt too, removes what was written; a process that is killed leaves a folder that says it is unfinished,
    which the next conversion to OUT replaces.

    Args:
        out: the folder to make.
        kind: "model" or "adapter".

    Raises:
        UserError: `out` exists (`already_exists`), or nothing can be made there (`bad_value`).
    """

    def __init__(self, out: str | os.PathLike[str], kind: str):
        self._out = Path(out).expanduser().absolute()
        self._about: dict[str, Any] = {"format": FORMAT, "kind": kind, "ocdbt": False}
        self._tensors: dict[str, dict[str, Any]] = {}
        self._num_groups = 0
        if os.path.lexists(self._out):
            raise UserError(
                f"{self._out} exists: give another folder with --out, or remove it",
                reason="already_exists",
                param="out",
            )
        self.folder = self._out.with_name(self._out.name + ".partial")
        try:
            if (self.folder / UNFINISHED_FILE).is_file():
                shutil.rmtree(self.folder)
            self.folder.mkdir(parents=True)
            (self.folder / UNFINISHED_FILE).touch()
        except OSError as error:
            raise UserError(
                f"out: cannot make {str(self.folder)!r}: {error.strerror}", reason="bad_value", param="out"
            ) from None
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=False, use_compression=False)
        self._checkpointer = ocp.AsyncCheckpointer(handler)

    def __enter__(self) -> FolderWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._checkpointer.close()  # waits for what is being written, and raises what went wrong
            if kind is None:
                self._complete()
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)  # is not there any more if all went well

    def add(self, tensors: dict[str, np.ndarray], by_columns: Container[str] = ()) -> None:
        """Begins to write a group, once the one before is written.

        Args:
            tensors: by name; they must not change any more.
            by_columns: those whose columns are split over shards.
        """
        group = f"{self._num_groups:04d}"
        self._num_groups += 1
        for name, tensor in tensors.items():
            entry = {"dtype": tensor.dtype.name, "shape": list(tensor.shape), "group": group}
            self._tensors[checked_name(name)] = entry
        chunks = {
            name: ocp.SaveArgs(
                chunk_byte_size=max(tensor.nbytes // _PARTS, _LEAST_PART) if name in by_columns else None
            )
            for name, tensor in tensors.items()
        }
        self._checkpointer.save(
            self.folder / WEIGHTS_FOLDER / group, args=ocp.args.PyTreeSave(tensors, save_args=chunks)
        )

    def say(self, **about: Any) -> None:
        """Adds entries to the manifest."""
        self._about |= about

    def _complete(self) -> None:
        files = {
            path.relative_to(self.folder).as_posix(): path.stat().st_size
            for path in sorted((self.folder / WEIGHTS_FOLDER).rglob("*"))
            if path.is_file()
        }
        manifest = json.dumps({**self._about, "tensors": self._tensors, "files": files}, indent=1)
        (self.folder / MANIFEST_FILE).write_text(manifest + "\n", encoding="utf-8")
        (self.folder / UNFINISHED_FILE).unlink()
        self.folder.rename(self._out)
