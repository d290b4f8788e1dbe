"""20 Questions as an environment: settings, objects by split, games."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from nlac_lightning.envs.base import Message, Task, TextEnv
from nlac_lightning.envs.twenty_questions.answerer import Answerer, TableAnswerer
from nlac_lightning.envs.twenty_questions.names import Names
from nlac_lightning.envs.twenty_questions.session import TwentyQuestionsSession, says
from nlac_lightning.envs.twenty_questions.table import BUILT_IN, load_table
from nlac_lightning.errors import ConfigError, require_choice, require_positive

SPLITS = ("train", "val", "test")


class TwentyQuestionsEnv(TextEnv):
    """Find out by yes/no questions which object is meant; reward 1 for naming it.

    A question that guesses an object by its whole name is a guess; any other is answered ``yes``,
    ``no`` or ``not clear``.

    Args:
        objects: an object table in YAML (the form of ``objects.yaml`` beside this module), or a
            CSV file whose column ``column`` holds names, such as the THINGS concepts; None is
            the built-in table.
        answerer: who answers; None looks up the table. A CSV file needs one.
        n_train, n_val, n_test: objects of each split, of which no two share one; each object is
            one task. ``n_train: null`` takes all that the others leave.
        seed: other seeds deal the objects to the splits in another way.
        questions: how many the agent has, guesses included.
        wrong_guess: ``ends`` the game, or ``continues`` it as a question answered "no".
        listed: the opening names this many objects, the right one among them, and the others of
            the same split: an easier game, above all for small models. None names none.
        share: the oracle calls a question good if it tells at least this share of what the best
            question would tell, in (0, 1].
        column: of the names in a CSV file.

    Raises:
        ConfigError: a setting that is out of range, or a file that cannot be read.
    """

    def __init__(
        self,
        objects: str | None = None,
        answerer: Answerer | None = None,
        n_train: int | None = None,
        n_val: int = 24,
        n_test: int = 48,
        seed: int = 0,
        questions: int = 20,
        wrong_guess: str = "ends",
        listed: int | None = None,
        share: float = 0.5,
        column: str = "word",
    ) -> None:
        require_positive("env.questions", questions)
        require_choice("env.wrong_guess", wrong_guess, ("ends", "continues"))
        require_positive("env.share", share)
        require_positive("env.share", 1 - share, zero=True)
        path = Path(objects) if objects else BUILT_IN
        self.table = None if path.suffix.lower() == ".csv" else load_table(path)
        if self.table is not None:
            self.objects, self.names = self.table.objects, self.table.names
        else:
            self.objects = read_names(path, column)
            self.names = Names({name: (name,) for name in self.objects})
        if answerer is None:
            if self.table is None:
                raise ConfigError(
                    "env.answerer", f"{path} says nothing about its objects", "name an answerer"
                )
            answerer = TableAnswerer(self.table)
        self.answerer = answerer
        self._deal = _deal(self.objects, (n_train, n_val, n_test), seed)
        if listed is not None:
            smallest = min(map(len, self._deal.values()))
            if not 2 <= listed <= smallest:
                raise ConfigError(
                    "env.listed", f"{listed} is not allowed", f"use 2 to {smallest}, or null"
                )
        self.questions, self.wrong_guess, self.share = questions, wrong_guess, share
        self.listed, self.seed = listed, seed
        self.name = f"twenty_questions/{path.stem}"

    def tasks(self, split: str) -> Sequence[Task]:
        """Tasks ``train-0000``, ..., each with its object."""
        require_choice("split", split, SPLITS)
        return [
            Task(f"{split}-{i:04d}", split, {"object": name})
            for i, name in enumerate(self._deal[split])
        ]

    def reset(self, task: Task, seed: int = 0) -> TwentyQuestionsSession:
        """Start a game; ``seed`` decides which other objects the opening lists."""
        secret = task.data["object"]
        if secret not in self.objects:
            raise ConfigError(
                "env.objects", f"'{secret}' of task '{task.id}' is not there", "use its file"
            )
        possible = self._listed(task, seed) if self.listed else self.objects
        oracle = self.table if isinstance(self.answerer, TableAnswerer) else None
        return TwentyQuestionsSession(
            secret=secret,
            opening=self._opening(possible),
            names=self.names,
            answerer=self.answerer,
            questions=self.questions,
            wrong_guess_ends=self.wrong_guess == "ends",
            table=oracle,
            possible=possible,
            share=self.share,
        )

    def _listed(self, task: Task, seed: int) -> list[str]:
        """The secret among others of its split, in an order that tells nothing."""
        others = [name for name in self._deal[task.split] if name != task.data["object"]]
        rng = np.random.default_rng([seed, self.seed, *task.id.encode()])
        drawn = rng.choice(len(others), (self.listed or 1) - 1, replace=False)
        return sorted([task.data["object"], *(others[i] for i in drawn)])

    def _opening(self, possible: Sequence[str]) -> list[Message]:
        guesses = (
            "A guess ends the game, right or wrong, so guess when you are sure or have one "
            "question left."
            if self.wrong_guess == "ends"
            else "A guess counts as a question; the right one wins."
        )
        rules = (
            f"Find out which object the answerer thinks of, with at most {self.questions} yes/no "
            "questions, one per turn. The answers are yes, no and not clear. To guess, ask for the "
            f'object by its name: "Is it a piano?" {guesses}'
        )
        known = f"It is one of: {', '.join(possible)}." if self.listed else "I think of an object."
        return [{"role": "system", "content": rules}, says(f"{known} Ask.")]


def read_names(path: Path, column: str) -> list[str]:
    """Distinct names of a CSV file, in its order.

    THINGS has 1,854 concepts under 1,823 names; concepts of one name cannot be told apart by it.

    Raises:
        ConfigError: no such file or column, or no names.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            names = [row[column].strip() for row in csv.DictReader(file)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError("env.objects", f"cannot read {path}: {error}", "name a file") from error
    except (KeyError, AttributeError) as error:
        raise ConfigError(
            "env.column", f"{path} has rows without '{column}'", "name the column of the objects"
        ) from error
    names = list(dict.fromkeys(filter(None, names)))
    if not names:
        raise ConfigError("env.objects", f"{path} holds no names", "name another file")
    return names


def _deal(
    objects: list[str], sizes: tuple[int | None, int, int], seed: int
) -> dict[str, list[str]]:
    """Objects of each split: test first, so that other train sizes leave the tests as they are."""
    n_train, n_val, n_test = sizes
    for name, size in zip(SPLITS, sizes, strict=True):
        if size is not None:
            require_positive(f"env.n_{name}", size)
    rest = len(objects) - n_val - n_test
    n_train = rest if n_train is None else n_train
    if not 0 < n_train <= rest:
        raise ConfigError(
            "env.n_train",
            f"{n_train} + {n_val} + {n_test} objects are asked for and there are {len(objects)}",
            "make the splits smaller",
        )
    require_positive("env.seed", seed, zero=True)
    order = [objects[i] for i in np.random.default_rng(seed).permutation(len(objects))]
    return {
        "test": order[:n_test],
        "val": order[n_test : n_test + n_val],
        "train": order[n_test + n_val : n_test + n_val + n_train],
    }
