"""Does it learn, and is the critic right? Runs in the language MDP beside the exact solution.

    python benchmarks/learning.py [--methods accept grpo] [--seeds 5] [--level 2] [--json FILE]

Each run is one Lightning run with the rollouts, buffer, EMA and trainer that any user has, on a
world of its seed, until it has played ``--episodes``. Its measurements are kept in ``--folder``; a
run that is there is not repeated, so an interrupted benchmark goes on where it stopped. Every
success rate is exact. ``--sweep`` tries step sizes on other worlds (seeds from 100 on).
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning
from learning_report import draw, rows_of, table

from nlac_lightning.algorithms.base import Algorithm
from nlac_lightning.algorithms.config import ComputeConfig, OptimizerConfig
from nlac_lightning.algorithms.grpo import GRPO
from nlac_lightning.algorithms.loss_config import LossConfig
from nlac_lightning.algorithms.nlac import NLAC
from nlac_lightning.algorithms.nlrl import NLRL
from nlac_lightning.algorithms.ppo import PPO
from nlac_lightning.algorithms.rft import RFT
from nlac_lightning.algorithms.self_distillation import SelfDistillation
from nlac_lightning.algorithms.warmup import WarmupConfig
from nlac_lightning.analysis import ImprovementStep, fixed_point
from nlac_lightning.analysis.fixed_point import LIMITS
from nlac_lightning.analysis.progress import ExactProgress
from nlac_lightning.backbone import BackboneConfig
from nlac_lightning.callbacks import EMACallback, RolloutCallback
from nlac_lightning.data import ReplayDataModule
from nlac_lightning.envs.language_mdp import LanguageMDPEnv
from nlac_lightning.generation.base import Sampling
from nlac_lightning.models import TINY
from nlac_lightning.roles.roles import RoleConfig, RolesConfig
from nlac_lightning.rollout import Exploration, RolloutLimits

LIMITS_OF_A_WALK = RolloutLimits(max_turns=40, parallel=64)
WARMUP = 10
"""Gradient steps on the critic alone, which also see every outcome as often as it is."""
SWEEP_SEEDS = 100
"""Seeds of worlds on which step sizes are chosen start here."""


def parts(lr: float, guard: str = "base", decay_steps: int = 0) -> dict[str, Any]:
    """Model, prompts and optimizer of every method.

    ``guard`` plays the roles that can drift. The moving average foresees: step sizes that teach the
    policy in a hundred steps make the online adapter know little but its last few batches.
    """

    def role(adapter: str, tokens: int, temperature: float = 1.0) -> RoleConfig:
        return RoleConfig(adapter, "none", Sampling(temperature, max_new_tokens=tokens))

    roles = RolesConfig(
        templates="language_mdp",
        endings=("solved", "failed"),
        format="plain",
        action="plain",
        policy=role("online", 4),
        successor=role("target", 10),
        backup=role("base" if guard == "base" else "target", 4, 0.0),
        evaluator=role(guard, 4, 0.0),
        refinement=role(guard, 4),
    )
    return {
        "backbone": BackboneConfig(TINY, lora_r=16, lora_alpha=16.0, dtype="float32"),
        "roles": roles,
        "optimizer": OptimizerConfig(
            lr=lr, warmup_steps=5, decay_steps=decay_steps, betas=(0.9, 0.99)
        ),
        "compute": ComputeConfig(512, 512, 128),
    }


def nlac(
    seed: int, lr: float, guard: str = "base", decay_steps: int = 0, **settings: Any
) -> Algorithm:
    """NLAC with protected roles and policy, and a critic that begins with outcomes.

    The paper's targets alone would take this model's first verdicts, which are coin flips, for
    facts: a walk has sixteen turns or so, and the error only leaves at its end.
    """
    defaults: dict[str, Any] = {
        "improvement": "accept",
        "base_action": "buffer",
        "loss": LossConfig(policy_kl=0.1, lower_bound=True),
        "warmup": WarmupConfig(min_steps=WARMUP, targets="outcome"),
    }
    return NLAC(seed=seed, **parts(lr, guard, decay_steps), **(defaults | settings))


def grpo(seed: int, lr: float, **settings: Any) -> Algorithm:
    return GRPO(seed=seed, **parts(lr), **settings)


def ppo(seed: int, lr: float, **settings: Any) -> Algorithm:
    return PPO(seed=seed, **parts(lr), **settings)


def rft(seed: int, lr: float, **settings: Any) -> Algorithm:
    return RFT(seed=seed, **parts(lr), **settings)


def nlrl(seed: int, lr: float, **settings: Any) -> Algorithm:
    loss = LossConfig(policy_kl=0.1, critic_share=0.1)
    return NLRL(seed=seed, loss=loss, limits=LIMITS_OF_A_WALK, **parts(lr), **settings)


def self_distillation(seed: int, lr: float, **settings: Any) -> Algorithm:
    return SelfDistillation(seed=seed, limits=LIMITS_OF_A_WALK, **parts(lr), **settings)


@dataclass(frozen=True)
class Method:
    """What is run.

    Attributes:
        make: the algorithm for a seed and a step size.
        settings: passed to ``make``.
        lr: step size, chosen by ``--sweep``.
        step: name of its improvement step, whose ceiling it is compared with; None without one.
        tau: of the EMA; 1 is no target network.
        batch_size: transitions of a gradient step, of methods that leave it to the data module.
        success_share: of such a batch, that comes from successful episodes.
        every: gradient steps between two rounds of 32 episodes.
        initial: episodes before the first step.
        epsilon: share of the later walks' moves that are drawn from all exits.
        critic: whether it trains the successor model, so that its critic is worth measuring.
    """

    make: Callable[..., Algorithm]
    settings: dict[str, Any] = field(default_factory=dict)
    lr: float = 5e-3
    step: str | None = None
    tau: float = 0.1
    batch_size: int = 48
    success_share: float = 0.5
    every: int = 8
    initial: int = 64
    epsilon: float = 0.0
    critic: bool = True


OWN_ACTIONS: dict[str, Any] = {
    "improvement": "refine_then_accept",
    "base_action": "fresh",
    "k": 3,
    "targets": "outcome",
    "decay_steps": 96,
}
"""Success reaches the policy through critiques alone: no stored action is imitated."""

ADVANTAGE: dict[str, Any] = {
    "improvement": "advantage",
    "loss": LossConfig(
        policy_weight=0.1, policy_kl=0.1, discount=0.8, next_actions=4, support=0.02
    ),
    "warmup": WarmupConfig(min_steps=112),
    "decay_steps": 248,
}
"""Bootstrapped throughout; the policy learns slowly enough for its critic to follow.

