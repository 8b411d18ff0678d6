"""Which folders adapters may be read from, and whether an adapter is there, without opening a file."""

from __future__ import annotations

import os
from collections.abc import Iterable

from multilora_jax.errors import NotFoundError, PermissionDeniedError, UserError
from multilora_jax.lora.adapter_files import CONFIG_FILE, INDEX_FILE, PICKLE_FILE, WEIGHTS_FILE, weight_files


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
            UserError: the path is empty, or none that the file system can hold (`bad_lora_path`).
            PermissionDeniedError: see `check_inside`.
        """
        if not path or "\0" in path or not _encodable(path):
            what = "is not a path the file system can hold" if path else "is empty"
            raise UserError(f"lora_path {what}", reason="bad_lora_path", param="lora_path")
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


def check_files(folder: str, path: str) -> None:
    """Checks that a real folder has a config and weights; opens nothing, so they may still be refused when loaded.

    Raises:
        NotFoundError: `adapter_path_not_found`, `adapter_file_not_found`; `path` is what the message names.
    """
    if not os.path.isdir(folder):
        raise NotFoundError(
            f"adapter folder {path[:500]!r} does not exist: give a local folder that holds {CONFIG_FILE}",
            reason="adapter_path_not_found", param="lora_path",
        )  # fmt: skip
    for names in ((CONFIG_FILE,), (WEIGHTS_FILE, INDEX_FILE, PICKLE_FILE)):
        if not any(os.path.lexists(os.path.join(folder, name)) for name in names):
            raise NotFoundError(
                f"adapter folder {path[:500]!r} has no {names[0]}: give a folder that PEFT saved an adapter in",
                reason="adapter_file_not_found", param="lora_path",
            )  # fmt: skip


def _encodable(path: str) -> bool:
    try:
        os.fsencode(path)
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can spell
        return False
    return True
