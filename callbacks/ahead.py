"""Rollouts that run while the model trains on."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from nlac_lightning.algorithms.base import Algorithm
from nlac_lightning.callbacks.collection import Jobs, Played
from nlac_lightning.distributed import world_size
from nlac_lightning.errors import ConfigError
from nlac_lightning.generation.vllm import VLLMGenerator
from nlac_lightning.rollout import ModelActor, Rollout


class Ahead:
    """A rollout in a thread of its own.

    Args:
        rollout, jobs: what is played.
        module: its adapters act as they are now; see :func:`check_ahead`.

    Attributes:
        version: of the adapter that acts.
    """

    def __init__(self, rollout: Rollout, jobs: Jobs, module: Algorithm) -> None:
        assert isinstance(module.generator, VLLMGenerator)
        self.version = module.backbone.versions["online"]
        self._rollout = rollout
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="rollouts")
        actor = ModelActor(module.roles, module.generator.pinned())
        self._played = self._pool.submit(self._play, jobs, actor)

    def _play(self, jobs: Jobs, actor: ModelActor) -> Played:
        began = time.perf_counter()
        episodes = list(self._rollout.play(jobs, actor))
        return Played(self._rollout, episodes, time.perf_counter() - began)

    def wait(self) -> Played:
        """The episodes, once all have ended."""
        played = self._played.result()
        self._pool.shutdown()
        return played


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
