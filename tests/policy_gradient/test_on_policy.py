"""PPO's and GRPO's whole gradient on multi-turn episodes of the tiny model."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from nlac_lightning.actors import ModelActor
from nlac_lightning.algorithms.grpo import GRPO
from nlac_lightning.algorithms.ppo import PPO
from nlac_lightning.errors import ConfigError
from nlac_lightning.generation.base import Sampling
from nlac_lightning.policy_gradient.on_policy import KLConfig
from nlac_lightning.policy_gradient.trajectory import Trajectory, make_trajectories
from nlac_lightning.replay.episode import Transition
from nlac_lightning.roles.roles import RoleConfig, RolesConfig
from nlac_lightning.rollout import Rollout, RolloutLimits

TEMPERATURE = 1.25
KL = KLConfig(0.1)


def ready(
    bench: Any, algorithm: type, turns: int = 3, limit: int = 30, **options: Any
) -> tuple[Any, list[Trajectory]]:
    """A module outside a Trainer whose adapter differs from the base, and its own episodes."""
    module = bench.build(algorithm, tokens=2, **options)
    module.configure_model()
    bench.shake(module)
    module.backbone.versions["online"] += 1
    module.manual_backward = lambda loss: loss.backward()
    batch = play(module, bench.Env(tasks=2, turns=turns), limit)
    trajectories = make_trajectories(batch, module.roles)
    module.double()  # so that a mistake cannot pass for rounding
    module._read_rollout(trajectories)
    return module, trajectories


def play(module: Any, env: Any, limit: int = 30) -> list[Transition]:
    """Three episodes of each task, by the module's own policy."""
    rollout = Rollout(env, module.roles, RolloutLimits(max_turns=limit))
    jobs = [(task, seed) for task in env.tasks("train") for seed in range(3)]
    played = rollout.play(jobs, ModelActor(module.roles, module.generator))
    return [x for i, episode in enumerate(played) for x in episode.transitions(i)]


def gradient(module: Any, trajectories: Sequence[Trajectory], targets: Any) -> list[Tensor]:
    """Gradients of all trained parameters."""
    module.zero_grad()
    module.accumulate(trajectories, targets)
    found = [p.grad for p in module.parameters() if p.requires_grad and p.grad is not None]
    return [g.clone() for g in found]


