from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from nlac_lightning.configs_path import CONFIGS, find_config, packaged_configs
from nlac_lightning.errors import ConfigError

ROOT = Path(__file__).parents[1]
BIN = "Scripts" if os.name == "nt" else "bin"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of what the build reads, with one marked callback and config more."""
    copy = tmp_path / "project"
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("nlac_lightning", "callbacks", "configs"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    (copy / "callbacks" / "marked.py").write_text("MARK = 7\n")
    (copy / "configs" / "strategy").mkdir(exist_ok=True)
    (copy / "configs" / "strategy" / "marked.yaml").write_text("seed_everything: 7\n")
    return copy


@pytest.fixture
def fresh_python(tmp_path: Path) -> Path:
    """Interpreter of a new virtual environment that has this one's packages, but not the project.

    A plain path in a .pth file is searched without the .pth files there, hence without an editable
    install of the project.
    """
    folder = tmp_path / "venv"
    venv.create(folder)
    python = folder / BIN / "python"
    (inside,) = run(python, "import sysconfig; print(sysconfig.get_path('purelib'))")
    (Path(inside) / "outer.pth").write_text(
        "\n".join([sysconfig.get_path("purelib"), *site.getsitepackages()])
    )
    with pytest.raises(subprocess.CalledProcessError):
        run(python, "import nlac_lightning")
    return python


def run(python: Path, code: str) -> list[str]:
    """Lines that ``code`` prints, away from the checkout and from PYTHONPATH."""
    command = [str(python), "-I", "-c", code]
    return subprocess.run(
        command, cwd=python.parent, capture_output=True, text=True, check=True
    ).stdout.splitlines()


def pip(python: Path, *arguments: str) -> None:
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    options = ["--quiet", "--no-deps", "--no-build-isolation", *arguments]
    subprocess.run([str(python), "-m", "pip", "install", *options], env=env, check=True)


LOOK = """
import nlac_lightning, nlac_lightning.callbacks.marked as marked
from nlac_lightning.configs_path import find_config
print(nlac_lightning.__file__, marked.MARK, find_config("strategy/marked").read_text().strip())
"""


def test_wheel_works_outside_the_checkout(project: Path, fresh_python: Path) -> None:
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "--wheel-dir", str(project / "dist"), str(project)], check=True)
    (wheel,) = (project / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    source = {
        path.relative_to(project).as_posix()
        for top in (".", "callbacks", "configs")
        for path in (project / "nlac_lightning" / top).rglob("*")
        if path.suffix in {".py", ".yaml", ".jinja", ".typed", ".json", ".safetensors"}
    }
    assert packed == source
    pip(fresh_python, str(wheel))
    shutil.rmtree(project)
    (line,) = run(fresh_python, LOOK)
    assert line.startswith(str(fresh_python.parents[1]))
    assert line.endswith("7 seed_everything: 7")
    assert (fresh_python.parent / "nlac").is_file()


def test_editable_install_follows_the_checkout(project: Path, fresh_python: Path) -> None:
    pip(fresh_python, "--editable", str(project))
    (project / "callbacks" / "marked.py").write_text("MARK = 8\n")
    (project / "configs" / "strategy" / "marked.yaml").write_text("seed_everything: 8\n")
    (line,) = run(fresh_python, LOOK)
    assert line == f"{project / 'nlac_lightning' / '__init__.py'} 8 seed_everything: 8"


def test_import_of_the_package_is_light() -> None:
    code = "import sys, nlac_lightning; print('torch' in sys.modules, nlac_lightning.__version__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[0] == "False"


# --- configs by name -----------------------------------------------------------------------------


def test_every_packaged_config_is_found_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    found = packaged_configs()
    assert found.keys() >= {"quickstart"}
    assert len(found) == len(list((ROOT / "configs").rglob("*.yaml")))
    for name, path in found.items():
        for spelling in (name, f"{name}.yaml", f"configs/{name}", f"configs/{name}.yaml"):
            assert find_config(spelling) == path
        assert path.is_relative_to(CONFIGS)


def test_an_existing_path_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    own = tmp_path / "configs" / "quickstart.yaml"
    own.touch()
    assert find_config("configs/quickstart.yaml").samefile(own)
    assert find_config("quickstart") == packaged_configs()["quickstart"]


@pytest.mark.parametrize("name", ["quickstar", "", "../pyproject", "strategy"])
def test_unknown_config_lists_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigError, match=r"one of .*quickstart"):
        find_config(name)


# --- the one-line set-up -------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize(
    ("python", "message"),
    [("no-such-python", "There is no 'no-such-python'"), ("false", "older than Python 3.11")],
)
def test_make_names_an_unfit_python(python: str, message: str, tmp_path: Path) -> None:
    command = ["make", "-C", str(ROOT), f"PYTHON={python}", f"VENV={tmp_path / 'venv'}", "test"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0
    assert message in done.stderr
    assert not (tmp_path / "venv").exists()
