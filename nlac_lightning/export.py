"""A trained adapter as a plain PEFT folder, without a checkpoint around it, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from peft import LoraConfig
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from nlac_lightning.checkpoint import read_checkpoint
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
    weights = _weights(content, adapter)
    facts = content["nlac"]
    config = LoraConfig(
        **facts["lora"],
        task_type="CAUSAL_LM",
        base_model_name_or_path=facts["base"],
        inference_mode=True,
    )
    try:
        write_folder(config, weights, out)
    except OSError as error:
        raise ConfigError(
            str(out), f"cannot be written ({error})", "name another folder"
        ) from error
    return (
        f"{adapter} adapter of {facts['base']} ({len(weights)} tensors) written to {out}\n"
        f"load it: peft.PeftModel.from_pretrained(base_model, '{out}')"
    )


def write_folder(config: LoraConfig, weights: dict[str, Tensor], out: Path) -> None:
    """Write an adapter as a PEFT folder, which is created if missing; OSError if it cannot be."""
    out.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(str(out))
    save_file(weights, out / "adapter_model.safetensors", metadata={"format": "pt"})


def read_adapter(path: Path) -> tuple[float, dict[str, Tensor]]:
    """A PEFT folder's adapter, or the online one of a checkpoint.

    Returns:
        Its scale, ``lora_alpha / r``, and its weights under PEFT's names.

    Raises:
        ConfigError: neither of the two.
    """
    if path.is_dir():
        try:
            config = LoraConfig.from_pretrained(str(path))
            return config.lora_alpha / config.r, load_file(path / "adapter_model.safetensors")
        except (OSError, ValueError, SafetensorError) as error:
            raise ConfigError(
                str(path), f"it is no LoRA folder ({error})", "name one that `nlac export` wrote"
            ) from error
    content = read_checkpoint(path)
    lora = content["nlac"]["lora"]
    return lora["lora_alpha"] / lora["r"], _weights(content, "online")


def _weights(content: dict[str, Any], adapter: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(PREFIX).replace(f".{adapter}.", "."): value.contiguous()
        for name, value in content["state_dict"].items()
        if f".{adapter}." in name
    }
