"""How trained adapters reach vLLM, and the proof that the new one is the one that answers."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nlac_lightning.backbone import Backbone
from nlac_lightning.errors import ConfigError, StoppedRun
from nlac_lightning.generation.base import EngineError, Sampling
from nlac_lightning.generation.sampling import distributions
from nlac_lightning.generation.vllm_engines import Engine
from nlac_lightning.prefix_tree import pack_tree

Ask = Callable[[list[dict[str, Any]]], list[dict[str, Any]]]
"""Completes requests, see :mod:`vllm_engines`."""

PROBE = (
    "The new adapter is the one that answers. A customer asks for a refund, a detective for a "
    "clue, and a student for the sum of two numbers; each of them reads this sentence to its end."
)
"""The fixed prompt of the check after each hand-over: more tokens, less noise of rounding."""
_ANSWER = 4
"""Tokens that are generated after it; vLLM computes the first one otherwise than the later ones."""
_DRAWN = Sampling(temperature=0.5, top_k=20, max_new_tokens=_ANSWER)
"""How texts are drawn in the check of the log-probabilities."""
_SAME = 1e-3
"""Mean difference in nats below which two versions cannot be told apart."""


@dataclass(frozen=True, eq=False)
class Handed:
    """An adapter as the engine knows it.

    Attributes:
        version: of the adapter.
        lora: arguments of vLLM's ``LoRARequest``.
        own: log-probability of each token of the probe but the first, by the model itself.
    """

    version: int
    lora: dict[str, Any]
    own: torch.Tensor


class HandOver:
    """Writes each version of an adapter to a folder of its own and shows it to the engine.

    The frozen base is handed over as an adapter of zeros: vLLM's CPU kernels compute a request
    without an adapter with another one's weights (their ``bgmv_shrink`` indexes by -1).

    Args:
        backbone: whose adapters are handed over.
        engine: who gets them.
        ask: completes requests with the engine, one thread at a time.
        tolerance: see :class:`GenerationConfig`.

    Attributes:
        number: versions handed over so far.
        gap: mean difference in nats between the engine's and the model's own log-probabilities of
            the probe, at the newest of them.
    """

    def __init__(self, backbone: Backbone, engine: Engine, ask: Ask, tolerance: float) -> None:
        self.backbone, self._engine, self._ask = backbone, engine, ask
        self._tolerance = tolerance
        self._current: dict[str, Handed] = {}
        self._pins: list[dict[str, Handed]] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.number, self.gap = 0, 0.0
        self._drawn = False
        encoded = backbone.tokenizer(PROBE, add_special_tokens=False)
        self._probe = tuple(encoded["input_ids"])

    def present(self, adapters: Iterable[str]) -> dict[str, Handed]:
        """The adapters' present versions, handed over and verified.

        Raises:
            StoppedRun: another version answers.
            ConfigError: the engine's log-probabilities are not those that it draws from.
            EngineError: the engine died.
        """
        return {adapter: self._present(adapter) for adapter in sorted(adapters)}

    def pin(self, adapters: Iterable[str]) -> dict[str, Handed]:
        """As :meth:`present`; they stay until :meth:`unpin`."""
        self._pins.append(self.present(adapters))
        return self._pins[-1]

    def unpin(self, pinned: dict[str, Handed]) -> None:
        """Delete those that have been replaced meanwhile."""
        self._pins = [pin for pin in self._pins if pin is not pinned]
        for handed in pinned.values():
            self._let_go(handed)

    def clear(self) -> None:
        """Delete all folders; the next request hands over anew."""
        self._current.clear()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _present(self, adapter: str) -> Handed:
        version = self.backbone.versions[adapter]
        before = self._current.get(adapter)
        if before is not None and before.version == version:
            return before
        self._folder = self._folder or tempfile.TemporaryDirectory(prefix="nlac_adapters_")
        self.number += 1
        # a server may know adapters of other runs, and keeps what it computed by their name
        name = f"{adapter}-{version}-{uuid.uuid4().hex[:12]}"
        path = Path(self._folder.name, name)
        lora = {"lora_name": name, "lora_int_id": self.number, "lora_path": str(path)}
        try:
            self.backbone.write_adapter(adapter, path)
            now = Handed(version, lora, self._verify(adapter, lora, before))
            if not self._drawn:
                self._check_drawn(adapter, lora)
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)
            raise
        self._current[adapter] = now
        if before is not None:
            self._let_go(before)
        return now

    def _let_go(self, handed: Handed) -> None:
        """Delete a version that nobody asks any more."""
        used = [self._current, *self._pins]
        if any(handed is other for versions in used for other in versions.values()):
            return
        with contextlib.suppress(EngineError):
            self._engine.forget(handed.lora)
        shutil.rmtree(handed.lora["lora_path"], ignore_errors=True)

    def _verify(self, adapter: str, lora: dict[str, Any], before: Handed | None) -> torch.Tensor:
        """The engine's answer has to be as likely as the model itself says, and to have moved."""
        greedy = Sampling(max_new_tokens=_ANSWER)
        answer = self._answer(lora, greedy, {"prompt_logprobs": 0})
        own = self._own(adapter, answer["ids"], greedy)
        prompt = own[: len(self._probe) - 1]
        gap = _gap(own, answer["prompt"] + answer["logprobs"])
        old = _gap(before.own, answer["prompt"]) if before is not None else gap
        if gap > self._tolerance or _gap(prompt, answer["prompt"]) > max(2 * old, _SAME):
            raise StoppedRun(
                f"vLLM does not answer with version {self.backbone.versions[adapter]} of the "
                f"{adapter} adapter: its log-probabilities of the probe are off by {gap:.4f} nats "
                f"in the mean, and by {old:.4f} from the version before. Fix: update vLLM, or set "
                "model.compute.generation.engine to in_process"
            )
        self.gap = gap
        return prompt

    def _check_drawn(self, adapter: str, lora: dict[str, Any]) -> None:
        """Log-probabilities have to be those of the distribution that is drawn from."""
        answer = self._answer(lora, _DRAWN, {"seed": 0})
        drawn, greedy = (
            _gap(self._own(adapter, answer["ids"], s)[len(self._probe) - 1 :], answer["logprobs"])
            for s in (_DRAWN, Sampling())
        )
        if drawn > max(min(2 * greedy, self._tolerance / _DRAWN.temperature), _SAME):
            raise ConfigError(
                "model.compute.generation",
                "vLLM's log-probabilities leave out the temperature and top-k of what it draws",
                "start the server with --logprobs-mode processed_logprobs",
            )
        self._drawn = True

    def _answer(
        self, lora: dict[str, Any], sampling: Sampling, more: dict[str, Any]
    ) -> dict[str, Any]:
        asked = {"ids": list(self._probe), "lora": lora, "sampling": parameters(sampling) | more}
        [answer] = self._ask([asked])
        if "error" in answer:
            raise EngineError(f"vLLM refuses the probe: {answer['error']}")
        return answer

    def _own(self, adapter: str, ids: Sequence[int], sampling: Sampling) -> torch.Tensor:
        """Log-probabilities of the probe's tokens but the first, and of an answer to it."""
        path = (*self._probe, *ids)
        with self.backbone.reading(), self.backbone.use(adapter):
            hidden = self.backbone.forward_tree(pack_tree([path[:-1]]))
            logits = self.backbone.logits(hidden).float()
        log_p = distributions(logits, [sampling] * len(logits))
        return log_p.gather(1, torch.tensor(path[1:], device=log_p.device)[:, None])[:, 0].cpu()


def parameters(sampling: Sampling, stop_ids: Sequence[int] = ()) -> dict[str, Any]:
    """Arguments of vLLM's ``SamplingParams``, but for the seed."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_tokens": sampling.max_new_tokens,
        "stop": list(sampling.stop),
        "stop_token_ids": list(stop_ids),
        "include_stop_str_in_output": True,
        "ignore_eos": True,  # the request's own stop ids decide
        "logprobs": 0,
        "skip_special_tokens": False,
    }


def _gap(own: torch.Tensor, theirs: Sequence[float]) -> float:
    """Mean absolute difference, nats."""
    return float((own - torch.tensor(theirs)).abs().mean())
