"""Rollouts on vLLM: an offline engine in a worker process, or a running server.

The trained adapters are handed over as PEFT folders, each under a new name and number for each
version, before the first request that needs them. Then a fixed prompt is asked, and the answer's
log-probability has to be that of the trained model itself: an engine that goes on with old weights
is an error, not staleness.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nlac_lightning.backbone import Backbone
from nlac_lightning.generation.base import ADAPTERS, Completion, Request, Sampling
from nlac_lightning.generation.sampling import complete
from nlac_lightning.generation.vllm_engines import Engine, GenerationConfig, Server, Worker
from nlac_lightning.models import resolve
from nlac_lightning.prefix_tree import pack_tree

PROBE = "The new adapter is the one that answers"
"""The fixed prompt of the check after each hand-over."""


Handed = dict[str, tuple[int, dict[str, Any] | None]]
"""Version of each adapter, and how the engine knows it."""


class Pinned:
    """Generator with the adapters of one moment, see :meth:`VLLMGenerator.pinned`."""

    def __init__(self, generator: VLLMGenerator, handed: Handed) -> None:
        self._generator, self._handed = generator, handed

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Complete all requests, in their order."""
        return self._generator.generate_with(requests, self._handed)

    def sync(self, version: int) -> int:
        """The version stays what it was."""
        return self._handed["online"][0]


class VLLMGenerator:
    """Generator on vLLM, for the adapters of a :class:`Backbone`.

    Args:
        backbone: its adapters are handed over whenever their version has changed.
        config: see :class:`GenerationConfig`.
        engine: another engine than the configured one.

    Raises:
        ConfigError: vLLM cannot be started or reached.
    """

    def __init__(
        self, backbone: Backbone, config: GenerationConfig, engine: Engine | None = None
    ) -> None:
        self.backbone, self.config = backbone, config
        self.counts: Counter[str] = Counter()
        self.seconds = 0.0
        self._folder = tempfile.TemporaryDirectory(prefix="nlac_adapters_")
        self._loaded: dict[str, tuple[int, dict[str, Any]]] = {}
        self._numbers = 0
        self._turn = threading.Lock()
        model = resolve(backbone.config.name)
        if engine is not None:
            self._engine: Engine = engine
        elif config.engine == "vllm":
            settings = {
                "model": model,
                "dtype": str(backbone.compute_dtype).removeprefix("torch."),
                "enable_lora": True,
                "max_lora_rank": max(8, 1 << (backbone.config.lora_r - 1).bit_length()),
                "max_loras": 2,
                "enable_prefix_caching": True,
                "logprobs_mode": "processed_logprobs",
                "enable_sleep_mode": config.sleep,
            }
            self._engine = Worker(config, settings | config.options)
        else:
            self._engine = Server(config, model)

    def sync(self, version: int) -> int:
        """Hand over the adapters that have changed; returns the online adapter's version in use."""
        for adapter in ("online", "target"):
            self._lora(adapter)
        return self._loaded["online"][0]

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Complete all requests, in their order."""
        return self.generate_with(requests, self._now({r.adapter for r in requests}))

    def pinned(self) -> Pinned:
        """A generator that keeps to the adapters as they are now, for a thread of its own."""
        return Pinned(self, self._now(set(ADAPTERS)))

    def _now(self, adapters: set[str]) -> Handed:
        return {a: (self.backbone.versions[a], self._lora(a)) for a in sorted(adapters)}

    def generate_with(self, requests: Sequence[Request], handed: Handed) -> list[Completion]:
        """Complete all requests with adapters that were handed over before."""
        began = time.perf_counter()
        asked = [
            {"ids": list(r.ids), "lora": handed[r.adapter][1], "sampling": _sampling(r)}
            for r in requests
        ]
        answers = self._complete(asked) if asked else []
        self.seconds += time.perf_counter() - began
        self.counts["prompt_tokens"] += sum(len(r.ids) for r in requests)
        self.counts["generated_tokens"] += sum(len(answer["ids"]) for answer in answers)
        return [
            complete(
                self.backbone.tokenizer, request, answer["ids"], answer["logprobs"],
                answer["reason"], handed[request.adapter][0],
            )
            for request, answer in zip(requests, answers, strict=True)
        ]  # fmt: skip

    def _complete(self, asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
        with self._turn:
            return self._engine.complete(asked)

    def close(self) -> None:
        """End the engine's process and delete the handed-over adapters."""
        self._engine.close()
        self._folder.cleanup()

    def _lora(self, adapter: str) -> dict[str, Any] | None:
        """How the engine knows an adapter's present version; hands it over where it does not."""
        if adapter == "base":
            return None
        version = self.backbone.versions[adapter]
        known = self._loaded.get(adapter)
        if known is not None and known[0] == version:
            return known[1]
        self._numbers += 1
        name = f"{adapter}-{version}-{self._numbers}"
        folder = Path(self._folder.name, name)
        self.backbone.write_adapter(adapter, folder)
        lora = {"lora_name": name, "lora_int_id": self._numbers, "lora_path": str(folder)}
        self._verify(adapter, lora)
        self._loaded[adapter] = (version, lora)
        self.counts["syncs"] += 1
        return lora

    def _verify(self, adapter: str, lora: dict[str, Any]) -> None:
        """The engine's answer to the probe has to be as likely as the model itself says."""
        ids = tuple(self.backbone.tokenizer(PROBE, add_special_tokens=False)["input_ids"])
        request = Request(ids, Sampling(max_new_tokens=1), adapter)
        asked = {"ids": list(ids), "lora": lora, "sampling": _sampling(request)}
        answer = self._complete([asked])[0]
        training = self.backbone.model.training
        self.backbone.model.eval()
        with torch.no_grad(), self.backbone.use(adapter):
            hidden = self.backbone.forward_tree(pack_tree([ids]))
            expected = self.backbone.logits(hidden[-1:]).float().log_softmax(-1)[0]
        self.backbone.model.train(training)
        gap = abs(answer["logprobs"][0] - float(expected[answer["ids"][0]]))
        if gap > self.config.tolerance:
            raise RuntimeError(
                f"vLLM does not answer with version {self.backbone.versions[adapter]} of the "
                f"{adapter} adapter: its log-probability of the probe is off by {gap:.3f} nats"
            )


def _sampling(request: Request) -> dict[str, Any]:
    s = request.sampling
    return {
        "temperature": s.temperature,
        "top_p": s.top_p,
        "top_k": s.top_k,
        "max_tokens": s.max_new_tokens,
        "stop": list(s.stop),
        "stop_token_ids": list(request.stop_ids),
        "include_stop_str_in_output": True,
        "ignore_eos": True,  # the request's own stop ids decide
        "seed": request.seed % 2**63,
        "logprobs": 0,
        "skip_special_tokens": False,
    }
