"""Models that several tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nlac_lightning import models
from nlac_lightning.errors import ConfigError

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers that each take all cores slow each other down many times; their commands inherit it.
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def smollm2_path() -> str:
    """Folder of the real SmolLM2-135M-Instruct; its first use downloads and converts it."""
    try:
        return models.resolve(models.SMOLLM2)
    except ConfigError as error:
        pytest.skip(f"needs the real model: {error}")


@pytest.fixture(scope="session")
def tiny_llama_path(smollm2_path: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a random two-layer Llama (untied head) with the real tokenizer. Do not write to."""
    folder: Path = tmp_path_factory.mktemp("tiny_llama")
    tokenizer = models.load_tokenizer(smollm2_path)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
