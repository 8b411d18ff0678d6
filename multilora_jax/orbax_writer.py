"""Writes a folder of Orbax checkpoints and its manifest; `stored_tensors` reads it."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
import orbax.checkpoint as ocp

from multilora_jax.errors import UserError
from multilora_jax.stored_tensors import FORMAT, MANIFEST_FILE, UNFINISHED_FILE, WEIGHTS_FOLDER, checked_name

_PARTS, _LEAST_PART = 16, 1 << 20
"""Tensors whose columns shards hold are stored in about so many parts, of at least so many bytes: Orbax halves the
longer side first, so that of eight shards each reads little more than its own. Any other tensor is one file, of which
rows are read as they are wanted: there the fewest files are the fastest."""
_REMOVALS = (0, 0.05, 0.2, 0.5)
"""Seconds before each look at whether a folder is gone: after a failure, the store's threads may still write to it."""
_OS_ERROR = re.compile(r"os_error_code='(\d+)'")


class FolderWriter:
    """Writes groups of tensors, each while the next one is read; use it in a `with` statement.

    The folder has the name OUT.partial until it is whole: what is called OUT is never half of something. An error, and
    an interrupt too, removes what was written; a process that is killed leaves a folder that says it is unfinished,
    which the next conversion to OUT replaces. While one is at work, another to the same OUT is refused.

    Args:
        out: the folder to make.
        kind: "model" or "adapter".

    Raises:
        UserError: `out` exists or is being made (`already_exists`), or nothing can be made there (`bad_value`). What
            cannot be written later, as on a full disk, is one too (`bad_value`), from `add` or the end of the `with`.
    """

    def __init__(self, out: str | os.PathLike[str], kind: str):
        self._out = Path(out).expanduser().absolute()
        self._about: dict[str, Any] = {"format": FORMAT, "kind": kind, "ocdbt": False}
        self._tensors: dict[str, dict[str, Any]] = {}
        self._num_groups = 0
        self._failed = False
        if os.path.lexists(self._out):
            raise UserError(
                f"{self._out} exists: give another folder with --out, or remove it",
                reason="already_exists",
                param="out",
            )
        self.folder = self._out.with_name(self._out.name + ".partial")
        with self._writing():
            if (self.folder / UNFINISHED_FILE).is_file():
                with self._locked():
                    shutil.rmtree(self.folder)
            self.folder.mkdir(parents=True)
            self._lock = self._locked()
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=False, use_compression=False)
        self._checkpointer = ocp.AsyncCheckpointer(handler)

    def __enter__(self) -> FolderWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                with self._writing():
                    self._checkpointer.close()  # waits for what is being written, and raises what went wrong
                    self._complete()
                return
            with suppress(Exception):  # of two errors the first is told
                self._checkpointer.close()
            if isinstance(error, OSError):
                with self._writing():
                    raise error
        finally:
            self._remove()  # is not there any more if all went well
            self._lock.close()

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
        with self._writing():
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

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Tells what the disk, or the store, refuses in words; its errors are ValueErrors that name the system's."""
        try:
            yield
        except UserError:
            raise
        except (OSError, ValueError, RuntimeError) as error:
            self._failed = True
            code = _OS_ERROR.search(str(error))
            why = error.strerror if isinstance(error, OSError) else os.strerror(int(code[1])) if code else None
            where = getattr(error, "filename", None) or str(self.folder)
            raise UserError(
                f"out: cannot make {str(self._out)!r}: {where}: {why or str(error)[:300]}",
                reason="bad_value",
                param="out",
            ) from None

    def _locked(self) -> IO[bytes]:
        """Opens the file that says the folder is unfinished, and makes it where there is none; locked until closed."""
        file = (self.folder / UNFINISHED_FILE).open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise UserError(
                f"another conversion to {self._out} is at work: wait for it, or give another folder with --out",
                reason="already_exists",
                param="out",
            ) from None
        return file

    def _remove(self) -> None:
        for seconds in _REMOVALS if self._failed else (0,):
            time.sleep(seconds)
            shutil.rmtree(self.folder, ignore_errors=True)
        if self._failed and self.folder.is_dir():
            (self.folder / UNFINISHED_FILE).touch()
