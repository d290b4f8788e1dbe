"""Where problems come from: files, hub data sets, or a generator."""

from __future__ import annotations

import importlib.util
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from nlac_lightning.envs.math.grader import last_boxed
from nlac_lightning.errors import ConfigError, require_positive

SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class Problem:
    """A problem.

    Attributes:
        question: its text.
        answer: the right answer, without a box.
        level: difficulty, higher is harder.
        solution: a worked solution, or empty.
    """

    question: str
    answer: str
    level: float = 0.0
    solution: str = ""

    def to_data(self) -> dict[str, Any]:
        """JSON-serialisable fields."""
        return asdict(self)


class Problems(ABC):
    """A source of problems; the splits share no question."""

    name: str

    @abstractmethod
    def load(self) -> dict[str, list[Problem]]:
        """Problems of ``train`` (easy ones first), ``val`` and ``test``."""


class DatasetProblems(Problems):
    """A data set with a column of problems and one of answers, split by difficulty.

    The ``n_test`` hardest problems of the last source are the test; all others are for training,
    but for ``n_val`` drawn from them. This is the paper's split of MATH: the 500 hardest of its
    test problems, and about 12,000 to train on.

    Args:
        sources: files (Parquet, JSON lines or CSV) or hub data sets as ``id:split``, whose
            problems are put together.
        question, answer: their columns. An answer with a box counts as what is in its last one.
        level: column of the difficulty, a number or a text that holds one (``Level 5``); None
            makes all equal.
        solution: column of worked solutions, or None.
        n_test, n_val: sizes; a question that occurs twice is kept once, in the test if it is there.
        seed: draws among equals.
    """

    def __init__(
        self,
        sources: list[str],
        question: str = "problem",
        answer: str = "answer",
        level: str | None = "level",
        solution: str | None = None,
        n_test: int = 500,
        n_val: int = 100,
        seed: int = 0,
    ) -> None:
        for name, value in (("n_test", n_test), ("n_val", n_val)):
            require_positive(f"env.problems.{name}", value)
        if not sources:
            raise ConfigError("env.problems.sources", "there are none", "name a file or a data set")
        self.sources, self.n_test, self.n_val, self.seed = sources, n_test, n_val, seed
        self.columns = {
            "question": question, "answer": answer, "level": level, "solution": solution
        }  # fmt: skip
        self.name = re.sub(r"[^\w.-]+", "_", Path(sources[-1].partition(":")[0]).stem)

    def load(self) -> dict[str, list[Problem]]:
        parts = [[self._problem(source, row) for row in _rows(source)] for source in self.sources]
        rng = np.random.default_rng(self.seed)
        last = [parts[-1][i] for i in rng.permutation(len(parts[-1]))]
        ranked = _distinct(sorted(last, key=lambda problem: -problem.level), set())
        test = ranked[: self.n_test]
        rest = [p for part in parts[:-1] for p in part] + ranked[self.n_test :]
        rest = _distinct(rest, {problem.question for problem in test})
        if len(rest) <= self.n_val:
            raise ConfigError(
                "env.problems",
                f"{len(ranked)} problems in {self.sources[-1]}, {len(rest)} beside the test",
                "make n_test and n_val smaller",
            )
        rest = [rest[i] for i in rng.permutation(len(rest))]
        train = sorted(rest[self.n_val :], key=lambda problem: problem.level)
        return {"train": train, "val": rest[: self.n_val], "test": test}

    def _problem(self, source: str, row: dict[str, Any]) -> Problem:
        fields: dict[str, Any] = {}
        for name, column in self.columns.items():
            if column is None:
                continue
            if row.get(column) is None:
                raise ConfigError(
                    f"env.problems.{name}",
                    f"a row of {source} has no '{column}'",
                    f"use one of {', '.join(map(str, row))}",
                )
            fields[name] = str(row[column])
        found = re.search(r"-?\d+(?:\.\d+)?", fields.get("level", ""))
        fields["level"] = float(found[0]) if found else 0.0
        fields["answer"] = last_boxed(fields["answer"]) or fields["answer"].strip()
        return Problem(**fields)


