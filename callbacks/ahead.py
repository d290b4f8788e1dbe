"""Rollouts that run while the model trains on."""

from __future__ import annotations

import threading
import time

from nlac_lightning.actors import ModelActor
from nlac_lightning.algorithms.base import Algorithm
from nlac_lightning.callbacks.collection import Jobs, Played
from nlac_lightning.distributed import world_size
from nlac_lightning.envs.limited import LimitedEnv
from nlac_lightning.errors import ConfigError
from nlac_lightning.generation.vllm import VLLMGenerator
from nlac_lightning.replay.episode import Episode
from nlac_lightning.rollout import Rollout


class Ahead:
    """A rollout in a thread of its own.

    A call of the environment that hangs costs its episode, as elsewhere, see :class:`LimitedEnv`;
    the engine's answers have a limit of their own (``model.compute.generation.seconds``).

    Args:
        rollout, jobs: what is played.
        module: its adapters act as they are now; see :func:`check_ahead`.

    Attributes:
        version: of the adapter that acts.
    """

    def __init__(self, rollout: Rollout, jobs: Jobs, module: Algorithm) -> None:
        assert isinstance(module.generator, VLLMGenerator)
        self.version = module.backbone.versions["online"]
        self._rollout, self._jobs = rollout, jobs
        self._adapters = module.generator.pinned()
        self._actor = ModelActor(module.roles, self._adapters)
        self._episodes: list[Episode] = []
        self._seconds = 0.0
        self._error: BaseException | None = None
        # no pool's thread: the end of the process would wait for it
        self._thread = threading.Thread(target=self._play, name="rollouts", daemon=True)
        self._thread.start()

    def _play(self) -> None:
        began = time.perf_counter()
        env = LimitedEnv(self._rollout.env, self._rollout.limits.call_seconds)
        self._rollout.env = env
        try:
            for episode in self._rollout.play(self._jobs, self._actor):
                self._episodes.append(episode)
        except BaseException as error:
            self._error = error
        env.leave()
        self._seconds = time.perf_counter() - began

    def wait(self) -> Played:
        """The episodes, once all have ended; raises what the rollout raised."""
        self._thread.join()
        self._adapters.release()
        if self._error is not None:
            raise self._error
        return Played(self._rollout, self._episodes, self._seconds)

    def drop(self) -> None:
        """Give up what is played; the thread ends at its next request."""
        self._adapters.revoke()


def check_ahead(module: Algorithm) -> None:
    """Raise ConfigError unless rollouts can be played while ``module`` trains."""
    if module.rollout_plan is not None:
        raise ConfigError(
            "rollout.ahead",
            f"{type(module).__name__} learns from the present policy's episodes only",
            "set it to false, or use an off-policy algorithm (nlac, rft)",
        )
    if not isinstance(module.generator, VLLMGenerator) or world_size() > 1:
        raise ConfigError(
            "rollout.ahead",
            "the process that trains cannot generate meanwhile",
            "set model.compute.generation.engine to vllm or vllm_server, trainer.devices to 1",
        )
