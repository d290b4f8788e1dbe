"""vLLM's side of generation: the hand-over of adapters, and the real engine where there is one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM

from nlac_lightning.algorithms import base
from nlac_lightning.algorithms.base import ComputeConfig
from nlac_lightning.algorithms.examples import Example, accumulate
from nlac_lightning.algorithms.nlac import NLAC, LossConfig
from nlac_lightning.backbone import Backbone, BackboneConfig
from nlac_lightning.callbacks import RolloutCallback
from nlac_lightning.data import ReplayDataModule
from nlac_lightning.envs.help_desk import HelpDeskEnv
from nlac_lightning.errors import ConfigError
from nlac_lightning.generation.base import ADAPTERS, Request, Sampling
from nlac_lightning.generation.in_process import InProcessGenerator
from nlac_lightning.generation.vllm import VLLMGenerator
from nlac_lightning.generation.vllm_engines import GenerationConfig
from nlac_lightning.replay.buffer import ReplayBuffer
from nlac_lightning.roles.roles import RoleConfig, RolesConfig
from nlac_lightning.rollout import RolloutLimits

PROMPT = (11, 12, 13, 14, 15)


@pytest.fixture
def backbone(tiny_llama_path: str) -> Backbone:
    backbone = Backbone(BackboneConfig(tiny_llama_path, lora_r=4, dtype="float32"))
    shake(backbone, 1)
    return backbone


def shake(backbone: Backbone, seed: int) -> None:
    torch.manual_seed(seed)
    for adapter in ("online", "target"):
        for parameter in backbone.adapter_parameters(adapter).values():
            nn.init.normal_(parameter, std=0.4)
        backbone.versions[adapter] += 1


class Peft:
    """An engine that answers with the handed-over folders, read by PEFT alone."""

    def __init__(self, path: str, stale: bool = False) -> None:
        self.path, self.stale = path, stale
        self.folders: list[str] = []
        self._models: dict[str, Any] = {}

    def complete(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [self._complete(request) for request in requests]

    @torch.no_grad()
    def _complete(self, request: dict[str, Any]) -> dict[str, Any]:
        folder = request["lora"]["lora_path"] if request["lora"] else ""
        self.folders.append(folder)
        model = self._model(self.folders[0] if self.stale else folder)
        ids = list(request["ids"])
        answer: dict[str, Any] = {"ids": [], "logprobs": [], "reason": "length"}
        for _ in range(request["sampling"]["max_tokens"]):
            log_p = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
            ids.append(int(log_p.argmax()))
            answer["ids"].append(ids[-1])
            answer["logprobs"].append(float(log_p.max()))
            if ids[-1] in request["sampling"]["stop_token_ids"]:
                answer["reason"] = "stop"
                break
        return answer

    def _model(self, folder: str) -> Any:
        if folder not in self._models:
            model: Any = AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32)
            self._models[folder] = (
                PeftModel.from_pretrained(model, folder).eval() if folder else model.eval()
            )
        return self._models[folder]

    def close(self) -> None:
        """Nothing runs."""


def test_handed_over_adapters_answer_like_the_model_itself(backbone: Backbone) -> None:
    """Also after an update, and the text is cut as that of the engine in the process."""
    own = InProcessGenerator(backbone)
    generator = VLLMGenerator(backbone, GenerationConfig("vllm"), Peft(backbone.config.name))
    sampling = Sampling(max_new_tokens=4)
    for seed in (2, 3):
        asked = [Request(PROMPT, sampling, adapter) for adapter in ADAPTERS]
        stop = own.generate(asked)[0].ids[1]
        asked += [replace(asked[0], stop_ids=(stop,))]
        for ours, theirs in zip(own.generate(asked), generator.generate(asked), strict=True):
            assert (theirs.ids, theirs.text) == (ours.ids, ours.text)
            assert theirs.finish_reason == ours.finish_reason and theirs.version == ours.version
            assert theirs.logprobs == pytest.approx(ours.logprobs, abs=1e-4)
        shake(backbone, seed)
    assert generator.counts["syncs"] == 4, "two adapters, twice; the base needs none"
    assert generator.sync(0) == backbone.versions["online"]
    assert generator.counts["syncs"] == 6
    generator.close()


def test_an_engine_that_keeps_old_weights_is_an_error(backbone: Backbone) -> None:
    engine = Peft(backbone.config.name, stale=True)
    generator = VLLMGenerator(backbone, GenerationConfig("vllm"), engine)
    generator.generate([Request(PROMPT)])
    shake(backbone, 2)
    with pytest.raises(RuntimeError, match="does not answer with version"):
        generator.generate([Request(PROMPT)])


def test_a_wrong_interpreter_is_a_wrong_setting(backbone: Backbone) -> None:
    with pytest.raises(ConfigError, match=r"model\.compute\.generation\.python"):
        VLLMGenerator(backbone, GenerationConfig("vllm", python="/no/such/python"))


def test_a_server_that_is_down_is_a_wrong_setting(backbone: Backbone) -> None:
    config = GenerationConfig("vllm_server", server="http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"model\.compute\.generation\.server"):
        VLLMGenerator(backbone, config).generate([Request(PROMPT, adapter="base")])


def ahead(path: str, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    """Four gradient steps with rollouts ahead every second; returns what was logged."""
    logged: list[dict[str, float]] = []

    class Records(CSVLogger):
        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:  # type: ignore[override]
            logged.append(dict(metrics))

    monkeypatch.setattr(
        base, "VLLMGenerator", lambda backbone, config: VLLMGenerator(backbone, config, Peft(path))
    )
    role = RoleConfig(sampling=Sampling(max_new_tokens=3))
    generation = GenerationConfig(options.pop("engine", "vllm"))
    module = NLAC(
        improvement="accept",
        critic="none",
        base_action="buffer",
        loss=LossConfig(critic_weight=0.0, policy_kl=0.1),
        roles=RolesConfig(templates="help_desk_small", format="plain", action="plain", policy=role),
        backbone=BackboneConfig(path, lora_r=4, dtype="float32"),
        compute=ComputeConfig(generation=generation),
    )
    trainer = lightning.Trainer(
        max_steps=4,
        limit_val_batches=0,
        accelerator="cpu",
        logger=Records(str(folder)),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[
            RolloutCallback(4, 3, 2, limits=RolloutLimits(max_turns=2), ahead=True, **options)
        ],
    )
    data = ReplayDataModule(HelpDeskEnv(level=0, n_train=8), batch_size=2)
    trainer.fit(module, data)
    with ReplayBuffer(folder / "replay.sqlite") as buffer:
        return logged, list(buffer.iter_episodes())


def test_rollouts_ahead_join_the_buffer_one_collection_later(
    tiny_llama_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged, episodes = ahead(tiny_llama_path, tmp_path, monkeypatch)
    assert [m["rollout/staleness"] for m in logged if "rollout/staleness" in m] == [2.0, 0.0]
    assert len({e.seed for e in episodes}) == len(episodes) == 4 + 2 * 3
    versions = [{t.policy_version for t in e.turns} for e in episodes]
    assert versions == [{0}] * 4 + [{2}] * 3 + [{4}] * 3, "each with the adapter of its beginning"


def test_rollouts_ahead_need_another_process(
    tiny_llama_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.ahead"):
        ahead(tiny_llama_path, tmp_path, monkeypatch, engine="in_process")


@pytest.fixture
def real(smollm2_path: str) -> Iterator[tuple[Backbone, VLLMGenerator]]:
    python = os.environ.get("NLAC_VLLM_PYTHON")
    if python is None:
        pytest.skip("NLAC_VLLM_PYTHON does not name the Python of an environment with vLLM")
    backbone = Backbone(BackboneConfig(smollm2_path, lora_r=8, dtype="float32"))
    options = {"max_model_len": 512, "enforce_eager": True, "max_num_seqs": 8}
    generator = VLLMGenerator(backbone, GenerationConfig("vllm", python, options=options))
    yield backbone, generator
    generator.close()


@pytest.mark.timeout(1800)
def test_the_whole_loop_on_the_real_engine(real: tuple[Backbone, VLLMGenerator]) -> None:
    """Rollout, update, sync, changed output: greedy texts follow the trained adapter."""
    backbone, generator = real
    ids = tuple(backbone.tokenizer("The capital of France is")["input_ids"])
    wanted = tuple(backbone.tokenizer(" a blue whale.")["input_ids"])
    request = Request(ids, Sampling(max_new_tokens=len(wanted)))
    before = generator.generate([request, replace(request, adapter="base")])
    assert before[0].ids == before[1].ids, "an adapter of zeros changes nothing"
    assert before[0].ids == InProcessGenerator(backbone).generate([request])[0].ids
    online = backbone.adapter_parameters("online").values()
    optimizer = torch.optim.AdamW(online, lr=3e-3)
    for _ in range(12):
        optimizer.zero_grad()
        accumulate(backbone, [Example("policy", ids + wanted, len(ids))], 64, torch.Tensor.backward)
        optimizer.step()
    backbone.versions["online"] += 1
    after = generator.generate([request, replace(request, adapter="base")])
    assert after[0].ids == wanted != before[0].ids, json.dumps(after[0].text)
    assert after[1].ids == before[1].ids
    assert after[0].version == backbone.versions["online"]
    assert Path(generator._folder.name).exists()
