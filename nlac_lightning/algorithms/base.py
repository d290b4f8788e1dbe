"""What all algorithms share: model, optimizer step from examples, evaluation, checkpoints."""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import Strategy
from torch import Tensor

from nlac_lightning.actors import Actor, ModelActor
from nlac_lightning.algorithms.config import ComputeConfig, OptimizerConfig
from nlac_lightning.algorithms.examples import Example, accumulate
from nlac_lightning.algorithms.skipped import SkippedSteps
from nlac_lightning.backbone import Backbone, BackboneConfig
from nlac_lightning.checkpoint import SafeCheckpointIO
from nlac_lightning.critic import Critic
from nlac_lightning.distributed import (
    add_gradients,
    broadcast,
    gather,
    means,
    rank,
    sums,
    world_size,
)
from nlac_lightning.envs.base import Task, TextEnv
from nlac_lightning.errors import ConfigError
from nlac_lightning.evaluation.evaluate import EvaluationConfig, Evaluator
from nlac_lightning.evaluation.records import EpisodeRecord, EvaluationResult
from nlac_lightning.generation.in_process import InProcessGenerator
from nlac_lightning.generation.vllm import VLLMGenerator
from nlac_lightning.interrupts import whole
from nlac_lightning.policy_gradient.plan import RolloutPlan
from nlac_lightning.replay.buffer import ReplayBuffer
from nlac_lightning.replay.sampler import BatchSampler
from nlac_lightning.report.evaluation import (
    evaluation_folder,
    scalars,
    write_comparison,
    write_result,
)
from nlac_lightning.roles.roles import Roles, RolesConfig
from nlac_lightning.sharding import (
    WholeAdapters,
    check_strategy,
    own_gradient_exchange,
    plain_name,
)

log = logging.getLogger(__name__)

TRANSCRIPTS = 24
"""Episodes of a test that are written out."""


