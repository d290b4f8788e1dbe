"""Episodes as dialogues to read: one self-contained HTML page, or plain text."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from nlac_lightning.envs.base import Message
from nlac_lightning.evaluation.records import EpisodeRecord, EvaluationResult, StepRecord
from nlac_lightning.report.style import STYLE
from nlac_lightning.report.table import comparison_table, critic_warnings, show_interval
from nlac_lightning.report.text import one_line, visible

VERDICTS = {True: "good", False: "bad", None: "no verdict"}

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<header>
<h1>{title}</h1>
<p class="note">{note}</p>
{cards}{warnings}</header>
<main>
{episodes}</main>
</body>
</html>
"""


def write_html(path: str | Path, result: EvaluationResult, max_episodes: int = 20) -> None:
    """Write the first ``max_episodes`` episodes as one HTML page without scripts or links.

    All text is escaped and its control characters are shown, so no text from a model, a user or a
    tool can change the page.
    """
    shown = list(islice(result.episodes, max_episodes))
    summary = result.summary()
    title = f"{result.env}, {result.split}: {result.policy}"
    cards = "".join(
        f'<div class="card"><b>{value}</b><span>{name}</span></div>\n'
        for name, value in _cards(summary)
    )
    warnings = "".join(
        f'<p class="warning">{_esc(text)}</p>\n' for text in critic_warnings(summary)
    )
    page = _PAGE.format(
        title=_esc(title),
        style=STYLE,
        note=_esc(_note(result, shown)),
        cards=f'<div class="cards">\n{cards}</div>\n',
        warnings=warnings,
        episodes="".join(_episode(episode, i == 0) for i, episode in enumerate(shown)),
    )
    Path(path).write_text(page, encoding="utf-8")


def write_text(path: str | Path, result: EvaluationResult, max_episodes: int = 20) -> None:
    """Write the summary and the first ``max_episodes`` episodes as plain UTF-8 text."""
    shown = list(islice(result.episodes, max_episodes))
    lines = [
        one_line(f"{result.env}, {result.split}: {result.policy}", 100),
        _note(result, shown),
        "",
    ]
    lines += [comparison_table([result]), ""]
    for episode in shown:
        lines += ["", *_episode_lines(episode)]
    Path(path).write_text(visible("\n".join(lines) + "\n"), encoding="utf-8")


def _note(result: EvaluationResult, shown: list[EpisodeRecord]) -> str:
    return f"The first {len(shown)} of {len(result.episodes)} episodes, in the order played."


def _cards(summary: dict[str, float]) -> Iterator[tuple[str, str]]:
    """Headline figures; those without data are left out."""
    yield "success, 95% interval", show_interval(summary, "success")
    for key, name in (("valid_rate", "valid actions"), ("right_rate", "right actions")):
        if not math.isnan(summary[key]):
            yield name, f"{summary[key]:.0%}"
    for key, name in (("mean_turns", "mean turns"), ("tokens_per_episode", "tokens per episode")):
        if not math.isnan(summary[key]):
            yield name, f"{summary[key]:.1f}"
    for truth in ("oracle", "outcome"):
        if summary[f"critic_vs_{truth}/n"]:
            yield f"critic vs {truth}: AUROC", show_interval(summary, f"critic_vs_{truth}/auroc")
    if summary["critic_vs_outcome/n"]:
        share = summary["critic_vs_outcome/positive_share"]
        yield "verdicts 'good'", "-" if math.isnan(share) else f"{share:.0%}"


def _esc(text: str) -> str:
    return html.escape(visible(text), quote=True)


def _speaker(message: Message) -> str:
    return one_line(message.get("name") or message["role"], 60)


def _chip(kind: str, text: str) -> str:
    return f'<span class="chip {kind}">{_esc(text)}</span>'


def _mark(flag: bool | None, yes: str, no: str) -> str:
    return "" if flag is None else _chip("good" if flag else "bad", yes if flag else no)


def _bubble(side: str, who: str, text: str, chips: str = "") -> str:
    return (
        f'<div class="bubble {side}"><div class="who">{_esc(who)} {chips}</div>'
        f'<div class="text">{_esc(text)}</div></div>\n'
    )


