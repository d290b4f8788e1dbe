"""vLLM's side of generation: the hand-over of adapters, and the real engine where there is one."""

from __future__ import annotations

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
from nlac_lightning.algorithms.nlac import NLAC, LossConfig
from nlac_lightning.backbone import Backbone, BackboneConfig
from nlac_lightning.callbacks import RolloutCallback
from nlac_lightning.data import ReplayDataModule
from nlac_lightning.envs.help_desk import HelpDeskEnv
from nlac_lightning.errors import ConfigError, StoppedRun
from nlac_lightning.generation.base import ADAPTERS, TOO_LONG, Request, Sampling
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
    """An engine that answers with the handed-over folders, read by PEFT alone.

    Args:
        stale: it goes on with the first adapter.
        raw: its log-probabilities leave out temperature and top-k.
    """

    max_tokens = 64

    def __init__(self, path: str, stale: bool = False, raw: bool = False) -> None:
        self.path, self.stale, self.raw = path, stale, raw
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
    assert generator.hand_over.number == 5, "two adapters, twice, and the base once"
    generator.close()


def test_an_engine_that_keeps_old_weights_is_an_error(backbone: Backbone) -> None:
    """Also where the step was as small as real ones are, far below the tolerance."""
    engine = Peft(backbone.config.name, stale=True)
    generator = VLLMGenerator(backbone, GenerationConfig("vllm"), engine)
    generator.generate([Request(PROMPT)])
    with torch.no_grad():
        for parameter in backbone.adapter_parameters("online").values():
            parameter.add_(0.005 * torch.randn_like(parameter))
    backbone.versions["online"] += 1
    with pytest.raises(StoppedRun, match="does not answer with version"):
        generator.generate([Request(PROMPT)])


def test_raw_log_probabilities_are_refused_with_the_flag(backbone: Backbone) -> None:
    generator = VLLMGenerator(
        backbone, GenerationConfig("vllm"), Peft(backbone.config.name, raw=True)
    )
    with pytest.raises(ConfigError, match="--logprobs-mode processed_logprobs"):
        generator.generate([Request(PROMPT)])


def test_folders_of_old_versions_go_once_nobody_asks_them(backbone: Backbone) -> None:
    engine = Peft(backbone.config.name)
    generator = VLLMGenerator(backbone, GenerationConfig("vllm"), engine)
    pinned = generator.pinned()
    root = Path(engine.folders[0]).parent
    old = generator.generate([Request(PROMPT)])[0]
    for seed in (2, 3, 4):
        shake(backbone, seed)
        generator.generate([Request(PROMPT), Request(PROMPT, adapter="target")])
        assert len(list(root.iterdir())) == 5, "three are pinned, and two of them are replaced"
    assert pinned.generate([Request(PROMPT)])[0] == old
    pinned.release()
    names = {folder.name.rpartition("-")[0] for folder in root.iterdir()}
    assert names == {"base-0", *(f"{a}-{backbone.versions[a]}" for a in ("online", "target"))}
    assert len(engine.forgotten) == 6 and not any(Path(f).exists() for f in engine.forgotten)
    with pytest.raises(RuntimeError, match="let go"):
        pinned.generate([Request(PROMPT)])
    generator.close()
    assert not root.exists()


def test_prompts_beyond_the_engine_s_reach_are_not_asked(backbone: Backbone) -> None:
    generator = VLLMGenerator(backbone, GenerationConfig("vllm"), Peft(backbone.config.name))
    lengths = (Peft.max_tokens + 1, Peft.max_tokens, Peft.max_tokens - 2, 5)
    outs = generator.generate([Request((7,) * n, Sampling(max_new_tokens=4)) for n in lengths])
    assert [out.finish_reason for out in outs] == [TOO_LONG, TOO_LONG, "length", "length"]
    assert [len(out.ids) for out in outs] == [0, 0, 2, 4]
    assert generator.counts["too_long"] == 2


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
