"""``nlac roles``: what each role is asked, and what the model really answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nlac_lightning.actors import ModelActor
from nlac_lightning.algorithms.base import Algorithm
from nlac_lightning.data import ReplayDataModule
from nlac_lightning.envs.base import TextEnv
from nlac_lightning.errors import ConfigError
from nlac_lightning.generation.base import Completion
from nlac_lightning.lightning_cli import NLACCommandLine
from nlac_lightning.replay.episode import Episode, Transition
from nlac_lightning.roles.codec import Ids
from nlac_lightning.rollout import Exploration, Rollout, RolloutLimits

WIDTH = 88
TURNS = 4
"""Actions of the episode that the transition is taken from."""


@dataclass(frozen=True)
class Answer:
    """A role's prompt and its completion.

    Attributes:
        text: the whole answer, a forced start included.
        shared: tokens that the prompt shares with the state.
    """

    role: str
    prompt: Ids
    prefill: str
    completion: Completion
    shared: int

    @property
    def text(self) -> str:
        return (self.prefill + self.completion.text).strip()


def preview(arguments: list[str]) -> None:
    """Print each role's rendered prompt and real answer for one transition.

    Args:
        arguments: those of ``nlac fit``: the same config is read.

    Raises:
        ConfigError: a wrong setting; no episode could be played.
    """
    line = NLACCommandLine.run_from(arguments, run=False)
    module, data = line.model, line.datamodule
    assert isinstance(module, Algorithm) and isinstance(data, ReplayDataModule)
    module.configure_model()
    data.env.meet(module.roles.codec.chat_template)
    episode = _episode(module, data.env)
    # The turn before the last has a next state, which the backup needs.
    state = episode.transition(max(len(episode.turns) - 2, 0))
    print(_heading(f"{episode.task_id} of {episode.env}, turn {state.t + 1}"))
    print(module.roles.codec.decode(state.state_ids))
    _show_roles(module, state)


def _episode(module: Algorithm, env: TextEnv) -> Episode:
    """A short episode of explored actions; the model acts where the environment lists none."""
    rollout = Rollout(
        env, module.roles, RolloutLimits(max_turns=TURNS), Exploration("epsilon", epsilon=1.0)
    )
    actor = ModelActor(module.roles, module.generator)
    played = list(rollout.play([(env.tasks("train")[0], 0)], actor))
    if not played:
        raise ConfigError("data.env", "its first task cannot be started", "see the warning above")
    return played[0]


def _show_roles(module: Algorithm, state: Transition) -> None:
    """All roles in the order of the method, each with what the earlier ones answered."""
    roles, turn = module.roles, state.turn
    action = turn.action
    own: Any = {"role": "assistant", "content": turn.completion}
    after = (state.next_state_ids, [*state.state_messages, own, *turn.replies])
    here = (state.state_ids, state.state_messages)

    def ask(role: str, ids: Ids, messages: Any, **fields: Any) -> Answer:
        prompt = roles.prompt(role, ids, messages, **fields)
        completion = module.generator.generate([roles.request(role, prompt)])[0]
        prefill = roles.codec.decode(prompt.ids[len(prompt.ids) - prompt.prefill :])
        return Answer(role, prompt.ids, prefill, completion, _shared(prompt.ids, ids))

    def show(answer: Answer, parsed: str) -> None:
        _print(answer, roles.codec.decode, parsed)

    policy = ask("policy", *here)
    show(policy, f"action: {roles.action(policy.text)!r}")

    future = ask("successor", *here, action=action)
    show(future, f"description of what follows {action!r}")

    next_action = roles.action(ask("policy", *after).text)
    forecast = ask("successor", *after, action=next_action)
    backup = ask(
        "backup",
        *here,
        action=action,
        reward=turn.reward,
        replies=" ".join(message["content"] for message in turn.replies),
        terminal=state.terminal,
        next_action="" if state.terminal else next_action,
        next_description="" if state.terminal else forecast.text,
    )
    show(backup, f"training target of the successor model after {action!r}")

    critique = ask("evaluator", *here, action=action, descriptions=[future.text])
    verdict = roles.verdict(critique.completion)
    word = {True: "good", False: "bad", None: "none could be read"}[verdict.good]
    show(critique, f"verdict: {word}; probability of good: {verdict.score:.2f}")

    refined = ask("refinement", *here, action=action, critique=critique.text)
    show(refined, f"action: {roles.action(refined.text)!r}, in place of {action!r}")


def _print(answer: Answer, decode: Callable[[Ids], str], parsed: str) -> None:
    out = answer.completion
    print(_heading(answer.role))
    print(decode(answer.prompt))
    print(_heading(f"{answer.role}: answer", "-"))
    print(answer.text or "(empty)")
    print(_heading(f"{answer.role}: read as", "-"))
    print(parsed)
    cut = "" if out.complete else " (cut off at its limit)"
    print(
        f"tokens: prompt {len(answer.prompt)}, of them {answer.shared} shared with the state; "
        f"answer {len(out.ids)}{cut}"
    )


def _heading(title: str, line: str = "=") -> str:
    return f"\n{line * 4} {title} ".ljust(WIDTH, line)


def _shared(prompt: Ids, state: Ids) -> int:
    """Length of the common prefix."""
    equal = 0
    for mine, theirs in zip(prompt, state, strict=False):
        if mine != theirs:
            break
        equal += 1
    return equal
