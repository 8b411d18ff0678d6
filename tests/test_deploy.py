"""What lies in configs/deploy: each file is parsed, and what it says is held against the code that it starts."""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from multilora_jax.config import EngineConfig

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "configs" / "deploy"
HEALTHCHECK = DEPLOY / "healthcheck.py"


# ---- Dockerfile


def instructions() -> list[tuple[str, str]]:
    """(word, arguments) of each instruction, continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n", " ", text).splitlines()
    return [(word, rest.strip()) for word, _, rest in (line.strip().partition(" ") for line in lines) if word]


def stages() -> list[list[tuple[str, str]]]:
    """The instructions of each image, from its FROM on."""
    found: list[list[tuple[str, str]]] = []
    for word, rest in instructions():
        if word == "FROM":
            found.append([])
        if found:
            found[-1].append((word, rest))
    return found


def of(stage: list[tuple[str, str]], word: str) -> list[str]:
    return [rest for found, rest in stage if found == word]


def environment(stage: list[tuple[str, str]]) -> dict[str, str]:
    return dict(pair.split("=", 1) for rest in of(stage, "ENV") for pair in shlex.split(rest))


def test_the_image_runs_as_nobody_special_and_tells_its_health():
    known = {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "ENV", "VOLUME", "USER", "EXPOSE", "HEALTHCHECK", "STOPSIGNAL",
             "ENTRYPOINT", "CMD"}  # fmt: skip
    assert {word for word, _ in instructions()} <= known
    _, final = stages()
    [user] = of(final, "USER")
    assert user == "10001:10001"
    words = [word for word, _ in final]
    assert words.index("USER") > max(i for i, word in enumerate(words) if word in ("RUN", "COPY"))
    [check] = of(final, "HEALTHCHECK")
    assert json.loads(check.partition("CMD ")[2]) == ["python", "/opt/multilora/healthcheck.py"]
    assert "configs/deploy/healthcheck.py /opt/multilora/healthcheck.py" in of(final, "COPY")
    assert of(final, "STOPSIGNAL") == ["SIGTERM"]


def test_the_image_starts_the_server_with_keys_that_there_are():
    _, final = stages()
    [entry], [command] = of(final, "ENTRYPOINT"), of(final, "CMD")
    start, flags = json.loads(entry)[:3], json.loads(entry)[3:] + json.loads(command)
    assert start == ["python", "-m", "multilora_jax.serve"]
    assert environment(final)["PATH"].startswith("/opt/multilora/bin:")
    names = [flag.removeprefix("--").replace("-", "_") for flag in flags[::2]]
    assert set(names) <= set(EngineConfig.__dataclass_fields__)
    assert dict(zip(names, flags[1::2], strict=True))["port"] in of(final, "EXPOSE")


def test_the_image_copies_what_there_is():
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().split()
    for stage in stages():
        for rest in of(stage, "COPY"):
            if rest.startswith("--from=build"):
                continue
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists(), source
                assert source.split("/")[0] not in ignored, source


def test_both_variants_ask_for_extras_that_there_are():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    [run] = of(stages()[0], "RUN")
    variants = dict(re.findall(r"(\w+)\) extras=([\w,]+)", run))
    assert variants.keys() == {"cpu", "cuda"}
    assert {name for names in variants.values() for name in names.split(",")} <= extras.keys()
    assert "gpu" in variants["cuda"].split(",")
    assert "gpu" not in variants["cpu"].split(",")
    case = run.partition(" && ")[0]
    for variant, status in (("cpu", 0), ("cuda", 0), ("rocm", 1)):
        done = subprocess.run(
            ["sh", "-c", case], env={**os.environ, "VARIANT": variant}, capture_output=True, text=True
        )
        assert done.returncode == status, done.stderr
    assert "VARIANT is cpu or cuda, not rocm" in done.stderr


@pytest.mark.slow
def test_the_image_s_steps_in_a_plain_environment(tmp_path):
    """No container engine is asked for: both stages' commands run with the image's paths below a folder."""
    build, final = stages()

    def below(command: str) -> str:
        command = command.replace(" --no-cache-dir", "")  # an image is kept small; here nothing is fetched twice
        return re.sub(r"(?<![\w.])/(opt/multilora|src|cache|models|adapters)\b", rf"{tmp_path}/\1", command)

    source = tmp_path / "src"
    source.mkdir()
    (tmp_path / "opt").mkdir()
    for rest in of(build, "COPY"):
        *names, _ = rest.split()
        for name in names:
            path = ROOT / name
            if path.is_dir():
                shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(path, source)
    run_all(
        of(build, "RUN"), below, cwd=source, VARIANT="cpu", PATH=f"{Path(sys.base_prefix)}/bin:{os.environ['PATH']}"
    )
    if os.geteuid() == 0 and shutil.which("useradd"):
        (tmp_path / "etc").mkdir()
        for name in ("passwd", "group", "shadow", "gshadow"):
            (tmp_path / "etc" / name).touch()
        run_all(of(final, "RUN"), lambda c: re.sub(r"\b(groupadd|useradd)", rf"\1 --prefix {tmp_path}", below(c)))
        assert "multilora:x:10001:10001" in (tmp_path / "etc" / "passwd").read_text()
        assert (tmp_path / "cache").stat().st_uid == 10001
    python = tmp_path / "opt" / "multilora" / "bin" / "python"
    entry, port = json.loads(of(final, "ENTRYPOINT")[0]), free_port()
    flags = ["--config", str(ROOT / "configs" / "tiny.yaml"), "--port", str(port), "--host", "127.0.0.1"]
    server = subprocess.Popen([str(python), *entry[1:], *flags], cwd=tmp_path, env=environment_of(tmp_path))
    try:
        url = f"http://127.0.0.1:{port}/health"
        deadline = time.monotonic() + 1800  # a machine with other work is no failure; a server that fails ends
        while subprocess.run([str(python), str(HEALTHCHECK), url], capture_output=True).returncode:
            assert server.poll() is None, "the server has ended"
            assert time.monotonic() < deadline, "the server did not become healthy"
            time.sleep(1)
        server.send_signal(signal.SIGTERM)
        assert server.wait(600) == 0
    finally:
        server.kill()


def run_all(commands: list[str], below: Any, cwd: Path | None = None, **env: str) -> None:
    for command in commands:
        done = subprocess.run(
            ["sh", "-c", below(command)],
            cwd=cwd,
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            timeout=1800,
        )
        assert done.returncode == 0, f"{below(command)}\n{done.stdout}\n{done.stderr}"


def environment_of(folder: Path) -> dict[str, str]:
    """The image's, without what would lead to the checkout's own package."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return {**kept, "HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


