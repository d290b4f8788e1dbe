"""``nlac replay import --format tau-bench``: recorded conversations into a replay buffer."""

from __future__ import annotations

import sys
from pathlib import Path

from nlac_lightning.algorithms.base import Algorithm
from nlac_lightning.data import ReplayDataModule
from nlac_lightning.envs.tau2.env import Tau2Env
from nlac_lightning.envs.tau2.recorded import RecordedEnv, episodes, read_runs
from nlac_lightning.errors import ConfigError
from nlac_lightning.lightning_cli import NLACCommandLine
from nlac_lightning.models import load_tokenizer
from nlac_lightning.replay.buffer import ReplayBuffer
from nlac_lightning.roles.roles import Roles


def import_tau_bench(source: str | Path, arguments: list[str], path: Path | None = None) -> str:
    """Append the runs of a tau-bench result file to a buffer; returns what to print.

    Only the tokenizer of the config's model is loaded.

    Args:
        source: the result file.
        arguments: those of ``nlac fit``, for tokenizer, prompts and environment.
        path: the buffer; None takes the one that the config trains on.

    Raises:
        ConfigError: the config's environment is not Tau2Env, or the file is not a result file.
    """
    line = NLACCommandLine.run_from(arguments, run=False)
    module, data = line.model, line.datamodule
    assert isinstance(module, Algorithm) and isinstance(data, ReplayDataModule)
    if not isinstance(data.env, Tau2Env):
        problem = f"tau-bench runs cannot be played in {data.env.name}"
        raise ConfigError("data.env", problem, "give a config of Tau2Env, e.g. tau_airline")
    config = module.backbone_config
    tokenizer = load_tokenizer(config.name, trust_remote_code=config.trust_remote_code)
    roles = Roles(module.roles_config, tokenizer)
    runs = read_runs(source, data.env)
    path = path or data.buffer_path(line.trainer.default_root_dir)
    same = transitions = reward = 0
    with ReplayBuffer(path, sys.maxsize, roles.codec.fingerprint, data.env.name) as buffer:
        for episode in episodes(RecordedEnv(data.env, runs), roles):
            buffer.append(episode)
            transitions += len(episode.turns)
            reward += episode.total_reward > 0
            same += episode.total_reward == episode.turns[-1].info["recorded_reward"]
        total = buffer.num_episodes
    return (
        f"{len(runs)} runs added to {path} as {transitions:,} transitions, {reward} of them "
        f"rewarded; the reward equals the recorded one in {same}. It now holds {total:,} episodes."
    )
