"""The small commands: ``nlac replay | roles | plot | export``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path


def replay(arguments: list[str]) -> None:
    """``nlac replay stats|check PATH`` and ``nlac replay export|import PATH FILE``.

    ``nlac replay import --format tau-bench FILE --config C`` needs no PATH: it is the config's.
    """
    from nlac_lightning.replay import commands

    parser = argparse.ArgumentParser("nlac replay", description="Look into a replay buffer.")
    actions = parser.add_subparsers(dest="action", required=True)
    for name, text in (("stats", "print what it holds"), ("check", "verify every episode")):
        actions.add_parser(name, help=text).add_argument("path", type=Path)
    for name, text in (("export", "write it as Parquet"), ("import", "add episodes of a file")):
        sub = actions.add_parser(name, help=text)
        if name == "import":
            sub.add_argument("--format", choices=("parquet", "tau-bench"), default="parquet")
            sub.add_argument("--config", help="tau-bench: the config that will train on them")
            sub.add_argument("path", type=Path, nargs="?", help="the buffer (tau-bench: optional)")
        else:
            sub.add_argument("path", type=Path, help="the buffer")
        sub.add_argument("file", type=Path, help="the file")
    options = parser.parse_args(arguments)
    if options.action == "stats":
        print(commands.stats(options.path))
    elif options.action == "export":
        print(commands.export(options.path, options.file))
    elif options.action == "import" and options.format == "tau-bench":
        from nlac_lightning.cli import with_config_paths
        from nlac_lightning.envs.tau2.importing import import_tau_bench

        if options.config is None:
            parser.error("--format tau-bench needs --config: prompts and tokenizer are its")
        config = with_config_paths(["--config", options.config])
        print(import_tau_bench(options.file, config, options.path))
    elif options.action == "import" and options.path is None:
        parser.error("import needs PATH, the buffer, and FILE")
    elif options.action == "import":
        print(commands.import_episodes(options.path, options.file))
    else:
        problems = commands.check(options.path)
        print("\n".join(problems) or f"{options.path}: sound")
        sys.exit(1 if problems else 0)


def plot(arguments: list[str]) -> None:
    """``nlac plot RUN... --out FILE``: success against steps, episodes and tokens."""
    from nlac_lightning.report.curves import plot_runs

    parser = argparse.ArgumentParser("nlac plot", description="Sample-efficiency curves of runs.")
    parser.add_argument("runs", nargs="+", type=Path, help="TensorBoard folders")
    parser.add_argument("--out", type=Path, default=Path("curves.png"))
    parser.add_argument("--metric", action="append", help="default: val/success")
    options = parser.parse_args(arguments)
    missing = plot_runs(options.runs, options.out, tuple(options.metric or ["val/success"]))
    for line in missing:
        print(f"missing: {line}")
    print(f"wrote {options.out}")


def export(arguments: list[str]) -> None:
    """``nlac export CHECKPOINT OUT``: the trained adapter in PEFT's own format."""
    from nlac_lightning.export import export_adapter

    parser = argparse.ArgumentParser("nlac export", description="Write a plain PEFT adapter.")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--adapter", choices=("online", "target"), default="online")
    options = parser.parse_args(arguments)
    print(export_adapter(options.checkpoint, options.out, options.adapter))


def roles(arguments: list[str]) -> None:
    """``nlac roles --config ...``: each role's prompt and a real answer for one transition."""
    from nlac_lightning.cli import with_config_paths
    from nlac_lightning.roles.preview import preview

    preview(with_config_paths(arguments))


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "replay": replay,
    "plot": plot,
    "export": export,
    "roles": roles,
}
