"""Does it learn, and is the critic right? Runs in the language MDP beside the exact solution.

    python benchmarks/learning.py [--methods accept refine] [--seeds 5] [--level 2] [--json FILE]

Each run is one Lightning run with the rollouts, buffer, EMA and checkpoint-free trainer that any
user has. Its measurements are kept in ``--folder``; a run that is there is not repeated, so an
interrupted benchmark goes on where it stopped. Every success rate is exact.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning
import numpy as np

from nlac_lightning.algorithms.base import Algorithm, ComputeConfig, OptimizerConfig
from nlac_lightning.algorithms.nlac import NLAC, LossConfig
from nlac_lightning.algorithms.warmup import WarmupConfig
from nlac_lightning.analysis import ImprovementStep, fixed_point
from nlac_lightning.analysis.language_model import critic_scores, critic_table, policy_table
from nlac_lightning.backbone import BackboneConfig
from nlac_lightning.callbacks import EMACallback, RolloutCallback
from nlac_lightning.data import ReplayDataModule
from nlac_lightning.envs.language_mdp import LanguageMDPEnv
from nlac_lightning.generation.base import Sampling
from nlac_lightning.models import TINY
from nlac_lightning.roles.roles import RoleConfig, RolesConfig
from nlac_lightning.rollout import RolloutLimits

LR = 5e-3
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""Student's t for a two-sided 95% interval of the mean of so many runs."""


def parts(lr: float, guard: str = "base") -> dict[str, Any]:
    """Model, prompts and optimizer of every method; ``guard`` plays the roles that can drift."""

    def role(adapter: str, tokens: int, temperature: float = 1.0) -> RoleConfig:
        return RoleConfig(adapter, "none", Sampling(temperature, max_new_tokens=tokens))

    roles = RolesConfig(
        templates="language_mdp",
        format="plain",
        action="plain",
        policy=role("online", 4),
        successor=role("online", 10),
        backup=role("base" if guard == "base" else "target", 4, 0.0),
        evaluator=role(guard, 4, 0.0),
        refinement=role(guard, 4),
    )
    return {
        "backbone": BackboneConfig(TINY, lora_r=16, lora_alpha=32.0, dtype="float32"),
        "roles": roles,
        "optimizer": OptimizerConfig(lr=lr, warmup_steps=5),
        "compute": ComputeConfig(4096, 4096, 128),
    }


def nlac(seed: int, lr: float, guard: str = "base", **settings: Any) -> Algorithm:
    """NLAC with protected roles and policy."""
    settings = {"improvement": "accept", "loss": LossConfig(policy_kl=0.1)} | settings
    return NLAC(seed=seed, **parts(lr, guard), **settings)


@dataclass(frozen=True)
class Method:
    """What is run.

    Attributes:
        make: the algorithm for a seed and a step size.
        step: name of its improvement step, whose ceiling it is compared with; None without one.
        tau: of the EMA; 1 is no target network.
    """

    make: Callable[..., Algorithm]
    settings: dict[str, Any] = field(default_factory=dict)
    step: str | None = "accept"
    tau: float = 0.1


# Monte-Carlo targets are those of a warm-up that never ends but does not hold the policy back.
METHODS: dict[str, Method] = {
    "accept": Method(nlac),
    "refine": Method(nlac, {"improvement": "refine"}, "refine"),
    "refine_then_accept": Method(nlac, {"improvement": "refine_then_accept"}, "refine_then_accept"),
    "oracle": Method(nlac, {"critic": "oracle"}),
    "none": Method(nlac, {"critic": "none"}),
    "shuffled": Method(nlac, {"critic": "shuffled"}),
    "no_ema": Method(nlac, tau=1.0),
    "unprotected": Method(nlac, {"guard": "online", "loss": LossConfig()}),
    "evaluation": Method(nlac, {"loss": LossConfig(policy_weight=0.0)}, None),
    "evaluation_outcome": Method(
        nlac,
        {
            "loss": LossConfig(policy_kl=0.1),
            "warmup": WarmupConfig(min_steps=10**6, targets="outcome"),
        },
        None,
    ),
}
"""Add a method with one line. The last two train the critic alone, of a policy that stays."""


