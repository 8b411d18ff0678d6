"""Makes golden_peft/: further adapters of PEFT on the bases of golden_tiny, with what transformers and PEFT compute.

Needs torch, transformers and peft, which nothing else here does; the versions used are in the manifest:

    pip install torch==2.13.0 transformers==4.57.6 peft==0.21.2
    python tests/data/make_golden_peft.py [FOLDER]        (deterministic, a minute on a CPU)
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import safetensors
import torch
import transformers
from golden_peft_cases import (
    BFLOAT16,
    CASES,
    MIN_MARGIN,
    MIXES,
    NEW_PROMPTS,
    NEW_TOKENS,
    PEFTS,
    PROMPTS,
)
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()
torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)

HERE = Path(__file__).parent
TINY = HERE / "golden_tiny"


def generator(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(int(hashlib.sha256(name.encode()).hexdigest()[:8], 16))


def load_base(name: str, vocab: int | None = None, dtype: torch.dtype = torch.float32, seed: str = "") -> Any:
    """The base, its vocabulary grown to `vocab` by rows drawn with `seed`."""
    model = LlamaForCausalLM.from_pretrained(str(TINY / "bases" / name), dtype=dtype).eval()
    if vocab is not None:
        old = model.config.vocab_size
        model.resize_token_embeddings(vocab, mean_resizing=False)
        random = generator(f"rows/{name}{seed}")
        for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
            new = torch.randn((vocab - old, layer.weight.shape[1]), generator=random) * 0.35
            layer.weight.data[old:] = new.to(dtype)
    return model


def randomize(model: PeftModel, random: torch.Generator) -> None:
    """Random numbers of a sensible size for everything that is trained."""

    def draw(parameter: torch.Tensor, std: float) -> torch.Tensor:
        return torch.randn(parameter.shape, generator=random) * std

    for name, p in sorted(model.named_parameters()):
        if "lora_embedding_A" in name:
            p.data.copy_(draw(p, 0.5))
        elif "lora_A" in name:
            p.data.copy_(draw(p, p.shape[1] ** -0.5))
        elif "lora_B" in name and name.endswith("bias"):
            p.data.copy_(draw(p, 0.3))
        elif "lora_B" in name or "lora_embedding_B" in name:
            p.data.copy_(draw(p, 0.5 * p.shape[1] ** -0.5))
        elif "lora_magnitude_vector" in name:
            p.data.mul_(1 + draw(p, 0.15))
        elif "trainable_tokens_delta" in name:
            p.data.copy_(draw(p, 0.5))
        elif "modules_to_save" in name:
            p.data.add_(draw(p, 0.2))


@torch.no_grad()
def outputs(model: Any, prompts: list[list[int]]) -> dict[str, torch.Tensor]:
    """prompt.i, logits.i and greedy.i (without a cache, the end-of-text token is a token like any other)."""
    result = {}
    for i, prompt in enumerate(prompts):
        ids = list(prompt)
        for _ in range(NEW_TOKENS):
            logits = model(torch.tensor([ids])).logits[0]
            if len(ids) == len(prompt):
                result[f"logits.{i}"] = logits.float().contiguous()
            ids.append(int(logits[-1].argmax()))
        result[f"prompt.{i}"] = torch.tensor(prompt, dtype=torch.int32)
        result[f"greedy.{i}"] = torch.tensor(ids[len(prompt) :], dtype=torch.int32)
    return result


@torch.no_grad()
def logits_of(model: Any, prompts: list[list[int]]) -> list[torch.Tensor]:
    return [model(torch.tensor([prompt])).logits[0].float() for prompt in prompts]


def greedy_margin(model: Any, expected: dict[str, torch.Tensor], prompts: list[list[int]]) -> float:
    """Least distance of the best logit from the second over the greedy steps."""
    margin = float("inf")
    for i, prompt in enumerate(prompts):
        ids = [*prompt, *expected[f"greedy.{i}"].tolist()[:-1]]
        best = logits_of(model, [ids])[0][len(prompt) - 1 :].topk(2).values
        margin = min(margin, float((best[:, 0] - best[:, 1]).min()))
    return margin


def worst(first: list[torch.Tensor], second: list[torch.Tensor]) -> float:
    return max(float((a[:, : b.shape[1]] - b[:, : a.shape[1]]).abs().max()) for a, b in zip(first, second, strict=True))


def split(folder: Path, tensors: dict[str, torch.Tensor], count: int) -> None:
    """Writes the tensors as `count` shards and an index, as transformers does for models."""
    names, where = sorted(tensors), {}
    for n in range(count):
        file, part = f"adapter_model-{n + 1:05}-of-{count:05}.safetensors", names[n::count]
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(part, file)
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    (folder / "adapter_model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    (folder / "adapter_model.safetensors").unlink()


def make_case(out: Path, name: str) -> dict[str, Any]:
    """The first of a few draws whose greedy tokens no rounding decides."""
    for salt in ("", "/1", "/2", "/3", "/4"):
        entry = draw_case(out, name, salt)
        if entry["min_greedy_margin"] >= MIN_MARGIN:
            return entry
    raise AssertionError(f"{name}: {entry['min_greedy_margin']}")


def draw_case(out: Path, name: str, salt: str) -> dict[str, Any]:
    base, arguments, options = CASES[name]
    vocab, folder = options.get("vocab"), out / "cases" / name
    shutil.rmtree(folder, ignore_errors=True)
    prompts = NEW_PROMPTS if vocab else PROMPTS
    model = get_peft_model(load_base(base, vocab), LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.0, **arguments))
    randomize(model, generator(f"case/{name}{salt}"))
    model.eval()
    before = logits_of(model, prompts)
    model.save_pretrained(str(folder))
    (folder / "README.md").unlink(missing_ok=True)
    config_path, weights_path = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    config = json.loads(config_path.read_text())
    config["base_model_name_or_path"] = f"../../../golden_tiny/bases/{base}"
    for key in ("target_modules", "modules_to_save"):
        if isinstance(config[key], list):
            config[key].sort()
    config_path.write_text(json.dumps(config, indent=2))
    tensors = load_file(weights_path)
    if "dtype" in options:
        tensors = {key: tensor.to(options["dtype"]) for key, tensor in tensors.items()}
        save_file(tensors, weights_path, metadata={"format": "pt"})
    # The reference is what PEFT makes of the files, on a base whose new rows are others than at training.
    model = PeftModel.from_pretrained(load_base(base, vocab, seed="/reload"), str(folder)).eval()
    expected = outputs(model, prompts)
    if "shards" in options:
        split(folder, tensors, options["shards"])
    save_file(expected, folder / "expected.safetensors")
    logits = [expected[f"logits.{i}"] for i in range(len(prompts))]
    return {
        "path": f"cases/{name}",
        "base": base,
        "lora_config": arguments,
        "vocab_size": vocab or 256,
        "file_dtype": str(options.get("dtype", torch.float32)).removeprefix("torch."),
        "tensors": {key: list(tensor.shape) for key, tensor in sorted(tensors.items())},
        "max_abs_diff_from_base": worst(logits, logits_of(load_base(base, vocab), prompts)),
        "max_abs_reload_diff": worst(logits, before),
        "min_greedy_margin": greedy_margin(model, expected, prompts),
    }


def base_of(manifest: dict[str, Any], case: str) -> tuple[str, int]:
    """Base and vocabulary of a case by its path."""
    name = Path(case).name
    cases = manifest["cases"] if case.startswith(PEFTS) else json.loads((TINY / "manifest.json").read_text())["cases"]
    return cases[name]["base"], cases[name].get("vocab_size", 256)


def load_case(out: Path, manifest: dict[str, Any], case: str, prepare: Callable[[Any], Any] = lambda m: m) -> Any:
    """PEFT's model of a case on its base, which `prepare` may change first."""
    base, vocab = base_of(manifest, case)
    model = load_base(base, vocab if vocab > 256 else None, seed="/reload")
    folder = out / case
    if not (folder / "adapter_model.safetensors").exists():
        joined = out / "joined"
        joined.mkdir()
        shutil.copy(folder / "adapter_config.json", joined)
        tensors = {key: value for part in folder.glob("*-of-*.safetensors") for key, value in load_file(part).items()}
        save_file(tensors, joined / "adapter_model.safetensors", metadata={"format": "pt"})
        result = PeftModel.from_pretrained(prepare(model), str(joined)).eval()
        shutil.rmtree(joined)
        return result
    return PeftModel.from_pretrained(prepare(model), str(folder)).eval()


