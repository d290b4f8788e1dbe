"""Questions to every role on random worlds, with all answers that are right.

``benchmarks/pretrain_tiny.py`` teaches them; :func:`skills` measures how well a model answers, and
so what a training run has made it forget. The worlds come from random streams that
``LanguageMDPEnv`` draws none of its own from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nlac_lightning.envs.base import OracleCritique
from nlac_lightning.envs.language_mdp.levels import LEVELS
from nlac_lightning.envs.language_mdp.texts import (
    dark_text,
    goal_text,
    reason_text,
    said,
    state_text,
    trap_text,
    wall_text,
)
from nlac_lightning.envs.language_mdp.world import DIRECTIONS, TRAP, World, draw_world
from nlac_lightning.prefix_tree import PackedTree, pack_tree
from nlac_lightning.roles.roles import LIKE, ROLES, Roles

TRAINING, TESTING = 1, 2
"""Streams of worlds."""
TAUGHT = (*ROLES, *LIKE)
SAMPLED = ("policy", "refinement", "hindsight")
"""Roles whose skill is the probability of a right answer; the others answer greedily."""


@dataclass(frozen=True)
class Question:
    """A role's prompt and all answers that are right.

    Attributes:
        asked: how many ids of each answer can be known; of a future, the place but not the end.
    """

    role: str
    prompt: tuple[int, ...]
    answers: tuple[tuple[int, ...], ...]
    asked: int


@dataclass(frozen=True)
class Sheet:
    """Questions about one state, packed as a tree that shares its tokens.

    Attributes:
        sources: [n] places whose next id is learned.
        targets: [n] those ids.
        branches: [n] which (question, answer) each belongs to.
        first: [n] bool, whether it is the first id of its answer.
    """

    questions: list[Question]
    tree: PackedTree
    sources: Tensor
    targets: Tensor
    branches: Tensor
    first: Tensor


class Lessons:
    """Draws questions to the roles, with their answers."""

    def __init__(self, roles: Roles, stream: int) -> None:
        self.roles = roles
        self.rng = np.random.Generator(np.random.Philox(np.random.SeedSequence([7_001, stream])))

    def draw(self, count: int) -> list[Sheet]:
        """``count`` sheets, each on a state of a world of its own."""
        return [_sheet(self.questions()) for _ in range(count)]

    def questions(self) -> list[Question]:
        """Questions to every role in one state."""
        world = draw_world(LEVELS[int(self.rng.integers(1, 4))].shape, self.rng)
        room, goal = (str(x) for x in self.rng.choice(list(world.exits), 2, replace=False))
        text = wall_text if self.rng.random() < 0.1 else state_text
        seen = text(world, room, goal)
        exits = list(world.exits[room])
        ways = [*exits, str(self.rng.choice(DIRECTIONS))] if self.rng.random() < 0.2 else exits
        return [
            self._ask("policy", seen, exits),
            *(self._successor(seen, world.exits[room].get(way), way, goal) for way in ways),
            self._backup(world, room, goal, seen),
            self._evaluator(world),
            *(self._refinement(world, room, seen) for _ in range(2)),
            self._aggregation(world),
            self._hindsight(seen, exits),
        ]

    def _ask(
        self, role: str, seen: str, answers: Sequence[str], unknown: int = 0, **fields: object
    ) -> Question:
        """``unknown``: ids at each answer's end that are a matter of chance."""
        prompt = self.roles.prompt(role, (), [said(seen)], **fields)
        ids = tuple(self.roles.codec.text(f" {answer}\n") for answer in answers)
        return Question(role, prompt.ids, ids, len(ids[0]) - unknown)

    def _outcome(self) -> str:
        return "solved" if self.rng.random() < 0.5 else "failed"

    def _place(self, world: World) -> str:
        return str(self.rng.choice([*world.exits, TRAP, "no such exit"]))

    def _successor(self, seen: str, target: str | None, way: str, goal: str) -> Question:
        ending = {TRAP: "failed", goal: "solved"}.get(str(target), self._outcome())
        future = f"{target or 'no such exit'}. End: {ending}."
        return self._ask("successor", seen, [future], unknown=3, action=way)

    def _backup(self, world: World, room: str, goal: str, seen: str) -> Question:
        ending, terminal = self._outcome(), bool(self.rng.random() < 0.4)
        replies = seen
        if terminal and self.rng.random() < 0.5:
            lost = str(self.rng.choice([trap_text(), dark_text(room)]))
            replies = goal_text(goal) if ending == "solved" else lost
        return self._ask(
            "backup",
            "",
            [f"{ending}."],
            replies=replies,
            terminal=terminal,
            reward=float(ending == "solved"),
            next_description=f"{self._place(world)}. End: {ending}.",
        )

    def _evaluator(self, world: World) -> Question:
        endings = [self._outcome() for _ in range(int(self.rng.choice([1, 1, 3])))]
        futures = [f"{self._place(world)}. End: {ending}." for ending in endings]
        good = 2 * endings.count("solved") > len(endings)
        return self._ask("evaluator", "", ["good." if good else "bad."], descriptions=futures)

    def _refinement(self, world: World, room: str, seen: str) -> Question:
        exits = list(world.exits[room])
        action = str(self.rng.choice(exits))
        others = [way for way in exits if way != action]
        told = self.rng.random() < 0.3
        good = bool(self.rng.random() < 0.25)
        better = action if good else str(self.rng.choice(others))
        reason = reason_text(good, world.exits[room][action])
        critique = OracleCritique(good, reason, better).text()
        if not told:
            critique = "good." if good else "bad."
        answers = [action] if good else [better] if told else others
        return self._ask("refinement", seen, answers, action=action, critique=critique)

    def _aggregation(self, world: World) -> Question:
        """The ending of one of the rollouts, each as likely: its probability is their mean."""
        endings = [self._outcome() for _ in range(4)]
        return self._ask(
            "aggregation",
            "",
            [f"{ending}." for ending in endings],
            replies=[f"{self._place(world)}."],
            returns=[float(ending == "solved") for ending in endings],
        )

    def _hindsight(self, seen: str, exits: Sequence[str]) -> Question:
        """Another exit where every rollout failed."""
        action = str(self.rng.choice(exits))
        returns = [float(self.rng.random() < 0.2) for _ in range(4)]
        answers = [action] if any(returns) else [way for way in exits if way != action]
        return self._ask(
            "hindsight", seen, answers, action=action, returns=returns, rollouts=[""] * 4
        )


