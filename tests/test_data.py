"""The data module in a real Trainer: what it hands out, when, and again after a resume."""

from collections.abc import Sequence

import lightning
import pytest
import torch

from nlac_lightning.data import ReplayDataModule
from nlac_lightning.envs.base import Session, Task, TextEnv
from nlac_lightning.errors import ConfigError
from nlac_lightning.replay.buffer import ReplayBuffer
from nlac_lightning.replay.episode import Episode, Turn
from nlac_lightning.replay.sampler import TransitionSampler


class Desk(TextEnv):
    name = "desk"

    def tasks(self, split: str) -> Sequence[Task]:
        return [Task(f"{split}-{i}", split) for i in range(10)]

    def reset(self, task: Task, seed: int = 0) -> Session:
        raise NotImplementedError


def episode(number: int, turns: int) -> Episode:
    def turn(t: int) -> Turn:
        last = t == turns - 1
        ids = (number, t, 7)
        return Turn("a", "a", ids, 1, 3, (-1.0, -2.0), "stop", 0, False, [], 1.0, last, False)

    opening = [{"role": "user", "content": str(number)}]
    steps = [turn(t) for t in range(turns)]
    return Episode("desk", f"t{number}", "train", 0, "codec-a", opening, (1, 2), steps, "done")


class Learner(lightning.LightningModule):
    """Records its batches, and stores an episode after every second one as a rollout would."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.keys = []
        self.positions = []
        self.tasks = []

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch, batch_idx):
        self.keys.append([(x.episode_id, x.t, x.task_id) for x in batch])
        return self.layer(torch.ones(1)).sum()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        data = self.trainer.datamodule
        self.positions.append((data.position, self.trainer.global_step))
        if self.trainer.global_step % 2 == 0:
            data.buffer.append(episode(self.trainer.global_step, 3))

    def on_save_checkpoint(self, checkpoint):
        checkpoint["mark"] = self.trainer.datamodule.buffer.high_water_mark

    def on_load_checkpoint(self, checkpoint):
        self.trainer.datamodule.buffer.truncate(checkpoint["mark"])

    def validation_step(self, batch, batch_idx):
        self.tasks.append([task.id for task in batch])

    test_step = predict_step = validation_step


def trainer(root, steps, **options):
    return lightning.Trainer(
        default_root_dir=root,
        max_steps=steps,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"enable_checkpointing": False, "limit_val_batches": 0, **options},
    )


def filled(path, **options):
    data = ReplayDataModule(Desk(), buffer=str(path), batch_size=4, **options)
    for number in range(6):
        data.buffer.append(episode(100 + number, 2 + number % 3))
    return data


def fit(root, steps, **options):
    model = Learner()
    data = filled(root / "replay.sqlite", **options)
    trainer(root, steps).fit(model, data)
    return model, data


def test_batches_are_drawn_from_the_buffer_as_it_is_then(tmp_path):
    """No batch is drawn early: episodes stored after a step can be in the very next batch."""
    model, data = fit(tmp_path, 8, seed=3)
    assert model.positions == [(n, n) for n in range(1, 9)]
    twin = filled(tmp_path / "twin.sqlite")
    sampler = TransitionSampler(twin.buffer, 4, seed=3)
    for position, keys in enumerate(model.keys):
        assert [key[:2] for key in keys] == sampler.draw(position)
        if (position + 1) % 2 == 0:
            twin.buffer.append(episode(position + 1, 3))
    assert data.buffer.num_episodes == 10  # opens again after the fit


def test_workers_hand_out_the_same_batches(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    alone, _ = fit(tmp_path / "a", 6)
    helped, data = fit(tmp_path / "b", 6, num_workers=2)
    assert helped.keys == alone.keys
    assert helped.positions == alone.positions
    assert data.buffer.problems() == []


def test_workers_survive_evictions_of_what_they_read_ahead(tmp_path):
    data = ReplayDataModule(
        Desk(), buffer=str(tmp_path / "r.sqlite"), batch_size=4, capacity=6, num_workers=1
    )
    data.buffer.append(episode(0, 6))
    batches = iter(data.train_dataloader())
    for number in range(1, 8):
        batch = next(batches)
        newest = data.buffer.high_water_mark
        assert {x.episode_id for x in batch} == {newest}
        assert {x.task_id for x in batch} == {f"t{number - 1}"}
        data.buffer.append(episode(number, 6))


def test_workers_do_the_reading(tmp_path, monkeypatch):
    """While the buffer stays as it is, the main process reads no transition."""
    data = filled(tmp_path / "replay.sqlite", num_workers=1)
    batches = iter(data.train_dataloader())
    next(batches)
    monkeypatch.setattr(data.buffer, "transitions", None)
    assert [len(next(batches)) for _ in range(5)] == [4] * 5


def test_six_steps_equal_three_resumed_for_three(tmp_path):
    for name in ("straight", "halves"):
        (tmp_path / name).mkdir()
    straight, data = fit(tmp_path / "straight", 6)

    first = Learner()
    halves = filled(tmp_path / "halves" / "replay.sqlite")
    half = trainer(tmp_path, 3)
    half.fit(first, halves)
    half.save_checkpoint(tmp_path / "half.ckpt")
    halves.buffer.append(episode(999, 2))  # after the checkpoint, hence lost

    second = Learner()
    resumed = ReplayDataModule(Desk(), str(tmp_path / "halves" / "replay.sqlite"), batch_size=4)
    trainer(tmp_path, 6).fit(second, resumed, ckpt_path=tmp_path / "half.ckpt", weights_only=False)
    assert first.keys + second.keys == straight.keys
    assert first.positions + second.positions == straight.positions
    assert list(resumed.buffer.iter_episodes()) == list(data.buffer.iter_episodes())


def test_ranks_draw_different_batches(tmp_path):
    class Rank:
        world_size, global_rank, max_steps, default_root_dir = 2, 0, 3, str(tmp_path)
        lightning_module = None

    batches = []
    for rank in range(2):
        data = filled(tmp_path / f"{rank}.sqlite")
        data.trainer = Rank()
        data.trainer.global_rank = rank
        batches += [[(x.episode_id, x.t) for x in batch] for batch in data.train_dataloader()]
    alone = filled(tmp_path / "alone.sqlite")
    stream = iter(alone.train_dataloader())
    drawn = [[(x.episode_id, x.t) for x in next(stream)] for _ in range(6)]
    assert sorted(batches) == sorted(drawn)


def test_epochs_go_on_where_the_last_ended(tmp_path):
    model = Learner()
    data = filled(tmp_path / "replay.sqlite", batches_per_epoch=2)
    trainer(tmp_path, -1, max_epochs=3).fit(model, data)
    assert model.positions == [(n, n) for n in range(1, 7)]


def test_an_epoch_needs_an_end(tmp_path):
    data = filled(tmp_path / "replay.sqlite")
    with pytest.raises(ConfigError, match=r"data\.batches_per_epoch: .*trainer\.max_steps"):
        trainer(tmp_path, -1, max_epochs=1).fit(Learner(), data)


def test_training_on_an_empty_buffer_says_so(tmp_path):
    data = ReplayDataModule(Desk(), batch_size=4)
    with pytest.raises(ConfigError, match="no transition to draw from"):
        trainer(tmp_path, 2).fit(Learner(), data)
    assert (tmp_path / "replay.sqlite").exists()  # the default place


def test_evaluation_batches_are_tasks(tmp_path):
    data = ReplayDataModule(Desk(), val_tasks=5, eval_batch_size=2)
    runner = trainer(tmp_path, 1, limit_val_batches=1.0)
    model = Learner()
    runner.validate(model, data, verbose=False)
    assert model.tasks == [["val-0", "val-1"], ["val-2", "val-3"], ["val-4"]]
    model.tasks.clear()
    runner.test(model, data, verbose=False)
    assert [task for batch in model.tasks for task in batch] == [f"test-{i}" for i in range(10)]
    assert not (tmp_path / "replay.sqlite").exists()  # evaluation needs no buffer


def test_more_tasks_than_there_are(tmp_path):
    data = ReplayDataModule(Desk(), test_tasks=11)
    with pytest.raises(ConfigError, match=r"data\.test_tasks: 11 tasks asked for, but desk has 10"):
        data.test_dataloader()


def test_a_buffer_of_another_task_or_codec_is_refused(tmp_path):
    path = tmp_path / "replay.sqlite"
    ReplayBuffer(path, codec="codec-z", env="quiz").close()
    data = ReplayDataModule(Desk(), buffer=str(path))
    with pytest.raises(ConfigError, match="env 'quiz', not 'desk'"):
        trainer(tmp_path, 1).fit(Learner(), data)
    data = filled(tmp_path / "mine.sqlite")
    assert len(data.open_buffer(codec="codec-a")) == 18
    with pytest.raises(ConfigError, match="codec 'codec-a', not 'codec-b'"):
        data.open_buffer(codec="codec-b")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("capacity", 0),
        ("batch_size", 0),
        ("batch_size", -1),
        ("strategy", "newest"),
        ("recency_half_life", -1.0),
        ("transitions_per_episode", 0),
        ("success_share", -0.1),
        ("success_share", 1.1),
        ("success_after", -1),
        ("batches_per_epoch", 0),
        ("val_tasks", 0),
        ("test_tasks", -5),
        ("eval_batch_size", 0),
        ("num_workers", -1),
        ("seed", -1),
    ],
)
def test_bad_sizes_are_named(name, value):
    with pytest.raises(ConfigError, match=rf"^data\.{name}: .*Fix: "):
        ReplayDataModule(Desk(), **{name: value})
