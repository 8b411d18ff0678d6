"""Incremental text: whole characters only, stop strings held back and cut, the same for every grouping of tokens."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multilora_jax.detokenizer import IncrementalDetokenizer
from multilora_jax.request import SamplingParams
from multilora_jax.tokenizer import Tokenizer
from tests.tiny_tokenizers import BOS, EOS, PIECES, byte_level, sentencepiece_like

TOKENIZER = Tokenizer(byte_level(), special_tokens={"bos_token": BOS, "eos_token": EOS})
SPM = Tokenizer(sentencepiece_like(), special_tokens={"bos_token": "<s>", "eos_token": "</s>"})


def piece(text: str) -> int:
    return 262 + PIECES.index(text)


def stream(groups, tokenizer: Tokenizer | None = TOKENIZER, *, continues_text=False, **params):
    """Texts after every call, the text after the flush, and the stop string."""
    detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams(**params), continues_text=continues_text)
    texts, stop = [], None
    for group in groups:
        stop = detokenizer.append(group)
        texts.append(detokenizer.text)
        if stop is not None:
            break
    detokenizer.finish()
    return texts, detokenizer.text, stop


def one_by_one(data: bytes):
    return [[byte] for byte in data]


@pytest.mark.parametrize("text", ["\U0001f600", "\U0001f1eb\U0001f1f7", "e\u0301", "漢字", "naïve"])
def test_d19_characters_are_sent_whole(text):
    texts, final, _ = stream(one_by_one(text.encode()))
    assert final == text
    for sent in texts:
        assert text.startswith(sent)
        assert "\ufffd" not in sent
    assert texts[-1] == text


def test_d19_character_over_tokens_that_split_it():
    groups = [[256], [0x98], [0x80], [258], [259], [261], [0x81]]
    texts, final, _ = stream(groups)
    assert texts == ["", "", "\U0001f600", "\U0001f600a", "\U0001f600a漢b", "\U0001f600a漢be", "\U0001f600a漢be\u0301"]
    assert final == texts[-1]


def test_d19_cut_tail_is_flushed_once():
    detokenizer = IncrementalDetokenizer(TOKENIZER, SamplingParams())
    detokenizer.append([ord("a"), 257])
    assert detokenizer.text == "a"
    detokenizer.finish()
    assert detokenizer.text == "a\ufffd"
    detokenizer.finish()
    assert detokenizer.append([ord("b")]) is None
    assert detokenizer.text == "a\ufffd"


def test_d19_bytes_that_are_no_character_are_replaced():
    texts, final, _ = stream([[ord("a")], [0xFF], [0xE2], [ord("b")]])
    assert texts == ["a", "a\ufffd", "a\ufffd", "a\ufffd\ufffdb"]
    assert final == TOKENIZER.decode([ord("a"), 0xFF, 0xE2, ord("b")])


def test_special_tokens_are_left_out_unless_wanted():
    ids = [ord("a"), TOKENIZER.eos_token_ids[0], ord("b"), 272]
    assert stream([ids])[1] == "ab<not special>"
    assert stream([ids], skip_special_tokens=False)[1] == f"a{EOS}b<not special>"
    assert stream([ids], stop=EOS, skip_special_tokens=False)[1] == "a"


def test_sentencepiece_words_and_bytes():
    ids = [271, 272, *(3 + byte for byte in "\U0001f600".encode()), 275]
    assert stream([[i] for i in ids], SPM)[1] == "hello w\U0001f600  "
    assert stream([[i] for i in ids], SPM)[1] == SPM.decode(ids)
    assert stream([[i] for i in ids], SPM, continues_text=True)[1] == " hello w\U0001f600  "
    texts, _, _ = stream([[259], [271]], SPM)
    assert texts == ["", " hello"]


def test_without_tokenizer_or_detokenize_the_text_is_empty():
    assert stream([[1], [2]], None)[1] == ""
    assert stream([[65], [66]], detokenize=False)[1] == ""


def test_d20_text_that_may_begin_a_stop_string_is_held():
    texts, final, stop = stream(one_by_one(b"ABCDEFGHIJK"), stop=["DEFGHIJ"])
    assert texts == ["A", "AB", *["ABC"] * 8]
    assert (final, stop) == ("ABC", "DEFGHIJ")
    texts, final, stop = stream(one_by_one(b"ABCDEFGHIJK"), stop=["XYZ", "FGH"])
    assert texts == ["A", "AB", "ABC", "ABCD", "ABCDE", "ABCDE", "ABCDE", "ABCDE"]
    assert (final, stop) == ("ABCDE", "FGH")


def test_d20_stop_string_may_be_kept():
    _, final, stop = stream(one_by_one(b"ABCDEFG"), stop=["CD"], include_stop_str_in_output=True)
    assert (final, stop) == ("ABCD", "CD")


def test_d20_stop_string_that_ends_inside_a_token_is_cut_exactly():
    groups = [[piece("AB")], [ord("C")], [piece("DEF")], [piece("GHI")]]
    assert stream(groups, stop=["CD"])[1:] == ("AB", "CD")
    assert stream(groups, stop=["E"])[1:] == ("ABCD", "E")
    assert stream(groups, stop=["E"], include_stop_str_in_output=True)[1:] == ("ABCDE", "E")


def test_d20_half_match_at_the_end_is_flushed():
    texts, final, stop = stream(one_by_one(b"ABCD"), stop=["CDE"])
    assert texts[-1] == "AB"
    assert (final, stop) == ("ABCD", None)


def test_d20_false_start_is_released():
    texts, final, _ = stream(one_by_one(b"aab aac"), stop=["aac"])
    assert texts == ["", "", "aab", "aab ", "aab ", "aab ", "aab "]
    assert final == "aab "


def test_d20_first_complete_stop_string_wins():
    assert stream([[piece("hello"), piece(" world")]], stop=["world", "ell"])[1:] == ("h", "ell")
    # "l" is complete before "ello", whether the word comes in one token or in five.
    assert stream([[piece("hello")]], stop=["ello", "l"])[1:] == ("he", "l")
    assert stream(one_by_one(b"hello"), stop=["ello", "l"])[1:] == ("he", "l")
    # Both are complete at the same character: the longer one, whatever the order.
    assert stream([[piece("hello")]], stop=["l", "el"])[1:] == ("h", "el")
    assert stream([[piece("hello")]], stop=["lo", "ello"])[1:] == ("h", "ello")


def test_d20_stop_string_inside_a_character_of_many_bytes():
    text = "x\U0001f600y"
    texts, final, stop = stream(one_by_one(text.encode()), stop=["\U0001f600y"])
    assert (final, stop) == ("x", "\U0001f600y")
    assert texts[-1] == "x"


def test_nothing_is_sent_after_a_stop():
    detokenizer = IncrementalDetokenizer(TOKENIZER, SamplingParams(stop="b"))
    assert detokenizer.append([ord("a"), ord("b"), 0xE2]) == "b"
    assert detokenizer.append([ord("c")]) is None
    detokenizer.finish()
    assert detokenizer.text == "a"


def expected(full: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Character by character over the finished text."""
    for end in range(1, len(full) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if full[:end].endswith(stop):
                return full[: end if include else end - len(stop)], stop
    return full, None


# Few letters, so that stop strings do occur; tokens that split characters among them.
TOKENS = st.sampled_from(
    [ord("a"), ord("b"), ord("a"), piece("é"), 0xC3, 0xA9, 256, 0x98, 0x80, 257, 261, 258, 259, 270, 272]
)
STOPS = st.lists(st.text("abé\U0001f600\ufffd<", min_size=1, max_size=4), max_size=6, unique=True)


@given(
    groups=st.lists(st.lists(TOKENS, max_size=4), max_size=12), stops=STOPS, include=st.booleans(), skip=st.booleans()
)
def test_any_grouping_equals_decoding_at_once(groups, stops, include, skip):
    full = TOKENIZER.decode([i for group in groups for i in group], skip_special_tokens=skip)
    want, want_stop = expected(full, stops, include)
    texts, final, stop = stream(
        groups, stop=stops, include_stop_str_in_output=include, skip_special_tokens=skip
    )  # fmt: skip
    assert final == want
    # A stop string of replacement characters can be complete in the flush only, after the last call.
    assert stop == want_stop or (stop is None and want_stop is not None and "\ufffd" in want_stop)
    for before, after in itertools.pairwise([*texts, final]):
        assert after.startswith(before)


@given(text=st.text(max_size=20), size=st.integers(1, 5), continues=st.booleans())
def test_sentencepiece_streams_equal_decoding_at_once(text, size, continues):
    ids = SPM.encode(text, add_special_tokens=False)
    final = stream([ids[i : i + size] for i in range(0, len(ids), size)], SPM, continues_text=continues)[1]
    # Every text is encoded with a space in front; a continuation keeps it.
    assert final == (" " if continues and text else "") + SPM.decode(ids)


def test_cost_per_token_does_not_grow():
    looked_up = []

    class Counting(Tokenizer):
        def token_bytes(self, token_id):
            looked_up.append(token_id)
            return super().token_bytes(token_id)

    # Nothing but bytes that never make a character, then an endless beginning of a stop string.
    for token, stop in ((0xE2, "x"), (ord("a"), "a" * 50 + "b")):
        detokenizer = IncrementalDetokenizer(Counting(byte_level()), SamplingParams(stop=stop))
        for _ in range(5000):
            detokenizer.append([token])
        assert looked_up == [token] * 5000
        looked_up.clear()
