"""The table that ends a run: one column per policy, and warnings in words."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence

from nlac_lightning.evaluation.records import EvaluationResult
from nlac_lightning.report.text import one_line

MAX_WIDTH = 100
COLUMN_WIDTH = 20
EXTREME_SHARE = 0.95
"""A critic whose share of good verdicts is above this, or below its complement, says nothing."""

Summary = dict[str, float]


def _number(key: str, digits: int = 2) -> Callable[[Summary], str]:
    return lambda summary: _show(summary[key], digits)


def _interval(key: str) -> Callable[[Summary], str]:
    return lambda summary: show_interval(summary, key)


def _part(key: str, total: str) -> Callable[[Summary], str]:
    """An interval with the number of cases that it rests on."""
    return lambda summary: _with_count(show_interval(summary, key), summary[total])


ROWS: tuple[tuple[str, Callable[[Summary], str]], ...] = (
    ("episodes", _number("n_episodes", 0)),
    ("success [95%]", _interval("success")),
    ("valid actions", _number("valid_rate")),
    ("right actions", _number("right_rate")),
    ("mean turns", _number("mean_turns", 1)),
    ("tokens per episode", _number("tokens_per_episode", 0)),
    ("critic vs oracle: accuracy", _interval("critic_vs_oracle/accuracy")),
    ("critic vs oracle: AUROC", _interval("critic_vs_oracle/auroc")),
    ("critic vs outcome: AUROC", _interval("critic_vs_outcome/auroc")),
    ("verdicts 'good'", _number("critic_vs_outcome/positive_share")),
    ("verdicts unparsable", _number("critic_vs_outcome/unparsable")),
    ("refined, wrong -> right", _part("refine_wrong_to_right", "refine_n_wrong")),
    ("refined, right -> wrong", _part("refine_right_to_wrong", "refine_n_right")),
)


def comparison_table(results: Sequence[EvaluationResult]) -> str:
    """Plain text, at most 100 columns wide: a column per result, then warnings about its critic.

    Intervals are at 95%, ``n`` counts the cases behind a share, and ``-`` stands for no data.
    More results than fit side by side continue in a second block.
    """
    summaries = [result.summary() for result in results]
    names = [one_line(result.policy, COLUMN_WIDTH) for result in results]
    columns = [
        [name, *(show(summary) for _, show in ROWS)]
        for name, summary in zip(names, summaries, strict=True)
    ]
    blocks = [side_by_side(["", *(label for label, _ in ROWS)], columns)]
    warnings = [
        _wrapped(f"warning ({name}): {warning}")
        for name, summary in zip(names, summaries, strict=True)
        for warning in critic_warnings(summary)
    ]
    return "\n\n".join(blocks + (["\n".join(warnings)] if warnings else []))


def side_by_side(labels: Sequence[str], columns: Sequence[Sequence[str]]) -> str:
    """Columns beside their labels, the first row as heading; those that do not fit go below."""
    label_width = max(map(len, labels))
    widths = [max(map(len, column)) for column in columns]
    blocks: list[str] = []
    start = 0
    while start < len(columns):
        stop, width = start, label_width
        while stop < len(columns) and width + 2 + widths[stop] <= MAX_WIDTH:
            width += 2 + widths[stop]
            stop += 1
        lines = []
        for row, label in enumerate(labels):
            cells = [columns[i][row].ljust(widths[i]) for i in range(start, stop)]
            lines.append("  ".join([label.ljust(label_width), *cells]).rstrip())
        lines.insert(1, "-" * width)
        blocks.append("\n".join(lines))
        start = stop
    return "\n\n".join(blocks)


def critic_warnings(summary: Summary) -> list[str]:
    """What a summary says against its critic, in words; empty where no critic ran."""
    if not summary["critic_vs_outcome/n"]:
        return []
    warnings = []
    share = summary["critic_vs_outcome/positive_share"]
    if share > EXTREME_SHARE:
        warnings.append(f"the critic says good to almost everything ({share:.0%} of its verdicts)")
    if share < 1 - EXTREME_SHARE:
        warnings.append(f"the critic says good to almost nothing ({share:.0%} of its verdicts)")
    unparsable = summary["critic_vs_outcome/unparsable"]
    if unparsable > 1 - EXTREME_SHARE:
        warnings.append(f"{unparsable:.0%} of the critiques hold no verdict")
    # Without an oracle the outcome is the only truth there is.
    truth = "oracle" if summary["critic_vs_oracle/n"] else "outcome"
    key = f"critic_vs_{truth}/auroc"
    if math.isnan(summary[key]):
        warnings.append(f"the critic's AUROC against the {truth} cannot be measured here")
    elif summary[f"{key}_low"] <= 0.5 <= summary[f"{key}_high"]:
        warnings.append(
            f"the critic cannot be told from chance (AUROC against the {truth} "
            f"{show_interval(summary, key)} includes 0.5)"
        )
    elif summary[f"{key}_high"] < 0.5:
        warnings.append(
            f"the critic is worse than chance (AUROC against the {truth} "
            f"{show_interval(summary, key)})"
        )
    return warnings


def show_interval(summary: Summary, key: str) -> str:
    """``0.89 [0.81, 0.93]``, or ``-``."""
    if math.isnan(summary[key]):
        return "-"
    return f"{summary[key]:.2f} [{summary[f'{key}_low']:.2f}, {summary[f'{key}_high']:.2f}]"


def _show(value: float, digits: int) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def _with_count(text: str, n: float) -> str:
    return text if text == "-" else f"{text} n={n:.0f}"


def _wrapped(text: str) -> str:
    return textwrap.fill(text, MAX_WIDTH, subsequent_indent="  ", break_on_hyphens=False)
