"""Two real processes: DDP, FSDP and FSDP2 against plain forward passes in one process.

Both processes are started once (a script that forks after its imports); each runs all jobs of
:func:`worker`, and the tests look at what they left behind.
"""

from __future__ import annotations

import faulthandler
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from nlac_lightning import distributed
from nlac_lightning.algorithms.config import ComputeConfig, OptimizerConfig
from nlac_lightning.algorithms.grpo import GRPO
from nlac_lightning.algorithms.loss_config import LossConfig
from nlac_lightning.algorithms.nlac import NLAC
from nlac_lightning.backbone import BackboneConfig
from nlac_lightning.callbacks import EMACallback, HeldOutEvaluation, RolloutCallback
from nlac_lightning.cli import main
from nlac_lightning.data import ReplayDataModule
from nlac_lightning.distributed import agree
from nlac_lightning.envs.help_desk import HelpDeskEnv
from nlac_lightning.errors import ConfigError
from nlac_lightning.evaluation.evaluate import EvaluationConfig
from nlac_lightning.generation.base import Sampling
from nlac_lightning.replay.buffer import ReplayBuffer
from nlac_lightning.roles.roles import RoleConfig, RolesConfig
from nlac_lightning.rollout import Exploration, RolloutLimits
from nlac_lightning.sharding import FSDPBaseStrategy, ShardedBaseStrategy

# A random model never ends a line; many of its tokens hold one of these letters, so texts differ
# in length from process to process.
ENDS = Sampling(temperature=1.0, max_new_tokens=16, stop=("e", "a"))
LR, CLIP, TAU, STEPS, BATCH, EPISODES, KL = 1e-3, 0.05, 0.25, 2, 3, 5, 0.5
pytestmark = pytest.mark.timeout(1200)
STRATEGIES = ("ddp", "fsdp", "fsdp2")
DEADLINE = 900
"""Seconds after which processes that wait for each other say where, and fail the tests."""
SMALL = """
model:
  init_args:
    backbone: {name: MODEL, lora_r: 2, dtype: float32, target_modules: all-linear}
    warmup: {min_steps: 0, max_steps: 0}
    evaluation: {critic_steps: 2, limits: {max_turns: 2}}
data:
  env: {class_path: nlac_lightning.envs.help_desk.HelpDeskEnv, init_args: {n_train: 8, n_test: 3}}
  batch_size: 3
trainer:
  max_steps: 2
  default_root_dir: ROOT
  logger: {class_path: lightning.pytorch.loggers.CSVLogger, init_args: {save_dir: ROOT, name: logs}}
  callbacks:
    - class_path: nlac_lightning.callbacks.HeldOutEvaluation
      init_args: {split: test, tasks: 3}
    - class_path: nlac_lightning.callbacks.RolloutCallback
      init_args:
        initial_episodes: 4
        episodes: 3
        every_n_steps: 1
        initial_exploration: {kind: return, epsilon: 1.0}
        limits: {max_turns: 2}
    - class_path: nlac_lightning.callbacks.EMACallback
    - class_path: nlac_lightning.callbacks.Console
    - class_path: nlac_lightning.callbacks.InterruptCheckpoint
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
      init_args: {dirpath: ROOT/checkpoints, save_last: true, every_n_train_steps: 1}
"""


def build(path: str, **options: Any) -> NLAC:
    role = RoleConfig(sampling=ENDS)
    roles = {name: role for name in ("policy", "successor", "evaluator", "refinement")}
    return NLAC(
        roles=RolesConfig(
            templates="help_desk_small",
            format="plain",
            action="plain",
            backup=RoleConfig(adapter="target", sampling=ENDS),
            **roles,
        ),
        backbone=BackboneConfig(path, lora_r=2, dtype="float32"),
        optimizer=OptimizerConfig(lr=LR, warmup_steps=0, clip_norm=CLIP),
        # packs so small that the processes have unequal numbers of them
        compute=ComputeConfig(train_pack_tokens=96, prefill_pack_tokens=128),
        evaluation=EvaluationConfig(critic_steps=2, limits=RolloutLimits(max_turns=2), trials=2),
        **options,
    )


def stored_actions(path: str) -> NLAC:
    """Learns the buffer's actions alone, so that a step can be computed by hand."""
    loss = LossConfig(critic_weight=0.0, policy_weight=1.0, policy_kl=KL)
    return build(path, improvement="accept", critic="none", base_action="buffer", loss=loss)


