"""From folders to versions and pages, and whose tokenizers are shared."""

from __future__ import annotations

import dataclasses
import gc
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from multilora_jax.errors import AdapterError, ConfigError
from multilora_jax.lora.builder import SharedTokenizers, own_template, tokenizer_warnings
from multilora_jax.lora.deltas import to_deltas
from multilora_jax.lora.packing import pack
from multilora_jax.lora.weights import load_adapter
from multilora_jax.tokenizer import Tokenizer
from tests.lora.conftest import NoTensors
from tests.tiny_tokenizers import BOS, EOS, byte_level


def save_tokenizer(folder: Path, *, indent: bool = False, word: str | None = None, **config: str) -> Path:
    """Writes tokenizer files; `word` is one more token, `indent` changes nothing but the bytes of the file."""
    folder.mkdir(parents=True, exist_ok=True)
    backend = byte_level()
    if word is not None:
        backend.add_tokens([word])
    (folder / "tokenizer.json").write_text(backend.to_str(pretty=indent), encoding="utf-8")
    fields = {"bos_token": BOS, "eos_token": EOS, "chat_template": "base {{ messages }}"} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(fields), encoding="utf-8")
    return folder


@pytest.fixture
def base(tmp_path) -> Tokenizer:
    tokenizer = Tokenizer.from_folder(save_tokenizer(tmp_path / "base"))
    assert tokenizer is not None
    return tokenizer


def test_a_folder_becomes_what_its_parts_make_of_it(make_builder, model_config, peft_folder):
    folder = str(peft_folder(base_model_name_or_path="some/base"))
    builder = make_builder()
    version, pages = builder.read(folder)
    weights = load_adapter(folder, model_config, max_lora_rank=16)
    geometry = model_config.geometry(num_pages=64, page_tokens=16)
    packed = pack(to_deltas(weights, model_config, NoTensors(), geometry.vocab_rows), geometry)
    np.testing.assert_array_equal(pages, packed.pages)
    assert (version.digest, version.base_model) == (weights.digest, "some/base")
    assert (version.layout.rank, version.layout.num_pages) == (8, len(pages))
    assert (version.tokenizer, version.chat_template) == (None, None)
    again, same = builder.read(folder, version)
    assert again is version
    np.testing.assert_array_equal(same, pages)


def test_files_that_changed_are_refused(make_builder, peft_folder, peft_tensors):
    builder, folder = make_builder(), peft_folder()
    version, _ = builder.read(str(folder))
    peft_folder("adapter", peft_tensors(seed=1))
    with pytest.raises(AdapterError, match="load_inplace") as caught:
        builder.read(str(folder), version)
    assert (caught.value.reason, caught.value.param) == ("adapter_changed", "lora_path")
    peft_folder("adapter", peft_tensors(), lora_alpha=17)
    with pytest.raises(AdapterError, match="load_inplace"):
        builder.read(str(folder), version)
    peft_folder("adapter")
    assert builder.read(str(folder), version)[0] is version


@pytest.mark.parametrize(
    ("template", "own"), [(None, None), ("base {{ messages }}", None), ("own {{ messages }}", "own {{ messages }}")]
)
def test_only_what_differs_from_the_base_is_the_adapter_s_own(
    make_builder, model_config, peft_folder, base, tmp_path, template, own
):
    weights = load_adapter(str(peft_folder()), model_config, max_lora_rank=16)
    builder = make_builder(base_tokenizer=base)
    same = save_tokenizer(tmp_path / "same", indent=True)
    version, _ = builder.build(dataclasses.replace(weights, tokenizer_folder=str(same), chat_template=template))
    assert (version.tokenizer, version.chat_template) == (None, own)
    other = save_tokenizer(tmp_path / "other", word="<new>")
    version, _ = builder.build(dataclasses.replace(weights, tokenizer_folder=str(other), chat_template=template))
    assert version.tokenizer is not None
    assert version.tokenizer.token_to_id("<new>") == base.vocab_size
    assert version.chat_template == own


