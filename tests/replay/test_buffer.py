"""What goes into the buffer comes out, in order, within capacity and after truncation."""

import json
import os
import pickle
import threading
import warnings
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nlac_lightning.errors import ConfigError
from nlac_lightning.replay.buffer import ReplayBuffer
from nlac_lightning.replay.episode import Episode, Turn

# Any text that JSON can carry, lone surrogates (which UTF-8 refuses) and NUL included.
TEXT = st.text(st.characters(exclude_categories=()), max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)
IDS = st.lists(st.integers(0, 2**31 - 1), max_size=5).map(tuple)
MESSAGES = st.lists(st.fixed_dictionaries({"role": TEXT, "content": TEXT}), max_size=2)


@st.composite
def turns(draw):
    ids = draw(IDS)
    start = draw(st.integers(0, len(ids)))
    end = draw(st.integers(start, len(ids)))
    size = draw(st.sampled_from([0, end - start]))
    return Turn(
        action=draw(TEXT),
        completion=draw(TEXT),
        delta_ids=ids,
        action_start=start,
        action_end=end,
        logprobs=tuple(
            draw(st.lists(st.floats(width=32, max_value=0), min_size=size, max_size=size))
        ),
        finish_reason=draw(st.sampled_from(["stop", "length", "given"])),
        policy_version=draw(st.integers(0, 2**40)),
        explored=draw(st.booleans()),
        replies=draw(MESSAGES),
        reward=draw(st.floats(allow_nan=False, allow_infinity=False)),
        terminated=draw(st.booleans()),
        truncated=draw(st.booleans()),
        info=draw(st.dictionaries(TEXT, JSON, max_size=2)),
    )


EPISODES = st.builds(
    Episode,
    env=st.just("desk"),
    task_id=st.text(max_size=5),
    split=st.sampled_from(["train", "val"]),
    seed=st.integers(-(2**63), 2**63 - 1),
    codec=st.just("codec-a"),
    opening=MESSAGES,
    opening_ids=IDS,
    turns=st.lists(turns(), min_size=1, max_size=3),
    reason=st.sampled_from(["done", "step_limit"]),
)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(episode=EPISODES)
def test_any_episode_comes_back_equal(episode, tmp_path_factory):
    path = tmp_path_factory.mktemp("any") / "replay.sqlite"
    with ReplayBuffer(path) as buffer:
        number = buffer.append(episode)
    with ReplayBuffer(path, read_only=True) as buffer:
        assert buffer.episode(number) == episode
        assert buffer.problems() == []


def test_reading_back(tmp_path, fill):
    buffer = ReplayBuffer(tmp_path / "new" / "replay.sqlite")
    episodes = fill(buffer, [3, 1, 4])
    assert buffer.episode_ids() == [1, 2, 3]
    assert (len(buffer), buffer.num_episodes, buffer.high_water_mark) == (8, 3, 3)
    assert list(buffer.iter_episodes()) == episodes
    assert buffer.transition(3, 2) == episodes[2].transition(2, 3)
    keys = [(3, 3), (1, 0), (3, 0), (1, 0)]
    assert buffer.transitions(keys) == [episodes[i - 1].transition(t, i) for i, t in keys]
    with pytest.raises(KeyError, match="no episode 4"):
        buffer.episode(4)
    with pytest.raises(IndexError):
        buffer.transition(2, 1)


def test_each_episode_of_a_batch_is_read_once(tmp_path, fill):
    buffer = ReplayBuffer(tmp_path / "replay.sqlite")
    fill(buffer, [5, 5])
    statements = []
    buffer._database.connection().set_trace_callback(statements.append)
    buffer.transitions([(1, 0), (2, 1), (1, 4), (2, 0), (1, 2)])
    assert sum("delta_ids" in statement for statement in statements) == 2


def test_append_many_is_all_or_nothing(tmp_path, make_episode):
    buffer = ReplayBuffer(tmp_path / "replay.sqlite")
    assert buffer.append_many(make_episode(i) for i in range(3)) == [1, 2, 3]
    with pytest.raises(ValueError, match="'bad' has no turn"):
        buffer.append_many([make_episode(3), replace(make_episode(4), turns=[], task_id="bad")])
    assert buffer.num_episodes == buffer.high_water_mark == 3
    assert buffer.append(make_episode(5)) == 4


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"action_end": 99}, "span"),
        ({"action_start": -1}, "span"),
        ({"logprobs": (0.0,) * 50}, "50 logprobs"),
        ({"reward": float("nan")}, "not finite"),
    ],
)
def test_a_turn_that_cannot_be_trained_on_is_refused(tmp_path, make_episode, change, word):
    buffer = ReplayBuffer(tmp_path / "replay.sqlite")
    episode = make_episode(0)
    episode.turns[1] = replace(episode.turns[1], **change)
    with pytest.raises(ValueError, match=f"refund-0', turn 1.*{word}"):
        buffer.append(episode)
    assert len(buffer) == 0


