"""Episodes and transitions: plain values, with token ids as the truth.

A state is a prefix of its episode's token ids. Each turn stores the ids by which it extends the
state and where in them the action lies; nothing is ever decoded and encoded again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from nlac_lightning.envs.base import Message

FAILURES = ("reset_error", "env_error", "user_failed", "policy_failed")
"""Reasons of episodes that ended because a part of the machinery failed, not by what was done."""


@dataclass(frozen=True)
class Turn:
    """One action and what followed it.

    Attributes:
        action: text of the action as the environment received it.
        completion: text as sampled; it may hold a thought before the action.
        delta_ids: ids from the end of the state to the end of the next one: the agent's header,
            the sampled completion, its closing, the environment's messages.
        action_start, action_end: the completion's span in ``delta_ids``.
        logprobs: log-probability of each sampled id under the distribution that it was drawn
            from, or empty for an action that was not sampled from the model.
        finish_reason: ``stop``, ``length`` (cut off) or ``given`` (not sampled).
        policy_version: adapter version that acted.
        explored: the action came from exploration, not from the policy.
        replies: the environment's messages.
        reward, terminated, truncated, info: see :class:`nlac_lightning.envs.base.Step`.
    """

    action: str
    completion: str
    delta_ids: tuple[int, ...]
    action_start: int
    action_end: int
    logprobs: tuple[float, ...]
    finish_reason: str
    policy_version: int
    explored: bool
    replies: list[Message]
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def action_ids(self) -> tuple[int, ...]:
        """The sampled ids of the completion, exactly as they were drawn."""
        return self.delta_ids[self.action_start : self.action_end]


@dataclass(frozen=True)
class Episode:
    """One whole episode.

    Attributes:
        env, task_id, split, seed: where it comes from; enough to play it again.
        codec: fingerprint of tokenizer and prompt format that the ids belong to.
        opening, opening_ids: the first state.
        turns: at least one.
        reason: why it ended: the environment's word, or ``step_limit``, ``token_limit``,
            ``time_limit``, or one of :data:`FAILURES`.
    """

    env: str
    task_id: str
    split: str
    seed: int
    codec: str
    opening: list[Message]
    opening_ids: tuple[int, ...]
    turns: list[Turn]
    reason: str

    @property
    def total_reward(self) -> float:
        """Sum of the rewards."""
        return sum(turn.reward for turn in self.turns)

    def state_ids(self, t: int) -> tuple[int, ...]:
        """Ids of the state in which turn ``t`` acts; ``t == len(turns)`` is the last state."""
        ids = list(self.opening_ids)
        for turn in self.turns[:t]:
            ids.extend(turn.delta_ids)
        return tuple(ids)

    def state_messages(self, t: int) -> list[Message]:
        """Messages of the state in which turn ``t`` acts, the agent's own included."""
        messages = list(self.opening)
        for turn in self.turns[:t]:
            messages.append({"role": "assistant", "content": turn.completion})
            messages.extend(turn.replies)
        return messages

    def transition(self, t: int, episode_id: int = -1) -> Transition:
        """The ``t``-th transition; ``episode_id`` is its number in a buffer."""
        state_ids = self.state_ids(t)
        return_to_go = sum(turn.reward for turn in self.turns[t:])
        return Transition(
            episode_id=episode_id,
            t=t,
            env=self.env,
            task_id=self.task_id,
            split=self.split,
            seed=self.seed,
            state_ids=state_ids,
            state_messages=self.state_messages(t),
            next_state_ids=state_ids + self.turns[t].delta_ids,
            turn=self.turns[t],
            past_actions=tuple(turn.action for turn in self.turns[:t]),
            episode_reward=self.total_reward,
            return_to_go=return_to_go,
            best_return=return_to_go,
            turns_left=len(self.turns) - 1 - t,
        )

    def transitions(self, episode_id: int = -1) -> list[Transition]:
        """All transitions in order."""
        return [self.transition(t, episode_id) for t in range(len(self.turns))]


@dataclass(frozen=True)
class Transition:
    """One (s, a, r, s') with all that training needs, self-contained.

    Attributes:
        state_ids, next_state_ids: s_t and s_{t+1}; the second extends the first.
        turn: action, reward and replies.
        past_actions: environment actions taken before, so that the episode can be replayed.
        episode_reward, return_to_go: undiscounted sums of rewards, of the whole episode and from
            this action on (Monte-Carlo targets).
        best_return: highest return-to-go of all episodes in the buffer that took this action in
            this state of this task; without a buffer the episode's own.
        turns_left: how many transitions of the episode come after this one.
    """

    episode_id: int
    t: int
    env: str
    task_id: str
    split: str
    seed: int
    state_ids: tuple[int, ...]
    state_messages: list[Message]
    next_state_ids: tuple[int, ...]
    turn: Turn
    past_actions: tuple[str, ...]
    episode_reward: float
    return_to_go: float
    best_return: float
    turns_left: int

    @property
    def last(self) -> bool:
        """No later transition exists in the episode."""
        return self.turns_left == 0

    @property
    def terminal(self) -> bool:
        """Whether s_{t+1} ends the task, so that there is nothing to bootstrap from."""
        return self.turn.terminated
