"""Per-token losses of policy gradients, and what to watch while they are minimised."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

KLEstimator = Literal["k1", "k2", "k3"]


def clipped_surrogate(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, low: float, high: float
) -> Tensor:
    """-min(ratio * A, clip(ratio, 1 - low, 1 + high) * A) of each token, [n].

    Source: arXiv 1707.06347, equation 7; ``high`` above ``low`` is DAPO's clip-higher
    (arXiv 2503.14476, section 3.1).
    """
    ratio = torch.exp(logprobs - old_logprobs)
    clipped = ratio.clamp(1.0 - low, 1.0 + high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None
) -> Tensor:
    """Half the squared error of each token's value, [n].

    With ``clip`` the larger of two errors counts, that of the value and that of the value kept
    within ``clip`` of the old one, so a step cannot move it far (as in OpenAI Baselines' PPO2).
    """
    loss = (values - returns).square()
    if clip is not None:
        near = old_values + (values - old_values).clamp(-clip, clip)
        loss = torch.maximum(loss, (near - returns).square())
    return 0.5 * loss


def kl_estimate(logprobs: Tensor, reference: Tensor, kind: KLEstimator) -> Tensor:
    """KL(policy || reference) of each token from its sample, [n], in nats.

    ``k1`` is the log-ratio: unbiased, but as a loss its gradient is zero in expectation. ``k2`` is
    half its square: as a loss it has the divergence's own gradient. ``k3`` is r - 1 - log r with
    r = reference / policy: unbiased, never negative, GRPO's choice.

    Source: J. Schulman, Approximating KL divergence (2020).
    """
    log_ratio = reference - logprobs
    if kind == "k1":
        return -log_ratio
    if kind == "k2":
        return 0.5 * log_ratio.square()
    return torch.expm1(log_ratio) - log_ratio


@torch.no_grad()
def ratio_diagnostics(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, low: float, high: float
) -> dict[str, Tensor]:
    """Per-token facts about the ratio, each [n]; their means are logged.

    ``ratio``; ``clipped``: the surrogate's minimum is the clipped term, so the token carries no
    gradient; ``off_ratio``: outside [0.9, 1.1], which in the first minibatch means that sampler
    and trainer disagree; ``approx_kl``: KL(old || new), k3.
    """
    log_ratio = logprobs - old_logprobs
    ratio = log_ratio.exp()
    clipped = ((ratio > 1 + high) & (advantages > 0)) | ((ratio < 1 - low) & (advantages < 0))
    return {
        "ratio": ratio,
        "clipped": clipped.float(),
        "off_ratio": ((ratio - 1).abs() > 0.1).float(),
        "approx_kl": torch.expm1(log_ratio) - log_ratio,
    }