def _sheet(questions: list[Question]) -> Sheet:
    """Pack every question with each of its right answers."""
    sequences = [q.prompt + answer for q in questions for answer in q.answers]
    starts = [len(q.prompt) for q in questions for _ in q.answers]
    tree = pack_tree(sequences)
    spans = [tree.paths[i][start - 1 : -1] for i, start in enumerate(starts)]
    targets = [torch.tensor(sequences[i][start:]) for i, start in enumerate(starts)]
    branches = torch.repeat_interleave(
        torch.arange(len(spans)), torch.tensor([len(span) for span in spans])
    )
    first = torch.cat([torch.ones(1, dtype=torch.bool), branches.diff() > 0])
    return Sheet(questions, tree, torch.cat(spans), torch.cat(targets), branches, first)


@torch.no_grad()
def skills(read: Callable[[Sheet], Tensor], roles: Roles, worlds: int = 400) -> dict[str, float]:
    """Share of each role's answers that are right, sampled or greedy as the role is used.

    Teacher forcing measures both without drawing: the probability of the right answers, and
    whether each id of one of them is the likeliest.

    Args:
        read: logits [n, vocabulary] at ``sheet.sources``.
        roles: prompts, with the templates ``language_mdp``.
        worlds: number of sheets.
    """
    hits: dict[str, list[float]] = {role: [] for role in TAUGHT}
    for sheet in Lessons(roles, TESTING).draw(worlds):
        logits, targets = read(sheet).cpu(), sheet.targets
        logprobs = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
        likeliest = logits.argmax(-1) == targets
        branch = 0
        for question in sheet.questions:
            places = [
                (sheet.branches == branch + i).nonzero()[: question.asked, 0]
                for i in range(len(question.answers))
            ]
            branch += len(places)
            if question.role in SAMPLED:
                hits[question.role].append(sum(float(logprobs[p].sum().exp()) for p in places))
            else:
                hits[question.role].append(float(any(bool(likeliest[p].all()) for p in places)))
    return {role: float(np.mean(values)) for role, values in hits.items()}
