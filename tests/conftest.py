"""Models that several tests share, and an engine that stands in for vLLM."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from nlac_lightning import models
from nlac_lightning.errors import ConfigError

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers that each take all cores slow each other down many times; their commands inherit it.
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def smollm2_path() -> str:
    """Folder of the real SmolLM2-135M-Instruct; its first use downloads and converts it."""
    try:
        return models.resolve(models.SMOLLM2)
    except ConfigError as error:
        pytest.skip(f"needs the real model: {error}")


@pytest.fixture(scope="session")
def tiny_llama_path(smollm2_path: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a random two-layer Llama (untied head) with the real tokenizer. Do not write to."""
    folder: Path = tmp_path_factory.mktemp("tiny_llama")
    tokenizer = models.load_tokenizer(smollm2_path)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


class PeftEngine:
    """An engine that answers with the handed-over folders, read by PEFT alone.

    Args:
        stale: it goes on with the first adapter.
        raw: its log-probabilities leave out temperature and top-k.
    """

    def __init__(
        self, path: str, stale: bool = False, raw: bool = False, max_tokens: int = 8192
    ) -> None:
        self.path, self.stale, self.raw, self.max_tokens = path, stale, raw, max_tokens
        self.folders: list[str] = []
        self.forgotten: list[str] = []
        self._models: dict[str, Any] = {}

    def complete(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [self._complete(request) for request in requests]

    @torch.no_grad()
    def _complete(self, request: dict[str, Any]) -> dict[str, Any]:
        folder, sampling = request["lora"]["lora_path"], request["sampling"]
        self.folders.append(folder)
        model = self._model(self.folders[0] if self.stale else folder)
        ids = list(request["ids"])
        answer: dict[str, Any] = {"ids": [], "logprobs": [], "reason": "length"}
        if "prompt_logprobs" in sampling:
            log_p = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
            answer["prompt"] = log_p.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
        for _ in range(sampling["max_tokens"]):
            logits = model(torch.tensor([ids])).logits[0, -1]
            ids.append(int(logits.argmax()))
            if not self.raw:
                kept = logits.topk(sampling["top_k"] or len(logits)).values
                logits = kept / (sampling["temperature"] or 1.0)
            answer["ids"].append(ids[-1])
            answer["logprobs"].append(float(logits.log_softmax(-1).max()))
            if ids[-1] in sampling["stop_token_ids"]:
                answer["reason"] = "stop"
                break
        return answer

    def forget(self, lora: dict[str, Any]) -> None:
        self.forgotten.append(lora["lora_path"])

    def _model(self, folder: str) -> Any:
        if folder not in self._models:
            model: Any = AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32)
            self._models[folder] = PeftModel.from_pretrained(model, folder).eval()
        return self._models[folder]

    def close(self) -> None:
        """Nothing runs."""


@pytest.fixture(scope="session")
def peft_engine() -> type[PeftEngine]:
    """An engine that stands in for vLLM."""
    return PeftEngine