def data(folder: Path, **options: Any) -> ReplayDataModule:
    env = HelpDeskEnv(level=0, n_train=8, n_test=3)
    return ReplayDataModule(env, str(folder / "replay.sqlite"), batch_size=BATCH, **options)


class Start(lightning.Callback):
    """Equal adapters that are not zero."""

    def on_fit_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        assert isinstance(pl_module, NLAC)
        shake(pl_module)


def shake(module: NLAC) -> None:
    generator = torch.Generator().manual_seed(3)
    for adapter in ("online", "target"):
        for parameter in module.backbone.adapter_parameters(adapter).values():
            nn.init.normal_(parameter, std=0.1, generator=generator)


def trainer(folder: Path, steps: int = STEPS, **options: Any) -> lightning.Trainer:
    rollouts = RolloutCallback(
        initial_episodes=EPISODES,
        episodes=0,
        initial_exploration=Exploration("epsilon", 0.5),
        limits=RolloutLimits(max_turns=3),
    )
    return lightning.Trainer(
        max_steps=steps,
        limit_val_batches=0,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **{"callbacks": [Start(), rollouts, EMACallback(TAU)], **options},
    )


def two_processes(strategy: str) -> dict[str, Any]:
    chosen: Any = strategy
    if strategy == "fsdp2":
        chosen = ShardedBaseStrategy(
            data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo"
        )
    elif strategy == "fsdp":  # for GPUs, but torch's own FSDP also runs on CPUs
        chosen = FSDPBaseStrategy(process_group_backend="gloo")
    return {"devices": 2, "strategy": chosen, "use_distributed_sampler": False}


def adapters(module: NLAC) -> dict[str, Tensor]:
    return {
        f"{adapter}/{name}": parameter.detach().clone()
        for adapter in ("online", "target")
        for name, parameter in module.backbone.adapter_parameters(adapter).items()
    }


class Losses(lightning.Callback):
    """The logged numbers of each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        self.steps.append({k: float(v) for k, v in trainer.callback_metrics.items()})


def by_strategy(strategy: str, path: str, folder: Path) -> dict[str, Any]:
    """Two steps that can be computed by hand, and a checkpoint."""
    folder.mkdir(exist_ok=True)
    torch.manual_seed(int(os.environ["LOCAL_RANK"]))  # unequal adapters, were they not sent
    module, losses = stored_actions(path), Losses()
    run = trainer(folder, **two_processes(strategy))
    run.callbacks.append(losses)  # type: ignore[attr-defined]
    run.fit(module, data(folder))
    run.save_checkpoint(folder / "two.ckpt")
    held = sum(
        (p.to_local() if isinstance(p, DTensor) else p).numel()
        for name, p in module.backbone._decoder.layers.named_parameters()
        if "lora_" not in name
    )
    return {"adapters": adapters(module), "steps": losses.steps, "held": held}


def the_papers(path: str, folder: Path) -> dict[str, Any]:
    """The paper's step over shards, with texts of unequal lengths at every turn, and evaluation."""
    folder.mkdir(exist_ok=True)
    module = build(path, loss=LossConfig(role_replay=0.5))
    held_out = HeldOutEvaluation(tasks=3)
    run = trainer(folder, 1, **two_processes("fsdp2"))
    run.callbacks.append(held_out)  # type: ignore[attr-defined]
    run.fit(module, data(folder, buffer_per_process=True))
    episodes = held_out.results["trained"].episodes
    return {"adapters": adapters(module), "evaluated": [e.task_id for e in episodes]}


def command_line(path: str, folder: Path) -> dict[str, Any]:
    """``nlac fit`` with a task's config, a strategy's and a smaller one over them."""
    folder.mkdir(exist_ok=True)
    small = folder / "small.yaml"
    small.write_text(SMALL.replace("MODEL", path).replace("ROOT", str(folder)))
    overlays = ("quickstart", "strategy/ddp", str(small))
    main(["fit", *(word for name in overlays for word in ("--config", name))])
    return {"adapters": torch.load(folder / "checkpoints/last.ckpt")["state_dict"]}


def agreed(failing: int | None) -> str:
    """How this process leaves an agreement in which process ``failing`` has failed."""
    try:
        agree(OSError("disk full") if distributed.rank() == failing else None)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "goes on"


