"""Text to token ids and back, and chat templates (host only)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence as SequenceABC
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from multilora_jax.chat_template import flatten_content, render_chat
from multilora_jax.encoding import byte_level_alphabet, check_bytes, longest_token, token_ids
from multilora_jax.errors import ConfigError, UserError

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """A `tokenizers.Tokenizer` with the rules around it that the file alone does not state.

    Decoding is a concatenation: each token stands for fixed bytes, the bytes of all tokens are joined and read as
    UTF-8, and what is not UTF-8 becomes U+FFFD. So text can be decoded piece by piece with the same result.

    Args:
        backend: the tokenizer proper; its truncation and padding are switched off.
        special_tokens: names (`bos_token`, ...) to texts; chat templates see them.
        chat_template: Jinja source, or named sources.
        add_bos: whether a raw prompt gets a BOS where the backend's post-processor adds none.

    Raises:
        ConfigError: a decoder whose tokens have no fixed bytes, or a special token that is not in the vocabulary.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: dict[str, str] | None = None,
        chat_template: str | dict[str, str] | None = None,
        add_bos: bool = False,
    ):
        self._backend = backend
        backend.no_truncation()
        backend.no_padding()
        self.special_tokens = dict(special_tokens or {})
        named = {"default": chat_template} if isinstance(chat_template, str) else dict(chat_template or {})
        self._chat_templates: dict[str, str] = named
        self.bos_token_id = self._special_id("bos_token")
        eos = self._special_id("eos_token")
        self.eos_token_ids: tuple[int, ...] = () if eos is None else (eos,)
        self._add_bos = add_bos
        self._special_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )  # fmt: skip
        self._read_decoder()
        self._bytes: dict[int, bytes] = {}
        self._fingerprint: str | None = None

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer | None:
        """Read tokenizer.json, tokenizer_config.json and the chat template of a Hugging Face folder.

        Returns:
            None where the folder has no tokenizer at all.

        Raises:
            ConfigError: a damaged file, or a tokenizer.model without tokenizer.json.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            if (folder / "tokenizer.model").is_file():
                raise ConfigError(
                    f"{folder}: tokenizer.model alone is not supported; write tokenizer.json beside it with "
                    "transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...)",
                    reason="unsupported_tokenizer", param="tokenizer",
                )  # fmt: skip
            return None
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        # The library raises bare Exception for a bad file.
        except Exception as error:
            raise ConfigError(f"{path}: {error}", reason="bad_tokenizer", param="tokenizer") from error
        config = _read_json(folder / "tokenizer_config.json")
        _add_missing_tokens(backend, config.get("added_tokens_decoder") or {}, path)
        add_bos = config.get("add_bos_token")
        if add_bos is None:
            add_bos = config.get("tokenizer_class") in ("LlamaTokenizer", "LlamaTokenizerFast")
        return cls(
            backend,
            special_tokens=_special_tokens({**_read_json(folder / "special_tokens_map.json"), **config}),
            chat_template=_chat_templates(folder, config.get("chat_template")),
            add_bos=bool(add_bos),
        )

    def save(self, folder: str | Path) -> None:
        """Writes the files that `from_folder` reads this tokenizer from."""
        templates = [{"name": name, "template": text} for name, text in self._chat_templates.items()]
        config = {**self.special_tokens, "add_bos_token": self._add_bos, "chat_template": templates}
        self._backend.save(str(Path(folder) / "tokenizer.json"))
        (Path(folder) / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def num_ids_from(self, limit: int) -> int:
        """Number of tokens whose ids are `limit` or more."""
        return sum(token_id >= limit for token_id in self._backend.get_vocab(with_added_tokens=True).values())

    @property
    def chat_template(self) -> str | None:
        """Jinja source of the default chat template, None where there is none."""
        return self._chat_templates.get("default")

    @property
    def tool_template(self) -> str | None:
        """The one that the tokenizer has for conversations with tools, None where it has none of its own for them."""
        return self._chat_templates.get("tool_use")

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that `skip_special_tokens` leaves out of a text."""
        return self._special_ids

    def fingerprint(self) -> str:
        """SHA-256 (hex) of the rules from text to ids and back; chat templates are left out."""
        if self._fingerprint is None:
            rules = [self._backend.to_str(), sorted(self.special_tokens.items()), self._add_bos]
            self._fingerprint = hashlib.sha256(json.dumps(rules).encode()).hexdigest()
        return self._fingerprint

    def encode(
        self, text: str, add_special_tokens: bool = True, limit: int | None = None, param: str = "prompt"
    ) -> list[int]:
        """Token ids of a text; one that cannot have `limit` tokens or fewer may be refused unread, blaming `param`.

        With `add_special_tokens` a model that wants a BOS gets exactly one: a text that already begins with the BOS
        (a chat rendered by the caller) is given no second.
        """
        if limit is not None and self._longest_token is not None:
            check_bytes(text, self._longest_token, limit, param)
        ids = token_ids(self._backend, text, add_special_tokens)
        bos = self.bos_token_id
        if not add_special_tokens or bos is None:
            return ids
        if ids[:2] == [bos, bos]:
            plain = token_ids(self._backend, text, False)
            return ids[1:] if ids[1 : len(plain) + 1] == plain else ids
        return [bos, *ids] if self._add_bos and ids[:1] != [bos] else ids

    def decode(self, ids: SequenceABC[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are no UTF-8 become U+FFFD, unknown ids nothing."""
        skipped = self._special_ids if skip_special_tokens else frozenset()
        text = b"".join(self.token_bytes(i) for i in ids if i not in skipped).decode("utf-8", errors="replace")
        return self.strip_start(text)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, b"" for an id without a token."""
        data = self._bytes.get(token_id)
        if data is None:
            token = self._backend.id_to_token(token_id) if token_id >= 0 else None
            data = self._bytes[token_id] = b"" if token is None else self._to_bytes(token)
        return data

    def token_text(self, token_id: int) -> str:
        """A token's own text, for display beside its log-probability."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's spelling of a token."""
        return self._backend.id_to_token(token_id)

    def token_to_id(self, token: str) -> int | None:
        """Id of a token by its vocabulary spelling."""
        return self._backend.token_to_id(token)

    def strip_start(self, text: str) -> str:
        """Remove the space that the tokenizer puts before a text's first word, where it does."""
        return text[1:] if self.strips_leading_space and text.startswith(" ") else text

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """Render a conversation to the text that the model was trained on.

        Args:
            messages: `{"role": str, "content": str | list of text parts | None, ...}`; text parts are joined by
                newlines.
            chat_template: Jinja source, or the name of one of the tokenizer's templates; default the tokenizer's own.
            add_generation_prompt: end with the opening of the assistant's turn.
            continue_final_message: leave the last message open for the model to continue; needs
                add_generation_prompt=False.
            **kwargs: further variables of the template, for example `tools`.

        Raises:
            UserError: malformed messages (`bad_messages`), no template (`no_chat_template`), or a template that
                fails or refuses the conversation (`chat_template_error`) or takes too much (`template_limit`).
        """
        if continue_final_message and add_generation_prompt:
            raise UserError(
                "continue_final_message needs add_generation_prompt=False: the last message is either continued or "
                "followed by a new one",
                reason="bad_messages", param="continue_final_message",
            )  # fmt: skip
        source = self._template_source(chat_template, bool(kwargs.get("tools")))
        variables = {"tools": None, "documents": None, **self.special_tokens, **kwargs}
        return render_chat(
            source,
            flatten_content(messages),
            variables | {"add_generation_prompt": add_generation_prompt},
            continue_final_message=continue_final_message,
        )

    def encode_chat(self, messages: list[dict[str, Any]], **kwargs: Any) -> list[int]:
        """Token ids of a rendered conversation; the template writes all special tokens, none is added.

        Takes the arguments of apply_chat_template.
        """
        return self.encode(self.apply_chat_template(messages, **kwargs), add_special_tokens=False)

    def _template_source(self, chosen: str | None, with_tools: bool) -> str:
        if chosen is not None:
            return self._chat_templates.get(chosen, chosen)
        if with_tools and "tool_use" in self._chat_templates:
            return self._chat_templates["tool_use"]
        if "default" in self._chat_templates:
            return self._chat_templates["default"]
        named = f" named {', '.join(sorted(self._chat_templates))}; choose one by name" if self._chat_templates else ""
        raise UserError(
            f"this model has no default chat template{named}: pass chat_template (Jinja source), set it in the "
            "configuration, or send a rendered prompt to the completions interface",
            reason="no_chat_template", param="chat_template",
        )  # fmt: skip

    def _special_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)

    def _read_decoder(self) -> None:
        file = json.loads(self._backend.to_str())
        self._longest_token = longest_token(self._backend, file)
        state = file.get("decoder")
        steps = [] if state is None else state.get("decoders", [state]) if state["type"] == "Sequence" else [state]
        kinds = [step["type"] for step in steps]
        self.strips_leading_space = False
        self._replacements: list[tuple[str, str]] = []
        self._byte_alphabet: dict[str, int] | None = None
        self._byte_fallback = "ByteFallback" in kinds
        self._word_prefix = ""
        for step, kind in zip(steps, kinds, strict=True):
            if kind == "ByteLevel":
                self._byte_alphabet = byte_level_alphabet()
            elif kind == "Replace" and "String" in step["pattern"]:
                self._replacements.append((step["pattern"]["String"], step["content"]))
            elif kind == "Metaspace":
                self._replacements.append((step["replacement"], " "))
                self.strips_leading_space = step.get("prepend_scheme", "always") != "never"
            elif kind == "Strip" and step["content"] == " " and (step["start"], step["stop"]) in ((1, 0), (0, 0)):
                self.strips_leading_space = step["start"] == 1
            elif kind not in ("ByteFallback", "Fuse"):
                raise ConfigError(
                    f"tokenizer.json: decoder {json.dumps(step)} is not supported",
                    reason="unsupported_tokenizer", param="tokenizer",
                )  # fmt: skip
        if not steps:
            # Without a decoder the library joins tokens by spaces.
            self._word_prefix, self.strips_leading_space = " ", True

    def _to_bytes(self, token: str) -> bytes:
        if self._byte_alphabet is not None:
            alphabet = self._byte_alphabet
            if all(char in alphabet for char in token):
                return bytes(alphabet[char] for char in token)
            return token.encode("utf-8")
        if self._byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        for old, new in self._replacements:
            token = token.replace(old, new)
        return (self._word_prefix + token).encode("utf-8")


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON ({error})", reason="bad_tokenizer", param="tokenizer") from error
    return value if isinstance(value, dict) else {}


def _token_text(value: Any) -> str | None:
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    texts = {name: _token_text(config.get(name)) for name in _SPECIAL_NAMES}
    return {name: text for name, text in texts.items() if text is not None}


def _add_missing_tokens(backend: tokenizers.Tokenizer, decoder: dict[str, Any], path: Path) -> None:
    """Add tokens that only tokenizer_config.json lists; their ids must come out as listed."""
    for token_id, entry in sorted((int(key), value) for key, value in decoder.items()):
        content = _token_text(entry)
        if content is None or backend.token_to_id(content) is not None:
            continue
        options = {key: bool(entry.get(key, False)) for key in ("special", "lstrip", "rstrip", "single_word")}
        backend.add_tokens([AddedToken(content, normalized=bool(entry.get("normalized", True)), **options)])
        if backend.token_to_id(content) != token_id:
            raise ConfigError(
                f"{path}: tokenizer_config.json lists {content!r} as id {token_id}, which does not follow on from the "
                "vocabulary",
                reason="bad_tokenizer", param="tokenizer",
            )  # fmt: skip


def _chat_templates(folder: Path, configured: Any) -> str | dict[str, str] | None:
    """The folder's templates; files win over tokenizer_config.json."""
    templates: dict[str, str] = {}
    if isinstance(configured, str):
        templates["default"] = configured
    elif isinstance(configured, list):
        named = [entry for entry in configured if isinstance(entry, dict) and {"name", "template"} <= entry.keys()]
        templates |= {str(entry["name"]): str(entry["template"]) for entry in named}
    elif isinstance(configured, dict):
        templates |= {str(name): str(template) for name, template in configured.items()}
    single = folder / "chat_template.jinja"
    if single.is_file():
        templates["default"] = single.read_text(encoding="utf-8")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = path.read_text(encoding="utf-8")
    return templates
