"""Episodes that ended for a reason that is left out of training."""

from collections.abc import Callable
from pathlib import Path

import pytest

from nlac_lightning.errors import ConfigError
from nlac_lightning.replay.buffer import ReplayBuffer
from nlac_lightning.replay.episode import Episode
from nlac_lightning.replay.sampler import TransitionSampler

Make = Callable[..., Episode]


def test_failed_users_are_kept_but_never_drawn(tmp_path: Path, make_episode: Make) -> None:
    buffer = ReplayBuffer(tmp_path / "b.sqlite")
    sampler = TransitionSampler(buffer, batch_size=8, exclude=["user_failed"])
    for number in range(12):
        reason = "user_failed" if number % 3 == 0 else "done"
        buffer.append(make_episode(number, reason=reason))
        if number == 0:
            with pytest.raises(ConfigError, match="no transition to draw"):
                sampler.draw(0)
    assert buffer.num_episodes == 12
    drawn = {episode_id for position in range(60) for episode_id, _ in sampler.draw(position)}
    assert drawn == {number + 1 for number in range(12) if number % 3}
    everything = TransitionSampler(buffer, batch_size=8)
    assert {i for p in range(60) for i, _ in everything.draw(p)} == set(range(1, 13))
