"""Rollouts on vLLM: an offline engine in a worker process, or a running server.

The trained adapters are handed over as PEFT folders, each under a new name for each version,
before the first request that needs them, see :mod:`vllm_handover`: an engine that goes on with old
weights is an error, not staleness. An engine that dies costs the episodes that waited for it; other
requests are asked again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from nlac_lightning.backbone import Backbone
from nlac_lightning.generation.base import (
    ADAPTERS,
    FAILED,
    TOO_LONG,
    Completion,
    EngineError,
    Request,
    with_room,
)
from nlac_lightning.generation.sampling import complete
from nlac_lightning.generation.vllm_engines import Engine, GenerationConfig, Server
from nlac_lightning.generation.vllm_handover import Handed, HandOver, parameters
from nlac_lightning.generation.vllm_process import Worker
from nlac_lightning.models import resolve

log = logging.getLogger(__name__)

PAUSES = (1.0, 10.0, 60.0)
"""Seconds before each further try with an engine that died: a server may be starting again."""


class Pinned:
    """Generator with the adapters of one moment, see :meth:`VLLMGenerator.pinned`."""

    def __init__(self, generator: VLLMGenerator, handed: dict[str, Handed]) -> None:
        self._generator, self._handed = generator, handed
        self._revoked = False

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Complete all requests, in their order; RuntimeError once it is revoked."""
        if self._revoked:
            raise RuntimeError("nobody waits for an answer any more")
        return self._generator.generate_with(requests, self._handed)

    def revoke(self) -> None:
        """Refuse further requests, without waiting for one that the engine is at."""
        self._revoked = True

    def release(self) -> None:
        """Let go of the adapters, so that old ones are deleted."""
        self.revoke()
        self._generator.hand_over.unpin(self._handed)


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
        self.backbone = backbone
        self.counts: Counter[str] = Counter()
        self.seconds = 0.0
        self._turn = threading.Lock()
        self._engine = engine or _engine(backbone, config)
        self.hand_over = HandOver(backbone, self._engine, self._ask, config.tolerance)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Complete all requests, in their order.

        Raises:
            EngineError: the engine died, or still does after several tries; with a request that is
                asked ``once``, after the first.
        """
        if not requests:  # nothing to wait for a rollout's turn for
            return []
        adapters = {request.adapter for request in requests}
        pauses = () if any(request.once for request in requests) else PAUSES
        for pause in pauses:
            try:
                return self.generate_with(requests, self.hand_over.present(adapters))
            except EngineError as error:
                log.warning("%s; asked again in %g s", error, pause)
                time.sleep(pause)
        return self.generate_with(requests, self.hand_over.present(adapters))

    def pinned(self) -> Pinned:
        """A generator that keeps to the adapters as they are now, for a thread of its own.

        All adapters are handed over here, since that computes with the model.
        """
        return Pinned(self, self.hand_over.pin(ADAPTERS))

    def generate_with(
        self, requests: Sequence[Request], handed: dict[str, Handed]
    ) -> list[Completion]:
        """Complete all requests with adapters that were handed over before."""
        began = time.perf_counter()
        positions = min(self.backbone.max_positions, self._engine.max_tokens)
        fitting = [with_room(request, positions) for request in requests]
        asked = [
            {
                "ids": list(r.ids),
                "lora": handed[r.adapter].lora,
                "sampling": parameters(r.sampling, r.stop_ids) | {"seed": r.seed % 2**63},
            }
            for r in fitting
            if r is not None
        ]
        found = self._ask(asked) if asked else []
        answers = iter(found)
        out = []
        for request, fitted in zip(requests, fitting, strict=True):
            version = handed[request.adapter].version
            if fitted is None:
                out.append(Completion((), "", (), TOO_LONG, version))
            else:
                out.append(self._completion(fitted, next(answers), version))
        with self._turn:  # another thread counts as well
            self.seconds += time.perf_counter() - began
            prompts = sum(len(request["ids"]) for request in asked)
            self.counts["prompt_tokens"] += prompts
            self.counts["prefilled_tokens"] += prompts - sum(a.get("cached", 0) for a in found)
            self.counts["generated_tokens"] += sum(len(completion.ids) for completion in out)
            self.counts["too_long"] += len(requests) - len(asked)
        return out

    def _completion(self, request: Request, answer: dict[str, Any], version: int) -> Completion:
        if "error" in answer:
            log.warning("vLLM refuses a request: %s", answer["error"])
            # elsewhere the text would be read as a role's answer
            return Completion((), answer["error"] if request.once else "", (), FAILED, version)
        return complete(
            self.backbone.tokenizer,
            request,
            answer["ids"],
            answer["logprobs"],
            answer["reason"],
            version,
        )

    def _ask(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        with self._turn:
            return self._engine.complete(requests)

    def close(self) -> None:
        """End the engine's process and delete the adapters, until the next request."""
        self._engine.close()
        self.hand_over.clear()


def _engine(backbone: Backbone, config: GenerationConfig) -> Engine:
    if config.engine == "vllm_server":
        return Server(config)
    settings: dict[str, Any] = {
        "model": resolve(backbone.config.name),
        "dtype": str(backbone.compute_dtype).removeprefix("torch."),
        "trust_remote_code": backbone.config.trust_remote_code,
        "enable_lora": True,
        "max_lora_rank": max(8, 1 << (backbone.config.lora_r - 1).bit_length()),
        "max_loras": len(ADAPTERS),
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "enable_sleep_mode": config.sleep,
    }
    settings |= config.options
    if "max_model_len" in settings:  # vLLM refuses to start with more than there are
        settings["max_model_len"] = min(settings["max_model_len"], backbone.max_positions)
    return Worker(config, settings)