def worker(path: str, folder: Path) -> None:
    """One of the two processes."""
    result = {name: by_strategy(name, path, folder / name) for name in STRATEGIES}
    result["paper"] = the_papers(path, folder / "paper")
    result["cli"] = command_line(path, folder / "cli")
    try:
        run = trainer(folder / "refused", **two_processes("ddp"))
        run.fit(GRPO(backbone=BackboneConfig(path)), data(folder))
    except ConfigError as error:
        result["on_policy"] = {"error": str(error)}
    result["agree"] = {str(failing): agreed(failing) for failing in (None, 0, 1)}
    torch.save(result, folder / f"{os.environ['LOCAL_RANK']}.pt")


@dataclass
class Ran:
    """What the two processes left behind."""

    folder: Path
    path: str
    results: list[dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def ran(tiny_llama_path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    folder = tmp_path_factory.mktemp("two")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "NODE_RANK": "0",
    }
    command = [sys.executable, __file__, tiny_llama_path, str(folder)]
    done = subprocess.run(
        command, env=environment, timeout=DEADLINE + 60, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    yield Ran(folder, tiny_llama_path, [torch.load(folder / f"{n}.pt") for n in (0, 1)])


def test_a_failure_of_one_process_ends_all(ran: Ran) -> None:
    first, second = (result["agree"] for result in ran.results)
    assert first == {
        "None": "goes on",
        "0": "OSError: disk full",
        "1": "StoppedRun: process 1 stopped. OSError: disk full",
    }
    assert second == {
        "None": "goes on",
        "0": "StoppedRun: process 0 stopped. OSError: disk full",
        "1": "OSError: disk full",
    }


@dataclass
class ByHand:
    """The same steps by one plain forward pass for each example of both processes."""

    start: dict[str, Tensor]
    end: dict[str, Tensor]
    steps: list[dict[str, float]]


def by_hand(path: str, folder: Path) -> ByHand:
    module = stored_actions(path)
    module.configure_model()
    shake(module)
    start, steps = adapters(module), []
    backbone = module.backbone.eval()
    online = list(backbone.adapter_parameters("online").values())
    optimizer = torch.optim.AdamW(online, lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
    source = data(folder)
    sampler = source._make_sampler(source.buffer)
    for step in range(STEPS):
        drawn = [
            x
            for number in (2 * step, 2 * step + 1)
            for x in source.buffer.transitions(sampler.draw(number))
        ]
        nll, kl = [], []
        for x in drawn:
            prompt = module.roles.prompt("policy", x.state_ids, x.state_messages).ids
            ids = torch.tensor([[*prompt, *x.turn.action_ids]])
            log_p = {}
            for adapter in ("online", "target"):
                with backbone.use(adapter):
                    logits = backbone.model(ids).logits[0, len(prompt) - 1 : -1]
                    log_p[adapter] = logits.log_softmax(-1)
            if x.turn.finish_reason != "length":  # a cut-off action is not distilled
                nll.append(-log_p["online"].gather(1, ids[0, len(prompt) :, None])[:, 0])
            teacher = log_p["target"].detach()
            total = F.kl_div(log_p["online"], teacher, log_target=True, reduction="sum")
            kl.append(total / len(x.turn.action_ids))
        share = len(nll) / len(drawn)
        loss = share * torch.cat(nll).mean() + KL * torch.stack(kl).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = float(nn.utils.clip_grad_norm_(online, CLIP))
        optimizer.step()
        backbone.copy_online_to_target(TAU)
        steps.append(
            {
                "train/policy": float(torch.stack([x.mean() for x in nll]).detach().mean()),
                "train/policy_kl": float(torch.stack(kl).detach().mean()),
                "train/grad_norm": norm,
                "train/distilled": share,
            }
        )
    source.buffer.close()
    return ByHand(start, adapters(module), steps)


def flat(weights: dict[str, Tensor]) -> Tensor:
    return torch.cat([weights[name].flatten() for name in sorted(weights)])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_processes_equal_one(ran: Ran, strategy: str) -> None:
    """Losses, clipped gradient norm and adapters are those of one process with both batches."""
    truth = by_hand(ran.path, ran.folder / strategy)
    first, second = (result[strategy] for result in ran.results)
    update = flat(truth.end) - flat(truth.start)
    for result in (first, second):
        for step, expected in zip(result["steps"], truth.steps, strict=True):
            assert expected["train/grad_norm"] > CLIP, "clipping matters"
            for name, value in expected.items():
                assert step[name] == pytest.approx(value, rel=1e-5, abs=1e-7), name
        error = flat(result["adapters"]) - flat(truth.end)
        assert error.norm() < 1e-4 * update.norm()
    assert torch.equal(flat(first["adapters"]), flat(second["adapters"]))
    whole = ran.results[0]["ddp"]["held"]
    assert first["held"] == second["held"] == (whole if strategy == "ddp" else whole // 2)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_shared_buffer_has_no_duplicates(ran: Ran, strategy: str) -> None:
    with ReplayBuffer(ran.folder / strategy / "replay.sqlite") as buffer:
        seeds = [episode.seed for episode in buffer.iter_episodes()]
    assert len(seeds) == EPISODES == len(set(seeds))


def test_buffers_of_their_own_share_no_episode(ran: Ran) -> None:
    seeds = []
    for n in (0, 1):
        with ReplayBuffer(ran.folder / "paper" / f"replay.{n}.sqlite") as buffer:
            seeds.append([episode.seed for episode in buffer.iter_episodes()])
    assert sorted(map(len, seeds)) == [EPISODES // 2, EPISODES - EPISODES // 2]
    assert len({seed for own in seeds for seed in own}) == EPISODES


def test_generation_of_unequal_lengths_over_shards(ran: Ran) -> None:
    """It has not hung; both processes learned the same, and each task was evaluated in one."""
    first, second = (result["paper"] for result in ran.results)
    assert torch.equal(flat(first["adapters"]), flat(second["adapters"]))
    tasks = [task.id for task in HelpDeskEnv(level=0, n_train=8, n_test=3).tasks("test")]
    assert first["evaluated"] == second["evaluated"] == [task for task in tasks for _ in range(2)]


def test_on_policy_algorithms_are_refused(ran: Ran) -> None:
    assert "trainer.devices" in ran.results[0]["on_policy"]["error"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_process_continues_what_two_saved(ran: Ran, strategy: str) -> None:
    module, seen = stored_actions(ran.path), {}
    source = data(ran.folder / strategy)

    class Look(lightning.Callback):
        def on_train_start(
            self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
        ) -> None:
            seen.update(adapters(module))
            seen["position"] = torch.tensor(source.position)

    run = trainer(ran.folder / strategy, STEPS + 1, callbacks=[Look()], devices=1)
    run.fit(module, source, ckpt_path=ran.folder / strategy / "two.ckpt", weights_only=True)
    assert run.global_step == STEPS + 1
    assert seen.pop("position") == 2 * STEPS, "no batch is drawn again"
    saved = ran.results[0][strategy]["adapters"]
    assert all(torch.equal(value, seen[name]) for name, value in saved.items())
    moments = run.optimizers[0].state_dict()["state"]
    assert {int(s["step"]) for s in moments.values()} == {STEPS + 1}


def test_buffers_of_their_own_need_as_many_processes(ran: Ran) -> None:
    source = data(ran.folder / "paper", buffer_per_process=True)
    assert source.own_mark([7]) == 7
    with pytest.raises(ConfigError, match=r"data\.buffer_per_process"):
        source.own_mark([3, 2])


def test_nlac_fit_with_an_overlay(ran: Ran) -> None:
    """Rollouts, evaluation, checkpoints and the closing table, in two processes."""
    with ReplayBuffer(ran.folder / "cli" / "replay.sqlite") as buffer:
        seeds = [episode.seed for episode in buffer.iter_episodes()]
    assert len(seeds) == 4 + 3 == len(set(seeds))  # none are played after the last step
    assert list((ran.folder / "cli/logs").glob("*/evaluation/trained.json"))
    first, second = (result["cli"]["adapters"] for result in ran.results)
    assert len(first) > 0 and all(torch.equal(first[n], second[n]) for n in first)


if __name__ == "__main__":  # both processes of the fixture ``ran``
    child = os.fork()
    os.environ["LOCAL_RANK"] = "0" if child else "1"
    faulthandler.dump_traceback_later(DEADLINE, exit=True)
    worker(sys.argv[1], Path(sys.argv[2]))
    if child:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
