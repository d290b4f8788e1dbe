"""Configs by name: ``--config quickstart`` works from any folder, checkout or not."""

from __future__ import annotations

from pathlib import Path

from nlac_lightning.errors import ConfigError

CONFIGS = Path(__file__).parent / "configs"


def find_config(name: str) -> Path:
    """Find a config file: an existing path, else one that comes with the package.

    Args:
        name: a path, or a packaged config such as ``quickstart``, ``quickstart.yaml``,
            ``configs/quickstart.yaml`` or ``strategy/qlora``.

    Raises:
        ConfigError: there is no such file; the packaged ones are listed.
    """
    path = Path(name)
    if path.is_file():
        return path
    packaged = packaged_configs()
    key = name.removeprefix("configs/").removesuffix(".yaml")
    if key not in packaged:
        fix = f"name a file, or one of {', '.join(packaged)}"
        raise ConfigError("config", f"there is no '{name}'", fix)
    return packaged[key]


def packaged_configs() -> dict[str, Path]:
    """All configs of the package by name: path below ``configs/`` without ``.yaml``, sorted."""
    files = {p.relative_to(CONFIGS).with_suffix("").as_posix(): p for p in CONFIGS.rglob("*.yaml")}
    return dict(sorted(files.items()))
