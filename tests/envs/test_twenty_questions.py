"""20 Questions: names, questions, the reference player, splits, answerers and their cache."""

import csv
import itertools
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from nlac_lightning.backbone import BackboneConfig
from nlac_lightning.envs.twenty_questions import (
    Answerer,
    CachedAnswerer,
    GeneratorAnswerer,
    TableAnswerer,
    TwentyQuestionsEnv,
)
from nlac_lightning.envs.twenty_questions.answerer import audit, negate, read_answer
from nlac_lightning.envs.twenty_questions.player import gains
from nlac_lightning.envs.twenty_questions.table import ANSWERS, load_table
from nlac_lightning.errors import ConfigError

THINGS = Path(__file__).parents[3] / "shared" / "data" / "things_concepts.csv"
SPLITS = ("train", "val", "test")


@pytest.fixture(scope="module")
def table():
    return load_table()


@pytest.fixture(scope="module")
def env():
    return TwentyQuestionsEnv()


def answer(table, name, question):
    return TableAnswerer(table).answer(name, question)


def test_the_built_in_table_is_large_and_tells_every_object_from_every_other(table):
    assert len(table.objects) >= 150 and len(table.attributes) >= 40
    assert len(np.unique(table.values, axis=0)) == len(table.objects)
    for attribute, column in zip(table.attributes, table.values.T, strict=True):
        assert table.names.guess(attribute.question) is None
        assert np.array_equal(table.ask(attribute.question), column)


@pytest.mark.parametrize(
    ("name", "question", "expected"),
    [
        ("cat", "Is it alive?", "yes"),
        ("cat", "IS IT A LIVING THING", "yes"),
        ("hammer", "Is it alive?", "no"),
        ("cat", "Is it not alive?", "no"),
        ("cat", "Does it have four legs and fur?", "yes"),
        ("penguin", "Does it have fur or feathers?", "yes"),
        ("strawberry", "Is it a red fruit?", "yes"),
        ("banana", "Is it a red fruit?", "no"),
        ("refrigerator", "Would I find it in the kitchen?", "yes"),
        ("airplane", "Does it have wings?", "yes"),
        ("dog", "Is it larger than a person?", "no"),
        ("dog", "Is it heavier than a car?", "not clear"),
        ("dog", "Was it invented by a German?", "not clear"),
        ("dog", "", "not clear"),
    ],
)
def test_questions_are_understood_through_words_and_synonyms(table, name, question, expected):
    assert answer(table, name, question) == expected


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Is it a tennis ball?", "tennis ball"),
        ("is it the TENNIS BALLS", "tennis ball"),
        ("soccer ball", "soccer ball"),
        ("Is it a football?", "soccer ball"),
        ("My guess is: a watering can.", "watering can"),
        ("I guess it is a lawn-mower!", "lawn mower"),
        ("Is it a golf ball?", "golf ball"),
        ("Is it a tennis racket?", "tennis racket"),
        ("Is it a baseball bat?", "baseball bat"),
        ("Is it a bat?", "bat"),
        ("Is it scissors?", "scissors"),
        ("a pair of scissors", "scissors"),
        ("Are they mice?", None),
        ("mice", "mouse"),
        ("Is it a wine glass?", "wine glass"),
        ("strawberries", "strawberry"),
        ("knives", "knife"),
        ("shoes", "shoe"),
        ("Is it a ball?", None),
        ("Is it bigger than a cat?", None),
        ("Is it an animal?", None),
        ("cat or dog", None),
        ("", None),
    ],
)
def test_a_guess_is_a_whole_name_whatever_its_article_plural_and_case(table, text, name):
    assert table.names.guess(text) == name


def test_every_object_can_be_guessed_by_each_of_its_names_in_singular_and_plural(table):
    for name in table.objects:
        for text in (f"Is it a {name}?", f"IS IT THE {name.upper()}?", name):
            assert table.names.guess(text) == name


def test_gains_are_entropies(table):
    possible = np.arange(len(table.objects)) % 3 == 0
    for told, column in zip(gains(table.values, possible), table.values.T, strict=True):
        counts = Counter(column[possible].tolist()).values()
        total = sum(counts)
        assert told.before == total
        assert told.bits == pytest.approx(-sum(c / total * math.log2(c / total) for c in counts))
        assert told.left == pytest.approx(sum(c * c for c in counts) / total)


