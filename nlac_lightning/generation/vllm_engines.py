"""Where vLLM runs: in a worker process of an environment of its own, or as a server.

Both take the same requests: ``{"ids", "lora", "sampling"}``, where ``sampling`` holds arguments of
vLLM's ``SamplingParams`` and ``lora`` those of its ``LoRARequest``. They give ``{"ids", "logprobs",
"cached", "reason"}``, where ``cached`` counts the prompt's tokens that were not computed again,
with ``prompt`` where the prompt's own log-probabilities were asked for; or ``{"error"}`` for a
request that vLLM refuses.
"""

from __future__ import annotations

import http.client
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from nlac_lightning.endpoint.http import Response, send
from nlac_lightning.errors import ConfigError, require_choice, require_positive
from nlac_lightning.generation.base import EngineError

_FLAGS = (
    "start it with --enable-lora, --max-loras 3, --max-lora-rank of at least "
    "model.backbone.lora_r, and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
)


@dataclass
class GenerationConfig:
    """Which engine writes the texts."""

    engine: Literal["in_process", "vllm", "vllm_server"] = "in_process"
    """``in_process`` is the trained model itself. ``vllm`` starts a worker process, ``vllm_server``
    asks a server that can read this machine's files; docs/scale.md has the flags that it needs."""
    python: str = "python"
    """With ``vllm``: the interpreter of an environment in which vLLM is installed."""
    server: str = "http://127.0.0.1:8000"
    """With ``vllm_server``: its address, without ``/v1``."""
    options: dict[str, Any] = field(default_factory=dict)
    """With ``vllm``: further arguments of ``vllm.LLM``, such as ``gpu_memory_utilization``."""
    sleep: bool = False
    """With ``vllm`` on the GPU that also trains: give its memory back between calls."""
    tolerance: float = 0.25
    """Largest mean difference in nats between the engine's and the model's own log-probabilities of
    the probe; engines round differently: 0.05 is usual in bfloat16, 0.00001 in float32."""
    seconds: float = 600.0
    """Longest wait for a server's answer to a request, or a worker's to all requests of a call."""
    start_seconds: float = 1800.0
    """With ``vllm``: longest wait until a worker has loaded the model."""

    def __post_init__(self) -> None:
        require_choice(
            "model.compute.generation.engine", self.engine, ("in_process", "vllm", "vllm_server")
        )
        for name in ("tolerance", "seconds", "start_seconds"):
            require_positive(f"model.compute.generation.{name}", getattr(self, name))


class Engine(Protocol):
    """Completes prompts under named adapters.

    A failure before its first answer is a ConfigError, since a setting is the likely reason, and an
    EngineError from then on.

    Attributes:
        max_tokens: longest sequence, prompt and answer; known once it has been asked.
    """

    max_tokens: int

    def complete(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Answer requests, see the module's docstring, in their order."""
        ...

    def forget(self, lora: dict[str, Any]) -> None:
        """Let go of an adapter whose folder goes away."""
        ...

    def close(self) -> None:
        """Let go of processes and memory until the next call."""
        ...


def fault(answered: bool, field: str, problem: str, fix: str) -> Exception:
    """What a failure is: EngineError if the engine has ``answered`` before, else ConfigError."""
    return EngineError(problem) if answered else ConfigError(field, problem, fix)


class Server:
    """A running ``vllm serve``.

    Args:
        config: its ``server`` and ``seconds``.
        parallel: requests that are asked side by side.
    """

    def __init__(self, config: GenerationConfig, parallel: int = 64) -> None:
        self._url, self._seconds = config.server.rstrip("/"), config.seconds
        self._parallel = parallel
        self._loaded: set[str] = set()
        self._answered = False
        self.max_tokens = 0

    def complete(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        try:
            if not self._loaded:
                models = json.loads(self._send("GET", "/v1/models").body)["data"]
                self.max_tokens = min(m["max_model_len"] for m in models if m.get("max_model_len"))
            for lora in {r["lora"]["lora_name"]: r["lora"] for r in requests}.values():
                self._load(lora)
            pool = ThreadPoolExecutor(self._parallel, thread_name_prefix="vllm")
            try:
                answers = list(pool.map(self._complete, requests))
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            self._loaded.clear()
            raise self._fault(f"what it answers is not vLLM's ({error!r})") from error
        except EngineError:  # whether it has started anew, and knows no adapter, cannot be seen
            self._loaded.clear()
            raise
        self._answered = True
        return answers

    def forget(self, lora: dict[str, Any]) -> None:
        if lora["lora_name"] in self._loaded:
            self._loaded.remove(lora["lora_name"])
            self._send("POST", "/v1/unload_lora_adapter", {"lora_name": lora["lora_name"]})

    def close(self) -> None:
        """The server goes on, for others."""

    def _load(self, lora: dict[str, Any]) -> None:
        if lora["lora_name"] in self._loaded:
            return
        names = {"lora_name": lora["lora_name"], "lora_path": lora["lora_path"]}
        response = self._send("POST", "/v1/load_lora_adapter", names)
        # names are never used twice, so one that is known has these weights
        if response.status != 200 and b"already been loaded" not in response.body:
            raise self._refused(response)
        self._loaded.add(lora["lora_name"])

    def _complete(self, request: dict[str, Any]) -> dict[str, Any]:
        response = self._send(
            "POST",
            "/v1/completions",
            {
                "model": request["lora"]["lora_name"],
                "prompt": request["ids"],
                "return_token_ids": True,
                **request["sampling"],
            },
        )
        if self._answered and response.status in (400, 422):  # this request, not the server
            return {"error": response.body[:300].decode(errors="replace")}
        if response.status != 200:
            raise self._refused(response)
        said = json.loads(response.body)
        choice, details = said["choices"][0], said["usage"].get("prompt_tokens_details")
        answer = {
            "ids": choice["token_ids"],
            "logprobs": choice["logprobs"]["token_logprobs"],
            "reason": choice["finish_reason"],
            "cached": (details or {}).get("cached_tokens", 0),
        }
        if choice.get("prompt_logprobs"):  # the first token has none
            ids, tables = request["ids"][1:], choice["prompt_logprobs"][1:]
            answer["prompt"] = [t[str(i)]["logprob"] for i, t in zip(ids, tables, strict=True)]
        return answer

    def _send(self, method: str, path: str, body: dict[str, Any] | None = None) -> Response:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        try:
            return send(method, self._url + path, data, headers, 10.0, self._seconds)
        except (OSError, http.client.HTTPException) as error:
            raise self._fault(f"no answer ({error!r})") from error

    def _refused(self, response: Response) -> Exception:
        text = response.body[:300].decode(errors="replace")
        return self._fault(f"it answered {response.status}: {text}")

    def _fault(self, why: str) -> Exception:
        problem = f"the vLLM server {self._url}: {why}"
        return fault(self._answered, "model.compute.generation.server", problem, _FLAGS)
