"""Training examples and their packed forward and backward pass.

An example is a whole sequence whose tail is trained. Examples that start alike (the transitions of
an episode, the roles of a state) share that work: see :mod:`nlac_lightning.prefix_tree`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nlac_lightning.backbone import Backbone
from nlac_lightning.distributed import gather, sums, totals
from nlac_lightning.generation.base import ADAPTERS
from nlac_lightning.losses import token_kl, token_nll
from nlac_lightning.prefix_tree import pack_tree, split_packs


@dataclass(frozen=True)
class Teacher:
    """A distribution to match: another prompt, read by another adapter, before the same tokens.

    Attributes:
        adapter: who reads.
        ids: the prompt and then the very tokens that the example trains.
    """

    adapter: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Example:
    """A sequence, of which ``ids[start:]`` is trained.

    Attributes:
        name: loss that it belongs to (``critic``, ``policy``, ...).
        ids: prompt and target.
        start: first trained position, above 0.
        forced: that many of the first trained tokens were given, not drawn: their distribution is
            a point, so they carry the negative log-likelihood also under ``teacher``.
        teacher: None trains by negative log-likelihood, otherwise by KL(teacher || online).
        weight: of the mean over the example's tokens in the sum that is the loss.
    """

    name: str
    ids: tuple[int, ...]
    start: int
    forced: int = 0
    teacher: Teacher | None = None
    weight: float = 1.0


def weigh(examples: Sequence[Example], weight: float) -> list[Example]:
    """Share ``weight`` in proportion to their weights: the sum of their losses is then ``weight``
    times the mean.

    All processes call it together, and the mean is over the examples of all: a process whose
    backups were dropped does not make its few examples count more.
    """
    (total,) = totals(sum(example.weight for example in examples))
    return [replace(example, weight=weight * example.weight / total) for example in examples]


Reader = Callable[[str, Sequence[tuple[int, ...]], Sequence[int]], list[Tensor]]
"""See :meth:`~nlac_lightning.generation.in_process.InProcessGenerator.read`."""


def accumulate(
    backbone: Backbone,
    examples: Sequence[Example],
    pack_tokens: int,
    backward: Callable[[Tensor], None],
    read: Reader | None = None,
) -> dict[str, float]:
    """Forward and backward all examples, pack by pack.

    The gradient does not depend on ``pack_tokens``.

    Args:
        backbone: its ``online`` adapter is trained.
        examples: with their weights.
        pack_tokens: distinct tokens of one forward and backward pass.
        backward: called with each pack's loss.
        read: reads for the teachers where the engine that wrote the targets still knows their
            prompts. Not used with a sharded base, whose processes pass through it in step.

    Returns:
        The mean loss of each name over all processes' examples, in nats per token;
        ``packed_tokens``, ``example_tokens``. Examples that train no token have no part in it.
    """
    examples = [example for example in examples if example.start < len(example.ids)]
    losses_by_name: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    teachers = _teacher_states(backbone, examples, pack_tokens, None if backbone.sharded else read)
    for pack in _packs(backbone, [example.ids for example in examples], pack_tokens):
        if not pack:
            with backbone.use("online"):
                backward(0.0 * backbone.forward_tree(_IDLE).sum())
            continue
        chosen = [examples[i] for i in pack]
        tree = pack_tree([example.ids for example in chosen])
        with backbone.use("online"):
            hidden = backbone.forward_tree(tree)
            losses = []
            for n, example in enumerate(chosen):
                states = hidden[tree.rows(n, example.start - 1, len(example.ids) - 1)]
                losses.append((example, states, teachers.get(pack[n])))
            values = _token_losses(backbone, losses)
            loss = torch.stack(
                [v.mean() * e.weight for (e, _, _), v in zip(losses, values, strict=True)]
            ).sum()
            backward(loss)
        for (example, _, _), value in zip(losses, values, strict=True):
            losses_by_name[example.name] += float(value.detach().mean())
            counts[example.name] += 1
        counts["packed_tokens"] += len(tree.input_ids)
        counts["example_tokens"] += sum(len(example.ids) for example in chosen)
    losses_of_all, counts_of_all = sums(gather(dict(losses_by_name))), sums(gather(dict(counts)))
    means = {name: value / counts_of_all[name] for name, value in losses_of_all.items()}
    tokens = {name: counts_of_all.get(name, 0.0) for name in ("packed_tokens", "example_tokens")}
    return means | tokens


_IDLE = pack_tree([(0,)])
"""What a process computes when only others have work left."""


def _packs(
    backbone: Backbone, sequences: Sequence[tuple[int, ...]], pack_tokens: int
) -> list[list[int]]:
    """See :func:`split_packs`; empty ones keep a sharded base's processes in step."""
    packs = list(split_packs(sequences, pack_tokens))
    rounds = backbone.rounds(len(packs))  # agreed on before the first pass
    return packs + [[] for _ in range(rounds - len(packs))]


def _token_losses(
    backbone: Backbone, items: Sequence[tuple[Example, Tensor, Tensor | None]]
) -> list[Tensor]:
    """Per-token losses of each example, with one call of the head for each kind of loss."""
    nll_ids: list[int] = []
    nll_states, kl_student, kl_teacher = [], [], []
    for example, states, teacher in items:
        cut = example.forced if teacher is not None else len(states)
        nll_states.append(states[:cut])
        nll_ids += example.ids[example.start : example.start + cut]
        if teacher is not None:
            kl_student.append(states[cut:])
            kl_teacher.append(teacher[cut:])
    targets = torch.tensor(nll_ids, dtype=torch.long, device=backbone.device)
    nll = token_nll(torch.cat(nll_states), backbone.logits, targets)
    kl = None
    if kl_student:
        kl = token_kl(torch.cat(kl_teacher), torch.cat(kl_student), backbone.logits)
    result, at_nll, at_kl = [], 0, 0
    for example, states, teacher in items:
        cut = example.forced if teacher is not None else len(states)
        parts = [nll[at_nll : at_nll + cut]]
        at_nll += cut
        if teacher is not None and kl is not None:
            parts.append(kl[at_kl : at_kl + len(states) - cut])
            at_kl += len(states) - cut
        result.append(torch.cat(parts))
    return result


def _teacher_states(
    backbone: Backbone, examples: Sequence[Example], pack_tokens: int, read: Reader | None
) -> dict[int, Tensor]:
    """Hidden states of each teacher before the tokens that its example trains."""

    def read_anew(
        adapter: str, sequences: Sequence[tuple[int, ...]], counts: Sequence[int]
    ) -> list[Tensor]:
        states: dict[int, Tensor] = {}
        for pack in _packs(backbone, sequences, pack_tokens):
            tree = pack_tree([sequences[i] for i in pack]) if pack else _IDLE
            with backbone.use(adapter):
                hidden = backbone.forward_tree(tree)
            for row, i in enumerate(pack):
                end = len(sequences[i]) - 1
                states[i] = hidden[tree.rows(row, end - counts[i], end)]
        return [states[i] for i in range(len(sequences))]

    states: dict[int, Tensor] = {}
    with backbone.reading():
        for adapter in ADAPTERS:
            taught = {n: e.teacher for n, e in enumerate(examples) if e.teacher}
            of_adapter = [n for n, teacher in taught.items() if teacher.adapter == adapter]
            sequences = [taught[n].ids for n in of_adapter]
            counts = [len(examples[n].ids) - examples[n].start for n in of_adapter]
            found = (read or read_anew)(adapter, sequences, counts)
            states |= dict(zip(of_adapter, found, strict=True))
    return states