It waits for 112 steps on 288 walks of the first policy, of which about eight succeed: after 64
steps on 192 walks, two worlds of five began on a critic that knew nothing."""


def advantage(**settings: Any) -> Method:
    """A run of ``advantage`` with some settings replaced."""
    own = {name: settings.pop(name) for name in ("step", "tau") if name in settings}
    options: dict[str, Any] = {"step": "advantage", "tau": 0.3} | own
    walks: dict[str, Any] = {"every": 32, "initial": 192, "epsilon": 0.1}
    return Method(nlac, ADVANTAGE | settings, 3e-3, batch_size=96, **walks, **options)


METHODS: dict[str, Method] = {
    "advantage": advantage(),
    "advantage_oracle": advantage(critic="oracle", step=None),
    "advantage_none": advantage(critic="none", step=None),
    "advantage_shuffled": advantage(critic="shuffled", step=None),
    "advantage_no_ema": advantage(tau=1.0),
    "advantage_monte_carlo": advantage(targets="outcome"),
    "advantage_unsupported": advantage(loss=replace(ADVANTAGE["loss"], support=0.0)),
    "advantage_unprotected": advantage(
        guard="online",
        loss=LossConfig(policy_weight=0.1, discount=0.8, next_actions=4),
    ),
    "accept": Method(nlac, step="accept"),
    "accept_majority": Method(nlac, {"k": 3}, step="accept"),
    "refine": Method(nlac, {"improvement": "refine"}, step="refine"),
    "refine_then_accept": Method(
        nlac, {"improvement": "refine_then_accept"}, step="refine_then_accept"
    ),
    "nlql": Method(nlac, {"improvement": "best_of_n"}, step="best_of_n"),
    "oracle": Method(nlac, {"critic": "oracle"}),
    "none": Method(nlac, {"critic": "none"}),
    "shuffled": Method(nlac, {"critic": "shuffled"}),
    "no_ema": Method(nlac, step="accept", tau=1.0),
    # The critic describes how the stored episode went on, after the warm-up too.
    "monte_carlo": Method(nlac, {"targets": "outcome"}, step="accept"),
    "no_role_replay": Method(nlac, {"guard": "online"}, step="accept"),
    "unprotected": Method(
        nlac, {"guard": "online", "loss": LossConfig(lower_bound=True)}, step="accept"
    ),
    "no_lower_bound": Method(nlac, {"loss": LossConfig(policy_kl=0.1)}, step="accept"),
    "no_success_share": Method(nlac, step="accept", success_share=0.0),
    "fresh_actions": Method(nlac, {"base_action": "fresh"}, step="accept"),
    "own_actions": Method(nlac, OWN_ACTIONS, step="refine_then_accept"),
    "own_actions_shuffled": Method(nlac, OWN_ACTIONS | {"critic": "shuffled"}),
    "own_actions_oracle": Method(nlac, OWN_ACTIONS | {"critic": "oracle"}),
    "grpo": Method(grpo, critic=False),
    "ppo": Method(ppo, lr=2e-3, critic=False),
    "rft": Method(rft, lr=1e-3, critic=False),
    "nlrl": Method(nlrl, step="best_of_n"),
    "self_distillation": Method(self_distillation, batch_size=8, critic=False),
    "evaluation": Method(
        nlac, {"loss": LossConfig(policy_weight=0.0, policy_kl=0.1)}, lr=2e-3, success_share=0.0
    ),
    "evaluation_monte_carlo": Method(
        nlac,
        {
            "loss": LossConfig(policy_kl=0.1),
            "warmup": WarmupConfig(min_steps=10**6, targets="outcome"),
        },
        lr=2e-3,
        success_share=0.0,
    ),
}
"""Add a method with one line. The last two train the critic alone, of a policy that stays."""


def run(
    name: str,
    level: int,
    seed: int,
    episodes: int,
    lr: float | None = None,
    every: int = 24,
    max_steps: int = 400,
    skill_worlds: int = 40,
) -> ExactProgress:
    """One training run; returns its measurements."""
    method = METHODS[name]
    lightning.seed_everything(seed, verbose=False)
    progress = ExactProgress(every, episodes, skill_worlds)
    env = LanguageMDPEnv(level, seed=seed)
    with tempfile.TemporaryDirectory() as folder:
        data = ReplayDataModule(
            env,
            batch_size=method.batch_size,
            success_share=method.success_share,
            success_after=WARMUP,
            strategy="recency",
            recency_half_life=100,
            seed=seed,
        )
        rollouts = RolloutCallback(
            exploration=Exploration("epsilon", method.epsilon) if method.epsilon else None,
            initial_episodes=method.initial,
            episodes=32,
            every_n_steps=method.every,
            limits=LIMITS_OF_A_WALK,
            seed=seed,
        )
        trainer = lightning.Trainer(
            max_steps=max_steps,
            accelerator="cpu",
            devices=1,
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=0,
            callbacks=[rollouts, EMACallback(method.tau), progress],
        )
        module = method.make(seed, lr or method.lr, **method.settings)
        trainer.fit(module, datamodule=data)
    return progress


def ceiling(step: str, level: int, seed: int, k: int = 1) -> float:
    """Exact success at the fixed point of an improvement step under an exact critic."""
    mdp = LanguageMDPEnv(level, seed=seed).exact("test").mdp
    closed = step in LIMITS
    return fixed_point(mdp, ImprovementStep(step, k), tolerance=1e-7, closed_form=closed).success


def result_of(name: str, options: argparse.Namespace, seed: int, lr: float) -> dict[str, Any]:
    """A run's measurements, from the folder if they are there."""
    key = f"{name}-level{options.level}-lr{lr:g}-episodes{options.episodes}-seed{seed}"
    kept: Path = options.folder / f"{key}.json"
    if not kept.exists():
        progress = run(name, options.level, seed, options.episodes, lr, options.every)
        step, k = METHODS[name].step, METHODS[name].settings.get("k", 1)
        result = {
            "method": name,
            "level": options.level,
            "seed": seed,
            "lr": lr,
            "baselines": LanguageMDPEnv(options.level, seed=seed).baselines(),
            "ceiling": ceiling(step, options.level, seed, k) if step else None,
            "rows": progress.rows,
            "skills": progress.skills,
        }
        kept.write_text(json.dumps(result, indent=1) + "\n")
    result = json.loads(kept.read_text()) | {"critic": METHODS[name].critic}
    first, last = result["rows"][0], result["rows"][-1]
    print(
        f"{key}: success {first['success']:.3f} -> {last['success']:.3f} "
        f"in {last['step']} steps, spearman {last['spearman']:.2f}, auroc {last['auroc']:.2f}, "
        f"{last['cpu_seconds']:.0f} CPU-s",
        flush=True,
    )
    return result


def main() -> None:
    """Run what is missing, print the table, draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS)[:-2])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--level", type=int, default=2, choices=(1, 2, 3))
    parser.add_argument("--episodes", type=int, default=448, help="training episodes of a run")
    parser.add_argument("--every", type=int, default=24, help="steps between measurements")
    parser.add_argument("--lr", type=float, nargs="+", help="instead of each method's own")
    parser.add_argument("--sweep", action="store_true", help="on worlds kept for step sizes")
    parser.add_argument("--folder", type=Path, default=Path("runs/learning"))
    parser.add_argument("--json", type=Path, help="also write the table to this file")
    parser.add_argument("--figure", type=Path, help="draw success against costs to this file")
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    options.folder.mkdir(parents=True, exist_ok=True)
    first = SWEEP_SEEDS if options.sweep else 0
    results = [
        result_of(name, options, seed, lr)
        for name in options.methods
        for lr in options.lr or [METHODS[name].lr]
        for seed in range(first, first + options.seeds)
    ]
    print(table(results))
    if options.json:
        options.json.write_text(json.dumps({"rows": rows_of(results)}, indent=1) + "\n")
    if options.figure:
        draw(results, options.figure)


if __name__ == "__main__":
    main()
