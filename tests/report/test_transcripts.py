"""Transcripts: complete, readable by a real HTML parser, and closed to hostile text."""

from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nlac_lightning.envs.base import Message
from nlac_lightning.evaluation.records import EpisodeRecord, EvaluationResult, StepRecord
from nlac_lightning.report.text import one_line, visible
from nlac_lightning.report.transcripts import write_html, write_text

VOID = {"meta"}


class Page(HTMLParser):
    """Tags, attributes and text of a page; fails when tags do not nest."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.open: list[str] = []
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


HOSTILE = [
    "</div><script>alert(1)</script>",
    "\"' onmouseover=alert(1) <img src=x onerror=alert(1)>",
    "</style></details><!-- {title} %s &lt;",
    "\x1b[2J\x00\x07 \u202eevil\u2066 \ud800 \x85\u2028\r",
]


def hostile(text: str) -> EvaluationResult:
    """A result with ``text`` in every place that holds text."""
    step = StepRecord(
        text, text + "2", text, text, True, 0.5, True, True, text, False, True, text, 1.0
    )
    message: Message = {"role": text, "content": text, "name": text}
    system: Message = {"role": "system", "content": text}
    episode = EpisodeRecord(text, text, text, True, 1.0, [step], text, 3, [system, message])
    return EvaluationResult(text, text, [episode], text)


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_changes_nothing(tmp_path: Path, text: str) -> None:
    path = tmp_path / "page.html"
    write_html(path, hostile("harmless"))
    harmless = Page(path)
    write_html(path, hostile(text))
    page = Page(path)
    assert page.tags == harmless.tags and "script" not in page.tags
    assert page.attributes == harmless.attributes
    assert page.text.count(visible(text)) == harmless.text.count("harmless")
    raw = path.read_bytes().decode("utf-8")
    assert not {c for c in raw if (ord(c) < 32 and c != "\n") or c in "\x85\u2028\u202e\u2066"}


def test_page_is_self_contained(tmp_path: Path, trained: EvaluationResult) -> None:
    path = tmp_path / "page.html"
    write_html(path, trained, max_episodes=3)
    page = Page(path)
    assert not page.tags & {"script", "link", "img", "iframe", "object"}
    assert not page.attributes & {"src", "href"}
    assert "url(" not in path.read_text() and "@import" not in path.read_text()


def test_both_forms_show_every_part(tmp_path: Path, base: EvaluationResult) -> None:
    episode = next(e for e in base.episodes if any(s.refined_action for s in e.steps))
    steps = [replace(step, reward=0.25) for step in episode.steps]
    result = replace(base, episodes=[replace(episode, steps=steps)])
    write_html(tmp_path / "page.html", result)
    write_text(tmp_path / "page.txt", result)
    for shown in (Page(tmp_path / "page.html").text, (tmp_path / "page.txt").read_text()):
        flat = shown.replace("\n      | ", "\n")
        for message in episode.opening:
            assert message["content"] in flat
        for step in steps:
            for text in (step.action, step.completion, step.critique, step.description):
                assert text in flat
            assert step.reply in flat and (step.refined_action or "") in flat
        for word in (episode.task_id, episode.reason, "failure", "0.25", "wrong", "mistaken"):
            assert word in flat


def test_limit_and_order_are_stated(tmp_path: Path, trained: EvaluationResult) -> None:
    for write, name in ((write_html, "page.html"), (write_text, "page.txt")):
        write(tmp_path / name, trained, max_episodes=2)
        text = (tmp_path / name).read_text()
        assert "first 2 of 40 episodes" in text
        assert "refund-001" in text and "refund-002" not in text
        write(tmp_path / name, replace(trained, episodes=[]))
        assert "first 0 of 0 episodes" in (tmp_path / name).read_text()


def test_no_speech_passes_for_another_speaker(tmp_path: Path) -> None:
    forged = "fine\n\n2. agent (valid, right): refund all\rended: success\u2028ended: success"
    write_text(tmp_path / "page.txt", hostile(forged))
    lines = (tmp_path / "page.txt").read_text().splitlines()
    assert not [line for line in lines if line.startswith(("2. agent", "ended: success"))]
    assert [line for line in lines if line.startswith("1. agent")]


def test_visible_signs() -> None:
    assert visible("a\x1b\x7f\u202e\ud800\u2028") == "a␛␡<U+202E><U+D800><U+2028>"
    assert (
        visible("tab\tline\n👩\u200d💻 \u0646\u200c\u0647")
        == "tab\tline\n👩\u200d💻 \u0646\u200c\u0647"
    )
    assert one_line("a\nb", 10) == "a b"
    assert one_line("abcdef", 4) == "abc…"


@given(st.text(st.characters()))
def test_visible_text_can_be_written_and_read(text: str) -> None:
    shown = visible(text)
    assert shown.encode("utf-8").decode("utf-8") == shown
    assert len(f"{shown}.".splitlines()) == text.count("\n") + 1, "no other line break is left"
    assert visible(shown) == shown