def test_the_reference_player_wins_all_tests_and_its_own_critique_agrees(env):
    for task in env.tasks("test"):
        session, step = env.reset(task), None
        while (action := session.oracle_action()) is not None:
            assert session.oracle_critique(action).good
            assert session.table.index[task.data["object"]] in np.flatnonzero(session.possible)
            step = session.step(action)
        assert (step.reward, step.info["reason"]) == (1.0, "guessed")
    assert session.step("Is it alive?").info["error"] == "the game is over"


def test_critiques_tell_how_much_a_question_narrows(env):
    session = env.reset(env.tasks("train")[0])
    n = len(env.objects)
    good = session.oracle_critique("Is it alive?")
    assert good.good and f"narrows {n} objects to" in good.reason
    rare = session.oracle_critique("Is it a musical instrument?")
    assert not rare.good and rare.action == session.oracle_action()
    assert not session.oracle_critique("Was it invented by a German?").good
    early = session.oracle_critique("Is it a cat?")
    assert not early.good and f"among {n} objects" in early.reason
    before = session.possible.sum()
    session.step("Is it alive?")
    assert 0 < session.possible.sum() < before
    assert not session.oracle_critique("Is it alive?").good  # it would tell nothing new


def test_a_guess_ends_the_game_or_is_a_question_as_configured():
    for rule, ends in (("ends", True), ("continues", False)):
        env = TwentyQuestionsEnv(wrong_guess=rule, questions=3)
        task = env.tasks("test")[0]
        wrong = "cat" if task.data["object"] != "cat" else "dog"
        session = env.reset(task)
        step = session.step(f"Is it a {wrong}?")
        assert (step.terminated, step.reward) == (ends, 0.0)
        if not ends:
            assert step.messages[0]["content"] == "no"
            won = session.step(f"Is it a {task.data['object']}?")
            assert (won.terminated, won.reward) == (True, 1.0)
    session = env.reset(task)
    last = [session.step("Is it alive?") for _ in range(3)][-1]
    assert last.terminated and last.info["reason"] == "no_questions_left"


def test_bad_questions_are_answered_and_counted(env):
    session = env.reset(env.tasks("test")[0])
    for action in ("", " \n", "Is it " + "very " * 100 + "alive?"):
        step = session.step(action)
        assert not step.info["valid"] and step.messages[0]["content"] == "not clear"


def test_objects_are_dealt_by_seed_and_splits_share_none():
    def deal(**settings):
        env = TwentyQuestionsEnv(**settings)
        return {s: [t.data["object"] for t in env.tasks(s)] for s in SPLITS}

    first, other = deal(), deal(seed=1)
    assert first == deal() and first != other
    for a, b in itertools.combinations(SPLITS, 2):
        assert not set(first[a]) & set(first[b])
    assert sum(map(len, first.values())) == len(load_table().objects)
    assert deal(n_train=50)["test"] == first["test"]


def test_listed_games_name_the_secret_among_others_of_its_split():
    env = TwentyQuestionsEnv(listed=6, questions=6)
    test = {task.data["object"] for task in env.tasks("test")}
    places = Counter()
    for task in env.tasks("test"):
        session = env.reset(task, 3)
        names = session.opening[1]["content"].removeprefix("It is one of: ").split(".")[0]
        names = names.split(", ")
        assert len(set(names)) == 6 and task.data["object"] in names and set(names) <= test
        assert env.reset(task, 3).opening == session.opening
        places[names.index(task.data["object"])] += 1
        while (action := session.oracle_action()) is not None:
            step = session.step(action)
        assert step.reward == 1.0
    assert len(places) == 6  # the place in the list gives nothing away