def test_equal_files_share_one_tokenizer(base, tmp_path):
    shared = SharedTokenizers(base)
    first = save_tokenizer(tmp_path / "first", word="<new>")
    shutil.copytree(first, tmp_path / "second")
    tokenizer = shared.of_folder(str(first))
    assert tokenizer is not None
    assert shared.of_folder(str(tmp_path / "second")) is tokenizer
    # Anything that the tokenizer is made of tells two apart.
    folders = [
        save_tokenizer(tmp_path / "eos", word="<new>", eos_token=BOS),
        save_tokenizer(tmp_path / "template", word="<new>", chat_template="other"),
        save_tokenizer(tmp_path / "word", word="<newer>"),
    ]
    for name in ("chat_template.jinja", "additional_chat_templates/tools.jinja"):
        folders.append(save_tokenizer(tmp_path / f"with {Path(name).name}", word="<new>"))
        (folders[-1] / name).parent.mkdir(exist_ok=True)
        (folders[-1] / name).write_text("file", encoding="utf-8")
    others = [tokenizer, *(shared.of_folder(str(folder)) for folder in folders)]
    assert len({id(other) for other in others}) == 6
    assert None not in others


def test_the_base_s_rules_in_other_words_need_no_tokenizer(base, tmp_path):
    shared = SharedTokenizers(base)
    folder = save_tokenizer(tmp_path / "saved again", indent=True, chat_template="other")
    assert shared.of_folder(str(folder)) is None
    assert shared.of_folder(str(folder)) is None
    assert shared.of_folder(str(save_tokenizer(tmp_path / "eos", eos_token=BOS))) is not None
    tokenizer = SharedTokenizers(None).of_folder(str(folder))
    assert tokenizer is not None
    assert tokenizer.fingerprint() == base.fingerprint()


def test_tokenizers_go_with_their_last_adapter(base, tmp_path):
    shared = SharedTokenizers(base)
    folder = save_tokenizer(tmp_path / "own", word="<new>")
    tokenizer = shared.of_folder(str(folder))
    assert len(shared._known) == 1
    del tokenizer
    gc.collect()
    assert len(shared._known) == 0


def test_a_damaged_tokenizer_refuses_the_adapter(make_builder, model_config, peft_folder, base, tmp_path):
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "tokenizer.json").write_text("{", encoding="utf-8")
    weights = load_adapter(str(peft_folder()), model_config, max_lora_rank=16)
    with pytest.raises(ConfigError) as caught:
        make_builder(base_tokenizer=base).build(dataclasses.replace(weights, tokenizer_folder=str(tmp_path / "bad")))
    assert caught.value.reason == "bad_tokenizer"
    assert SharedTokenizers(base).of_folder(str(tmp_path)) is None  # no tokenizer at all


@pytest.mark.parametrize("template", ["{% if %}", "{{ 'a'|nothing }}"])
def test_a_template_that_does_not_compile_refuses_the_adapter(make_builder, peft_folder, base, template):
    folder = peft_folder()
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    with pytest.raises(AdapterError, match="chat template cannot be used") as caught:
        make_builder(base_tokenizer=base).read(str(folder))
    assert (caught.value.reason, caught.value.param) == ("bad_chat_template", "lora_path")
    # A copy of what the base has says nothing against the adapter.
    assert own_template(template, template) is None


def test_tokens_beyond_the_vocabulary_are_a_warning(make_builder, peft_folder, tmp_path):
    folder = peft_folder()
    save_tokenizer(folder)
    builder = make_builder()
    version, _ = builder.read(str(folder))
    assert version.tokenizer is not None
    size = version.tokenizer.vocab_size
    assert tokenizer_warnings(version.tokenizer, size) == tokenizer_warnings(None, 0) == []
    (warning,) = tokenizer_warnings(version.tokenizer, size - 2)
    assert f"2 tokens with ids of {size - 2} or more" in warning
    beyond = tokenizer_warnings(version.tokenizer, 256)  # the base of these tests has 256
    assert len(beyond) == 1
    assert [*version.warnings[-1:]] == beyond
