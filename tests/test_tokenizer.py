"""Tokenizer: special tokens once, decoding equal to the library's, files of a folder, chat templates."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from itertools import pairwise

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from multilora_jax.errors import ConfigError, NotFoundError, UserError
from multilora_jax.models.checkpoint import open_checkpoint
from multilora_jax.tokenizer import Tokenizer
from tests.tiny_tokenizers import BOS, EOS, PIECES, byte_level, sentencepiece_like

USER = [{"role": "user", "content": "Hi"}]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def make(template: str | dict[str, str] | None = TEMPLATE, **options) -> Tokenizer:
    backend = byte_level(bos_processor=options.pop("bos_processor", False))
    return Tokenizer(
        backend, special_tokens={"bos_token": BOS, "eos_token": EOS}, chat_template=template, **options
    )  # fmt: skip


@pytest.mark.parametrize(
    "options", [{"bos_processor": True}, {"add_bos": True}, {"bos_processor": True, "add_bos": True}]
)
def test_d10_exactly_one_bos(options):
    tokenizer = make(**options)
    bos = tokenizer.bos_token_id
    assert bos is not None
    plain = [ord(c) for c in "Hi"]
    assert tokenizer.encode("Hi") == [bos, *plain]
    assert tokenizer.encode("Hi", add_special_tokens=False) == plain
    assert tokenizer.encode("") == [bos]
    chat = tokenizer.encode_chat(USER)
    assert chat.count(bos) == 1
    assert chat[0] == bos
    # A prompt rendered by the caller already begins with the BOS text and is given no second.
    assert tokenizer.encode(tokenizer.apply_chat_template(USER)) == chat


def test_d10_template_alone_decides_the_bos_of_a_chat():
    tokenizer = make("{{ messages[0].content }}", bos_processor=True, add_bos=True)
    assert tokenizer.encode_chat(USER) == [ord(c) for c in "Hi"]


def test_d10_no_bos_where_the_model_wants_none():
    tokenizer = make()
    assert tokenizer.encode("Hi") == [ord(c) for c in "Hi"]
    assert tokenizer.encode(BOS + BOS + "H") == [270, 270, ord("H")]
    assert Tokenizer(byte_level()).encode("Hi") == [ord(c) for c in "Hi"]


def longest_wait(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds that `work` takes, and the longest that another thread waits for a turn meanwhile."""
    turns, done = [time.perf_counter()], threading.Event()

    def take_turns() -> None:
        while not done.wait(0.001):
            turns.append(time.perf_counter())

    other = threading.Thread(target=take_turns)
    other.start()
    started = time.perf_counter()
    work()
    seconds = time.perf_counter() - started
    done.set()
    other.join()
    return seconds, max(after - before for before, after in pairwise([*turns, time.perf_counter()]))


def test_others_go_on_while_a_long_text_is_read():
    """A prompt of megabytes must not stop the engine's steps and all other requests for as long as it is read."""
    tokenizer, text = make(add_bos=True), "a longer text, " * 20_000
    assert tokenizer.encode(text) == [tokenizer.bos_token_id, *text.encode()]
    # A machine that does something else for a while proves nothing: with the lock held it is so each time.
    shares = [wait / seconds for seconds, wait in (longest_wait(lambda: tokenizer.encode(text)) for _ in range(5))]
    assert min(shares) < 0.5


def test_ids_and_sizes():
    tokenizer = make()
    assert tokenizer.bos_token_id == 270
    assert tokenizer.eos_token_ids == (271,)
    assert tokenizer.vocab_size == 273
    assert tokenizer.special_ids == {270, 271}
    assert tokenizer.id_to_token(271) == EOS
    assert tokenizer.token_to_id(BOS) == 270
    assert tokenizer.token_bytes(0xFF) == b"\xff"
    assert tokenizer.token_text(263) == "DEF"
    assert (tokenizer.token_bytes(5000), tokenizer.token_bytes(-1)) == (b"", b"")


@given(ids=st.lists(st.integers(0, 275), max_size=24), skip=st.booleans())
def test_byte_level_decoding_equals_the_library(ids, skip):
    tokenizer = make()
    assert tokenizer.decode(ids, skip_special_tokens=skip) == byte_level().decode(ids, skip_special_tokens=skip)