def test_a_table_of_ones_own(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "attributes:\n  big: Is it big?, huge\n  wet: Is it wet?\n"
        "kinds:\n- all: big\n  objects: {whale / orca: wet, hill: -wet, cloud: ~wet -big}\n"
    )
    env = TwentyQuestionsEnv(str(path), n_val=1, n_test=1)
    assert env.table.objects == ["whale", "hill", "cloud"]
    assert env.table.values.tolist() == [[2, 2], [2, 0], [0, 1]]
    assert env.names.guess("an orca") == "whale"
    text = path.read_text()
    for old, new, problem in (
        ("Is it wet?", "Is it wet?, huge", "stands for two attributes"),
        ("wet, hill", "dry, hill", "unknown attribute 'dry'"),
        ("hill: -wet", "orca: -wet", "names two objects"),
        ("kinds", "sorts", "form of an object table"),
    ):
        assert old in text
        path.write_text(text.replace(old, new))
        with pytest.raises(ConfigError, match=problem):
            TwentyQuestionsEnv(str(path), n_val=1, n_test=1)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"questions": 0}, "env.questions"),
        ({"wrong_guess": "maybe"}, "env.wrong_guess"),
        ({"share": 1.5}, "env.share"),
        ({"n_test": 0}, "env.n_test"),
        ({"n_test": 10**4}, "env.n_train"),
        ({"listed": 1}, "env.listed"),
        ({"listed": 25}, "env.listed"),
        ({"objects": "none.yaml"}, "env.objects"),
        ({"objects": "none.csv"}, "env.objects"),
    ],
)
def test_wrong_settings_name_their_field(settings, field):
    with pytest.raises(ConfigError) as caught:
        TwentyQuestionsEnv(**settings)
    assert caught.value.field == field


class Loose(Answerer):
    """Answers by the question's length; every third time otherwise."""

    def __init__(self):
        self.calls = 0

    def answer(self, object_name, question):
        self.calls += 1
        return ANSWERS[(len(question) + self.calls // 3) % 3]


def test_cached_answers_are_free_and_identical_in_another_run(tmp_path):
    path = str(tmp_path / "answers" / "a.sqlite")
    asked = [(o, q) for o in ("cat", "hat") for q in ("Is it alive?", "Is it soft?")]
    first = CachedAnswerer(Loose(), path, "loose")
    answers = [first.answer(o, q) for o, q in asked]
    again = CachedAnswerer(Loose(), path, "loose")
    assert [again.answer(o, f" {q.upper()}  ") for o, q in asked] == answers
    assert (first.asked, again.asked) == (4, 0)
    other = CachedAnswerer(Loose(), path, "another model")
    other.answer(*asked[0])
    assert other.asked == 1


def test_the_audit_finds_an_answerer_that_contradicts_itself(table):
    pairs = [(o, a.question) for o in table.objects[:40] for a in table.attributes[:20]]
    sound = audit(TableAnswerer(table), pairs)
    assert sound.pairs == 800
    assert (sound.repeated, sound.negated) == (1.0, 1.0)
    loose = audit(Loose(), pairs)
    assert loose.repeated < 0.9 and loose.negated < 0.9
    assert negate("Can it fly?") == "Can it not fly?" and negate("Made of iron?") is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [("Yes.", "yes"), ("No, it is not.", "no"), ("It is not clear", "not clear"),
     ("unclear", "not clear"), ("I know nothing", "not clear"), ("", "not clear")],
)  # fmt: skip
def test_a_models_words_are_read(text, expected):
    assert read_answer(text) == expected


def test_a_local_model_answers(tiny_llama_path):
    answerer = GeneratorAnswerer(BackboneConfig(name=tiny_llama_path, lora_r=1))
    first = answerer.answer("cat", "Is it alive?")
    assert first in ANSWERS and answerer.answer("cat", "Is it alive?") == first


@pytest.mark.skipif(not THINGS.exists(), reason=f"needs {THINGS}")
def test_the_things_concepts_give_the_papers_objects():
    env = TwentyQuestionsEnv(
        str(THINGS), answerer=Loose(), n_train=1000, n_val=100, n_test=500, wrong_guess="continues"
    )
    assert len(env.objects) == 1823
    with THINGS.open(newline="") as file:
        assert set(env.objects) == {row["word"] for row in csv.DictReader(file)}
    dealt = [{t.data["object"] for t in env.tasks(s)} for s in SPLITS]
    assert [len(d) for d in dealt] == [1000, 100, 500]
    assert len(set.union(*dealt)) == 1600
    for name in env.objects:
        assert env.names.guess(f"Is it a {name}?") == name
    session = env.reset(env.tasks("test")[0])
    assert session.oracle_action() is None and list(session.admissible()) == []
    assert session.oracle_critique("Is it alive?") is None
    session.step("Is it alive?")
    won = session.step(f"Is it a {env.tasks('test')[0].data['object']}?")
    assert (won.reward, won.terminated) == (1.0, True)
    with pytest.raises(ConfigError, match=r"env\.answerer"):
        TwentyQuestionsEnv(str(THINGS))
    with pytest.raises(ConfigError, match=r"env\.column"):
        TwentyQuestionsEnv(str(THINGS), answerer=Loose(), column="noun")