def untie(model: Any) -> Any:
    """The same model with a head of its own, so that an adapter's two sides can be told apart when merged."""
    if model.config.tie_word_embeddings:
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.data.clone())
    return model


def grown(tensors: dict[str, torch.Tensor], vocab: int) -> dict[str, torch.Tensor]:
    """The vocabulary's tensors with rows of zeros up to `vocab`."""

    def grow(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name not in ("model.embed_tokens.weight", "lm_head.weight"):
            return tensor
        return torch.cat([tensor, torch.zeros((vocab - len(tensor), tensor.shape[1]))])

    return {name: grow(name, tensor) for name, tensor in tensors.items()}


def mixed_model(out: Path, manifest: dict[str, Any], base: str, adapters: list[tuple[str, float]], how: str) -> Any:
    """One model that computes the base and the sum of the scaled deltas."""
    if how == "cat":  # PEFT's own
        model = None
        for n, (case, _) in enumerate(adapters):
            if model is None:
                model = PeftModel.from_pretrained(load_base(base), str(out / case), adapter_name="a0")
            else:
                model.load_adapter(str(out / case), adapter_name=f"a{n}")
        assert model is not None
        names, factors = [f"a{n}" for n in range(len(adapters))], [factor for _, factor in adapters]
        model.add_weighted_adapter(names, factors, "mix", combination_type="cat")
        model.set_adapter("mix")
        return model.eval()
    vocab = max(base_of(manifest, case)[1] for case, _ in adapters)
    model = untie(load_base(base, vocab if vocab > 256 else None))
    start = grown(dict(untie(load_base(base)).state_dict()), vocab)
    total = {name: tensor.double() for name, tensor in start.items()}
    for case, factor in adapters:
        merged = load_case(out, manifest, case, untie).merge_and_unload()
        plain, own = load_case(out, manifest, case), merged.config.vocab_size
        prompts = NEW_PROMPTS if own > 256 else PROMPTS
        assert worst(logits_of(merged, prompts), logits_of(plain, prompts)) < 1e-4, case
        for name, tensor in grown(dict(merged.state_dict()), vocab).items():
            total[name] += factor * (tensor.double() - start[name].double())
        assert merged.state_dict().keys() == total.keys()
    model.load_state_dict({name: tensor.float() for name, tensor in total.items()})
    return model.eval()


def make_mix(out: Path, manifest: dict[str, Any], name: str) -> dict[str, Any]:
    base, adapters, how = MIXES[name]
    vocab = max(base_of(manifest, case)[1] for case, _ in adapters)
    prompts = NEW_PROMPTS if vocab > 256 else PROMPTS
    model = mixed_model(out, manifest, base, adapters, how)
    if how == "cat":
        assert worst(
            logits_of(model, prompts), logits_of(mixed_model(out, manifest, base, adapters, "sum"), prompts)
        ) < 1e-4  # fmt: skip
    expected = outputs(model, prompts)
    margin = greedy_margin(model, expected, prompts)
    assert margin >= MIN_MARGIN, (name, margin)
    folder = out / "mixes" / name
    folder.mkdir(parents=True)
    save_file(expected, folder / "expected.safetensors")
    return {
        "path": f"mixes/{name}",
        "base": base,
        "adapters": [{"path": case, "scale": factor} for case, factor in adapters],
        "vocab_size": vocab,
        "reference": "add_weighted_adapter(combination_type='cat')" if how == "cat" else "sum of merged deltas",
        "min_greedy_margin": margin,
    }


def make_bfloat16(out: Path, manifest: dict[str, Any], case: str) -> dict[str, Any]:
    """What PEFT computes on a base in bfloat16, and how far that is from its float32.

    PEFT keeps the adapter itself in float32 then; the errors named `whole` are those of a model that is bfloat16
    throughout. rms: root of the mean square over all logits of prompts cut to 8 tokens.
    """
    expected, prompts, exact = load_file(out / case / "expected.safetensors"), [], []
    for i in range(3):
        prompts.append(expected[f"prompt.{i}"].tolist()[:8])
        exact.append(expected[f"logits.{i}"][:8])
    mixed = logits_of(load_case(out, manifest, case, lambda model: model.to(torch.bfloat16)), prompts)
    whole = logits_of(load_case(out, manifest, case).to(torch.bfloat16), prompts)
    name = Path(case).name
    (out / "bfloat16").mkdir(exist_ok=True)
    tensors = {f"logits.{i}": logits.to(torch.bfloat16) for i, logits in enumerate(mixed)}
    tensors |= {f"prompt.{i}": torch.tensor(prompt, dtype=torch.int32) for i, prompt in enumerate(prompts)}
    save_file(tensors, out / "bfloat16" / f"{name}.safetensors")

    def rms(logits: list[torch.Tensor]) -> float:
        return float((torch.cat(logits) - torch.cat(exact)).square().mean().sqrt())

    return {
        "path": f"bfloat16/{name}.safetensors", "case": case, "rms_error": rms(mixed), "rms_error_whole": rms(whole),
        "max_error": worst(mixed, exact), "max_error_whole": worst(whole, exact),
    }  # fmt: skip


def main() -> None:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "golden_peft"
    for folder in ("cases", "mixes", "bfloat16"):
        shutil.rmtree(out / folder, ignore_errors=True)
    manifest: dict[str, Any] = {
        "versions": {module.__name__: module.__version__ for module in (torch, transformers, peft, safetensors)},
        "new_tokens": NEW_TOKENS, "cases": {}, "mixes": {}, "bfloat16": {},
    }  # fmt: skip
    for name in CASES:
        entry = manifest["cases"][name] = make_case(out, name)
        print(name, {k: v for k, v in entry.items() if k.startswith(("max", "min"))}, flush=True)
    for name in MIXES:
        manifest["mixes"][name] = make_mix(out, manifest, name)
        print(name, manifest["mixes"][name]["min_greedy_margin"], flush=True)
    for case in BFLOAT16:
        entry = manifest["bfloat16"][Path(case).name] = make_bfloat16(out, manifest, case)
        print(entry, flush=True)
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")


if __name__ == "__main__":
    main()