class Algorithm(lightning.LightningModule):
    """Base of all algorithms: manual optimisation of one adapter.

    Args:
        backbone: which model is trained, and how its adapters look.
        roles: prompts, sampling and adapter of each role.
        optimizer: step size, its schedule, and clipping of the gradient.
        compute: how much is processed at one time; changes speed and memory, never results.
        evaluation: how held-out tasks are played, and what is measured there.

    Attributes:
        rollout_plan: what an on-policy algorithm asks of RolloutCallback; None leaves it its own
            settings.
        saved_parameters: parts of the names of the weights that checkpoints hold.
    """

    rollout_plan: RolloutPlan | None = None
    saved_parameters: tuple[str, ...] = ("lora_",)

    def __init__(
        self,
        backbone: BackboneConfig | None = None,
        roles: RolesConfig | None = None,
        optimizer: OptimizerConfig | None = None,
        compute: ComputeConfig | None = None,
        evaluation: EvaluationConfig | None = None,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.backbone_config = backbone or BackboneConfig()
        self.roles_config = roles or RolesConfig()
        self.optimizer_config = optimizer or OptimizerConfig()
        self.compute_config = compute or ComputeConfig()
        self.evaluation_config = evaluation or EvaluationConfig()
        self.backbone: Backbone
        self.roles: Roles
        self.generator: InProcessGenerator | VLLMGenerator
        self.critic: Critic
        self.counts: Counter[str] = Counter()
        self.seconds: dict[str, float] = defaultdict(float)
        self._skipped = SkippedSteps(self.optimizer_config.max_skipped)
        self._episodes: list[EpisodeRecord] = []
        self._tested: dict[str, list[EpisodeRecord]] = {}
        self._comparison = ""
        self.strict_loading = False  # checkpoints hold the adapters; on_load_checkpoint is strict

    def setup(self, stage: str) -> None:
        """Checkpoint files that a crash cannot harm, unless the user chose others."""
        if type(self.trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            self.trainer.strategy.checkpoint_io = SafeCheckpointIO()

    def configure_model(self) -> None:
        """Load the model once, on whichever entry point comes first."""
        if hasattr(self, "roles"):
            return
        self.backbone = Backbone(self.backbone_config)
        self.roles = Roles(self.roles_config, self.backbone.tokenizer)
        if self.env is not None:
            self.env.meet(self.roles.codec.chat_template)
        compute = self.compute_config
        if compute.generation.engine == "in_process":
            self.generator = InProcessGenerator(
                self.backbone,
                compute.decode_rows,
                compute.prefill_pack_tokens,
                compute.cache_tokens,
            )
        else:
            self.generator = VLLMGenerator(self.backbone, compute.generation)
        self.critic = self.make_critic()
        attach = getattr(getattr(self.env, "user", None), "attach", None)
        if attach is not None:  # a simulated user may share the frozen base
            attach(self.generator, self.backbone.tokenizer)
        if self._trainer is not None:
            self._spread(self.trainer.strategy)

    def _spread(self, strategy: Strategy) -> None:
        """Give every process the same adapters, and its part of a base that is sharded."""
        check_strategy(strategy, on_policy=self.rollout_plan is not None)
        if world_size() > 1:  # NCCL sends between GPUs only
            self.backbone.to(strategy.root_device)
        for adapter in ("online", "target"):
            broadcast([p.data for p in self.backbone.adapter_parameters(adapter).values()])
        if isinstance(strategy, WholeAdapters):
            self.backbone.shard(strategy.shard)

    def on_train_start(self) -> None:
        """Leave the exchange of gradients to :meth:`gradient_step`."""
        own_gradient_exchange(self.trainer.strategy)

    @property
    def env(self) -> TextEnv | None:
        """The data module's environment."""
        if self._trainer is None:
            return None
        return getattr(self.trainer.datamodule, "env", None)  # type: ignore[attr-defined]

    def make_critic(self) -> Critic:
        """The critic whose fidelity an evaluation measures."""
        return Critic(self.roles, self.generator, env=self.env)

    def make_sampler(self, buffer: ReplayBuffer, batch_size: int, seed: int) -> BatchSampler | None:
        """Which transitions make a training batch; None leaves it to the data module."""
        return None

    def tested(self) -> dict[str, str]:
        """Policies that a test compares, and their adapters."""
        return {"base": "base", "trained": "online"}

    def actor(self, adapter: str) -> Actor:
        """Who chooses the actions while an adapter is tested."""
        return ModelActor(self.roles, self.generator, adapter, self.evaluation_config.temperature)

    def evaluator(self) -> Evaluator:
        """Plays held-out tasks with this module's model."""
        if self.env is None:
            raise ConfigError("data.env", "no environment", "name one under data.env.class_path")
        return Evaluator(self.env, self.roles, self.generator, self.critic, self.evaluation_config)

    def configure_optimizers(self) -> Any:
        """AdamW over the online adapter; the step size follows the gradient steps."""
        config = self.optimizer_config
        optimizer = torch.optim.AdamW(
            [p for p in self.parameters() if p.requires_grad],
            lr=config.lr,
            betas=config.betas,
            weight_decay=config.weight_decay,
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, config.scale)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def optimize(self, examples: Sequence[Example]) -> dict[str, float]:
        """One gradient step on all processes' examples; returns mean losses, norm and step size.

        Examples longer than the model's positions are left out (``examples_dropped``).
        """
        pack_tokens = self.compute_config.train_pack_tokens
        fitting = [example for example in examples if self._trainable(example)]
        read = self.generator.read if isinstance(self.generator, InProcessGenerator) else None
        self.counts["examples_dropped"] += len(examples) - len(fitting)
        return self.gradient_step(
            lambda: accumulate(self.backbone, fitting, pack_tokens, self.manual_backward, read)
        )

    def _trainable(self, example: Example) -> bool:
        """Whether it trains any token, and the model has positions for it and for its teacher."""
        longest = max(len(example.ids), len(example.teacher.ids) if example.teacher else 0)
        return example.start < len(example.ids) and longest <= self.backbone.max_positions

    def gradient_step(self, backward: Callable[[], dict[str, float]]) -> dict[str, float]:
        """One gradient step after ``backward``, whose metrics it returns with norm and step size.

        A step without a gradient, or with one or a loss that is not finite, changes no weight; it
        is counted in ``skipped_steps`` and still counts as a step, so that the run goes on.
        """
        optimizer = self.optimizers()
        assert isinstance(optimizer, LightningOptimizer)
        began = time.perf_counter()
        with torch.random.fork_rng():  # dropout follows from seed and step, so resuming is exact
            torch.manual_seed(torch.initial_seed() + self.global_step)
            self._loss = torch.zeros((), device=self.backbone.device)
            metrics = backward()
        empty = not add_gradients(p for p in self.parameters() if p.requires_grad)
        norm = self._clip(self.optimizer_config.clip_norm)
        why = self._why_skipped(norm, empty)
        with whole():
            if why:
                self.counts["skipped_steps"] += 1
                log.warning("step %d skipped: %s", self.global_step, why)
                optimizer.zero_grad()
            optimizer.step()
            optimizer.zero_grad()
            scheduler = self.lr_schedulers()
            metrics["lr"] = optimizer.param_groups[0]["lr"]
            scheduler.step()  # type: ignore[union-attr]
            self.backbone.versions["online"] += 1
        self.seconds["optimize"] += time.perf_counter() - began
        return metrics | {"grad_norm": float(norm)}

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self._loss = self._loss + loss.detach()  # a loss that is nan or inf stays so
        super().manual_backward(loss, *args, **kwargs)

    def _why_skipped(self, norm: Tensor, empty: bool) -> str | None:
        """Why this step should change nothing, or None; all processes say the same.

        Args:
            norm: of the gradient, summed over the processes.
            empty: no process has a gradient.
        """
        wrong = None
        if not torch.isfinite(self._loss):
            wrong = f"loss of {float(self._loss)}"
        elif not torch.isfinite(norm):
            wrong = f"gradient norm of {float(norm)}"
        found = [reason for reason in gather(wrong) if reason is not None]
        if found:
            self._skipped.reason = wrong or f"{found[0]} in another process"
            return self._skipped.reason
        return "nothing to train on" if empty else None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        folder = Path(self.trainer.default_root_dir, "skipped")
        if self.trainer.world_size > 1:
            folder /= f"rank_{self.global_rank}"
        self._skipped.after_step(folder, self.global_step, batch)

    def _clip(self, max_norm: float) -> Tensor:
        parameters = [p for p in self.parameters() if p.grad is not None]
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    def log_step(self, metrics: dict[str, float], batch_size: int) -> None:
        """Log scalars of a training step under ``train/``, with the costs so far.

        Metrics are means over the processes, counts their sums.
        """
        values = {f"train/{name}": float(n) for name, n in means(gather(metrics)).items()}
        counts, costs = sums(gather(dict(self.counts))), sums(gather(dict(self.generator.counts)))
        values |= {f"count/{name}": n for name, n in counts.items()}
        values["gen/tokens"] = costs.get("generated_tokens", 0.0)
        for name in ("prefilled_tokens", "prompt_tokens", "read_tokens", "too_long"):
            values[f"gen/{name}"] = costs.get(name, 0.0)
        self.log_dict(values, batch_size=max(batch_size, 1))

    def whole(self) -> AbstractContextManager[None]:
        """See :meth:`Backbone.whole`; a policy behind an endpoint has no base to hold."""
        return self.backbone.whole() if hasattr(self, "backbone") else nullcontext()

    def on_validation_epoch_start(self) -> None:
        self._episodes = []

    def validation_step(self, batch: list[Task], batch_idx: int) -> None:
        """Play a batch of tasks with the trained policy."""
        with self.whole():
            self._episodes += self.evaluator().play(batch, "online", "trained")

    def on_validation_epoch_end(self) -> None:
        result = EvaluationResult(
            "trained", "val", _all_episodes(self._episodes), self.env.name if self.env else ""
        )
        self.log_dict(scalars(result, "val"))

    def on_test_epoch_start(self) -> None:
        self._tested = {}

    def test_step(self, batch: list[Task], batch_idx: int) -> None:
        """Play a batch of tasks with each tested policy, and again what failed, if configured."""
        evaluator = self.evaluator()
        with self.whole():
            for policy, adapter in self.tested().items():
                actor = self.actor(adapter)
                for label, records in evaluator.play_with_retries(batch, policy, actor):
                    self._tested.setdefault(label, []).extend(records)

    def on_test_epoch_end(self) -> None:
        env = self.env.name if self.env else ""
        results = [
            EvaluationResult(p, "test", _all_episodes(e), env) for p, e in self._tested.items()
        ]
        folder = evaluation_folder(self.trainer)
        for result in results:
            self.log_dict(scalars(result, f"test/{result.policy}"))
        if not self.trainer.is_global_zero:
            return
        for result in results:
            write_result(folder, result, TRANSCRIPTS)
        lines = [write_comparison(folder, results), "", f"transcripts: {folder}"]
        if "trained" in self._tested and not self.backbone.versions["online"]:
            lines.append("The adapter is untrained, so both are the base: give --ckpt_path.")
        self._comparison = "\n".join(lines)

    def teardown(self, stage: str) -> None:
        generator = getattr(self, "generator", None)
        if isinstance(generator, VLLMGenerator):
            generator.close()
        if self._comparison:  # last, below Lightning's own table
            print(f"\n{self._comparison}", flush=True)
            self._comparison = ""

    def predict_step(self, batch: list[Task], batch_idx: int) -> list[dict[str, Any]]:
        """Play a batch of tasks with the trained policy; returns :class:`EpisodeRecord` fields.

        Plain dictionaries, since Lightning refuses predictions that are frozen dataclasses.
        """
        with self.whole():
            return [asdict(record) for record in self.evaluator().play(batch, "online", "trained")]

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """What is trained only: the base model is loaded by name and never saved."""
        return {
            plain_name(name): parameter.detach()
            for name, parameter in self.named_parameters()
            if self._saves(name)
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        """Set what :meth:`state_dict` holds; :meth:`on_load_checkpoint` has compared the names."""
        for name, own in self.state_dict().items():
            own.copy_(state_dict[name])

    def _saves(self, name: str) -> bool:
        return any(part in name for part in self.saved_parameters)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        lora = self.backbone.model.peft_config["online"]
        targets, progress = lora.target_modules, self.progress()
        if isinstance(self.generator, InProcessGenerator):
            self.generator.forget()  # so that this run goes on bit for bit like a resumed one
        checkpoint["nlac"] = {
            "base": self.backbone_config.name,
            "base_fingerprint": self.backbone.base_fingerprint,
            "lora": {
                "r": lora.r,
                "lora_alpha": lora.lora_alpha,
                "lora_dropout": lora.lora_dropout,
                "target_modules": targets if isinstance(targets, str) else sorted(targets),
            },
            **progress,
            "counts": sums(gather(progress["counts"])),
            "generator": sums(gather(progress["generator"])),
        }

    def progress(self) -> dict[str, Any]:
        """This process's counters, and what else a step changes beside the weights."""
        return {
            "versions": dict(self.backbone.versions),
            "counts": dict(self.counts),
            "generator": dict(self.generator.counts),
        }

    def restore_progress(self, state: dict[str, Any]) -> None:
        """Return to what :meth:`progress` said."""
        self.backbone.versions.update(state["versions"])
        for counts, before in (
            (self.counts, state["counts"]),
            (self.generator.counts, state["generator"]),
        ):
            counts.clear()
            counts.update(before)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of another model or without an adapter; restore counters."""
        self.configure_model()
        own = self.state_dict()
        found = checkpoint.get("state_dict", {})
        wrong = sorted(set(own) ^ set(found)) or [
            name for name, value in own.items() if value.shape != found[name].shape
        ]
        facts = checkpoint.get("nlac", {})
        mine = self.backbone.base_fingerprint
        if not wrong and facts.get("base_fingerprint", mine) != mine:
            wrong = ["the base model's own weights"]
        if wrong:
            saved = facts.get("base", "another model")
            raise ConfigError(
                "ckpt_path",
                f"it holds adapters of {saved} that do not fit {self.backbone_config.name} "
                f"(first difference: {wrong[0]})",
                "use the checkpoint's own model.backbone settings",
            )
        state = dict(checkpoint["nlac"])
        if rank() > 0:  # its counts are sums over the processes
            state |= {"counts": {}, "generator": {}}
        self.restore_progress(state)


def _all_episodes(own: Sequence[EpisodeRecord]) -> list[EpisodeRecord]:
    """All processes' episodes; a task that was dealt to two of them to fill up counts once."""
    played: dict[str, list[EpisodeRecord]] = {}
    for part in gather(list(own)):
        new = [record for record in part if record.task_id not in played]
        for record in new:
            played.setdefault(record.task_id, []).append(record)
    return [record for records in played.values() for record in records]
