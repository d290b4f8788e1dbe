"""Mathematics: grading that threads do not change, splits by level, boxes, scores."""

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("math_verify")
pytest.importorskip("reasoning_gym")

from nlac_lightning.envs.math import DatasetProblems, GeneratedProblems, Grader, MathEnv, Stage
from nlac_lightning.envs.math.grader import last_boxed
from nlac_lightning.errors import ConfigError
from nlac_lightning.evaluation.breakdown import breakdown
from nlac_lightning.evaluation.records import EpisodeRecord, EvaluationResult, StepRecord

PAIRS = [  # gold, answer, equal
    ("42", "42", True),
    ("42", "42.0", True),
    ("42", "43", False),
    (r"\frac{1}{2}", "0.5", True),
    (r"\frac{1}{2}", r"\frac{2}{4}", True),
    (r"\frac{1}{2}", r"\frac12", True),
    ("x^2+2x+1", "(x+1)^2", True),
    ("x^2+2x+1", "(x+2)^2", False),
    (r"\sqrt{8}", r"2\sqrt{2}", True),
    (r"\{1, 2\}", r"\{2, 1\}", True),
    ("(1, 2)", "(2, 1)", False),
    ("-7", "7", False),
    ("7", "no idea", False),
    ("7", "", False),
    ("7", r"\frac{", False),
]


@pytest.fixture(scope="module")
def grader():
    grader = Grader(workers=2)
    yield grader
    grader.close()


def test_concurrent_grading_equals_serial_grading_and_the_truth(grader):
    """math-verify itself, called in these threads, would refuse them all."""
    serial = [grader.grade(gold, answer).correct for gold, answer, _ in PAIRS]
    assert serial == [equal for _, _, equal in PAIRS]
    jobs = PAIRS * 4
    with ThreadPoolExecutor(8) as pool:
        concurrent = list(pool.map(lambda job: grader.grade(job[0], job[1]).correct, jobs))
    assert concurrent == serial * 4


def test_a_comparison_that_never_ends_is_cut_and_the_next_one_works(grader):
    quick = Grader(seconds=2)
    assert quick.grade("3", "3").correct  # started
    began = time.monotonic()
    tower = "9" + "^{9" * 8 + "}" * 8
    assert not quick.grade("3", tower).correct
    assert time.monotonic() - began < 30
    assert quick.grade("3", "3").correct
    quick.close()


def test_a_worker_that_hangs_is_killed_and_replaced():
    quick = Grader(seconds=2)
    assert quick.grade("3", "3").correct
    pid = quick._idle.queue[0]._process.pid
    os.kill(pid, signal.SIGSTOP)  # it neither answers nor heeds its own limit
    hung = quick.grade("3", "3")
    assert not hung.correct and "no result within" in hung.error
    assert quick.grade("3", "3").correct
    os.kill(quick._idle.queue[0]._process.pid, signal.SIGKILL)
    quick.grade("3", "3")  # may be lost with the process that had it
    assert quick.grade("3", "3").correct
    quick.close()


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{1} then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{3} and \boxed{cut", "3"),
        (r"\boxed{}", ""),
        ("42", None),
        (r"\boxed 4", None),
        ("", None),
    ],
)
def test_the_last_whole_box_counts(text, inside):
    assert last_boxed(text) == inside


def sums(**settings) -> GeneratedProblems:
    stages = [
        Stage("chain_sum", {"min_terms": n, "max_terms": n, "min_digits": n, "max_digits": n})
        for n in (2, 3)
    ]
    return GeneratedProblems(stages, **{"n_train": 20, "n_val": 5, "n_test": 6, **settings})


def test_generated_problems_are_distinct_and_ordered_and_solved_by_the_oracle():
    env = MathEnv(sums())
    tasks = {split: env.tasks(split) for split in ("train", "val", "test")}
    assert {split: len(t) for split, t in tasks.items()} == {"train": 20, "val": 5, "test": 6}
    questions = [t.data["question"] for split in tasks.values() for t in split]
    assert len(set(questions)) == 31
    levels = [t.data["level"] for t in tasks["train"]]
    assert levels == sorted(levels) and set(levels) == {0.0, 1.0}
    assert MathEnv(sums()).tasks("train") == tasks["train"]
    assert MathEnv(sums(seed=1)).tasks("train") != tasks["train"]
    for task in tasks["test"]:
        session = env.reset(task)
        right = session.oracle_action()
        assert session.oracle_critique(right).good
        wrong = session.oracle_critique(r"\boxed{-1}")
        assert not wrong.good and wrong.action == right
        step = session.step(right)
        assert (step.reward, step.terminated, step.info["reason"]) == (1.0, True, "right")
        assert session.oracle_action() is None and session.step(right).reward == 0.0
    env.grader.close()


