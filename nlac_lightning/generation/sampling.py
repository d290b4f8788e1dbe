"""Drawing tokens and finding where a completion ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from nlac_lightning.generation.base import Completion, Request, Sampling


def uniforms(request: Request) -> np.ndarray:
    """One uniform number per new token, from the request's seed alone."""
    count = request.sampling.max_new_tokens
    if request.sampling.temperature == 0:
        return np.zeros(count)
    return np.random.Generator(np.random.Philox(key=request.seed % 2**64)).random(count)


def draw(
    logits: Tensor, settings: list[Sampling], noise: list[float]
) -> tuple[list[int], list[float]]:
    """Draw one token per row.

    Args:
        logits: [b, vocabulary] float32.
        settings: how each row is sampled.
        noise: a uniform number in [0, 1) for each row.

    Returns:
        Token ids, and their log-probabilities under the distribution that they were drawn from.
    """
    log_p = distributions(logits, settings)
    tokens = logits.argmax(-1)
    random = [i for i, s in enumerate(settings) if s.temperature > 0]
    if random:
        # Inverse of the cumulative distribution: one uniform number decides, whatever the batch.
        mass = log_p[random].double().exp().cumsum(-1)
        u = torch.tensor([noise[i] for i in random], dtype=torch.float64, device=mass.device)
        picked = torch.searchsorted(mass, (u * mass[:, -1])[:, None], right=True)[:, 0]
        tokens[random] = picked.clamp(max=logits.shape[-1] - 1)
    scores = log_p.gather(1, tokens[:, None])[:, 0]
    return tokens.tolist(), scores.tolist()


def distributions(logits: Tensor, settings: list[Sampling]) -> Tensor:
    """Log-probabilities [b, vocabulary] that each row's token is drawn from.

    Greedy rows have the model's own distribution.
    """
    temperature = torch.tensor([s.temperature if s.temperature > 0 else 1.0 for s in settings])
    scaled = logits / temperature.to(logits)[:, None]
    if any(s.top_k or s.top_p < 1 for s in settings):
        scaled = torch.stack([_truncate(row, s) for row, s in zip(scaled, settings, strict=True)])
    return F.log_softmax(scaled, dim=-1)


def _truncate(row: Tensor, sampling: Sampling) -> Tensor:
    if sampling.temperature == 0 or not (sampling.top_k or sampling.top_p < 1):
        return row
    kept = sampling.top_k or len(row)
    values, order = row.topk(min(kept, len(row)))  # descending; top-k spares the full sort
    if sampling.top_p < 1:
        p = values.softmax(-1)
        keep = p.cumsum(-1) - p < sampling.top_p  # the most likely token always stays
        values, order = values[keep], order[keep]
    return torch.full_like(row, -torch.inf).scatter(0, order, values)


def stop_reached(tokenizer: Any, ids: list[int], request: Request) -> bool:
    """Whether the last id ends the completion."""
    if ids[-1] in request.stop_ids:
        return True
    stops = request.sampling.stop
    if not stops:
        return False
    # A token may end in a stop string's first characters, or hold the whole string and more.
    tail = tokenizer.decode(ids[-(max(map(len, stops)) + 4) :], clean_up_tokenization_spaces=False)
    return any(stop in tail for stop in stops)


def complete(
    tokenizer: Any,
    request: Request,
    ids: list[int],
    logprobs: list[float],
    reason: str,
    version: int,
) -> Completion:
    """The completion of sampled ids: its text has no stop id and ends before a stop string."""
    shown = ids[:-1] if ids and ids[-1] in request.stop_ids else ids
    text = tokenizer.decode(shown, clean_up_tokenization_spaces=False)
    cuts = [at for stop in request.sampling.stop if (at := text.find(stop)) >= 0]
    text = text[: min(cuts)] if cuts else text
    return Completion(tuple(ids), text, tuple(logprobs), reason, version)
