"""What comes from outside is data: an audit of the source, and runs that try to get out."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from nlac_lightning.backbone import BackboneConfig
from nlac_lightning.evaluation.records import EpisodeRecord, EvaluationResult, StepRecord
from nlac_lightning.report.evaluation import write_comparison, write_result

ROOT = Path(__file__).parents[1]
SOURCES = sorted(
    path
    for folder in ("nlac_lightning", "callbacks", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
)
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "yaml.load"}
IN_SQL = {"kept", "name", "column", "table", "which", "APPLICATION_ID", "SCHEMA_VERSION"}
"""Names that may be put into an SQL text: each is a constant of the program or placeholders."""


def calls(tree: ast.AST) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def name_of(call: ast.Call) -> str:
    return ast.unparse(call.func)


def keyword(call: ast.Call, name: str) -> str | None:
    return next((ast.unparse(k.value) for k in call.keywords if k.arg == name), None)


def problems(source: str) -> list[str]:
    """What an audit of one file finds."""
    tree = ast.parse(source)
    found = []
    for node in ast.walk(tree):
        modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        found += [f"imports {m}" for m in modules if m.partition(".")[0] in UNSAFE_MODULES]
    for call in calls(tree):
        name = name_of(call)
        if name in UNSAFE_CALLS:
            found.append(f"calls {name}")
        if keyword(call, "shell") not in (None, "False"):
            found.append("starts a shell")
        if name == "torch.load" and keyword(call, "weights_only") != "True":
            found.append("torch.load without weights_only=True")
        elif "load" in name and keyword(call, "weights_only") == "False":
            found.append("weights_only=False")
        if keyword(call, "allow_pickle") == "True":
            found.append("allow_pickle=True")
        if keyword(call, "trust_remote_code") == "True":
            found.append("trust_remote_code=True")
        if name.endswith((".execute", ".executemany", ".executescript")) and call.args:
            found += [f"SQL made of {part}" for part in foreign_parts(call.args[0])]
    return found


def foreign_parts(text: ast.expr) -> list[str]:
    """What is put into an SQL text and is no known constant."""
    if isinstance(text, ast.JoinedStr):
        values = [v.value for v in text.values if isinstance(v, ast.FormattedValue)]
    elif isinstance(text, ast.IfExp):
        return foreign_parts(text.body) + foreign_parts(text.orelse)
    elif isinstance(text, ast.Constant) or (isinstance(text, ast.Name) and text.id.isupper()):
        values = []
    else:
        values = [text]
    names = [ast.unparse(value) for value in values]
    return [name for name in names if name not in IN_SQL | {"statement"}]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_source_runs_no_foreign_code(path: Path) -> None:
    assert problems(path.read_text("utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "eval(text)",
        "subprocess.run(text, shell=True)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "AutoModel.from_pretrained(x, trust_remote_code=True)",
        'connection.execute(f"SELECT {text}")',
        'connection.execute("SELECT " + text)',
        'connection.execute("SELECT {}".format(text))',
        "yaml.load(text)",
    ],
)
def test_the_audit_finds_what_it_looks_for(source: str) -> None:
    assert len(problems(source)) == 1


def test_code_of_a_hub_model_is_off_by_default() -> None:
    assert BackboneConfig().trust_remote_code is False


def test_no_id_leads_out_of_the_folder(tmp_path: Path) -> None:
    step = StepRecord("a", "a", right=True, reply="r")
    names = ["../../escape", "/tmp/escape", "a/b", "..", "nul\x00", "x" * 5000, "\ud800"]
    episodes = [
        EpisodeRecord(name, "test", "trained", True, 1.0, [step], name, 3) for name in names
    ]
    result = EvaluationResult("trained", "test", episodes, "../../env")
    folder = tmp_path / "run" / "evaluation"
    folder.mkdir(parents=True)
    for policy in ("base", "trained"):
        write_result(folder, replace(result, policy=policy), 10)
    write_comparison(folder, [result])
    written = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert written and all(path.parent == folder for path in written)
