"""Advantages and per-token losses against plain float64 formulas."""

import math

import numpy as np
import pytest
import torch

from nlac_lightning.policy_gradient.advantages import gae, group_advantages, normalise
from nlac_lightning.policy_gradient.surrogate import (
    KLEstimator,
    clipped_surrogate,
    clipped_value_loss,
    kl_estimate,
    ratio_diagnostics,
)

RNG = np.random.default_rng(0)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.7), (0.99, 0.0)])
@pytest.mark.parametrize("bootstrap", [0.0, 1.5])
def test_gae_is_the_discounted_sum_of_td_errors(gamma: float, lam: float, bootstrap: float) -> None:
    rewards, values = RNG.normal(size=7), RNG.normal(size=7)
    advantages, returns = gae(rewards, values, bootstrap, gamma, lam)
    after = [*values[1:], bootstrap]
    delta = [rewards[i] + gamma * after[i] - values[i] for i in range(7)]
    for i in range(7):
        expected = sum((gamma * lam) ** (j - i) * delta[j] for j in range(i, 7))
        assert advantages[i] == pytest.approx(expected, rel=1e-12)
        assert returns[i] == pytest.approx(expected + values[i], rel=1e-12)


def test_without_discount_the_return_reaches_every_token() -> None:
    _, returns = gae(np.array([0.0, 0, 0, 2.0]), RNG.normal(size=4), 0.0, 1.0, 1.0)
    assert returns == pytest.approx([2.0] * 4)


def test_group_advantages() -> None:
    rewards = [0.0, 1.0, 1.0, 4.0]
    deviation = math.sqrt(sum((r - 1.5) ** 2 for r in rewards) / 3)
    centred = [r - 1.5 for r in rewards]
    assert group_advantages(rewards, "none") == pytest.approx(centred)
    expected = [c / (deviation + 1e-4) for c in centred]
    assert group_advantages(rewards, "std") == pytest.approx(expected)
    for scale in ("std", "none"):
        assert not group_advantages([0.7] * 5, scale).any()  # type: ignore[arg-type]
        assert not group_advantages([3.0], scale).any()  # type: ignore[arg-type]


def test_normalise_over_all_tokens() -> None:
    parts = normalise([RNG.normal(3, 2, size=5), RNG.normal(-1, 1, size=8)])
    assert [len(p) for p in parts] == [5, 8]
    together = np.concatenate(parts)
    assert together.mean() == pytest.approx(0, abs=1e-9)
    assert together.std() == pytest.approx(1, rel=1e-6)


def test_clipped_surrogate_value_and_gradient() -> None:
    new, old, advantage = (RNG.normal(scale=0.4, size=200) for _ in range(3))
    low, high = 0.2, 0.28
    logprobs = torch.tensor(new, requires_grad=True)
    arguments = (torch.tensor(old), torch.tensor(advantage), low, high)
    loss = clipped_surrogate(logprobs, *arguments)
    loss.sum().backward()
    clipped = ratio_diagnostics(logprobs, *arguments)["clipped"]
    assert logprobs.grad is not None
    for i in range(200):
        r, a = math.exp(new[i] - old[i]), advantage[i]
        kept = min(max(r, 1 - low), 1 + high)
        assert float(loss[i]) == pytest.approx(-min(r * a, kept * a), rel=1e-12)
        dead = (a > 0 and r > 1 + high) or (a < 0 and r < 1 - low)
        assert float(logprobs.grad[i]) == pytest.approx(0.0 if dead else -r * a, rel=1e-12)
        assert bool(clipped[i]) == dead
    assert 0 < clipped.sum() < 200


def test_value_loss_takes_the_larger_error() -> None:
    new, old, target = (RNG.normal(size=50) for _ in range(3))
    tensors = [torch.tensor(x) for x in (new, old, target)]
    clipped = clipped_value_loss(*tensors, clip=0.2)
    for i in range(50):
        near = old[i] + min(max(new[i] - old[i], -0.2), 0.2)
        expected = 0.5 * max((new[i] - target[i]) ** 2, (near - target[i]) ** 2)
        assert float(clipped[i]) == pytest.approx(expected, rel=1e-12)
    assert clipped_value_loss(*tensors, clip=None).numpy() == pytest.approx(
        0.5 * (new - target) ** 2
    )


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_estimators_in_expectation(kind: KLEstimator) -> None:
    """Sums over all outcomes: k1 and k3 are the divergence; k2's gradient is its gradient, and
    times the ratio (1 in value) so are those of k1 and k3."""
    logits = torch.tensor(RNG.normal(size=5), requires_grad=True)
    reference = torch.log_softmax(torch.tensor(RNG.normal(size=5)), 0)
    logprobs = torch.log_softmax(logits, 0)
    p = logprobs.exp()
    divergence = (p * (logprobs - reference)).sum()
    (true_gradient,) = torch.autograd.grad(divergence, logits, retain_graph=True)
    estimate = kl_estimate(logprobs, reference, kind)
    (gradient,) = torch.autograd.grad((p.detach() * estimate).sum(), logits, retain_graph=True)
    ratio = torch.exp(logprobs - logprobs.detach())
    (corrected,) = torch.autograd.grad((p.detach() * ratio * estimate).sum(), logits)
    assert torch.allclose(corrected, true_gradient) == (kind != "k2")
    if kind != "k2":
        assert float((p * estimate).sum().detach()) == pytest.approx(float(divergence.detach()))
    if kind == "k1":
        assert gradient.abs().max() < 1e-12  # why it is refused as a loss
    if kind == "k2":
        assert torch.allclose(gradient, true_gradient)
    if kind == "k3":
        assert (estimate >= 0).all() and gradient.abs().max() > 1e-3
