"""LightningCLI for algorithms on a replay buffer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.cli import (
    ArgsType,
    LightningArgumentParser,
    LightningCLI,
    SaveConfigCallback,
)

from nlac_lightning.algorithms.base import Algorithm
from nlac_lightning.checkpoint import read_checkpoint
from nlac_lightning.data import ReplayDataModule
from nlac_lightning.errors import ConfigError

AUTOMATIC = {
    "gradient_clip_val": (None, "model.init_args.optimizer.clip_norm"),
    "gradient_clip_algorithm": (None, "model.init_args.optimizer.clip_norm"),
    "accumulate_grad_batches": (
        1,
        "data.batch_size (model.init_args.compute.train_pack_tokens bounds the memory)",
    ),
}
"""Trainer settings that need automatic optimisation: their default, and what takes their place."""


class NLACCommandLine(LightningCLI):
    """``--model`` takes any :class:`Algorithm` by class path, ``--data`` the replay data module."""

    @classmethod
    def run_from(cls, arguments: list[str], run: bool = True) -> NLACCommandLine:
        """Parse and run; unknown keys fail, a second run in the same folder works.

        Args:
            arguments: a subcommand and its options.
            run: False takes options without a subcommand, and only makes the objects.
        """
        return cls(
            Algorithm,
            ReplayDataModule,
            subclass_mode_model=True,
            save_config_callback=SaveConfigCallback,
            save_config_kwargs={"overwrite": True},
            seed_everything_default=0,
            args=arguments,
            run=run,
            auto_configure_optimizers=False,  # an algorithm has its own
            parser_kwargs={
                "description": "Natural Language Actor-Critic for LLM agents",
                # the usage that stands above an error would list hundreds of options
                **{
                    name: {"usage": f"nlac {name} --config FILE [--KEY VALUE ...]"}
                    for name in cls.subcommands()
                },
            },
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--threads", type=int, default=None, help="CPU threads of PyTorch; default: its own"
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse, and refuse at once what could only fail after the model is loaded."""
        super().parse_arguments(parser, args)
        path = self._setting("ckpt_path")
        if path not in (None, "last", "best", "hpc") and not Path(path).is_dir():
            read_checkpoint(Path(path))
        accelerator = self._setting("trainer")["accelerator"]
        if accelerator in ("gpu", "cuda") and not torch.cuda.is_available():
            raise ConfigError(
                "trainer.accelerator",
                f"'{accelerator}', but PyTorch finds no GPU here",
                "overlay configs/strategy/qlora.yaml (one device, GPU or CPU), or set it to cpu",
            )
        for name, (default, instead) in AUTOMATIC.items():
            if self._setting("trainer")[name] != default:
                raise ConfigError(
                    f"trainer.{name}", "manual optimisation does not use it", f"set {instead}"
                )

    def before_instantiate_classes(self) -> None:
        threads = self._setting("threads")
        if threads:
            torch.set_num_threads(threads)

    def _setting(self, name: str) -> Any:
        subcommand = self.config.get("subcommand")
        return (self.config[subcommand] if subcommand else self.config).get(name)