@dataclass
class Stage:
    """One kind of generated problem.

    Attributes:
        dataset: name in ``reasoning_gym``.
        settings: its configuration (sizes of numbers, number of terms, ...).
    """

    dataset: str
    settings: dict[str, Any] = field(default_factory=dict)


class GeneratedProblems(Problems):
    """Problems that ``reasoning-gym`` makes, in stages from easy to hard.

    Args:
        stages: from easy to hard; each gives an equal share of every split.
        n_train, n_val, n_test: number of problems; all are distinct.
        seed: other seeds give other problems.
    """

    def __init__(
        self,
        stages: list[Stage],
        n_train: int = 512,
        n_val: int = 96,
        n_test: int = 96,
        seed: int = 0,
    ) -> None:
        self.sizes = dict(zip(SPLITS, (n_train, n_val, n_test), strict=True))
        for split, size in self.sizes.items():
            require_positive(f"env.problems.n_{split}", size)
        if not stages:
            raise ConfigError("env.problems.stages", "there are none", "name a data set")
        if importlib.util.find_spec("reasoning_gym") is None:
            raise ConfigError("env.problems", "needs reasoning-gym", "run pip install -e '.[math]'")
        self.stages, self.seed = stages, seed
        self.name = "+".join(dict.fromkeys(stage.dataset for stage in stages))

    def load(self) -> dict[str, list[Problem]]:
        found: dict[str, list[Problem]] = {split: [] for split in SPLITS}
        seen: set[str] = set()
        for number, stage in enumerate(self.stages):
            wanted = {
                split: (size * (number + 1)) // len(self.stages)
                - (size * number) // len(self.stages)
                for split, size in self.sizes.items()
            }
            made = self._make(number, stage, sum(wanted.values()), seen)
            for split in ("test", "val", "train"):
                found[split] += made[: wanted[split]]
                made = made[wanted[split] :]
        return found

    def _make(self, number: int, stage: Stage, count: int, seen: set[str]) -> list[Problem]:
        import reasoning_gym

        size, seed = 20 * count, int(np.random.default_rng([self.seed, number]).integers(2**31))
        try:
            rows = reasoning_gym.create_dataset(
                stage.dataset, seed=seed, size=size, **stage.settings
            )
        except (AssertionError, TypeError, ValueError) as error:
            raise ConfigError(
                f"env.problems.stages[{number}]", str(error), "see reasoning-gym's data sets"
            ) from error
        made: list[Problem] = []
        for i in range(size):
            row = rows[i]
            if row["question"] not in seen:
                seen.add(row["question"])
                made.append(Problem(row["question"], str(row["answer"]), float(number)))
                if len(made) == count:
                    return made
        raise ConfigError(
            f"env.problems.stages[{number}]",
            f"'{stage.dataset}' has only {len(made)} of {count} distinct problems",
            "widen its settings or make the splits smaller",
        )


def _rows(source: str) -> Sequence[dict[str, Any]]:
    """Rows of a file or of a hub data set."""
    import datasets

    kinds = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv"}
    kind = kinds.get(Path(source).suffix.lower())
    try:
        if kind:
            return datasets.load_dataset(kind, data_files=source, split="train").to_list()
        path, _, split = source.partition(":")
        return datasets.load_dataset(path, split=split or "train").to_list()
    except Exception as error:  # the library raises what its many readers raise
        raise ConfigError(
            "env.problems.sources",
            f"cannot load {source}: {error}",
            "name a .parquet, .jsonl or .csv file, or a hub data set as id:split",
        ) from error


def _distinct(problems: list[Problem], seen: set[str]) -> list[Problem]:
    """Problems whose question is new, in order."""
    seen, kept = set(seen), []
    for problem in problems:
        if problem.question not in seen:
            seen.add(problem.question)
            kept.append(problem)
    return kept
