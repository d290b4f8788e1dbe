"""Episodes that leave a stored one: back to its state, another action, then the policy."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from nlac_lightning.actors import Actor, Live
from nlac_lightning.envs.base import Task
from nlac_lightning.envs.replay import resume
from nlac_lightning.errors import ConfigError
from nlac_lightning.generation.base import Completion
from nlac_lightning.interrupts import time_limit
from nlac_lightning.replay.episode import Episode, Transition
from nlac_lightning.rollout import Rollout

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fork:
    """Where a rollout leaves a stored episode.

    Attributes:
        task, state: the state to go back to.
        action: what is done there first.
        seed: of all that follows, the environment's chance included.
    """

    task: Task
    state: Transition
    action: Completion
    seed: int


class ForkedRollout(Rollout):
    """A :class:`Rollout` whose episodes may begin in the middle of stored ones."""

    def branch(self, forks: Sequence[Fork], actor: Actor) -> Iterator[Episode]:
        """Play on from stored states; the episodes begin there and carry their fork's seed.

        The environment must give equal answers to equal seeds and actions.

        Raises:
            ConfigError: the environment's settings are not those of the stored episode.
        """
        return self._play([partial(self._fork, fork) for fork in forks], actor)

    def _fork(self, fork: Fork) -> Live | None:
        state = fork.state
        try:
            with time_limit(self.limits.call_seconds):
                session = resume(self.env, fork.task, state.seed, state.past_actions)
            chance, draws = np.random.SeedSequence(fork.seed).spawn(2)
            session.reseed(int(chance.generate_state(1, np.uint64)[0]))
        except ConfigError:
            raise
        except Exception as error:
            self.counts["reset_error"] += 1
            log.warning("task %s could not be played again: %s", fork.task.id, error)
            return None
        return Live(
            fork.task,
            fork.seed,
            session,
            state.state_ids,
            state.state_ids,
            list(state.state_messages),
            np.random.Generator(np.random.Philox(draws)),
            time.monotonic(),
            list(state.state_messages),
            first=fork.action,
            before=state.t,
        )