def test_a_solution_without_a_box_is_a_format_failure_and_only_a_wrong_one_is_told_the_answer():
    env = MathEnv(sums())
    task = env.tasks("val")[0]
    answer = task.data["answer"]
    bare = env.reset(task).step(f"It is {answer}")
    assert (bare.reward, bare.info["valid"], bare.info["reason"]) == (0.0, False, "no_answer")
    assert f"It is {answer}." in bare.messages[0]["content"]
    silent = MathEnv(sums(), reveal="nothing").reset(task).step(r"\boxed{-123}")
    assert silent.info["reason"] == "wrong" and answer not in silent.messages[0]["content"]
    env.grader.close()


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_the_hardest_test_problems_are_held_out(tmp_path, ending):
    import datasets

    def rows(part, n):
        return [
            {"q": f"{part} {i}", "a": rf"so \boxed{{{i}}}", "l": f"Level {i % 5 + 1}"}
            for i in range(n)
        ]

    sources = []
    for part, n in (("first", 30), ("second", 20)):
        table = datasets.Dataset.from_list([*rows(part, n), *rows("both", 1)])
        sources.append(str(tmp_path / f"{part}.{ending}"))
        write = {"jsonl": table.to_json, "csv": table.to_csv, "parquet": table.to_parquet}[ending]
        write(sources[-1])
    made = DatasetProblems(sources, question="q", answer="a", level="l", n_test=6, n_val=5).load()
    # 4 problems of level 5 in the second file, the other two of level 4
    assert sorted(p.level for p in made["test"]) == [4, 4, 5, 5, 5, 5]
    assert all(p.question.startswith("second") for p in made["test"])
    questions = [p.question for split in made.values() for p in split]
    assert len(questions) == len(set(questions)) == 51
    assert all(p.answer.isdigit() for split in made.values() for p in split)
    levels = [p.level for p in made["train"]]
    assert levels == sorted(levels)


def test_wrong_settings_name_their_field(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(json.dumps({"problem": str(i), "answer": "1"}) for i in range(40)))
    one = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    digits = Stage("chain_sum", one)
    cases = [
        (lambda: DatasetProblems([]), "env.problems.sources"),
        (lambda: DatasetProblems([str(tmp_path / "none.csv")]).load(), "env.problems.sources"),
        (lambda: DatasetProblems([str(path)]).load(), "env.problems.level"),
        (lambda: DatasetProblems([str(path)], level=None).load(), "env.problems"),
        (lambda: DatasetProblems([str(path)], n_val=0), "env.problems.n_val"),
        (lambda: GeneratedProblems([]), "env.problems.stages"),
        (lambda: GeneratedProblems([Stage("nothing")]).load(), "env.problems.stages[0]"),
        (lambda: GeneratedProblems([digits], n_train=500).load(), "env.problems.stages[0]"),
    ]
    for make, field in cases:
        with pytest.raises(ConfigError) as caught:
            make()
        assert caught.value.field == field


def test_evaluations_report_accuracy_pass_at_k_format_failures_and_length():
    """Real gradings of four solutions to each of four problems, counted by hand."""
    env = MathEnv(sums(n_test=4))
    records = []
    for number, task in enumerate(env.tasks("test")):
        right = rf"\boxed{{{task.data['answer']}}}"
        for trial, solution in enumerate([right, r"\boxed{-1}", right, "no box"]):
            step = env.reset(task).step(solution if number != 3 else "no box")
            record = StepRecord(solution, valid=step.info["valid"], reward=step.reward)
            records.append(
                EpisodeRecord(
                    task.id, "test", "base", step.reward > 0, step.reward, [record],
                    step.info["reason"], 10 + trial, facts=env.facts(task),
                )
            )  # fmt: skip
    env.grader.close()
    result = EvaluationResult("base", "test", records, env.name)
    found, summary = breakdown(result), result.summary()
    assert summary["success"] == pytest.approx(3 * 2 / 16)
    assert found["pass@k"] == pytest.approx(
        {"1": 3 / 8, "2": 3 / 4 * 5 / 6, "3": 3 / 4, "4": 3 / 4}
    )
    assert found["invalid_rate"] == pytest.approx((3 + 4) / 16)
    assert summary["tokens_per_episode"] == 11.5
    levels = {name: g["success"] for name, g in found["groups"].items() if "level" in name}
    assert levels == {"level 0": 0.5, "level 1": 0.25}