def test_info_that_json_cannot_hold_is_refused(tmp_path, make_episode):
    buffer = ReplayBuffer(tmp_path / "replay.sqlite")
    episode = make_episode(0)
    episode.turns[0].info["object"] = object()
    with pytest.raises(TypeError, match="not JSON serializable"):
        buffer.append(episode)
    assert len(buffer) == 0


def test_storage_grows_with_tokens_not_with_turns_squared(tmp_path, make_episode):
    def size(turns):
        path = tmp_path / f"{turns}.sqlite"
        with ReplayBuffer(path) as buffer:
            buffer.append(make_episode(0, turns))
        return path.stat().st_size

    empty = tmp_path / "empty.sqlite"
    ReplayBuffer(empty).close()
    base = empty.stat().st_size
    assert size(1600) - base < 4.5 * (size(400) - base)


# Capacity and truncation


def test_eviction_takes_whole_oldest_episodes(tmp_path, fill):
    buffer = ReplayBuffer(tmp_path / "replay.sqlite", capacity=10)
    fill(buffer, [4, 4, 2])
    assert buffer.episode_ids() == [1, 2, 3]  # exactly full
    fill(buffer, [1], first=3)
    assert buffer.episode_ids() == [2, 3, 4]
    assert len(buffer) == 7
    with pytest.raises(KeyError):
        buffer.transition(1, 0)
    assert buffer.stats().transitions == 7
    assert buffer.problems() == []


def test_the_newest_episode_stays_even_above_capacity(tmp_path, fill):
    buffer = ReplayBuffer(tmp_path / "replay.sqlite", capacity=3)
    fill(buffer, [2, 9])
    assert buffer.episode_ids() == [2]
    assert len(buffer) == 9
    fill(buffer, [1], first=2)
    assert buffer.episode_ids() == [3]


def test_evicted_episodes_leave_the_file_after_one_turnover(tmp_path, fill):
    path = tmp_path / "replay.sqlite"
    buffer = ReplayBuffer(path, capacity=20)
    fill(buffer, [5] * 50)
    with buffer._database.transaction() as connection:
        assert connection.execute("SELECT count(*) FROM episodes").fetchone()[0] <= 9
        assert connection.execute("SELECT count(*) FROM turns").fetchone()[0] <= 45


def test_truncate_resumes_with_the_same_ids_and_episodes(tmp_path, fill):
    """Stopped after 12 episodes with a checkpoint at 8, resumed: as if never stopped."""
    sizes = [3, 2, 4, 1, 3, 2, 5, 2, 3, 4, 1, 2]
    straight = ReplayBuffer(tmp_path / "straight.sqlite", capacity=15)
    fill(straight, sizes)
    stopped = ReplayBuffer(tmp_path / "stopped.sqlite", capacity=15)
    fill(stopped, sizes[:8])
    at_checkpoint = [*stopped.index()[:2], list(stopped.iter_episodes())]
    fill(stopped, [7, 1, 2], first=100)  # evicts, and is lost by the stop
    stopped.close()

    resumed = ReplayBuffer(tmp_path / "stopped.sqlite", capacity=15)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed.truncate(8)
    index = resumed.index()
    assert (index.ids == at_checkpoint[0]).all() and (index.turns == at_checkpoint[1]).all()
    assert list(resumed.iter_episodes()) == at_checkpoint[2]
    assert len(resumed) == index.turns.sum()
    assert resumed.high_water_mark == 8
    fill(resumed, sizes[8:], first=8)
    assert resumed.episode_ids() == straight.episode_ids()
    assert list(resumed.iter_episodes()) == list(straight.iter_episodes())
    assert resumed.problems() == []


def test_truncate_warns_when_the_checkpoint_is_older_than_the_buffer(tmp_path, fill):
    buffer = ReplayBuffer(tmp_path / "replay.sqlite", capacity=6)
    fill(buffer, [3] * 12)
    with pytest.warns(UserWarning, match="will differ"):
        buffer.truncate(3)
    assert buffer.high_water_mark == 3
    assert buffer.problems() == []


def test_truncate_refuses_a_mark_that_the_file_never_reached(tmp_path, fill):
    buffer = ReplayBuffer(tmp_path / "replay.sqlite")
    fill(buffer, [1, 1])
    buffer.truncate(2)
    with pytest.raises(ConfigError, match=r"knows 3 episodes, this file only 2.*data\.buffer"):
        buffer.truncate(3)


# Processes and threads


def test_pickle_opens_the_same_file(tmp_path, fill, monkeypatch):
    monkeypatch.chdir(tmp_path)
    buffer = ReplayBuffer("replay.sqlite", capacity=50)
    fill(buffer, [2])
    monkeypatch.chdir("/")
    copy = pickle.loads(pickle.dumps(buffer))
    fill(copy, [3], first=1)
    assert (len(buffer), copy.capacity) == (5, 50)


