"""Loss functions: pure tensors in, scalars or per-token values out.

Logits exist only for the positions that carry a loss, and only a chunk of them at a time, so memory
is a few times ``chunk x vocabulary`` whatever the batch. Measured on a CPU with the 151,936 tokens
of Qwen2.5: 3.4 float32 tensors of that shape at the peak of :func:`token_nll` and 5.2 of
:func:`token_kl`, so 2.1 and 3.2 GB for a full chunk of 1,024 positions. The head is frozen: it gets
no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

Head = Callable[[Tensor], Tensor]
"""Maps hidden states [n, d] to logits [n, vocabulary]."""


def token_nll(hidden: Tensor, head: Head, targets: Tensor, chunk: int = 1024) -> Tensor:
    """Negative log-likelihood of each target under the head's distribution.

    Args:
        hidden: [n, d] states at the positions before the targets.
        head: the language-model head.
        targets: [n] token ids.
        chunk: positions whose logits exist at one time.

    Returns:
        [n] float32, natural logarithm.
    """

    def step(h: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(head(h).float(), t, reduction="none")

    return _by_row(step, chunk, hidden, targets)


def token_kl(teacher: Tensor, student: Tensor, head: Head, chunk: int = 1024) -> Tensor:
    """Divergence KL(teacher || student) over the whole vocabulary at each position.

    Args:
        teacher: [n, d] hidden states of the distribution to match; no gradient flows into it.
        student: [n, d] hidden states of the trained distribution.
        head: the language-model head, shared by both.
        chunk: positions whose logits exist at one time.

    Returns:
        [n] float32, in nats. Source: L1 of NLAC (arXiv 2512.04601) per token.
    """

    def step(s: Tensor, t: Tensor) -> Tensor:
        with torch.no_grad():
            log_p = F.log_softmax(head(t).float(), dim=-1)
        log_q = F.log_softmax(head(s).float(), dim=-1)
        return F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)

    return _by_row(step, chunk, student, teacher.detach())


def token_logprobs(
    hidden: Tensor, head: Head, targets: Tensor, temperature: float = 1.0, chunk: int = 1024
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target, and entropy, of the distribution at a temperature.

    Args:
        hidden: [n, d] states at the positions before the targets.
        head: the language-model head.
        targets: [n] token ids.
        temperature: that of sampling, above 0.
        chunk: positions whose logits exist at one time.

    Returns:
        Two [n] float32, in nats.
    """

    def step(h: Tensor, t: Tensor) -> Tensor:
        log_p = F.log_softmax(head(h).float() / temperature, dim=-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        return torch.stack([log_p.gather(-1, t[:, None])[:, 0], entropy])

    both = _chunked(step, chunk, hidden, targets)
    return both[0], both[1]


def _chunked(step: Callable[[Tensor, Tensor], Tensor], chunk: int, a: Tensor, b: Tensor) -> Tensor:
    if len(a) == 0:
        return a.new_zeros(0, dtype=torch.float32) + a.float().sum()
    parts = [
        checkpoint(step, a[i : i + chunk], b[i : i + chunk], use_reentrant=False)
        for i in range(0, len(a), chunk)
    ]
    return torch.cat(parts, dim=-1)


def _by_row(step: Callable[[Tensor, Tensor], Tensor], chunk: int, a: Tensor, b: Tensor) -> Tensor:
    """As :func:`_chunked` for a ``step`` that gives one value for each row of ``a``."""
    if len(a) == 0 or not (torch.is_grad_enabled() and a.requires_grad):
        return _chunked(step, chunk, a, b)
    return _RowLoss.apply(step, chunk, a, b)


class _RowLoss(torch.autograd.Function):
    """Takes each row's gradient while its logits are there, so that none is computed twice."""

    @staticmethod
    def forward(
        ctx: Any, step: Callable[[Tensor, Tensor], Tensor], chunk: int, a: Tensor, b: Tensor
    ) -> Tensor:
        values, slopes = [], []
        for i in range(0, len(a), chunk):
            with torch.enable_grad():
                rows = a[i : i + chunk].detach().requires_grad_()
                value = step(rows, b[i : i + chunk])
                slopes.append(torch.autograd.grad(value.sum(), rows)[0])
            values.append(value.detach())
        ctx.save_for_backward(torch.cat(slopes))
        return torch.cat(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor, None]:
        (slopes,) = ctx.saved_tensors
        return None, None, slopes * gradient[:, None].to(slopes.dtype), None
