"""Two real processes: DDP and FSDP2 against plain forward passes in one process."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nlac_lightning.algorithms.base import ComputeConfig, OptimizerConfig
from nlac_lightning.algorithms.nlac import NLAC, LossConfig
from nlac_lightning.backbone import BackboneConfig
from nlac_lightning.callbacks import EMACallback, HeldOutEvaluation, RolloutCallback
from nlac_lightning.data import ReplayDataModule
from nlac_lightning.distributed import ShardedBaseStrategy
from nlac_lightning.envs.help_desk import HelpDeskEnv
from nlac_lightning.evaluation.evaluate import EvaluationConfig
from nlac_lightning.generation.base import Sampling
from nlac_lightning.replay.buffer import ReplayBuffer
from nlac_lightning.roles.roles import RoleConfig, RolesConfig
from nlac_lightning.rollout import Exploration, RolloutLimits

# A random model never ends a line; many of its tokens hold one of these letters, so texts differ
# in length from process to process.
ENDS = Sampling(temperature=1.0, max_new_tokens=16, stop=("e", "a"))
LR, CLIP, TAU, STEPS, BATCH, EPISODES = 1e-3, 0.05, 0.25, 2, 3, 5


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
        evaluation=EvaluationConfig(critic_steps=2, limits=RolloutLimits(max_turns=2)),
        **options,
    )


def stored_actions(path: str) -> NLAC:
    """Learns the buffer's actions alone, so that a step can be computed by hand."""
    loss = LossConfig(critic_weight=0.0, policy_weight=1.0, policy_kl=0.5)
    return build(path, improvement="accept", critic="none", base_action="buffer", loss=loss)


def data(folder: Path) -> ReplayDataModule:
    env = HelpDeskEnv(level=0, n_train=8, n_test=3)
    return ReplayDataModule(env, str(folder / "replay.sqlite"), batch_size=BATCH)


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


def adapters(module: NLAC) -> dict[str, Tensor]:
    return {
        f"{adapter}/{name}": parameter.detach().clone()
        for adapter in ("online", "target")
        for name, parameter in module.backbone.adapter_parameters(adapter).items()
    }


def worker(strategy: str, path: str, folder: Path) -> None:
    """One of the two processes."""
    sharded = ShardedBaseStrategy(
        data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo"
    )
    options: dict[str, Any] = {
        "devices": 2,
        "strategy": sharded if strategy == "fsdp2" else "ddp",
        "use_distributed_sampler": False,
    }
    torch.manual_seed(int(os.environ["LOCAL_RANK"]))  # unequal adapters, were they not sent
    module = stored_actions(path)
    run = trainer(folder, **options)
    run.fit(module, data(folder))
    run.save_checkpoint(folder / "two.ckpt")
    layer = module.backbone._decoder.layers[0].mlp.up_proj.base_layer.weight
    result: dict[str, Any] = {
        "adapters": adapters(module),
        "grad_norm": float(run.logged_metrics["train/grad_norm"]),
        "local": layer.to_local().numel() if strategy == "fsdp2" else layer.numel(),
    }
    if strategy == "fsdp2":  # the paper's step, with texts of unequal lengths at every turn
        whole = build(path, loss=LossConfig(role_replay=0.5))
        held_out = HeldOutEvaluation(tasks=3)
        again = ShardedBaseStrategy(
            data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo"
        )
        run = trainer(folder, 1, **{**options, "strategy": again, "callbacks": [Start(), held_out]})
        run.fit(whole, data(folder))
        result["paper"] = adapters(whole)
        result["episodes"] = len(held_out.results["trained"].episodes)
    torch.save(result, folder / f"{run.global_rank}.pt")


def launch(strategy: str, path: str, folder: Path) -> list[dict[str, Any]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, __file__, strategy, path, str(folder)]
    workers = [
        subprocess.Popen(command, env={**environment, "LOCAL_RANK": str(n), "NODE_RANK": "0"})
        for n in (0, 1)
    ]
    try:
        assert [process.wait(timeout=250) for process in workers] == [0, 0]
    finally:
        for process in workers:
            process.kill()
    return [torch.load(folder / f"{n}.pt") for n in (0, 1)]


