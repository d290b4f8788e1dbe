"""A trained adapter as a plain PEFT folder, without this package's checkpoint around it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from peft import LoraConfig
from safetensors.torch import save_file
from torch import Tensor

from nlac_lightning.backbone import Backbone, lora_config
from nlac_lightning.errors import ConfigError, require_choice

PREFIX = "backbone.model."
"""Where an algorithm keeps its PEFT model."""


def export_adapter(checkpoint: Path, out: Path, adapter: Literal["online", "target"]) -> str:
    """Write an adapter of a Lightning checkpoint so that ``peft`` alone can load it.

    Args:
        checkpoint: a checkpoint of an :class:`~nlac_lightning.algorithms.base.Algorithm`.
        out: folder for ``adapter_config.json`` and ``adapter_model.safetensors``, created if
            missing.
        adapter: ``online``, the trained one, or ``target``, its moving average.

    Returns:
        A line that says what was written and how to load it.

    Raises:
        ConfigError: no such file, or not a checkpoint of this package.
    """
    require_choice("adapter", adapter, ("online", "target"))
    content = read_checkpoint(checkpoint)
    weights: dict[str, Tensor] = {
        name.removeprefix(PREFIX).replace(f".{adapter}.", "."): value.contiguous()
        for name, value in content["state_dict"].items()
        if f".{adapter}." in name
    }
    facts = content["nlac"]
    config = LoraConfig(
        **facts["lora"],
        task_type="CAUSAL_LM",
        base_model_name_or_path=facts["base"],
        inference_mode=True,
    )
    try:
        out.mkdir(parents=True, exist_ok=True)
        config.save_pretrained(str(out))
        save_file(weights, out / "adapter_model.safetensors", metadata={"format": "pt"})
    except OSError as error:
        raise ConfigError(
            str(out), f"cannot be written ({error})", "name another folder"
        ) from error
    return (
        f"{adapter} adapter of {facts['base']} ({len(weights)} tensors) written to {out}\n"
        f"load it: peft.PeftModel.from_pretrained(base_model, '{out}')"
    )


def write_adapter(backbone: Backbone, adapter: str, out: Path) -> None:
    """Write an adapter of a live model as a plain PEFT folder, which is created."""
    weights = {
        name: value.detach().cpu().contiguous()
        for name, value in backbone.adapter_parameters(adapter).items()
    }
    out.mkdir(parents=True)
    lora = lora_config(backbone.config)
    lora.target_modules = backbone.model.peft_config[adapter].target_modules
    lora.inference_mode = True
    lora.save_pretrained(str(out))
    save_file(weights, out / "adapter_model.safetensors", metadata={"format": "pt"})


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Content of a checkpoint file of this package, else :class:`ConfigError`."""
    fix = "name a .ckpt file that `nlac fit` wrote"
    if not path.is_file():
        raise ConfigError(str(path), "there is no such checkpoint", fix)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # any foreign file: torch raises whatever its parts do
        raise ConfigError(
            str(path), f"it is no checkpoint ({type(error).__name__})", fix
        ) from error
    if not isinstance(content, dict) or "lora" not in content.get("nlac", {}):
        raise ConfigError(str(path), "it is not a checkpoint of this package", fix)
    return content
