"""A language model in the language MDP, read out as tables that the exact solve can take.

Nothing is sampled: probabilities of whole answers are computed in every room, so a success rate
has no sampling error.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torchmetrics.functional import spearman_corrcoef
from torchmetrics.functional.classification import binary_auroc

from nlac_lightning.analysis.lessons import Sheet, skills
from nlac_lightning.backbone import Backbone
from nlac_lightning.envs.language_mdp.env import LanguageMDPEnv
from nlac_lightning.envs.language_mdp.solve import Array, Mask
from nlac_lightning.envs.language_mdp.texts import SYSTEM, said, state_text
from nlac_lightning.envs.language_mdp.world import DIRECTIONS
from nlac_lightning.prefix_tree import pack_tree, split_packs
from nlac_lightning.roles.codec import Ids
from nlac_lightning.roles.roles import Roles

_PACK = 2048


def answer_logprobs(
    backbone: Backbone, pairs: Sequence[tuple[Ids, Ids]], adapter: str = "online"
) -> list[float]:
    """Natural log-probability of each (prompt, answer)'s answer, in float64, temperature 1."""
    sequences = [prompt + answer for prompt, answer in pairs]
    values = [0.0] * len(pairs)
    with backbone.reading(), backbone.use(adapter):
        for pack in split_packs(sequences, _PACK):
            tree = pack_tree([sequences[i] for i in pack])
            hidden = backbone.forward_tree(tree)
            for row, i in enumerate(pack):
                start, end = len(pairs[i][0]), len(sequences[i])
                logits = backbone.logits(hidden[tree.rows(row, start - 1, end - 1)]).double()
                wanted = torch.tensor(pairs[i][1], device=logits.device)
                chosen = logits.log_softmax(-1).gather(-1, wanted[:, None])
                values[i] = float(chosen.sum())
    return values


def policy_table(
    backbone: Backbone, roles: Roles, env: LanguageMDPEnv, adapter: str = "online"
) -> Array:
    """[S, A], the policy at the start of a walk from each state, for ``env.success``.

    What is left to text that names no direction counts as a direction without an exit.
    """
    exact = env.world.exact
    answers = [roles.codec.given(direction).ids for direction in DIRECTIONS]
    pairs = [(prompt, a) for prompt in _prompts(roles, env, "policy") for a in answers]
    table = np.exp(answer_logprobs(backbone, pairs, adapter)).reshape(-1, len(DIRECTIONS))
    rest = np.clip(1.0 - table.sum(-1), 0.0, None)
    rows = np.arange(len(exact.states))
    table[rows, exact.mdp.allowed.argmin(-1)] += rest
    return table / table.sum(-1, keepdims=True)


def critic_table(
    backbone: Backbone, roles: Roles, env: LanguageMDPEnv, adapter: str = "online"
) -> Array:
    """[S, A], probability that the successor model foresees success, given where an exit leads.

    For the templates ``language_mdp``, whose futures read ``PLACE. End: solved.`` An action that
    is not allowed has nan.
    """
    exact = env.world.exact
    where, pairs = [], []
    for s, (room, goal) in enumerate(exact.states):
        seen = [said(state_text(exact.world, room, goal))]
        state_ids = _state(roles, seen[0]["content"])
        for direction, target in exact.world.exits[room].items():
            prompt = roles.prompt("successor", state_ids, seen, action=direction).ids
            where.append((s, DIRECTIONS.index(direction)))
            for ending in ("solved", "failed"):
                pairs.append((prompt, roles.codec.text(f" {target}. End: {ending}.\n")))
    logprobs = np.array(answer_logprobs(backbone, pairs, adapter)).reshape(-1, 2)
    table = np.full(exact.mdp.success.shape, np.nan)
    rows, columns = np.array(where).T
    table[rows, columns] = 1.0 / (1.0 + np.exp(logprobs[:, 1] - logprobs[:, 0]))
    return table


def critic_scores(env: LanguageMDPEnv, q: Array, critic: Array) -> dict[str, float]:
    """A critic beside exact values, on allowed actions two or more moves from the end.

    Args:
        env: the world.
        q: [S, A], exact values of what the critic should know.
        critic: [S, A], its scores in [0, 1].

    Returns:
        ``spearman`` with Q over all such state-actions; ``auroc`` of telling actions whose Q is
        above the state's mean from the others; ``calibration``, the mean distance to Q;
        ``monotone`` and ``monotone_state``, the share of pairs with different Q, of any states and
        of the same state, that the critic puts in the same order (a total order with a monotone map
        to Q, as the paper's theory assumes, has 1; a blind critic one half).
        A critic that sees only the immediate outcome, which is the same for all of these actions,
        has 0 and 0.5 by construction.
    """
    mdp = env.world.exact.mdp
    far = mdp.allowed & (mdp.success == 0) & (mdp.transition.sum(-1) > 0)
    mean = _mean(q, mdp.allowed)
    score, truth = torch.tensor(critic[far]), torch.tensor(q[far])
    above = torch.tensor((q > mean + 1e-9)[far].astype(int))
    advantage = torch.tensor((critic - _mean(critic, mdp.allowed))[far])
    state = np.nonzero(far)[0]
    order, same = _order(critic[far], q[far]), state[:, None] == state
    return {
        "spearman": float(spearman_corrcoef(score, truth)),
        "auroc": float(binary_auroc(advantage.sigmoid(), above)),
        "calibration": float((score - truth).abs().mean()),
        "monotone": float(np.nanmean(order)),
        "monotone_state": float(np.nanmean(order[same])),
    }


def _mean(values: Array, allowed: Mask) -> Array:
    """[S, 1], mean over the allowed actions."""
    return np.where(allowed, values, 0.0).sum(-1, keepdims=True) / allowed.sum(-1, keepdims=True)


def _order(critic: Array, q: Array) -> Array:
    """[n, n], 1 where two are in the same order for both, 0.5 where the critic sees none, else 0;
    nan where Q is equal."""
    truth = np.sign(np.round(q[:, None] - q, 9))
    order = (1.0 + truth * np.sign(critic[:, None] - critic)) / 2
    return np.where(truth == 0, np.nan, order)


def role_skills(
    backbone: Backbone, roles: Roles, adapter: str = "online", worlds: int = 100
) -> dict[str, float]:
    """Share of right answers of each role on random worlds: what pretraining taught and training
    may have made the adapter forget. The policy's is the probability of any exit."""

    def read(sheet: Sheet) -> torch.Tensor:
        hidden = backbone.forward_tree(sheet.tree)
        return backbone.logits(hidden[sheet.sources.to(hidden.device)]).float()

    with backbone.reading(), backbone.use(adapter):
        found = skills(read, roles, worlds)
    return found


def _prompts(roles: Roles, env: LanguageMDPEnv, role: str) -> list[Ids]:
    exact = env.world.exact
    texts = [state_text(exact.world, room, goal) for room, goal in exact.states]
    return [roles.prompt(role, _state(roles, text), [said(text)]).ids for text in texts]


def _state(roles: Roles, text: str) -> Ids:
    return roles.codec.messages([{"role": "system", "content": SYSTEM}, said(text)])
