"""What a model says about the drawn tokens of many segments, packed as prefix trees.

An episode's turns share their tokens (:mod:`nlac_lightning.prefix_tree`): usually a whole episode
is processed as one sequence, and the episodes of a task share its opening.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nlac_lightning.backbone import Backbone
from nlac_lightning.losses import token_logprobs
from nlac_lightning.policy_gradient.trajectory import Segment
from nlac_lightning.prefix_tree import pack_tree, split_packs


@dataclass(frozen=True)
class TokenOutputs:
    """Per drawn token, each [n] float32.

    Attributes:
        logprobs: natural log-probability at the sampling temperature.
        entropy: of the distribution that the token was drawn from, in nats.
        values: value head before the token, or None without one.
    """

    logprobs: Tensor
    entropy: Tensor
    values: Tensor | None


class ValueHead(nn.Module):
    """A linear value on the last hidden state; it starts at zero.

    Args:
        width: size of the hidden state.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """[n, d] hidden states to [n] values in the precision of the weights, float32."""
        return self.linear(hidden.to(self.linear.weight.dtype))[:, 0]


def packed_states(
    backbone: Backbone, segments: Sequence[Segment], adapter: str, pack_tokens: int
) -> Iterator[tuple[list[int], list[Tensor]]]:
    """Pack by pack: which segments, and for each the hidden states before its drawn tokens.

    The adapter is in use until the next pack is asked for, so a backward pass that recomputes
    activations is made with it.
    """
    for pack in split_packs([segment.ids for segment in segments], pack_tokens):
        tree = pack_tree([segments[i].ids for i in pack])
        with backbone.use(adapter):
            hidden = backbone.forward_tree(tree)
            yield (
                pack,
                [
                    hidden[tree.rows(n, segments[i].start - 1, len(segments[i].ids) - 1)]
                    for n, i in enumerate(pack)
                ],
            )


def token_outputs(
    backbone: Backbone,
    segments: Sequence[Segment],
    states: Sequence[Tensor],
    temperature: float,
    value_head: ValueHead | None = None,
) -> TokenOutputs:
    """Outputs for the drawn tokens of ``segments``, one after the other."""
    hidden = torch.cat(list(states))
    drawn = [i for segment in segments for i in segment.ids[segment.start :]]
    targets = torch.tensor(drawn, dtype=torch.long, device=backbone.device)
    logprobs, entropy = token_logprobs(hidden, backbone.logits, targets, temperature)
    return TokenOutputs(logprobs, entropy, value_head(hidden) if value_head else None)


def read_tokens(
    backbone: Backbone,
    segments: Sequence[Segment],
    adapter: str,
    pack_tokens: int,
    temperature: float,
) -> list[Tensor]:
    """Log-probabilities [len(segment)] of each segment under ``adapter``, without dropout."""
    result: list[Tensor] = [torch.empty(0)] * len(segments)
    with backbone.reading():
        for pack, states in packed_states(backbone, segments, adapter, pack_tokens):
            chosen = [segments[i] for i in pack]
            logprobs = token_outputs(backbone, chosen, states, temperature).logprobs
            for i, part in zip(pack, logprobs.split([len(s) for s in chosen]), strict=True):
                result[i] = part.cpu()
    return result


def read_values(
    backbone: Backbone, segments: Sequence[Segment], head: ValueHead, pack_tokens: int
) -> list[Tensor]:
    """Values [len(segment)] of each segment under the online adapter, without dropout."""
    result: list[Tensor] = [torch.empty(0)] * len(segments)
    with backbone.reading():
        for pack, states in packed_states(backbone, segments, "online", pack_tokens):
            for i, hidden in zip(pack, states, strict=True):
                result[i] = head(hidden).cpu()
    return result
