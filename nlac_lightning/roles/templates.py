"""The text of the roles: Jinja files in a folder that a user can copy and edit.

A family is a folder with ``policy``, ``successor``, ``backup``, ``evaluator`` and ``refinement``,
each a ``.jinja`` file. ``NAME.prefill.jinja``, where present, is the start of the role's answer:
the model continues it, and it counts as part of the answer. ``aggregation`` and ``hindsight``, the
roles of baselines, may be left out: a family without them uses those of ``default``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, TemplateRuntimeError, TemplateSyntaxError, nodes
from jinja2.sandbox import SandboxedEnvironment

from nlac_lightning.errors import ConfigError

FAMILIES = Path(__file__).parent / "templates"

COMMON = frozenset({"opening", "observation", "agent"})
"""Fields of every role: the first and the last message that the agent did not write, its name."""

FIELDS: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "policy": (frozenset(), frozenset()),
    "successor": (frozenset({"action"}), frozenset()),
    "backup": (
        frozenset({"replies", "next_description"}),
        frozenset({"action", "reward", "next_action", "terminal"}),
    ),
    "evaluator": (frozenset({"descriptions"}), frozenset({"action"})),
    "refinement": (frozenset({"critique"}), frozenset({"action"})),
    "aggregation": (frozenset({"returns"}), frozenset({"action", "rollouts", "replies"})),
    "hindsight": (frozenset({"rollouts"}), frozenset({"action", "returns", "replies"})),
}
OPTIONAL = ("aggregation", "hindsight")
"""For each role, the fields that its files must use and those that they may use."""


@dataclass(frozen=True)
class RoleTemplate:
    """A compiled role.

    Attributes:
        role: its name.
        path: file of the instruction, for messages.
    """

    role: str
    path: Path
    body: Any
    prefill: Any

    def render(self, fields: dict[str, Any]) -> tuple[str, str]:
        """The instruction and the start of the answer."""
        try:
            return self.body.render(**fields), self.prefill.render(**fields)
        except TemplateRuntimeError as error:
            raise ConfigError(str(self.path), str(error), "correct the template") from error


def load_templates(family: str) -> dict[str, RoleTemplate]:
    """Load and check the roles of a family.

    Args:
        family: a folder, or the name of one that comes with the package.

    Raises:
        ConfigError: folder or file missing, syntax error, a field unknown or left out; the message
            names file and line.
    """
    folder = Path(family) if Path(family).is_dir() else FAMILIES / family
    if not folder.is_dir():
        known = ", ".join(sorted(path.name for path in FAMILIES.iterdir() if path.is_dir()))
        raise ConfigError(
            "model.roles.templates", f"no folder '{family}'", f"give a folder, or one of {known}"
        )
    # Sandboxed: a template folder may come from somebody else.
    environment = SandboxedEnvironment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return {role: _load(environment, folder, role) for role in FIELDS}


def _load(environment: SandboxedEnvironment, folder: Path, role: str) -> RoleTemplate:
    path = folder / f"{role}.jinja"
    if role in OPTIONAL and not path.is_file():
        folder = FAMILIES / "default"
        path = folder / f"{role}.jinja"
    if not path.is_file():
        raise ConfigError(str(path), "the role's template is missing", "add the file")
    prefill = folder / f"{role}.prefill.jinja"
    sources = {path: path.read_text(encoding="utf-8")}
    if prefill.is_file():
        sources[prefill] = prefill.read_text(encoding="utf-8")
    required, optional = FIELDS[role]
    used: set[str] = set()
    for file, source in sources.items():
        try:
            tree = environment.parse(source)
            environment.from_string(source)  # finds unknown filters and tests
        except TemplateSyntaxError as error:
            raise ConfigError(
                f"{file}:{error.lineno}", str(error.message), "correct the template"
            ) from error
        bound = {node.name for node in tree.find_all(nodes.Name) if node.ctx == "store"}
        for node in tree.find_all(nodes.Name):
            if node.ctx == "load" and node.name not in bound | {"loop", "range"}:
                if node.name not in required | optional | COMMON:
                    allowed = ", ".join(sorted(required | optional | COMMON))
                    raise ConfigError(
                        f"{file}:{node.lineno}",
                        f"unknown field '{node.name}' in the {role} template",
                        f"use one of {allowed}",
                    )
                used.add(node.name)
    for name in sorted(required - used):
        lines = len(sources[path].splitlines())
        raise ConfigError(
            f"{path}:{max(lines, 1)}",
            f"the {role} template ends without using the field '{name}'",
            f"put {{{{ {name} }}}} where the model needs it",
        )
    return RoleTemplate(
        role,
        path,
        environment.from_string(sources[path]),
        environment.from_string(sources.get(prefill, "")),
    )