def test_fork_opens_its_own_connection(tmp_path, fill, make_episode):
    buffer = ReplayBuffer(tmp_path / "replay.sqlite")
    fill(buffer, [2])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other libraries' threads
        child = os.fork()
    if child == 0:
        os._exit(0 if buffer.append(make_episode(1)) == 2 and len(buffer) == 5 else 1)
    assert os.waitpid(child, 0)[1] == 0
    fill(buffer, [1], first=2)
    assert buffer.episode_ids() == [1, 2, 3]
    assert buffer.problems() == []


def test_threads_share_a_buffer(tmp_path, make_episode):
    buffer = ReplayBuffer(tmp_path / "replay.sqlite")
    errors = []

    def work(first):
        try:
            for i in range(first, first + 10):
                buffer.transition(buffer.append(make_episode(i)), 0)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(100 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert buffer.episode_ids() == list(range(1, 41))


def test_stats(tmp_path, fill):
    buffer = ReplayBuffer(tmp_path / "replay.sqlite", capacity=40)
    empty = buffer.stats()
    assert (empty.episodes, empty.success_rate, empty.policy_versions) == (0, 0.0, None)
    fill(buffer, [4] * 15)
    episodes = list(buffer.iter_episodes())
    turns = [turn for episode in episodes for turn in episode.turns]
    stats = buffer.stats()
    assert (stats.env, stats.codec) == ("desk", "codec-a")
    assert stats.episodes == len(episodes) == 10
    assert stats.transitions == len(turns) == len(buffer)
    assert stats.success_rate == sum(e.total_reward > 0 for e in episodes) / 10
    assert stats.mean_turns == 4
    assert stats.tokens == sum(len(e.state_ids(len(e.turns))) for e in episodes)
    assert stats.explored == sum(turn.explored for turn in turns) / len(turns)
    reasons = [e.reason for e in episodes]
    assert stats.reasons == {reason: reasons.count(reason) for reason in set(reasons)}
    versions = [turn.policy_version for turn in turns]
    assert stats.policy_versions == (min(versions), max(versions))
    assert stats.file_bytes >= sum(len(json.dumps(e.opening)) for e in episodes)


@pytest.fixture
def path(make_episode):
    """``path(actions, reward, task)``: equal beginnings give equal states."""

    def make(actions: str, reward: float, task: str = "a") -> Episode:
        blank = make_episode(0, turns=len(actions), task_id=task)
        turns = [
            replace(turn, action=a, delta_ids=(ord(a), t, 7, 8, 9), action_start=0, action_end=1,
                    logprobs=(), reward=reward * (t == len(actions) - 1))
            for t, (turn, a) in enumerate(zip(blank.turns, actions, strict=True))
        ]  # fmt: skip
        return replace(blank, turns=turns)

    return make


WORDS = [("xy", 0.0, "a"), ("xyz", 0.0, "a"), ("xyw", 1.0, "a"), ("yx", 0.5, "a"),
         ("xy", 0.25, "b"), ("xyw", -1.0, "a"), ("xyw", 0.5, "b")]  # fmt: skip


def test_best_return_is_the_best_of_equal_actions_in_equal_states(tmp_path, path):
    """Brute force over episodes that share beginnings; another task shares none of them."""
    with ReplayBuffer(tmp_path / "b.sqlite") as buffer:
        ids = buffer.append_many(path(*word) for word in WORDS)
        for episode_id, (actions, _, task) in zip(ids, WORDS, strict=True):
            for t in range(len(actions)):
                same = [r for a, r, k in WORDS if k == task and a[: t + 1] == actions[: t + 1]]
                assert buffer.transition(episode_id, t).best_return == max(same)
        buffer.truncate(ids[1])
        assert buffer.transition(ids[0], 0).best_return == 0.0


def test_alternatives_are_what_else_was_done_in_a_state(tmp_path, path):
    """Brute force likewise; the newest transition stands for each action."""
    with ReplayBuffer(tmp_path / "b.sqlite") as buffer:
        ids = buffer.append_many(path(*word) for word in WORDS)
        for episode_id, (actions, _, task) in zip(ids, WORDS, strict=True):
            for t in range(len(actions)):
                best: dict[str, float] = {}
                newest: dict[str, int] = {}
                for other, (a, r, k) in zip(ids, WORDS, strict=True):
                    if k == task and len(a) > t and a[:t] == actions[:t]:
                        best[a[t]] = max(best.get(a[t], -9), r)
                        newest[a[t]] = other
                expected = {((newest[a], t), best[a]) for a in best}
                assert set(buffer.alternatives((episode_id, t))) == expected


def test_evicted_episodes_are_no_alternatives(tmp_path, path):
    with ReplayBuffer(tmp_path / "b.sqlite", capacity=4) as buffer:
        first, second = buffer.append_many([path("xy", 1.0), path("zy", 0.0)])
        assert len(buffer.alternatives((second, 0))) == 2
        buffer.append(path("yy", 0.0))
        assert first not in buffer.episode_ids()
        assert {key[0] for key, _ in buffer.alternatives((second, 0))} == {second, second + 1}
