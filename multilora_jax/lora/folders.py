"""Which folders adapters may be read from, and whether an adapter is there, without opening a file."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress

from multilora_jax.errors import AdapterError, NotFoundError, PermissionDeniedError, UserError
from multilora_jax.lora.adapter_files import CONFIG_FILE, INDEX_FILE, PICKLE_FILE, WEIGHTS_FILE, weight_files
from multilora_jax.stored_tensors import MANIFEST_FILE, UNFINISHED_FILE


class AllowedFolders:
    """The folders that adapters must lie in.

    Args:
        roots: symbolic links are followed; None or empty allows any folder.
    """

    def __init__(self, roots: Iterable[str] | None = None) -> None:
        self._roots = [os.path.realpath(root) for root in roots or ()]

    def real_folder(self, path: str, *, trusted: bool = False) -> str:
        """The real folder behind a path; the roots do not bind a trusted one.

        Raises:
            UserError: the path is empty, none that the file system can hold, or no text (`bad_lora_path`).
            PermissionDeniedError: see `check_inside`.
        """
        if not path or "\0" in path or not _encodable(path):
            what = "is not a path the file system can hold" if path else "is empty"
            raise UserError(f"lora_path {what}", reason="bad_lora_path", param="lora_path")
        _check_text(os.path.abspath(path))
        folder = os.path.realpath(path)
        if not trusted:
            self.check_inside(folder, path)
        return folder

    def check_inside(self, folder: str, path: str) -> None:
        """Checks that every file of a real folder that a load may read lies in the roots.

        Whether anything exists outside the roots is not told.

        Raises:
            PermissionDeniedError: one does not (`path_outside_roots`); `path` is what the message names.
        """
        for file in [folder, *weight_files(folder)] if self._roots else ():
            real = os.path.realpath(file)
            if not any(os.path.commonpath((root, real)) == root for root in self._roots):
                raise PermissionDeniedError(
                    f"lora_path {path[:500]!r} leads outside the folders that adapters may be loaded from: "
                    "move the adapter there, or add its folder to adapter_roots",
                    reason="path_outside_roots", param="lora_path",
                )  # fmt: skip


def check_folder(folder: str, path: str, name: str = "") -> None:
    """Checks that a folder is one, and may hold an adapter.

    Args:
        folder: what is looked at.
        path: what the message calls it.
        name: the adapter's, for the message, where it has one.

    Raises:
        NotFoundError: there is no such folder (`adapter_path_not_found`); or neither a config nor weights are in it
            (`adapter_file_not_found`).
        UserError: the folder's name is no text (`bad_lora_path`).
    """
    _check_text(folder)
    what = f"adapter {name!r}: folder {path[:500]!r}" if name else f"adapter folder {path[:500]!r}"
    if not os.path.isdir(folder):
        why = f"does not exist: give a local folder that holds {CONFIG_FILE}"
        if os.path.exists(folder):
            why = f"is a file: give its folder, the one that holds {CONFIG_FILE}"
        raise NotFoundError(f"{what} {why}", reason="adapter_path_not_found", param="lora_path")
    with suppress(OSError):  # one that may not be listed may yet be read
        inside = os.listdir(folder)
        if not any(entry == CONFIG_FILE or entry.endswith((".safetensors", ".bin")) for entry in inside):
            why = "is empty" if not inside else f"holds no adapter, neither {CONFIG_FILE} nor {WEIGHTS_FILE}"
            if any(os.path.lexists(os.path.join(folder, entry, CONFIG_FILE)) for entry in inside):
                why += ", but folders in it do: give one of them"
            else:
                why += ": give a folder that PEFT saved an adapter in"
            raise NotFoundError(f"{what} {why}", reason="adapter_file_not_found", param="lora_path")


def check_size(folder: str, max_bytes: int) -> None:
    """Raises AdapterError (`adapter_too_large`) where the files of an adapter have more bytes; none is opened."""
    num_bytes = 0
    for file in weight_files(folder):
        with suppress(OSError):  # most of them need not exist
            num_bytes += os.stat(file).st_size
    if num_bytes > max_bytes:
        raise AdapterError(
            f"the adapter's files have {num_bytes / 2**20:.1f} MiB, and {max_bytes / 2**20:g} are allowed: raise "
            "max_adapter_mib",
            reason="adapter_too_large", param="lora_path",
        )  # fmt: skip


def check_files(folder: str, path: str, name: str) -> None:
    """Checks that a real folder has a config and weights; opens nothing, so they may still be refused when loaded.

    Args:
        folder: what is looked at.
        path, name: what the message calls the folder, and the adapter.

    Raises:
        NotFoundError: `adapter_path_not_found`, `adapter_file_not_found`.
    """
    check_folder(folder, path, name)
    for files in ((CONFIG_FILE,), (WEIGHTS_FILE, INDEX_FILE, PICKLE_FILE, MANIFEST_FILE, UNFINISHED_FILE)):
        if not any(os.path.lexists(os.path.join(folder, file)) for file in files):
            raise NotFoundError(
                f"adapter {name!r}: folder {path[:500]!r} has no {files[0]}: give a folder that PEFT saved an adapter "
                "in",
                reason="adapter_file_not_found", param="lora_path",
            )  # fmt: skip


def _check_text(path: str) -> None:
    """Refuses a path with bytes that are not UTF-8: it could not be told in any answer, nor in a list of models."""
    try:
        path.encode()
    except UnicodeEncodeError:
        raise UserError(
            f"lora_path {path[:500]!r} is not valid UTF-8: rename the folder", reason="bad_lora_path", param="lora_path"
        ) from None


def _encodable(path: str) -> bool:
    try:
        os.fsencode(path)
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can spell
        return False
    return True