SPM = Tokenizer(sentencepiece_like(), special_tokens={"bos_token": "<s>", "eos_token": "</s>"}, add_bos=True)


@given(text=st.text(max_size=20), skip=st.booleans(), bos=st.booleans())
def test_sentencepiece_decoding_equals_the_library(text, skip, bos):
    ids = SPM.encode(text, add_special_tokens=bos)
    assert SPM.decode(ids, skip_special_tokens=skip) == sentencepiece_like().decode(ids, skip_special_tokens=skip)


@given(ids=st.lists(st.sampled_from([1, 2, 259, 260, 261, 271, 272, 273, 274, 275]), max_size=12), skip=st.booleans())
def test_sentencepiece_decoding_of_any_whole_pieces_equals_the_library(ids, skip):
    assert SPM.decode(ids, skip_special_tokens=skip) == sentencepiece_like().decode(ids, skip_special_tokens=skip)


def test_invalid_bytes_keep_their_valid_neighbours():
    euro = [3 + byte for byte in "€".encode()]
    assert SPM.decode([*euro, 3 + 0xE2, 260]) == "€\ufffda"


def test_other_decoders():
    for scheme, text in (("always", "ab ab"), ("never", " ab ab")):
        backend = tokenizers.Tokenizer(models.BPE(vocab={"\u2581ab": 0}, merges=[]))
        backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
        assert Tokenizer(backend).decode([0, 0]) == text
    backend = tokenizers.Tokenizer(models.WordLevel(vocab={"a": 0, "b": 1}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    assert Tokenizer(backend).decode([0, 1, 0]) == backend.decode([0, 1, 0]) == "a b a"
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ConfigError, match="WordPiece"):
        Tokenizer(backend)


def write_folder(folder, config=None, *, backend=None, **files):
    (backend or byte_level()).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config or {}))
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None
    return tokenizer


def test_folder_without_tokenizer_gives_none(tmp_path):
    assert Tokenizer.from_folder(tmp_path) is None


def test_sentencepiece_model_alone_is_refused(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(ConfigError, match="save_pretrained"):
        Tokenizer.from_folder(tmp_path)


def test_damaged_files_are_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="tokenizer.json"):
        Tokenizer.from_folder(tmp_path)
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match="tokenizer_config.json: not valid JSON"):
        Tokenizer.from_folder(tmp_path)


def test_folder_is_read_whole(tmp_path):
    config = {"bos_token": {"content": BOS}, "eos_token": EOS, "add_bos_token": True, "chat_template": TEMPLATE}
    tokenizer = write_folder(tmp_path, config)
    assert tokenizer.encode("A")[0] == tokenizer.bos_token_id == 270
    assert tokenizer.eos_token_ids == (271,)
    assert tokenizer.chat_template == TEMPLATE


def test_special_tokens_map_fills_in(tmp_path):
    tokenizer = write_folder(tmp_path, special_tokens_map__json=json.dumps({"eos_token": EOS}))
    assert tokenizer.eos_token_ids == (271,)
    assert tokenizer.bos_token_id is None


@pytest.mark.parametrize(
    ("config", "adds"),
    [
        ({}, False),
        ({"tokenizer_class": "LlamaTokenizer"}, True),
        ({"tokenizer_class": "LlamaTokenizer", "add_bos_token": False}, False),
    ],
)
def test_add_bos_token_and_its_default(tmp_path, config, adds):
    tokenizer = write_folder(tmp_path, {"bos_token": BOS, **config})
    assert (tokenizer.encode("A")[0] == tokenizer.bos_token_id) is adds


def test_stored_truncation_and_padding_are_off(tmp_path):
    backend = byte_level()
    backend.enable_truncation(2)
    backend.enable_padding(length=5)
    assert len(write_folder(tmp_path, backend=backend).encode("abcd")) == 4


def test_tokens_of_the_config_alone_are_added(tmp_path):
    added = {"273": {"content": "<extra>", "special": True}, "270": {"content": BOS, "special": True}}
    tokenizer = write_folder(tmp_path, {"added_tokens_decoder": added})
    assert tokenizer.encode("<extra>") == [273]
    assert tokenizer.decode([273]) == ""
    with pytest.raises(ConfigError, match="as id 300"):
        write_folder(tmp_path, {"added_tokens_decoder": {"300": {"content": "<gap>"}}})


