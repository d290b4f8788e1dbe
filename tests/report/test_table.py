"""The table says what the summaries say, and warns when a critic says nothing."""

from collections.abc import Callable
from dataclasses import replace

from nlac_lightning.evaluation.records import EvaluationResult
from nlac_lightning.report.table import comparison_table

Make = Callable[..., EvaluationResult]


def cells(table: str, label: str) -> list[str]:
    """What stands right of a label, one string per column."""
    line = next(line for line in table.splitlines() if line.startswith(label))
    return [cell.strip() for cell in line[len(label) :].split("  ") if cell.strip()]


def test_table_shows_both_policies(base: EvaluationResult, trained: EvaluationResult) -> None:
    table = comparison_table([base, trained])
    assert table.splitlines()[0].split() == ["base", "trained"]
    for column, result in enumerate((base, trained)):
        out = result.summary()
        low, high = out["success_low"], out["success_high"]
        success = cells(table, "success [95%]")[column]
        assert success == f"{out['success']:.2f} [{low:.2f}, {high:.2f}]"
        assert float(cells(table, "right actions")[column]) == round(out["right_rate"], 2)
        accuracy = cells(table, "critic vs oracle: accuracy")[column]
        assert float(accuracy.split()[0]) == round(out["critic_vs_oracle/accuracy"], 2)
        refined = cells(table, "refined, wrong -> right")[column]
        assert refined.endswith(f"n={out['refine_n_wrong']:.0f}")


def test_columns_are_aligned(base: EvaluationResult, trained: EvaluationResult) -> None:
    lines = comparison_table([base, trained]).split("\n\n")[0].splitlines()
    starts = [lines[0].index("base"), lines[0].index("trained")]
    for line in [lines[0], *lines[2:]]:
        assert all(line[start - 1] == " " != line[start] for start in starts), line


def test_many_and_long_names_stay_narrow(make: Make) -> None:
    names = ["p" * 300, "new\nline", "\x1b[31mred", *"abcde"]
    table = comparison_table([make(name, 0.9, episodes=10) for name in names])
    assert max(map(len, table.splitlines())) <= 100
    assert "\x1b" not in table and "new line" in table
    assert table.count("success [95%]") > 1, "too many columns continue in another block"


def test_no_critic_is_a_dash_and_no_warning(make: Make) -> None:
    table = comparison_table([make("base", 0.5, critic="none")])
    assert cells(table, "critic vs oracle: AUROC") == ["-"]
    assert "nan" not in table and "warning" not in table


def test_no_episodes(trained: EvaluationResult) -> None:
    table = comparison_table([replace(trained, episodes=[])])
    assert cells(table, "success [95%]") == ["-"] and "nan" not in table


def warnings(result: EvaluationResult) -> str:
    return " ".join(comparison_table([result]).partition("warning")[2].split())


def test_always_good_and_always_bad_are_called_out(make: Make) -> None:
    result = make("base", 0.5, critic="good")
    assert "good to almost everything (100% of its verdicts)" in warnings(result)
    assert "cannot be told from chance" in warnings(result)
    assert "good to almost nothing (0% of its verdicts)" in warnings(judged(result, False, 0.1))


def judged(result: EvaluationResult, verdict: bool | None, score: float) -> EvaluationResult:
    """The same episodes under a critic that always says the same."""
    episodes = [
        replace(episode, steps=[replace(s, verdict=verdict, score=score) for s in episode.steps])
        for episode in result.episodes
    ]
    return replace(result, episodes=episodes)


def test_critic_that_cannot_be_parsed_or_measured(make: Make) -> None:
    text = warnings(judged(make("base", 0.5), None, float("nan")))
    assert "100% of the critiques hold no verdict" in text
    assert "cannot be measured" in text
    assert "almost" not in text


def test_true_and_inverted_critics(make: Make) -> None:
    result = make("trained", 0.7)
    assert warnings(result) == ""
    flipped = [
        replace(
            episode,
            steps=[
                replace(s, verdict=not s.right, score=0.1 if s.right else 0.9)
                for s in episode.steps
            ],
        )
        for episode in result.episodes
    ]
    assert "worse than chance" in warnings(replace(result, episodes=flipped))
