"""The small commands: ``nlac replay | roles | plot | export | serve``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path


def replay(arguments: list[str]) -> None:
    """``nlac replay stats|check PATH`` and ``nlac replay export|import PATH FILE``."""
    from nlac_lightning.replay import commands

    parser = argparse.ArgumentParser("nlac replay", description="Look into a replay buffer.")
    actions = parser.add_subparsers(dest="action", required=True)
    for name, text in (("stats", "print what it holds"), ("check", "verify every episode")):
        actions.add_parser(name, help=text).add_argument("path", type=Path)
    for name, text in (("export", "write it as Parquet"), ("import", "add episodes from Parquet")):
        sub = actions.add_parser(name, help=text)
        sub.add_argument("path", type=Path, help="the buffer")
        sub.add_argument("file", type=Path, help="the Parquet file")
    options = parser.parse_args(arguments)
    if options.action == "stats":
        print(commands.stats(options.path))
    elif options.action == "export":
        print(commands.export(options.path, options.file))
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


def serve(arguments: list[str]) -> None:
    """``nlac serve --model NAME``: a small OpenAI-compatible chat server on a local model."""
    from nlac_lightning.backbone import Backbone, BackboneConfig
    from nlac_lightning.endpoint.serve import ChatServer
    from nlac_lightning.generation.in_process import InProcessGenerator
    from nlac_lightning.roles.codec import make_codec

    parser = argparse.ArgumentParser("nlac serve", description="Serve a model on HTTP.")
    parser.add_argument("--model", default=BackboneConfig.name, help="folder, hub id or name")
    parser.add_argument("--host", default="127.0.0.1", help="there is no password: keep it local")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max_tokens", type=int, default=8192, help="prompt and answer together")
    options = parser.parse_args(arguments)
    backbone = Backbone(BackboneConfig(options.model))
    codec = make_codec("auto", backbone.tokenizer)
    chat = ChatServer(InProcessGenerator(backbone), codec, options.model, options.max_tokens)
    with chat.listen(options.host, options.port) as server:
        print(f"http://{options.host}:{server.server_address[1]}/v1", flush=True)
        server.serve_forever()


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "replay": replay,
    "plot": plot,
    "export": export,
    "roles": roles,
    "serve": serve,
}
