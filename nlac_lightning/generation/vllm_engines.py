"""Where vLLM runs: in a worker process of an environment of its own, or as a server.

Both take the same requests: ``{"ids", "lora", "sampling"}``, where ``sampling`` holds arguments of
vLLM's ``SamplingParams`` and ``lora`` those of its ``LoRARequest`` (or None), and give ``{"ids",
"logprobs", "reason"}``.
"""

from __future__ import annotations

import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from nlac_lightning.endpoint.http import post
from nlac_lightning.errors import ConfigError, require_choice, require_positive
from nlac_lightning.generation import vllm_worker

ENGINES = ("in_process", "vllm", "vllm_server")


@dataclass
class GenerationConfig:
    """Which engine writes the texts."""

    engine: Literal["in_process", "vllm", "vllm_server"] = "in_process"
    """``in_process`` is the trained model itself. ``vllm`` starts a worker process, ``vllm_server``
    asks a server that was started with ``--enable-lora`` and
    ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=True``, and that can read this machine's files."""
    python: str = "python"
    """With ``vllm``: the interpreter of an environment in which vLLM is installed."""
    server: str = "http://127.0.0.1:8000"
    """With ``vllm_server``: its address, without ``/v1``."""
    options: dict[str, Any] = field(default_factory=dict)
    """With ``vllm``: further arguments of ``vllm.LLM``, such as ``gpu_memory_utilization``."""
    sleep: bool = False
    """With ``vllm`` on the GPU that also trains: give its memory back between calls."""
    tolerance: float = 0.1
    """Largest difference in nats between the engine's and the model's own log-probability of the
    probe; engines round differently. 0.1 suits bfloat16."""
    seconds: float = 600.0
    """Longest wait for a server's answer."""

    def __post_init__(self) -> None:
        require_choice(
            "model.compute.generation.engine", self.engine, ("in_process", "vllm", "vllm_server")
        )
        require_positive("model.compute.generation.tolerance", self.tolerance)
        require_positive("model.compute.generation.seconds", self.seconds)


class Engine(Protocol):
    """Completes prompts under named adapters."""

    def complete(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Each request holds ``ids``, ``lora`` and ``sampling``; each answer ``ids``, ``logprobs``
        and ``reason``."""
        ...

    def close(self) -> None:
        """Let go of processes and memory."""
        ...


class Worker:
    """vLLM's offline engine in a process of its own, see :mod:`vllm_worker`."""

    def __init__(self, config: GenerationConfig, settings: dict[str, Any]) -> None:
        self._sleep = config.sleep
        command = [config.python, vllm_worker.__file__]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        except OSError as error:
            raise ConfigError(
                "model.compute.generation.python",
                str(error),
                "name the Python of vLLM's environment",
            ) from error
        self._ask(settings)
        self._set_sleep(True)

    def complete(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        self._set_sleep(False)
        completions = self._ask({"complete": requests})["completions"]
        self._set_sleep(True)
        return completions

    def close(self) -> None:
        if self._process.stdin:
            self._process.stdin.close()
        self._process.wait(timeout=60)

    def _set_sleep(self, asleep: bool) -> None:
        if self._sleep:
            self._ask({"sleep": asleep})

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except OSError:
            line = ""
        if not line:
            raise ConfigError(
                "model.compute.generation",
                f"vLLM's process ended with status {self._process.wait()}",
                "see its messages above; check model.compute.generation.python and options",
            )
        return json.loads(line)


class Server:
    """A running ``vllm serve``."""

    def __init__(self, config: GenerationConfig, model: str, parallel: int = 64) -> None:
        self._url, self._seconds = config.server.rstrip("/"), config.seconds
        self._model = model
        self._pool = ThreadPoolExecutor(parallel)
        self._loaded: set[str] = set()

    def complete(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for lora in {r["lora"]["lora_name"]: r["lora"] for r in requests if r["lora"]}.values():
            if lora["lora_name"] not in self._loaded:
                names = {"lora_name": lora["lora_name"], "lora_path": lora["lora_path"]}
                self._post("/v1/load_lora_adapter", names)
                self._loaded.add(lora["lora_name"])
        return list(self._pool.map(self._complete, requests))

    def _complete(self, request: dict[str, Any]) -> dict[str, Any]:
        body = {
            "model": request["lora"]["lora_name"] if request["lora"] else self._model,
            "prompt": request["ids"],
            "return_token_ids": True,
            **request["sampling"],
        }
        choice = json.loads(self._post("/v1/completions", body))["choices"][0]
        return {
            "ids": choice["token_ids"],
            "logprobs": choice["logprobs"]["token_logprobs"],
            "reason": choice["finish_reason"],
        }

    def _post(self, path: str, body: dict[str, Any]) -> bytes:
        headers = {"Content-Type": "application/json"}
        try:
            response = post(
                self._url + path, json.dumps(body).encode(), headers, 10.0, self._seconds
            )
        except OSError as error:
            raise ConfigError(
                "model.compute.generation.server", f"no answer ({error})", "start it, or correct it"
            ) from error
        if response.status != 200:
            text = response.body[:300].decode(errors="replace")
            raise ConfigError(
                "model.compute.generation.server",
                f"{path} answered {response.status}: {text}",
                "start it with --enable-lora, --max-lora-rank of at least model.backbone.lora_r, "
                "and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True",
            )
        return response.body

    def close(self) -> None:
        self._pool.shutdown()