def plain_outputs(module: Any, trajectory: Trajectory) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities, entropies and hidden states before each drawn token, turn by turn."""
    logprobs, entropies, hidden = [], [], []
    model = module.backbone.model.get_base_model()
    for segment in trajectory.segments:
        out = model(torch.tensor([segment.ids]), output_hidden_states=True)
        before = slice(segment.start - 1, len(segment.ids) - 1)
        log_p = torch.log_softmax(out.logits[0, before].double() / TEMPERATURE, -1)
        drawn = torch.tensor(segment.ids[segment.start :])
        logprobs.append(log_p.gather(-1, drawn[:, None])[:, 0])
        entropies.append(-(log_p.exp() * log_p).sum(-1))
        hidden.append(out.hidden_states[-1][0, before])
    return torch.cat(logprobs), torch.cat(entropies), torch.cat(hidden)


def assert_gradient(module: Any, found: Sequence[Tensor], loss: Tensor) -> None:
    """``found`` is the gradient of ``loss``."""
    module.zero_grad()
    loss.backward()
    expected = [p.grad for p in module.parameters() if p.requires_grad and p.grad is not None]
    assert len(found) == len(expected) > 0
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * float(b.abs().max()))


def off_policy(episodes: Sequence[Trajectory]) -> list[Trajectory]:
    """Other old probabilities, so that ratios differ from 1 and some are clipped."""
    rng = np.random.default_rng(0)
    return [replace(t, logprobs=t.logprobs + rng.normal(0, 0.3, len(t))) for t in episodes]


@pytest.mark.parametrize(
    ("normalisation", "scale", "kl"),
    [
        ("sequence", "std", KL),
        ("sequence", "none", KLConfig(0.1, corrected=True)),
        ("token", "std", KLConfig(0.1, "loss", "k2")),
        ("constant", "none", KLConfig(0.1, "reward", "k1")),
    ],
)
def test_grpo_gradient_is_that_of_the_formula(
    bench: Any, normalisation: str, scale: str, kl: KLConfig
) -> None:
    longest = 6 if normalisation == "constant" else None
    options = {"normalisation": normalisation, "max_tokens": longest, "scale": scale, "kl": kl}
    module, episodes = ready(bench, GRPO, clip_high=0.28, entropy=0.02, **options)
    episodes = off_policy(episodes)
    found = gradient(module, episodes, module.targets(episodes))
    with module.backbone.use("base"), torch.no_grad():
        references = [plain_outputs(module, t)[0] for t in episodes]
    rewards = [
        t.total_reward
        - 0.1 * (kl.where == "reward") * float((torch.tensor(t.logprobs) - reference).sum())
        for t, reference in zip(episodes, references, strict=True)
    ]
    total = sum(len(t) for t in episodes)
    loss = torch.zeros((), dtype=torch.float64)
    for t, reward, reference in zip(episodes, rewards, references, strict=True):
        group = [r for u, r in zip(episodes, rewards, strict=True) if u.task_id == t.task_id]
        advantage = reward - np.mean(group)
        if scale == "std":
            advantage /= np.std(group, ddof=1) + 1e-4
        with module.backbone.use("online"):
            new, entropy, _ = plain_outputs(module, t)
        ratio = torch.exp(new - torch.tensor(t.logprobs))
        token = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
        if kl.estimator == "k3":
            k3 = torch.exp(reference - new) - (reference - new) - 1
            token = token + 0.1 * (ratio * k3 if kl.corrected else k3)
        elif kl.estimator == "k2":
            token = token + 0.1 * 0.5 * (reference - new) ** 2
        length = {"sequence": len(t) * 6, "token": total, "constant": 6 * 6}[normalisation]
        loss = loss + (token - 0.02 * entropy).sum() / length
    assert_gradient(module, found, loss)


@pytest.mark.parametrize("kl", [KL, KLConfig(0.1, "reward", "k1")])
def test_ppo_gradient_is_that_of_the_formula(bench: Any, kl: KLConfig) -> None:
    """Surrogate, normalised GAE over turns, clipped values, entropy and KL, all at once."""
    module, episodes = ready(
        bench, PPO, gamma=0.9, lam=0.8, value_weight=0.3, value_clip=0.05, entropy=0.02, kl=kl
    )
    head = module.value_head.linear
    torch.manual_seed(0)
    nn.init.normal_(head.weight, std=0.05)
    module._frozen.clear()
    module._read_rollout(episodes)
    old_head = copy.deepcopy(module.value_head)
    with torch.no_grad():  # as if steps were made since
        head.weight.add_(0.02 * torch.randn_like(head.weight))
    episodes = [replace(t, truncated=i % 2 == 0) for i, t in enumerate(off_policy(episodes))]
    found = gradient(module, episodes, module.targets(episodes))

    rows = []
    decoder = module.backbone.model.get_base_model().get_decoder()
    for t in episodes:
        with module.backbone.use("base"), torch.no_grad():
            reference, _, _ = plain_outputs(module, t)
        with module.backbone.use("online"):
            new, entropy, hidden = plain_outputs(module, t)
            last = decoder(torch.tensor([t.final_ids])).last_hidden_state[0, -1:]
        old = old_head(torch.cat([hidden, last])).detach().numpy()
        old[-1] *= t.truncated
        rewards = t.rewards.copy()
        if kl.where == "reward":
            rewards -= 0.1 * (t.logprobs - reference.numpy())
        delta = rewards + 0.9 * old[1:] - old[:-1]
        n = len(t)
        decayed = [[0.72 ** (j - i) * delta[j] for j in range(i, n)] for i in range(n)]
        gae = np.array([sum(row) for row in decayed])
        values = module.value_head(hidden)
        old = torch.tensor(old[:-1])
        returns = torch.tensor(gae) + old
        near = old + (values - old).clamp(-0.05, 0.05)
        error = torch.maximum((values - returns) ** 2, (near - returns) ** 2)
        token = 0.3 * 0.5 * error - 0.02 * entropy
        if kl.where == "loss":
            token = token + 0.1 * (torch.exp(reference - new) - (reference - new) - 1)
        rows.append((torch.exp(new - torch.tensor(t.logprobs)), gae, token))
    ratio, token = (torch.cat([row[i] for row in rows]) for i in (0, 2))
    gae = np.concatenate([row[1] for row in rows])
    advantages = torch.tensor((gae - gae.mean()) / gae.std())
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    assert_gradient(module, found, (token - surrogate).mean())


def test_ppo_targets_and_value_gradient(bench: Any) -> None:
    """Episodes cut after two of three turns bootstrap from the value of their last state."""
    module, episodes = ready(
        bench, PPO, limit=2, gamma=0.9, lam=0.8, normalise_advantages=False, value_clip=None
    )
    with torch.no_grad():
        module.value_head.linear.weight.normal_(0, 0.05)
    module._frozen.clear()
    module._read_rollout(episodes)
    targets = module.targets(episodes)
    at, decoder = 0, module.backbone.model.get_base_model().get_decoder()
    for t in episodes:
        assert t.truncated and len(t.segments) == 2
        with module.backbone.use("online"), torch.no_grad():
            _, _, hidden = plain_outputs(module, t)
            last = decoder(torch.tensor([t.final_ids])).last_hidden_state[0, -1:]
            values = module.value_head(torch.cat([hidden, last])).double().numpy()
        delta = t.rewards + 0.9 * values[1:] - values[:-1]
        expected = [
            sum((0.9 * 0.8) ** (j - i) * delta[j] for j in range(i, len(t))) for i in range(len(t))
        ]
        row = slice(at, at + len(t))
        assert targets.values[row].numpy() == pytest.approx(values[:-1], abs=1e-4)
        assert targets.advantages[row].numpy() == pytest.approx(expected, abs=1e-3)
        assert targets.returns[row].numpy() == pytest.approx(expected + values[:-1], abs=1e-3)
        at += len(t)
    gradient(module, episodes, targets)
    # dL/db of the value part: weight * mean(V - R); the surrogate does not know the head
    error = (targets.values - targets.returns).mean()
    bias = module.value_head.linear.bias.grad
    assert float(bias) == pytest.approx(0.1 * float(error), abs=1e-4)


@pytest.mark.parametrize("algorithm", [PPO, GRPO])
def test_gradient_does_not_depend_on_the_pack(bench: Any, algorithm: type) -> None:
    module, episodes = ready(bench, algorithm, kl=KL, entropy=0.01)
    targets = module.targets(episodes)
    found = []
    for tokens in (1, 40, 4096):
        module.compute_config.train_pack_tokens = tokens
        found.append(gradient(module, episodes, targets))
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * float(b.abs().max()) + 1e-9)


def test_ratios_are_one_before_the_first_step(bench: Any) -> None:
    module, episodes = ready(bench, GRPO)
    facts = module.accumulate(episodes, module.targets(episodes))
    assert facts["ratio"] == pytest.approx(1, abs=1e-4)
    assert facts["off_ratio"] == facts["clipped"] == 0
    assert facts["approx_kl"] == pytest.approx(0, abs=1e-6)


def test_ratios_are_one_in_the_whole_first_epoch(bench: Any) -> None:
    """In a real run: what the sampler stored is what the trainer computes, at any temperature."""
    module = bench.build(PPO, episodes=8, minibatches=1, epochs=2, tokens=2)
    metrics, _ = bench.fit(module, 4, bench.Env(turns=2))
    for first, second in (metrics[:2], metrics[2:]):
        assert first["ratio"] == pytest.approx(1, abs=1e-4)
        assert first["approx_kl"] == pytest.approx(0, abs=1e-6)
        assert first["off_ratio"] == first["clipped"] == 0
        assert second["approx_kl"] > 1e-4


def test_turns_that_were_not_drawn_are_no_tokens_but_their_reward_flows(bench: Any) -> None:
    module, _ = ready(bench, PPO)
    batch = play(module, bench.Env(tasks=1, reward=lambda _: 1.0, turns=3))
    given = [replace(x, turn=replace(x.turn, logprobs=())) if x.t == 1 else x for x in batch]
    for whole, part in zip(
        make_trajectories(batch, module.roles), make_trajectories(given, module.roles), strict=True
    ):
        assert part.segments == (whole.segments[0], whole.segments[2])
        assert part.rewards.sum() == whole.rewards.sum() == 3.0
        assert part.rewards[len(part.segments[0]) - 1] == 2.0


def test_masked_episodes_carry_no_gradient(bench: Any) -> None:
    module, episodes = ready(bench, GRPO, truncated="mask")
    episodes = [replace(t, truncated=i % 2 == 0) for i, t in enumerate(episodes)]
    whole = gradient(module, episodes, module.targets(episodes))
    # whatever the masked tokens are, the rest of the gradient stays
    garbled = [
        replace(t, logprobs=t.logprobs + 80 * t.truncated) if t.truncated else t for t in episodes
    ]
    for a, b in zip(whole, gradient(module, garbled, module.targets(garbled)), strict=True):
        assert torch.equal(a, b)
    every = [replace(t, truncated=True) for t in episodes]
    assert gradient(module, every, module.targets(every)) == []


def test_nothing_moves_under_a_constant_reward(bench: Any) -> None:
    module = bench.build(GRPO, groups=2, group_size=2)
    before: dict[str, Tensor] = {}
    module.configure_model()
    for name, p in module.backbone.adapter_parameters("online").items():
        before[name] = p.detach().clone()
    metrics, data = bench.fit(module, 2, bench.Env(reward=lambda _: 1.0))
    for name, p in module.backbone.adapter_parameters("online").items():
        assert torch.equal(p, before[name])
    assert metrics[-1]["grad_norm"] == 0
    assert metrics[-1]["staleness"] == 0
    # each rollout: two tasks, twice each, played by the version that is then trained
    for start in (0, 4):
        played = data.buffer.outcomes()[start : start + 4]
        assert len({o.task_id for o in played}) == 2
        assert {o.policy_version for o in played} == {start // 4}


def test_a_stale_batch_is_refused(bench: Any) -> None:
    module, episodes = ready(bench, PPO, minibatches=1, epochs=2)
    module.backbone.versions["online"] += 1
    assert len(module._usable(episodes)) == len(episodes)
    module.backbone.versions["online"] += 1
    with pytest.raises(ConfigError, match="RolloutCallback"):
        module._usable(episodes)


@pytest.mark.parametrize("bad", [{1}, {4, 5, 6, 7}], ids=["one of four", "all of a rollout"])
@pytest.mark.parametrize("algorithm", [PPO, GRPO])
def test_failed_episodes_cost_steps_not_the_run(
    bench: Any, algorithm: type[Any], bad: set[int]
) -> None:
    size = {"episodes": 4} if algorithm is PPO else {"groups": 2, "group_size": 2}
    module = bench.build(algorithm, minibatches=2, epochs=1, **size)

    class Unlucky(bench.Env):  # type: ignore[name-defined, misc]
        def reset(self, task: Any, seed: int = 0) -> Any:
            session = super().reset(task, seed)
            if seed in bad:
                session.step = None
            return session

    steps, data = bench.fit(module, 6, env=Unlucky())
    failed = [e for e in data.buffer.iter_episodes() if e.reason == "env_error"]
    assert {e.seed for e in failed} == bad
    assert len(steps) == 6
    assert module.counts["skipped_steps"] == (2 if len(bad) == 4 else 0)


@pytest.mark.parametrize(
    ("algorithm", "options", "field"),
    [
        (PPO, {"episodes": 5, "minibatches": 2}, "episodes"),
        (PPO, {"gamma": 1.5}, "gamma"),
        (GRPO, {"group_size": 1}, "group_size"),
        (GRPO, {"normalisation": "constant"}, "max_tokens"),
        (GRPO, {"max_tokens": 5}, "max_tokens"),
    ],
)
def test_wrong_settings_name_the_field(
    bench: Any, algorithm: type, options: dict[str, Any], field: str
) -> None:
    with pytest.raises(ConfigError, match=f"model.{field}"):
        bench.build(algorithm, **options)


def test_settings_that_break_the_ratio_are_refused() -> None:
    with pytest.raises(ConfigError, match="estimator"):
        KLConfig(0.1, "loss", "k1")
    with pytest.raises(ConfigError, match="corrected"):
        KLConfig(0.1, "reward", "k1", corrected=True)
    roles = RolesConfig(policy=RoleConfig(sampling=Sampling(temperature=1.0, top_p=0.9)))
    with pytest.raises(ConfigError, match="top_p"):
        GRPO(roles=roles)


def test_value_head_is_in_the_checkpoint(bench: Any) -> None:
    module, _ = ready(bench, PPO)
    assert {"value_head.linear.weight", "value_head.linear.bias"} <= module.state_dict().keys()
    assert all("lora_" in n or n.startswith("value_head") for n in module.state_dict())
