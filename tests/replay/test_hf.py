"""Export and import lose nothing and refuse what does not belong."""

import json
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset

from nlac_lightning.errors import ConfigError
from nlac_lightning.replay.buffer import ReplayBuffer
from nlac_lightning.replay.hf import (
    CHUNK,
    FEATURES,
    export_parquet,
    from_rows,
    import_dataset,
    import_parquet,
    to_dataset,
)


@pytest.fixture
def buffer(tmp_path, fill):
    with ReplayBuffer(tmp_path / "replay.sqlite") as buffer:
        fill(buffer, [3, 1, 6])
        yield buffer


def test_dataset_round_trip(tmp_path, buffer):
    episodes = list(buffer.iter_episodes())
    dataset = to_dataset(episodes)
    assert dataset.features == FEATURES
    assert list(from_rows(dataset)) == episodes
    with ReplayBuffer(tmp_path / "copy.sqlite") as copy:
        assert import_dataset(copy, dataset) == 3
        assert list(copy.iter_episodes()) == episodes


def test_parquet_round_trip_in_several_chunks(tmp_path, buffer, make_episode):
    buffer.append_many(make_episode(i, turns=1) for i in range(CHUNK + 10))
    assert export_parquet(buffer, tmp_path / "out" / "episodes.parquet") == CHUNK + 13
    with ReplayBuffer(tmp_path / "copy.sqlite") as copy:
        assert import_parquet(copy, tmp_path / "out" / "episodes.parquet") == CHUNK + 13
        assert list(copy.iter_episodes()) == list(buffer.iter_episodes())


def test_datasets_reads_and_writes_the_same_parquet(tmp_path, buffer):
    episodes = list(buffer.iter_episodes())
    ours, theirs = tmp_path / "ours.parquet", tmp_path / "theirs.parquet"
    export_parquet(buffer, ours)
    dataset = Dataset.from_parquet(str(ours), cache_dir=str(tmp_path / "cache"))
    assert dataset.features == FEATURES
    assert list(from_rows(dataset)) == episodes
    to_dataset(episodes).to_parquet(theirs)
    with ReplayBuffer(tmp_path / "copy.sqlite") as copy:
        import_parquet(copy, theirs)
        assert list(copy.iter_episodes()) == episodes


@pytest.mark.parametrize("field", ["codec", "env"])
def test_rows_of_another_codec_or_task_are_refused(tmp_path, buffer, make_episode, field):
    mixed = tmp_path / "mixed.parquet"
    episodes = [make_episode(0), make_episode(1, **{field: "other"})]
    to_dataset(episodes).to_parquet(mixed)
    before = list(buffer.iter_episodes())
    with pytest.raises(ConfigError, match=f"{field} '.*', not 'other'.*Fix: name a new file"):
        import_parquet(buffer, mixed)
    assert list(buffer.iter_episodes()) == before  # not even the first row


def change(path, **columns):
    """Write a one-episode table with some of its columns replaced."""

    def write(episode):
        row = {**to_dataset([episode])[0], **columns}
        table = pa.Table.from_pylist([row], schema=FEATURES.arrow_schema)
        pq.write_table(table, path)
        return path

    return write


@pytest.mark.parametrize(
    ("columns", "word"),
    [
        ({"opening": "{"}, "row 0 is not an episode"),
        ({"opening": json.dumps([{"role": "user"}])}, "row 0 .*chat messages"),
        ({"opening_ids": None}, "row 0 is not an episode"),
        ({"turns": []}, "has no turn"),
    ],
)
def test_bad_rows_are_named(tmp_path, buffer, make_episode, columns, word):
    file = change(tmp_path / "bad.parquet", **columns)(make_episode(0))
    with pytest.raises(ConfigError, match=f"bad.parquet: .*{word}.*nlac replay export"):
        import_parquet(buffer, file)
    assert buffer.num_episodes == 3


def test_files_that_are_no_export_are_refused(tmp_path, buffer, make_episode):
    text = tmp_path / "text.parquet"
    text.write_text("not parquet")
    other = tmp_path / "other.parquet"
    pq.write_table(pa.table({"prompt": ["a"]}), other)
    for path in (text, other, tmp_path / "missing.parquet"):
        with pytest.raises(ConfigError, match=f"{path.name}: .*Fix: import what"):
            import_parquet(buffer, path)
    with pytest.raises(ConfigError, match="columns"):
        import_dataset(buffer, Dataset.from_dict({"prompt": ["a"]}))


def test_a_failed_export_leaves_no_file(tmp_path, buffer):
    folder = tmp_path / "folder.parquet"
    folder.mkdir()
    with pytest.raises(ConfigError, match="cannot be written"):
        export_parquet(buffer, folder)
    assert [p.name for p in tmp_path.glob("*.partial")] == []


def test_thoughts_and_numbers_survive_exactly(make_episode):
    episode = make_episode(0)
    episode.turns[0] = replace(
        episode.turns[0], reward=0.1 + 0.2, info={"big": 2**70, "text": "\ud800"}
    )
    assert list(from_rows(to_dataset([episode]))) == [episode]
