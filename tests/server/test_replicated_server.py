"""A server of two replicas as its operator runs it: a process, keys, clients, adapters that come and go, SIGTERM."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from safetensors.numpy import load_file

from tests.server.fake_engine import GOLDEN
from tests.server.keyed import KEYS, bearer, write_keys
from tests.server.test_process_faults import Running

ADAPTERS = {"adapter-a": "all_linear", "a-qv": "qv", "adapter-b": "attn_only", "b-64": "rank64"}
COMPLETIONS = "/v1/completions"


def expected(case):
    """(prompt, greedy tokens) of a case, or of the base."""
    file = load_file((GOLDEN / (f"cases/{case}" if case else "bases/tied")) / "expected.safetensors")
    return file["prompt.1"].tolist(), file["greedy.1"].tolist()


@pytest.fixture(scope="module")
def running(tmp_path_factory, configs):
    """The server, its keys limited."""
    folder = tmp_path_factory.mktemp("keys")
    limits = {"b": {"max_concurrent": 2}}
    modules = ["--lora_modules", ",".join(f"{name}={GOLDEN / 'cases' / case}" for name, case in ADAPTERS.items())]
    flags = os.environ.get("XLA_FLAGS")
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    try:
        with (folder / "log").open("w") as log:
            server = Running(
                "multilora_jax.serve", "--config", str(configs / "tiny.yaml"),
                "--model", str(GOLDEN / "bases" / "tied"),
                "--load_format", "auto", "--tokenizer", str(configs / "tiny_model"), "--data_parallel_size", "2",
                "--max_num_seqs", "4", "--keys_file", write_keys(folder, **limits), *modules, "--port", "PORT",
                "--drain_seconds", "60", output=log,
            )  # fmt: skip
    finally:
        os.environ.pop("XLA_FLAGS")
        if flags is not None:
            os.environ["XLA_FLAGS"] = flags
    yield server
    server.popen.kill()
    server.popen.wait()


def ask(server, tenant, model, case, **fields):
    prompt, tokens = expected(case)
    body = {"model": model, "prompt": prompt, "max_tokens": len(tokens), "temperature": 0, "ignore_eos": True,
            "return_token_ids": True, **fields}  # fmt: skip
    return httpx.post(server.address + COMPLETIONS, json=body, headers=bearer(tenant), timeout=600)


def is_right(response, case):
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["token_ids"] == expected(case)[1]


def metrics(server):
    """Sample name to the values of its label sets."""
    text = httpx.get(f"{server.address}/metrics", headers=bearer("scraper"), timeout=60).text
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def manage(server, action, **body):
    path = f"{server.address}/v1/{action}_lora_adapter"
    return httpx.post(path, json=body, headers=bearer("ops"), timeout=600)


def client_of(server, tenant):
    return openai.OpenAI(base_url=f"{server.address}/v1", api_key=KEYS[tenant], max_retries=0, timeout=600)


@pytest.mark.slow
class TestReplicatedServer:
    """In the order of a server's life; the last test ends it."""

    def test_every_adapter_answers_as_the_reference_many_at_once(self, running):
        asked = [("ops", name, case) for name, case in ADAPTERS.items()] + [("a", "tiny", None)] * 2
        with ThreadPoolExecutor(12) as pool:
            answers = list(pool.map(lambda each: is_right(ask(running, *each), each[2]), asked * 2))
        assert all(answers)
        seen = metrics(running)
        parts = dict.fromkeys("01", 0.0)
        for labels, value in seen["multilora:replica_generation_tokens_total"]:
            parts[labels["replica"]] += value
        [(_, total)] = seen["vllm:generation_tokens_total"]
        assert min(parts.values()) > 0
        assert sum(parts.values()) == total == sum(len(expected(case)[1]) for *_, case in asked * 2)

    def test_curl_and_the_openai_client(self, running):
        body = json.dumps({"model": "a-qv", "prompt": "hello", "max_tokens": 4, "temperature": 0})
        command = ["curl", "-sS", f"{running.address}{COMPLETIONS}", "-H", "Content-Type: application/json",
                   "-H", f"Authorization: Bearer {KEYS['a']}", "-d", body]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
        with client_of(running, "a") as client:
            assert {model.id for model in client.models.list()} == {"tiny", "adapter-a", "a-qv"}
            again = client.completions.create(model="a-qv", prompt="hello", max_tokens=4, temperature=0)
            assert again.choices[0].text == json.loads(done.stdout)["choices"][0]["text"]
            stream = client.completions.create(model="a-qv", prompt="hello", max_tokens=4, temperature=0, stream=True)
            assert "".join(chunk.choices[0].text for chunk in stream) == again.choices[0].text
            with pytest.raises(openai.NotFoundError):
                client.completions.create(model="adapter-b", prompt="hello")
        assert ask(running, "mlj-nobody", "tiny", None).status_code == 401

    def test_a_key_s_limit_holds_over_both_replicas(self, running):
        """Two at once, whichever replica they are on."""
        with ThreadPoolExecutor(6) as pool:
            names = ["adapter-b", "b-64", "tiny"] * 2
            statuses = list(pool.map(lambda name: ask(running, "b", name, None, max_tokens=200).status_code, names))
        assert statuses.count(429) >= 1
        assert set(statuses) == {200, 429}
        rows = metrics(running)["multilora:tenant_requests_refused_total"]
        refused = {labels["limit"]: value for labels, value in rows if labels["tenant"] == "b"}
        assert refused["max_concurrent"] == statuses.count(429)

    def test_adapters_come_change_and_go_while_others_run(self, running):
        stop, wrong, count = threading.Event(), [], [0]

        def others():
            while not stop.is_set():
                response = ask(running, "ops", "adapter-a", ADAPTERS["adapter-a"])
                count[0] += 1
                if not is_right(response, ADAPTERS["adapter-a"]):
                    wrong.append(response.text)

        threads = [threading.Thread(target=others) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            for case in ("rslora", "dora", "all_linear", "rank1"):
                body = {"lora_name": "swapped", "lora_path": str(GOLDEN / "cases" / case), "load_inplace": True}
                response = manage(running, "load", **body)
                assert response.status_code == 200, response.text
                with ThreadPoolExecutor(8) as pool:  # more than one replica has seats for
                    answers = list(pool.map(lambda _, c=case: is_right(ask(running, "ops", "swapped", c), c), range(8)))
                assert all(answers), case
            assert manage(running, "pin", lora_name="swapped").status_code == 200
            assert manage(running, "unpin", lora_name="swapped").status_code == 200
            bad = manage(
                running, "load", lora_name="swapped", lora_path=str(GOLDEN / "bases" / "tied"), load_inplace=True
            )
            assert bad.status_code == 404  # no adapter lies there
            assert is_right(ask(running, "ops", "swapped", "rank1"), "rank1")  # the one before is still served
            assert manage(running, "unload", lora_name="swapped").status_code == 200
            assert ask(running, "ops", "swapped", "rank1").status_code == 404
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert not wrong
        assert count[0] > 3

    def test_the_page_shows_both_pools(self, running):
        seen = httpx.get(f"{running.address}/page/live", headers=bearer("ops"), timeout=60).json()
        pages = metrics(running)["multilora:replica_pages_free"]
        assert seen["pool"]["pages"] == 2 * 255
        assert seen["pool"]["free"] == sum(value for _, value in pages)
        tiers = {row["name"]: row["tier"] for row in seen["adapters"]["rows"]}
        assert tiers == dict.fromkeys(ADAPTERS, "resident")
        assert seen["totals"]["generation_tokens"] > 0

    def test_sigterm_lets_both_replicas_finish(self, running):
        started, texts = threading.Barrier(5), []

        def stream(model):
            body = {"model": model, "prompt": [1, 2, 3], "max_tokens": 120, "ignore_eos": True, "stream": True}
            with httpx.stream(
                "POST", running.address + COMPLETIONS, json=body, headers=bearer("ops"), timeout=600
            ) as r:
                lines = r.iter_lines()
                first = next(lines)
                started.wait(600)
                texts.append((r.status_code, [first, *lines]))

        threads = [threading.Thread(target=stream, args=(name,)) for name in ADAPTERS]
        for thread in threads:
            thread.start()
        started.wait(600)
        running.popen.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 60
        while ask(running, "ops", "tiny", None).status_code != 503 and time.monotonic() < deadline:
            time.sleep(0.01)
        for thread in threads:
            thread.join()
        assert running.popen.wait(600) == 0
        assert len(texts) == len(ADAPTERS)
        for status, lines in texts:
            assert status == 200
            assert [line for line in lines if line][-1] == "data: [DONE]"