class ExactProgress(lightning.Callback):
    """Measures exactly before training and every few gradient steps."""

    def __init__(self, every: int) -> None:
        self.every, self.rows = every, []
        self.cpu = self.measuring = 0.0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.cpu, self.measuring = time.process_time(), 0.0
        self._measure(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step % self.every == 0:
            self._measure(trainer, pl_module)

    def _measure(self, trainer: Any, pl_module: Any) -> None:
        began = time.process_time()
        env = trainer.datamodule.env
        backbone, roles = pl_module.backbone, pl_module.roles
        policy = policy_table(backbone, roles, env)
        scores = critic_scores(env, policy, critic_table(backbone, roles, env))
        self.rows.append(
            {
                "step": trainer.global_step,
                "episodes": trainer.datamodule.buffer.high_water_mark,
                "generated_tokens": pl_module.generator.counts["generated_tokens"],
                "cpu_seconds": began - self.cpu - self.measuring,
                "success": env.success(policy, "test"),
                "train_success": env.success(policy, "train"),
                "valid": float((policy * env.world.exact.mdp.allowed).sum(-1).mean()),
                **scores,
            }
        )
        self.measuring += time.process_time() - began
        logging.getLogger(__name__).info("%s", self.rows[-1])


def run(
    name: str, level: int, seed: int, steps: int, every: int = 25, lr: float = LR
) -> list[dict[str, float]]:
    """One training run; returns its measurements."""
    method = METHODS[name]
    lightning.seed_everything(seed, verbose=False)
    progress = ExactProgress(every)
    env = LanguageMDPEnv(level, seed=seed)
    with tempfile.TemporaryDirectory() as folder:
        data = ReplayDataModule(
            env, batch_size=48, strategy="recency", recency_half_life=1000, seed=seed
        )
        trainer = lightning.Trainer(
            max_steps=steps,
            accelerator="cpu",
            devices=1,
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=0,
            callbacks=[
                RolloutCallback(
                    initial_episodes=64,
                    episodes=8,
                    every_n_steps=2,
                    limits=RolloutLimits(max_turns=30, parallel=64),
                    seed=seed,
                ),
                EMACallback(method.tau),
                progress,
            ],
        )
        trainer.fit(method.make(seed, lr, **method.settings), datamodule=data)
    return progress.rows


def ceiling(step: str, level: int, seed: int) -> float:
    """Exact success at the fixed point of an improvement step under an exact critic."""
    mdp = LanguageMDPEnv(level, seed=seed).exact("test").mdp
    closed = step == "refine"
    return fixed_point(mdp, ImprovementStep(step), tolerance=1e-7, closed_form=closed).success


def interval(values: Sequence[float]) -> str:
    """Mean and half-width of its 95% interval."""
    mean = f"{np.mean(values):.3f}"
    if len(values) not in T_95:
        return mean
    half = T_95[len(values)] * np.std(values, ddof=1) / math.sqrt(len(values))
    return f"{mean} ± {half:.3f}"


def main() -> None:
    """Run what is missing, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--level", type=int, default=2, choices=(1, 2, 3))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=25)
    parser.add_argument("--lr", type=float, default=LR)
    parser.add_argument("--folder", type=Path, default=Path("runs/learning"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    options.folder.mkdir(parents=True, exist_ok=True)
    results = []
    for name in options.methods:
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            key = f"{name}-level{options.level}-lr{options.lr:g}-{options.steps}-seed{seed}"
            kept = options.folder / f"{key}.json"
            if not kept.exists():
                rows = run(name, options.level, seed, options.steps, options.every, options.lr)
                step = METHODS[name].step
                result = {
                    "method": name,
                    "level": options.level,
                    "seed": seed,
                    "lr": options.lr,
                    "baselines": LanguageMDPEnv(options.level, seed=seed).baselines(),
                    "ceiling": ceiling(step, options.level, seed) if step else None,
                    "rows": rows,
                }
                kept.write_text(json.dumps(result, indent=1) + "\n")
            results.append(json.loads(kept.read_text()))
            first, last = results[-1]["rows"][0], results[-1]["rows"][-1]
            print(
                f"{key}: success {first['success']:.3f} -> {last['success']:.3f}, "
                f"spearman {last['spearman']:.2f}, auroc {last['auroc']:.2f}, "
                f"{last['cpu_seconds']:.0f} CPU-s",
                flush=True,
            )
    print(table(results))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


def table(results: Sequence[dict[str, Any]]) -> str:
    """Last measurements by method, above them what needs no learning."""
    lines = [f"{'':20} {'success':>16} {'of ceiling':>16} {'AUROC':>16} {'Spearman':>16}"]
    unlearned = {r["seed"]: r["baselines"] for r in results}.values()
    for name in ("uniform", "heuristic", "one_step_critic", "optimal"):
        lines.append(f"{name:20} {interval([b[name] for b in unlearned]):>16}")
    for name in dict.fromkeys(result["method"] for result in results):
        own = [r for r in results if r["method"] == name]
        last = [r["rows"][-1] for r in own]
        cells = [interval([row["success"] for row in last])]
        shares = [
            row["success"] / r["ceiling"] for row, r in zip(last, own, strict=True) if r["ceiling"]
        ]
        cells.append(interval(shares) if shares else "-")
        cells += [interval([row[score] for row in last]) for score in ("auroc", "spearman")]
        lines.append(f"{name:20} " + " ".join(f"{cell:>16}" for cell in cells))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