def test_another_tokenizer_may_be_named(golden_tiny, tmp_path):
    write_folder(tmp_path, {"eos_token": EOS})
    checkpoint = open_checkpoint(golden_tiny / "bases" / "tied")
    for place in (tmp_path, tmp_path / "tokenizer.json"):
        tokenizer = checkpoint.load_tokenizer(str(place))
        assert tokenizer is not None
        assert tokenizer.eos_token_ids == (271,)
    with pytest.raises(NotFoundError, match="no such folder"):
        checkpoint.load_tokenizer(str(tmp_path / "nothing"))
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="has no tokenizer.json"):
        checkpoint.load_tokenizer(str(tmp_path))


def test_named_templates_and_template_files(tmp_path):
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T{{ tools | tojson }}"}]
    tokenizer = write_folder(tmp_path, {"chat_template": named})
    assert tokenizer.apply_chat_template(USER) == "D"
    assert tokenizer.apply_chat_template(USER, tools=[{"é": 1}]) == 'T[{"é": 1}]'
    assert tokenizer.apply_chat_template(USER, chat_template="tool_use") == "Tnull"
    assert tokenizer.apply_chat_template(USER, chat_template="own {{ messages[0].role }}") == "own user"
    assert write_folder(tmp_path, {"chat_template": named}, chat_template__jinja="F").apply_chat_template(USER) == "F"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("R")
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer is not None
    assert tokenizer.apply_chat_template(USER, chat_template="rag") == "R"


def test_missing_template_says_how_to_give_one():
    with pytest.raises(UserError, match="pass chat_template") as error:
        make(None).apply_chat_template(USER)
    assert error.value.reason == "no_chat_template"
    with pytest.raises(UserError, match="named a, b"):
        make({"b": "1", "a": "2"}).apply_chat_template(USER)


LONG = st.sampled_from([*PIECES, BOS, "<not special>", "</s>", "<unk>", " hello", "\u2581hello", " "])


@given(parts=st.lists(LONG | st.text(max_size=3)), times=st.integers(1, 4))
def test_no_text_that_fits_is_refused_unread(parts, times):
    text = "".join(parts) * times
    for tokenizer in (make(bos_processor=True, add_bos=True), SPM):
        for special in (False, True):
            ids = tokenizer.encode(text, special)
            assert tokenizer.encode(text, special, limit=len(ids)) == ids


def test_a_text_that_cannot_fit_is_refused_unread(monkeypatch):
    monkeypatch.setattr("multilora_jax.tokenizer.token_ids", lambda *_: pytest.fail("was read"))
    # "<not special>" has 13 bytes, "<0x00>" as the vocabulary has it 6, " hello" with its mark 8
    for tokenizer, longest in ((make(), 13), (SPM, 8)):
        with pytest.raises(UserError, match=f"has {8 * longest + 1} bytes of text, at least 9 tokens") as caught:
            tokenizer.encode("a" * (8 * longest + 1), limit=8, param="messages")
        assert (caught.value.reason, caught.value.param) == ("context_length_exceeded", "messages")


def unbounded() -> dict[str, tokenizers.Tokenizer]:
    """Tokenizers some of whose tokens stand for text of any length, or text for no token at all."""
    cases = {name: byte_level() for name in ("nfkc", "strip", "replace", "removed", "lstrip", "words")}
    cases["nfkc"].normalizer = normalizers.Sequence([normalizers.NFKC()])
    cases["strip"].normalizer = normalizers.Strip()
    cases["replace"].normalizer = normalizers.Replace("  ", "")
    split = pre_tokenizers.Split(" ", "removed")
    cases["removed"].pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    cases["lstrip"].add_tokens([AddedToken("<l>", lstrip=True)])
    cases["words"].model = models.WordLevel({"<unk>": 0}, unk_token="<unk>")
    unk = models.BPE(vocab={"<unk>": 0, "a": 1}, merges=[], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    return cases | {"unk": tokenizers.Tokenizer(unk)}


@pytest.mark.parametrize("name", list(unbounded()))
def test_a_text_is_read_where_its_length_says_nothing(name):
    text = "<l>".rjust(500) if name == "lstrip" else "b" * 500 if name == "unk" else " " * 500
    if name == "nfkc":
        text = "\u3000" * 500
    assert Tokenizer(unbounded()[name]).encode(text, limit=8) is not None