def by_hand(path: str, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], float]:
    """The same steps by one plain forward pass for each example.

    Returns:
        Adapters before and after, and the last gradient norm.
    """
    module = stored_actions(path)
    module.configure_model()
    shake(module)
    start = adapters(module)
    backbone = module.backbone.eval()
    online = list(backbone.adapter_parameters("online").values())
    optimizer = torch.optim.AdamW(online, lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
    source = data(folder)
    sampler = source._make_sampler(source.buffer)
    norm = math.nan
    for step in range(STEPS):
        total = torch.zeros(())
        for draw in (2 * step, 2 * step + 1):
            for x in source.buffer.transitions(sampler.draw(draw)):
                prompt = module.roles.prompt("policy", x.state_ids, x.state_messages).ids
                ids = torch.tensor([[*prompt, *x.turn.action_ids]])
                log_p = {}
                for adapter in ("online", "target"):
                    with backbone.use(adapter):
                        logits = backbone.model(ids).logits[0, len(prompt) - 1 : -1]
                        log_p[adapter] = logits.log_softmax(-1)
                answers = ids[0, len(prompt) :, None]
                nll = -log_p["online"].gather(1, answers).mean()
                teacher = log_p["target"].detach()
                kl = F.kl_div(log_p["online"], teacher, log_target=True, reduction="sum")
                # a cut-off action is not distilled
                distilled = nll if x.turn.finish_reason != "length" else 0.0 * nll
                total = total + (distilled + 0.5 * kl / len(answers)) / BATCH / 2
        optimizer.zero_grad()
        total.backward()
        norm = float(nn.utils.clip_grad_norm_(online, CLIP))
        optimizer.step()
        backbone.copy_online_to_target(TAU)
    source.buffer.close()
    return start, adapters(module), norm


def flat(weights: dict[str, Tensor]) -> Tensor:
    return torch.cat([weights[name].flatten() for name in sorted(weights)])


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_processes_equal_one(tiny_llama_path: str, tmp_path: Path, strategy: str) -> None:
    first, second = launch(strategy, tiny_llama_path, tmp_path)
    start, expected, norm = by_hand(tiny_llama_path, tmp_path)
    update = flat(expected) - flat(start)
    assert norm > CLIP, "clipping matters"
    for result in (first, second):
        assert result["grad_norm"] == pytest.approx(norm, rel=1e-3)
        # Adam divides by the gradient's size, so rounding shows in entries whose gradient is tiny
        error = flat(result["adapters"]) - flat(start) - update
        assert error.norm() < 0.01 * update.norm()
    assert torch.equal(flat(first["adapters"]), flat(second["adapters"]))
    with ReplayBuffer(tmp_path / "replay.sqlite") as buffer:
        played = [(e.task_id, e.seed) for e in buffer.iter_episodes()]
    assert len(played) == EPISODES and len({seed for _, seed in played}) == EPISODES
    if strategy == "fsdp2":
        assert first["local"] == 64 * 128 // 2, "each process holds its half"
        assert first["episodes"] == 3
        assert all(torch.equal(v, second["paper"][n]) for n, v in first["paper"].items())
    resume_on_one(tiny_llama_path, tmp_path, first["adapters"])


def resume_on_one(path: str, folder: Path, saved: dict[str, Tensor]) -> None:
    """What two processes saved is what one process continues with."""
    module, source, seen = stored_actions(path), data(folder), {}

    class Look(lightning.Callback):
        def on_train_start(
            self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
        ) -> None:
            seen.update(adapters(module))
            seen["position"] = torch.tensor(source.position)

    run = trainer(folder, STEPS + 1, callbacks=[Look()], devices=1)
    run.fit(module, source, ckpt_path=folder / "two.ckpt", weights_only=True)
    assert run.global_step == STEPS + 1
    assert seen.pop("position") == 2 * STEPS, "no batch is drawn again"
    assert all(torch.equal(value, seen[name]) for name, value in saved.items())
    moments = run.optimizers[0].state_dict()["state"]
    assert {int(s["step"]) for s in moments.values()} == {STEPS + 1}


if __name__ == "__main__":  # one process of test_two_processes_equal_one
    worker(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
