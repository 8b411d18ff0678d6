"""The shipped model configurations: the shapes of the published models, and served without their files."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from multilora_jax.config import EngineConfig
from multilora_jax.engine.devices import max_model_len
from multilora_jax.engine.llm_engine import LLMEngine
from multilora_jax.errors import ConfigError
from multilora_jax.models.checkpoint import expected_shapes
from multilora_jax.models.checkpoint.dummy import check_shape, dummy_model, stand_in_tokenizer
from multilora_jax.models.config import ModelConfig
from tests.tiny_engine import TINY_MODEL, Request, greedy, make_engine, run_all

PARAMETERS = {
    "smollm2-135m": 134_515_008, "smollm2-360m": 361_821_120, "smollm2-1.7b": 1_711_376_384,
    "tinyllama-1.1b": 1_100_048_384, "llama-2-7b": 6_738_415_616, "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192, "llama-3.1-8b": 8_030_261_248, "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400, "llama-3.2-3b": 3_212_749_824,
}  # fmt: skip
"""As published; a tied head counts once."""
SIZES = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
         "num_attention_heads": 2}  # fmt: skip


def read(configs: Path, name: str, **overrides) -> tuple[EngineConfig, ModelConfig]:
    config = EngineConfig.from_yaml(configs / f"{name}.yaml", {"load_format": "dummy", **overrides})
    return config, dummy_model(config.model, config.base_name, config.model_shape, config.tokenizer)[0]


def test_every_model_configuration_is_counted(configs):
    shaped = [path.stem for path in configs.glob("*.yaml") if "model_shape" in path.read_text()]
    assert sorted(shaped) == sorted(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_shapes_are_those_of_the_published_models(configs, name):
    config, model = read(configs, name)
    assert model.num_parameters == PARAMETERS[name]
    assert sum(math.prod(shape) for shape in expected_shapes(model).values()) == PARAMETERS[name]
    assert max_model_len(config, model) <= model.max_position_embeddings
    geometry = model.geometry(8, config.page_tokens, config.tensor_parallel_size, config.dtype, config.max_extra_vocab)
    assert geometry.vocab_rows >= model.vocab_size
    # One page of each shard and its part of the weights fit the smallest device that the file names.
    assert model.weight_bytes(2) / config.tensor_parallel_size < 36e9


@pytest.mark.parametrize("name", ["smollm2-135m", "smollm2-360m", "smollm2-1.7b", "tinyllama-1.1b", "llama-3.2-1b",
                                  "llama-3.2-3b"])  # fmt: skip
def test_the_files_say_over_how_many_devices(configs, name):
    text = (configs / f"{name}.yaml").read_text()
    sentence = text[text.index("tensor_parallel_size may be ") :].split(".\n")[0]
    said = {int(word.strip(",")) for word in sentence.split() if word.strip(",").isdigit()}
    model = read(configs, name)[1]

    def splits(tp: int) -> bool:
        try:
            model.geometry(8, 16, tp)
        except ConfigError:
            return False
        return model.num_heads % tp == 0

    assert said == {tp for tp in range(1, 65) if splits(tp)}


def test_the_smallest_is_served_without_a_file(configs):
    config, _ = read(
        configs, "smollm2-135m", dtype="float32", pool_memory_gib=0.05, max_model_len=128, max_num_seqs=2,
        max_num_batched_tokens=32, warm_up=False, max_rank_rows=64,
    )  # fmt: skip
    engine = LLMEngine(config, progress=False)
    assert engine.base_name == "HuggingFaceTB/SmolLM2-135M-Instruct"
    weights = sum(x.nbytes for x in engine.runner.params["layers"][0].values())
    assert weights == 4 * (2 * 576 + 2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536)
    assert engine.tokenizer is not None
    assert engine.tokenizer.vocab_size == 49152
    [output] = run_all(engine, [Request("Grüße!", greedy(3))])
    assert len(output.outputs[0].token_ids) == 3
    assert len(output.prompt_token_ids) == 1 + len("Grüße!".encode())


def test_a_shape_can_be_given_as_flags_are():
    words = [f"{field}={value}" for field, value in SIZES.items()]
    config = EngineConfig.from_dict({"model": "x", "model_shape": [*words, "tie_word_embeddings=true"]})
    assert config.model_shape == {**SIZES, "tie_word_embeddings": True}
    for bad in ("hidden_size", ["hidden_size"], {1: 2}, ["a={"]):
        with pytest.raises(ConfigError) as error:
            EngineConfig.from_dict({"model": "x", "model_shape": bad})
        assert error.value.param == "model_shape"


def test_weights_of_another_shape_are_refused(golden_tiny):
    with pytest.raises(ConfigError, match="hidden_size is 64, not 32") as error:
        make_engine(golden_tiny / "bases" / "tied", model_shape={"model_type": "llama", **SIZES})
    assert error.value.param == "model_shape"
    model = ModelConfig.from_hf({"model_type": "llama", **SIZES}, "a")
    check_shape(dataclasses.replace(model, name="b", eos_token_ids=(7,)), {"model_type": "llama", **SIZES}, "b")


@pytest.mark.slow
def test_dummy_weights_in_eight_bits_and_of_other_families():
    shape = {**SIZES, "model_type": "qwen3", "head_dim": 16, "num_key_value_heads": 1}
    engine = make_engine("nowhere", load_format="dummy", model_shape=shape, quantization="int8", max_extra_vocab=0)
    [one, other] = run_all(engine, [Request("ab", greedy(4)), Request("ab", greedy(4))])
    assert one.outputs[0].token_ids == other.outputs[0].token_ids
    assert str(engine.runner.params["layers"][0]["qkv"].values_OI.dtype) == "int8"


class TestStandInTokenizer:
    @pytest.mark.parametrize(
        "ids", [{"bos_token_id": 1, "eos_token_id": 2}, {"bos_token_id": None, "eos_token_id": 299}]
    )
    def test_every_text_comes_back_and_every_id_has_a_text(self, ids):
        config = ModelConfig.from_hf({"model_type": "llama", **SIZES, **ids}, "x")
        tokenizer = stand_in_tokenizer(config)
        text = "Grüße,\t世界 <bos>\n"
        encoded = tokenizer.encode(text.replace("<bos>", ""))
        assert tokenizer.decode(encoded) == text.replace("<bos>", "")
        assert (encoded[0] == 1) == (ids["bos_token_id"] is not None)
        assert tokenizer.vocab_size == 300
        assert tokenizer.eos_token_ids == (ids["eos_token_id"],)
        assert all(tokenizer.token_bytes(token_id) for token_id in range(300))
        assert len({tokenizer.id_to_token(token_id) for token_id in range(300)}) == 300
        chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=True)
        assert chat == "user: Hi\nassistant: "

    def test_a_small_vocabulary_is_refused(self):
        config = ModelConfig.from_hf({"model_type": "llama", **SIZES, "vocab_size": 257}, "x")
        with pytest.raises(ConfigError, match="does not hold the 256 bytes"):
            stand_in_tokenizer(config)


def test_a_folder_s_own_tokenizer_goes_first():
    shape = {"model_type": "llama", **SIZES}
    assert dummy_model(TINY_MODEL, "x", shape, None)[1] is not None
    own = dummy_model(TINY_MODEL, "x", {}, None)[1]
    found = dummy_model(TINY_MODEL, "x", shape, None)[1]
    assert own is not None
    assert found is not None
    assert own.fingerprint() == found.fingerprint()