# ---- health check


@pytest.fixture
def answering():
    """Serves a status; yields (address, statuses by path)."""
    statuses = {"/health": 200, "/ready": 503}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(statuses.get(self.path, 404))
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(("path", "status"), [("/health", 0), ("/ready", 1), ("/nothing", 1)])
def test_the_health_check_tells_200_from_all_else(answering, path, status):
    proxied = {**os.environ, "http_proxy": "http://127.0.0.1:1"}
    command = [sys.executable, str(HEALTHCHECK), answering + path]
    assert subprocess.run(command, capture_output=True, env=proxied).returncode == status


def test_the_health_check_of_a_server_that_is_not_there():
    done = subprocess.run(
        [sys.executable, str(HEALTHCHECK), f"http://127.0.0.1:{free_port()}/health"], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "refused" in done.stderr
    assert "Traceback" not in done.stderr


# ---- systemd


def unit() -> dict[str, dict[str, list[str]]]:
    """Section to key to its values; keys may repeat."""
    found: dict[str, dict[str, list[str]]] = {}
    section: dict[str, list[str]] = {}
    for line in (DEPLOY / "multilora-jax.service").read_text().splitlines():
        if line.startswith("["):
            section = found.setdefault(line.strip("[]"), {})
        elif line and not line.startswith("#"):
            key, separator, value = line.partition("=")
            if not separator:
                raise configparser.ParsingError(line)
            section.setdefault(key, []).append(value)
    return found


def test_the_unit_is_hardened():
    service = unit()["Service"]
    wanted = {
        "NoNewPrivileges": "yes", "ProtectSystem": "strict", "ProtectHome": "yes", "PrivateTmp": "yes",
        "CapabilityBoundingSet": "", "RestrictNamespaces": "yes", "ProtectKernelModules": "yes", "UMask": "0077",
        "SystemCallFilter": "@system-service", "RestrictAddressFamilies": "AF_INET AF_INET6 AF_UNIX",
    }  # fmt: skip
    assert {key: service[key] for key in wanted} == {key: [value] for key, value in wanted.items()}
    assert service["User"] == ["multilora"]
    assert "MemoryDenyWriteExecute" not in service, "XLA could not run what it compiles"


def test_the_unit_gives_requests_time_to_finish():
    service = unit()["Service"]
    assert int(service["TimeoutStopSec"][0]) > EngineConfig(model="m").drain_seconds
    command = service["ExecStart"][0].split()
    assert command[1:4] == ["-m", "multilora_jax.serve", "--config"]
    assert service["Restart"] == ["on-failure"], "a stop on purpose exits with 0"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_understands_the_unit(tmp_path):
    text = (DEPLOY / "multilora-jax.service").read_text()
    # verify asks that the program is there.
    path = tmp_path / "multilora-jax.service"
    path.write_text(text.replace("/opt/multilora-jax/bin/python", sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", str(path)], capture_output=True, text=True, timeout=60)
    complaints = [line for line in (done.stdout + done.stderr).splitlines() if "multilora-jax.service" in line]
    assert not complaints
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=25", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if "Failed to" not in done.stderr:  # where nothing may be loaded, there is nothing to rate
        assert done.returncode == 0, done.stdout[-2000:]


# ---- Kubernetes


def objects() -> dict[str, dict[str, Any]]:
    with (DEPLOY / "kubernetes.yaml").open() as file:
        found = list(yaml.safe_load_all(file))
    assert len({item["kind"] for item in found}) == len(found)
    return {item["kind"]: item for item in found}


def test_the_manifest_holds_what_a_server_needs():
    kinds = objects()
    assert kinds.keys() == {"Secret", "PersistentVolumeClaim", "Deployment", "Service"}
    versions = {kind: item["apiVersion"] for kind, item in kinds.items()}
    assert versions == {**dict.fromkeys(kinds, "v1"), "Deployment": "apps/v1"}
    deployment, service = kinds["Deployment"]["spec"], kinds["Service"]["spec"]
    pod = deployment["template"]
    assert service["selector"].items() <= pod["metadata"]["labels"].items()
    assert deployment["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    [container] = pod["spec"]["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes.keys()
    assert volumes["cache"]["persistentVolumeClaim"]["claimName"] == kinds["PersistentVolumeClaim"]["metadata"]["name"]
    assert volumes["config"]["secret"]["secretName"] == kinds["Secret"]["metadata"]["name"]
    assert service["ports"][0]["targetPort"] in {port["name"] for port in container["ports"]}
    assert deployment["strategy"]["type"] == "Recreate", "two Pods cannot mount the claim"


def test_the_manifest_s_pod_is_probed_and_bounded():
    spec = objects()["Deployment"]["spec"]["template"]["spec"]
    [container] = spec["containers"]
    paths = {name: container[name]["httpGet"]["path"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert paths == {"startupProbe": "/health", "livenessProbe": "/health", "readinessProbe": "/ready"}
    ports = {port["name"] for port in container["ports"]}
    assert all(container[name]["httpGet"]["port"] in ports for name in paths)
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 900, "a first start compiles for minutes"
    assert container["resources"]["requests"].keys() == {"cpu", "memory"}
    assert "memory" in container["resources"]["limits"]
    assert spec["terminationGracePeriodSeconds"] > EngineConfig(model="m").drain_seconds
    assert spec["securityContext"]["runAsNonRoot"] is True
    user = f"{spec['securityContext']['runAsUser']}:{spec['securityContext']['runAsGroup']}"
    assert of(stages()[1], "USER") == [user]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}
    }  # fmt: skip


def test_the_manifest_s_configuration_is_one():
    kinds = objects()
    [container] = kinds["Deployment"]["spec"]["template"]["spec"]["containers"]
    config = EngineConfig.from_dict(yaml.safe_load(kinds["Secret"]["stringData"]["serve.yaml"]))
    assert [port["containerPort"] for port in container["ports"]] == [config.port]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert container["args"] == ["--config", f"{mounts['config']}/serve.yaml"]
    assert mounts["cache"] == environment(stages()[1])["XDG_CACHE_HOME"]
    assert (config.api_keys, config.admin_keys) == ((), ()), "no key that everybody knows"
    examples = "/adapters/examples/"
    assert f"configs/adapters {examples.rstrip('/')}" in of(stages()[1], "COPY")
    for path in config.lora_modules.values():
        assert (ROOT / "configs" / "adapters" / path.removeprefix(examples)).is_dir(), path
