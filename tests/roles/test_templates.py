"""Template folders: what is wrong is said at start, with file and line."""

import shutil
from pathlib import Path

import pytest

from nlac_lightning.errors import ConfigError
from nlac_lightning.roles.templates import FAMILIES, FIELDS, load_templates

BACKUP = {
    "replies": "ok",
    "next_description": "fine",
    "action": "go",
    "reward": 1.0,
    "next_action": "stop",
    "terminal": False,
}
VALUES = {
    "policy": {},
    "successor": {"action": "go"},
    "backup": BACKUP,
    "evaluator": {"action": "go", "descriptions": ["one future", "another"]},
    "refinement": {"action": "go", "critique": "bad"},
    "aggregation": {"action": "go", "returns": [1.0], "rollouts": ["one way"], "replies": ["ok"]},
    "hindsight": {"action": "go", "rollouts": ["one way", "another"], "returns": [1.0, 0.0]},
}
COMMON = {"opening": "hello", "observation": "so?", "agent": "Agent"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of one's own, as a user would copy it."""
    return shutil.copytree(FAMILIES / "help_desk_small", tmp_path / "mine")


@pytest.mark.parametrize("family", sorted(p.name for p in FAMILIES.iterdir() if p.is_dir()))
def test_packaged_families_load_and_render(family: str) -> None:
    templates = load_templates(family)
    assert templates.keys() == FIELDS.keys()
    for role, template in templates.items():
        text, prefill = template.render(COMMON | VALUES[role])
        if role != "policy":
            assert text.strip()
        for required in FIELDS[role][0]:
            value = VALUES[role][required]
            if isinstance(value, str | list) and len(value) > 1:  # it is used, as words or counted
                fewer = COMMON | VALUES[role] | {required: value[1:]}
                assert template.render(fewer) != (text, prefill)
        if role == "backup":
            assert template.render(COMMON | BACKUP | {"terminal": True, "next_description": ""})


def test_a_family_may_leave_the_roles_of_baselines_to_the_default(folder: Path) -> None:
    own = load_templates(str(folder))["hindsight"].path
    (folder / "hindsight.jinja").unlink()
    assert own.parent == folder
    assert load_templates(str(folder))["hindsight"].path == FAMILIES / "default/hindsight.jinja"


def test_an_own_folder_is_used(folder: Path) -> None:
    (folder / "successor.jinja").write_text("What follows {{ action }}?")
    (folder / "successor.prefill.jinja").write_text("After {{ action }}")
    text, prefill = load_templates(str(folder))["successor"].render(COMMON | {"action": "x"})
    assert (text, prefill) == ("What follows x?", "After x")


def refused(folder: Path, *parts: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_templates(str(folder))
    for part in parts:
        assert part in str(caught.value)


def test_unknown_family_lists_the_known_ones(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "model.roles.templates", "nowhere", "help_desk_small")


def test_missing_file(folder: Path) -> None:
    (folder / "evaluator.jinja").unlink()
    refused(folder, "evaluator.jinja", "missing")


@pytest.mark.parametrize("name", ["successor.jinja", "backup.prefill.jinja"])
@pytest.mark.parametrize("broken", ["{% if action %}", "{{ action | no_such_filter }}"])
def test_syntax_error_with_its_line(folder: Path, name: str, broken: str) -> None:
    path = folder / name
    path.write_text("{{ action }}\ntwo\n" + broken)
    refused(folder, f"{path}:3")


@pytest.mark.parametrize("name", ["refinement.jinja", "backup.prefill.jinja"])
def test_unknown_field_with_its_line(folder: Path, name: str) -> None:
    path = folder / name
    path.write_text(path.read_text().rstrip("\n") + "\n\n{{ citrique }}")
    line = len(path.read_text().splitlines())
    refused(folder, f"{path}:{line}", "'citrique'", "action")


@pytest.mark.parametrize(
    ("role", "field"), [(r, f) for r, (required, _) in FIELDS.items() for f in sorted(required)]
)
def test_missing_required_field(folder: Path, role: str, field: str) -> None:
    (folder / f"{role}.prefill.jinja").unlink(missing_ok=True)
    others = "".join(f"{{{{ {f} }}}}" for f in FIELDS[role][0] if f != field)
    path = folder / f"{role}.jinja"
    path.write_text(f"one\n{others}\nthree")
    refused(folder, f"{path}:3", f"'{field}'")


def test_a_required_field_may_stand_in_the_start_of_the_answer(folder: Path) -> None:
    (folder / "successor.jinja").write_text("What follows?")
    (folder / "successor.prefill.jinja").write_text("After {{ action }}")
    assert load_templates(str(folder))["successor"].render(COMMON | {"action": "x"})[1] == "After x"


def test_a_loop_over_futures_is_allowed(folder: Path) -> None:
    (folder / "evaluator.jinja").write_text(
        "{% for d in descriptions %}{% set n = loop.index %}{{ n }}: {{ d }} {% endfor %}"
    )
    text, _ = load_templates(str(folder))["evaluator"].render(COMMON | VALUES["evaluator"])
    assert text.split() == ["1:", "one", "future", "2:", "another"]


def test_templates_are_sandboxed(folder: Path) -> None:
    (folder / "successor.jinja").write_text(
        "{{ action }}{{ action.__class__.__mro__[1].__subclasses__() }}"
    )
    template = load_templates(str(folder))["successor"]
    with pytest.raises(ConfigError, match="successor"):
        template.render(COMMON | {"action": "x"})