def _episode(episode: EpisodeRecord, is_open: bool) -> str:
    outcome = _mark(episode.success, "success", "failure")
    opening = "".join(_opening(message) for message in episode.opening)
    steps = "".join(_step(i, step) for i, step in enumerate(episode.steps, 1))
    return (
        f'<details class="episode"{" open" if is_open else ""}>\n'
        f"<summary>{outcome} <b>{_esc(episode.task_id)}</b> "
        f'<span class="facts">{_esc(_facts(episode))}</span></summary>\n'
        f'{opening}{steps}<p class="end">ended: {_esc(episode.reason)}</p>\n</details>\n'
    )


def _facts(episode: EpisodeRecord) -> str:
    turns = len(episode.steps)
    return (
        f"{turns} turn{'' if turns == 1 else 's'}, reward {episode.total_reward:g}, "
        f"{episode.tokens} tokens"
    )


def _opening(message: Message) -> str:
    """System prompts are long and the same everywhere, so they start folded."""
    if message["role"] == "system":
        return (
            f'<details class="system"><summary>{_esc(_speaker(message))} prompt</summary>'
            f'<div class="text">{_esc(message["content"])}</div></details>\n'
        )
    return _bubble("other", _speaker(message), message["content"])


def _step(number: int, step: StepRecord) -> str:
    chips = _mark(step.valid, "valid", "invalid") + _mark(step.right, "right", "wrong")
    chips += _chip("plain", "explored") if step.explored else ""
    parts = [_bubble("agent", f"agent, turn {number}", step.action, chips)]
    if step.completion and step.completion.strip() != step.action.strip():
        parts.append(
            '<details class="aside"><summary>as sampled</summary>'
            f'<div class="text">{_esc(step.completion)}</div></details>\n'
        )
    if step.criticised:
        parts.append(_critique(step))
    if step.refined_action is not None:
        chips = _mark(step.refined_right, "right", "wrong")
        parts.append(_bubble("aside", "refined action", step.refined_action, chips))
    if step.reply or step.reward:
        reward = _chip("plain", f"reward {step.reward:g}") if step.reward else ""
        parts.append(_bubble("other", "environment", step.reply, reward))
    return "".join(parts)


def _critique(step: StepRecord) -> str:
    kind = {True: "good", False: "bad", None: "plain"}[step.verdict]
    score = "" if math.isnan(step.score) else f" {step.score:.2f}"
    chip = _chip(kind, VERDICTS[step.verdict] + score)
    if _mistaken(step):
        chip += _chip("bad", "mistaken")
    predicted = ""
    if step.description:
        predicted = (
            '<div class="who">predicted</div>'
            f'<div class="text predicted">{_esc(step.description)}</div>'
        )
    return (
        f'<div class="critic {kind}">{predicted}<div class="who">critique {chip}</div>'
        f'<div class="text">{_esc(step.critique)}</div></div>\n'
    )


def _mistaken(step: StepRecord) -> bool:
    """Whether the oracle contradicts the verdict."""
    return None not in (step.verdict, step.right) and step.verdict != step.right


def _episode_lines(episode: EpisodeRecord) -> Iterator[str]:
    yield f"=== {one_line(episode.task_id, 80)}: {'success' if episode.success else 'failure'}"
    yield f"    {_facts(episode)}"
    for message in episode.opening:
        yield _entry(_speaker(message), message["content"])
    for number, step in enumerate(episode.steps, 1):
        yield ""
        marks = ["valid" if step.valid else "invalid"]
        marks += [] if step.right is None else ["right" if step.right else "wrong"]
        marks += ["explored"] if step.explored else []
        yield _entry(f"{number}. agent ({', '.join(marks)})", step.action)
        if step.completion and step.completion.strip() != step.action.strip():
            yield _entry("   as sampled", step.completion)
        if step.description:
            yield _entry("   predicted", step.description)
        if step.criticised:
            verdict = VERDICTS[step.verdict] + (", mistaken" if _mistaken(step) else "")
            yield _entry(f"   critique ({verdict})", step.critique)
        if step.refined_action is not None:
            mark = {True: " (right)", False: " (wrong)", None: ""}[step.refined_right]
            yield _entry(f"   refined action{mark}", step.refined_action)
        if step.reply:
            yield _entry("   environment", step.reply)
        if step.reward:
            yield f"   reward: {step.reward:g}"
    yield _entry("ended", episode.reason)


def _entry(who: str, text: str) -> str:
    """One speech; its later lines are indented, so that no text can pass for another speaker."""
    return f"{who}: " + text.replace("\n", "\n      | ")
