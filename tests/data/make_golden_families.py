"""Makes golden_families/: tiny random models of every family, an adapter of PEFT on each, and what both compute.

Needs torch, transformers and peft, which nothing else here does; the versions used are in the manifest:

    pip install torch==2.13.0 transformers==4.57.6 peft==0.21.2
    python tests/data/make_golden_families.py [FOLDER]        (deterministic, seconds on a CPU)
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()
torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)

VOCAB, NEW_TOKENS, MIN_MARGIN = 64, 12, 2e-3
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral_window": {"model_type": "mistral", "sliding_window": 21, "tie_word_embeddings": True},
    "mistral_full": {"model_type": "mistral", "sliding_window": None, "head_dim": 16, "rope_theta": 1e6},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True, "use_sliding_window": False, "sliding_window": 16},
    "qwen2_window": {
        "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 17, "max_window_layers": 0,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
    "qwen3_biased": {
        "model_type": "qwen3", "head_dim": 8, "attention_bias": True,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    },
}  # fmt: skip
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def generator(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(int(hashlib.sha256(name.encode()).hexdigest()[:8], 16))


def randomize(model: torch.nn.Module, random: torch.Generator) -> None:
    """Random numbers that bfloat16 holds exactly, of a size at which every part of the model matters."""
    for name, p in sorted(model.named_parameters()):
        noise = torch.randn(p.shape, generator=random)
        if name.endswith("norm.weight"):
            value = 1 + 0.3 * noise
        elif name.endswith("bias"):
            value = 0.5 * noise
        elif "embed_tokens" in name:
            value = noise
        else:
            value = noise * 1.5 * p.shape[-1] ** -0.5
        p.data.copy_(value.bfloat16().float())


@torch.no_grad()
def outputs(model: Any, prompts: list[list[int]], kind: str) -> dict[str, torch.Tensor]:
    """KIND.logits.i of prompt and answer, KIND.greedy.i; without a cache, so that nothing is ever left out of one."""
    result = {}
    for i, prompt in enumerate(prompts):
        ids = list(prompt)
        for _ in range(NEW_TOKENS):
            logits = model(torch.tensor([ids]), use_cache=False).logits[0].float()
            ids.append(int(logits[-1].argmax()))
        best = logits[len(prompt) - 1 :].topk(2).values
        assert float((best[:, 0] - best[:, 1]).min()) > MIN_MARGIN, (kind, i)
        result[f"{kind}.logits.{i}"] = logits.contiguous()
        result[f"{kind}.greedy.{i}"] = torch.tensor(ids[len(prompt) :], dtype=torch.int32)
    return result


def make(folder: Path, name: str) -> None:
    """Writes one model, its adapter and what they compute."""
    random = generator(name)
    config = AutoConfig.for_model(**{**SIZES, **FAMILIES[name]})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    randomize(model, random)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({key: t.bfloat16() for key, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "generation_config.json").unlink()
    prompts = [torch.randint(3, VOCAB, (n,), generator=random).tolist() for n in (5, 43)]
    expected = outputs(model, prompts, "base")
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, task_type="CAUSAL_LM"))
    assert isinstance(adapted, PeftModel)
    for key, p in sorted(adapted.named_parameters()):
        if "lora_" in key:
            p.data.copy_((torch.randn(p.shape, generator=random) * 0.7 * p.shape[1] ** -0.5).bfloat16().float())
    expected |= outputs(adapted.eval(), prompts, "adapter")
    adapted.save_pretrained(folder / "adapter")
    (folder / "adapter" / "README.md").unlink()
    path = folder / "adapter" / "adapter_model.safetensors"
    save_file({key: t.bfloat16() for key, t in load_file(path).items()}, path, {"format": "pt"})
    settings = json.loads((folder / "adapter" / "adapter_config.json").read_text()) | {"base_model_name_or_path": name}
    settings["target_modules"] = sorted(settings["target_modules"])
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    expected |= {f"prompt.{i}": torch.tensor(prompt, dtype=torch.int32) for i, prompt in enumerate(prompts)}
    save_file(expected, folder / "expected.safetensors")


def main(out: Path) -> None:
    shutil.rmtree(out, ignore_errors=True)
    for name in FAMILIES:
        (out / name).mkdir(parents=True)
        make(out / name, name)
    versions = {module.__name__: module.__version__ for module in (torch, transformers, peft)}
    (out / "manifest.json").write_text(json.dumps({"versions": versions, "models": list(FAMILIES)}, indent=2) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "golden_families")
