"""On-policy minibatches and batches of successes, from a real buffer."""

from collections import Counter
from pathlib import Path

import pytest

from nlac_lightning.errors import ConfigError
from nlac_lightning.policy_gradient.plan import RolloutPlan
from nlac_lightning.policy_gradient.sampler import OnPolicySampler, newest_rollout
from nlac_lightning.replay.buffer import ReplayBuffer
from nlac_lightning.replay.episode import Episode, Turn
from nlac_lightning.replay.mixed_sampler import MixedSampler
from nlac_lightning.replay.sampler import TransitionSampler
from nlac_lightning.replay.successes import SuccessSampler


def episode(task: str, version: int, reward: float = 0.0, turns: int = 2) -> Episode:
    """An episode with a reward at its end."""
    made = [
        Turn("a", "a", (1, 2), 0, 1, (-0.5,), "stop", version, False, [],
             reward if t == turns - 1 else 0.0, t == turns - 1, False)
        for t in range(turns)
    ]  # fmt: skip
    return Episode("env", task, "train", 0, "codec", [], (1,), made, "done")


@pytest.fixture
def buffer(tmp_path: Path) -> ReplayBuffer:
    return ReplayBuffer(tmp_path / "replay.sqlite")


def test_each_epoch_goes_over_the_newest_rollout_once_in_whole_groups(buffer: ReplayBuffer) -> None:
    buffer.append_many([episode(f"old{i}", 0) for i in range(5)])
    buffer.append_many([episode(f"t{i % 4}", 3) for i in range(8)])  # groups come interleaved
    plan = RolloutPlan(episodes=8, minibatches=2, epochs=2, group_size=2)
    sampler = OnPolicySampler(buffer, plan, seed=0)
    tasks = {o.episode_id: o.task_id for o in buffer.outcomes()}
    for epoch in range(2):
        batches = [sampler.draw(epoch * 2 + part) for part in range(2)]
        assert Counter(key for b in batches for key in b) == {
            (i, t): 1 for i in range(6, 14) for t in range(2)
        }
        for batch in batches:
            counts = Counter(tasks[i] for i, t in batch if t == 0)
            assert list(counts.values()) == [2, 2]
    assert sampler.draw(1) == OnPolicySampler(buffer, plan, seed=0).draw(1)
    buffer.append_many([episode("new", 7) for _ in range(8)])
    assert {i for i, _ in sampler.draw(4)} <= set(range(14, 22))


def test_dynamic_sampling_drops_groups_without_a_difference(buffer: ReplayBuffer) -> None:
    rewards = {"a": [0, 0], "b": [1, 0], "c": [1, 1], "d": [0, 1], "e": [1, 0]}
    buffer.append_many([episode(t, 1, r) for t, pair in rewards.items() for r in pair])
    plan = RolloutPlan(4, group_size=2, informative=True)
    held = {i for i, _ in OnPolicySampler(buffer, plan, 0).draw(0)}
    tasks = {o.task_id for o in newest_rollout(buffer) if o.episode_id in held}
    assert tasks == {"b", "d"} and len(held) == 4


def test_an_empty_buffer_names_the_callback(buffer: ReplayBuffer) -> None:
    with pytest.raises(ConfigError, match="RolloutCallback"):
        OnPolicySampler(buffer, RolloutPlan(2), 0).draw(0)


def test_successes_only_with_a_cap_per_task(buffer: ReplayBuffer) -> None:
    assert SuccessSampler(buffer, 4).draw(0) == []
    buffer.append_many([episode("easy", 0, 1.0) for _ in range(20)])
    buffer.append_many([episode("hard", 0, 0.0) for _ in range(20)])
    buffer.append_many([episode("hard", 0, 1.0)])
    sampler = SuccessSampler(buffer, 5, per_task=2)
    assert {i for i, _ in sampler.successes()} == {19, 20, 41}
    drawn = Counter(key for position in range(300) for key in sampler.draw(position))
    assert set(drawn) == {(i, t) for i in (19, 20, 41) for t in range(2)}
    assert max(drawn.values()) < 1.2 * min(drawn.values())  # 5 of 6 a time, all alike
    for position in range(20):
        keys = sampler.draw(position)
        assert len(set(keys)) == 5 and keys == sampler.draw(position)
    assert len(SuccessSampler(buffer, 50).draw(0)) == 42
    buffer.append(episode("easy", 0, 1.0))
    assert {i for i, _ in sampler.successes()} == {20, 41, 42}


def test_a_mixed_batch_holds_its_share_of_successes(buffer: ReplayBuffer) -> None:
    buffer.append_many([episode(f"t{i}", 0) for i in range(60)])
    rest = TransitionSampler(buffer, 8, seed=1)
    mixed = MixedSampler(buffer, rest, 8, share=0.5, after=3, seed=1)
    assert mixed.draw(5) == rest.draw(5), "without a success the rest fills the batch"
    buffer.append_many([episode("rare", 0, 1.0) for _ in range(3)])
    for position in range(12):
        keys, good = mixed.draw(position), {61, 62, 63}
        assert len(keys) == 8 and keys == mixed.draw(position)
        if position < 3:
            assert keys == rest.draw(position)
        else:
            assert all(i in good for i, _ in keys[:4]) and keys[4:] == rest.draw(position)[:4]
    assert {i for i, _ in rest.draw(7)} - good, "the other half comes from all episodes"
