"""Hugging Face transformers and PEFT in a process of their own, told over a pipe when to run what.

A script for the interpreter that has them: it needs torch, transformers and peft, and nothing of this package. It reads
one JSON object per line from its input and answers each with one on its output:

{"cmd": "load", "model": FOLDER, "adapters": [FOLDER, ...], "dtypes": [NAME, ...], "threads": N}
    -> {"versions": {...}, "threads": N}
{"cmd": "run", "dtype": NAME, "method": "mixed" or "loop", "prompts": [[ID, ...], ...],
 "adapters": [NUMBER or null, ...], "max_tokens": N}
    -> {"seconds": S, "tokens": [[ID, ...], ...]}

or with {"error": TEXT, "kind": NAME OF THE EXCEPTION}. It ends with its input.
"""

from __future__ import annotations

import copy
import importlib
import json
import os
import sys
import time
from typing import Any

PAD = 0
BASE_NAME = "__base__"
"""PEFT's name for a row without an adapter."""


class Models:
    """A base and its adapters, in several types.

    Args:
        message: of "load", see above.

    Attributes:
        versions: of the packages.
    """

    def __init__(self, message: dict[str, Any]):
        # By name: the package is checked where none of them is installed.
        self._torch: Any = importlib.import_module("torch")
        transformers: Any = importlib.import_module("transformers")
        peft: Any = importlib.import_module("peft")
        self._torch.set_num_threads(message["threads"])
        self.versions = {package.__name__: package.__version__ for package in (self._torch, transformers, peft)}
        self._plain: dict[str, Any] = {}
        self._tuned: dict[str, Any] = {}
        for name in message["dtypes"]:
            dtype = getattr(self._torch, name)
            plain = transformers.AutoModelForCausalLM.from_pretrained(message["model"], dtype=dtype).eval()
            plain.generation_config.eos_token_id = None  # answers of full length
            self._plain[name] = plain
            if message["adapters"]:
                self._tuned[name] = self._with_adapters(peft, plain, message["adapters"])

    def _with_adapters(self, peft: Any, plain: Any, paths: list[str]) -> Any:
        """PEFT's model over the same weights: PEFT changes the modules of the model that it is given."""
        shared = {id(tensor): tensor for tensor in (*plain.parameters(), *plain.buffers())}
        model = None
        for number, path in enumerate(paths):
            # Left to itself PEFT computes adapters in float32, which costs conversions beside a base in bfloat16.
            options = {"adapter_name": _name(number), "autocast_adapter_dtype": False}
            if model is None:
                model = peft.PeftModel.from_pretrained(copy.deepcopy(plain, shared), path, **options)
            else:
                model.load_adapter(path, **options)
        assert model is not None
        return model.eval()

    def run(self, message: dict[str, Any]) -> dict[str, Any]:
        """Answers all prompts; see "run" above."""
        prompts, adapters = message["prompts"], message["adapters"]
        plain, tuned = self._plain[message["dtype"]], self._tuned.get(message["dtype"])
        tokens: list[list[int]] = [[] for _ in prompts]
        start = time.perf_counter()
        if all(number is None for number in adapters):
            tokens = self._generate(plain, prompts, message["max_tokens"])
        elif message["method"] == "mixed":
            names = [BASE_NAME if number is None else _name(number) for number in adapters]
            tokens = self._generate(tuned, prompts, message["max_tokens"], adapter_names=names)
        else:
            for number in dict.fromkeys(adapters):
                rows = [row for row, its in enumerate(adapters) if its == number]
                model: Any = plain if number is None else tuned
                if number is not None:
                    model.set_adapter(_name(number))
                answers = self._generate(model, [prompts[row] for row in rows], message["max_tokens"])
                for row, answer in zip(rows, answers):  # noqa: B905 (this interpreter may be an old one)
                    tokens[row] = answer
        return {"seconds": time.perf_counter() - start, "tokens": tokens}

    def _generate(self, model: Any, prompts: list[list[int]], max_tokens: int, **options: Any) -> list[list[int]]:
        torch, longest = self._torch, max(map(len, prompts))
        padded = [[PAD] * (longest - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        with torch.inference_mode():
            out = model.generate(
                input_ids=torch.tensor(padded), attention_mask=torch.tensor(mask), max_new_tokens=max_tokens,
                do_sample=False, use_cache=True, pad_token_id=PAD, **options,
            )  # fmt: skip
        return out[:, longest:].tolist()


def _name(number: int) -> str:
    return f"adapter{number}"


def main() -> None:
    """Answers messages until the input ends."""
    # Libraries print what they like; the pipe is for answers alone.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    models = None
    for line in sys.stdin:
        message = json.loads(line)
        try:
            if message["cmd"] == "load":
                models = Models(message)
                answer = {"versions": models.versions, "threads": models._torch.get_num_threads()}
            else:
                assert models is not None, "nothing was loaded"
                answer = models.run(message)
        except Exception as error:
            answer = {"error": str(error), "kind": type(error).__name__}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    # The folder of this script comes first on the path, and its neighbours' names are not those of anybody's packages.
    sys.path.pop(0)
    main()
