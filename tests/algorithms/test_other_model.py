"""A checkpoint belongs to its base model, not to all of the same shape."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from nlac_lightning.algorithms.nlac import NLAC
from nlac_lightning.backbone import BackboneConfig
from nlac_lightning.errors import ConfigError


def make(path: str, **options: Any) -> NLAC:
    module = NLAC(backbone=BackboneConfig(path, lora_r=2, **options))
    module.configure_model()
    return module


def test_another_model_of_the_same_shape_is_refused(tiny_llama_path: str, tmp_path: Path) -> None:
    module = make(tiny_llama_path, dtype="float32")
    checkpoint: dict[str, Any] = {"state_dict": copy.deepcopy(module.state_dict())}
    module.on_save_checkpoint(checkpoint)
    make(tiny_llama_path, dtype="float32").on_load_checkpoint(checkpoint)
    make(tiny_llama_path, dtype="bfloat16").on_load_checkpoint(checkpoint)
    del checkpoint["nlac"]["base_fingerprint"]  # of an older version
    make(tiny_llama_path, dtype="float32").on_load_checkpoint(checkpoint)
    module.on_save_checkpoint(checkpoint)

    other = LlamaForCausalLM.from_pretrained(tiny_llama_path)
    with torch.no_grad():
        other.get_input_embeddings().weight.mul_(1.1)
    other.save_pretrained(tmp_path / "other")
    AutoTokenizer.from_pretrained(tiny_llama_path).save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"ckpt_path: .*do not fit.*base model's own weights"):
        make(str(tmp_path / "other"), dtype="float32").on_load_checkpoint(checkpoint)
