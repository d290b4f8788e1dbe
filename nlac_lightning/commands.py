"""The small commands: ``nlac replay | roles | plot | compare | export | serve | doctor``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path


def replay(arguments: list[str]) -> None:
    """``nlac replay stats|check PATH`` and ``nlac replay export|import|salvage PATH FILE``.

    ``nlac replay import --format tau-bench FILE --config C`` needs no PATH: it is the config's.
    Further options are then those of ``nlac fit``.
    """
    from nlac_lightning.replay import commands

    parser = argparse.ArgumentParser("nlac replay", description="Look into a replay buffer.")
    actions = parser.add_subparsers(dest="action", required=True)
    for name, text in (("stats", "print what it holds"), ("check", "verify every episode")):
        actions.add_parser(name, help=text).add_argument("path", type=Path)
    for name, text in (
        ("export", "write it as Parquet"),
        ("import", "add episodes of a file"),
        ("salvage", "copy what is good of a damaged buffer to a new file"),
    ):
        sub = actions.add_parser(name, help=text)
        if name == "import":
            sub.add_argument("--format", choices=("parquet", "tau-bench"), default="parquet")
            sub.add_argument(
                "--config",
                action="append",
                help="tau-bench: the config that will train on them, and its overlays",
            )
            sub.add_argument("path", type=Path, nargs="?", help="the buffer (tau-bench: optional)")
        else:
            sub.add_argument("path", type=Path, help="the buffer")
        sub.add_argument("file", type=Path, help="the file")
    options, rest = parser.parse_known_args(arguments)
    if rest and getattr(options, "format", "") != "tau-bench":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if options.action == "stats":
        print(commands.stats(options.path))
    elif options.action == "salvage":
        print(commands.salvage_episodes(options.path, options.file))
    elif options.action == "export":
        print(commands.export(options.path, options.file))
    elif options.action == "import" and options.format == "tau-bench":
        from nlac_lightning.cli import with_config_paths
        from nlac_lightning.envs.tau2.importing import import_tau_bench

        if options.config is None:
            parser.error("--format tau-bench needs --config: prompts and tokenizer are its")
        configs = [word for name in options.config for word in ("--config", name)]
        config = with_config_paths([*configs, *rest])
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
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs, at any depth")
    parser.add_argument("--out", type=Path, default=Path("curves.png"))
    parser.add_argument(
        "--metric", action="append", help="default: success, on whatever tasks it was measured"
    )
    options = parser.parse_args(arguments)
    missing = plot_runs(options.runs, options.out, options.metric or ())
    for line in missing:
        print(f"missing: {line}")
    print(f"wrote {options.out}")


def compare(arguments: list[str]) -> None:
    """``nlac compare --config TASK --algorithms A,B --seeds 0,1``: one table and one figure."""
    from nlac_lightning.cli import with_config_paths
    from nlac_lightning.compare import compare as run_all

    parser = argparse.ArgumentParser(
        "nlac compare",
        description="Train several algorithms on one task, each with several seeds, in turn. The "
        "same command continues what was stopped. Other options are those of nlac fit.",
        usage="nlac compare --config TASK.yaml --algorithms A,B --seeds 0,1,2 [--KEY VALUE ...]",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--algorithms",
        required=True,
        type=lambda text: text.split(","),
        help="names of configs/algorithm/NAME.yaml, or files",
    )
    parser.add_argument(
        "--seeds", default=[0], type=lambda text: [int(seed) for seed in text.split(",")]
    )
    parser.add_argument("--out", type=Path, default=Path("runs/compare"))
    options, rest = parser.parse_known_args(arguments)
    results = run_all(with_config_paths(rest), options.algorithms, options.seeds, options.out)
    print((options.out / "table.txt").read_text("utf-8"))
    print(f"wrote table.txt, results.json and curves.png in {options.out}")
    sys.exit(any(result.state == "failed" for result in results))


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


def doctor(arguments: list[str]) -> None:
    """``nlac doctor [--config ...]``: this machine, and what a config will cost on it."""
    from nlac_lightning.cli import with_config_paths
    from nlac_lightning.doctor import report

    if arguments and arguments[0] in ("-h", "--help"):
        print("usage: nlac doctor [--config FILE ...] [--KEY VALUE ...]\n\n" + str(doctor.__doc__))
        return
    print(report(with_config_paths(arguments)))


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "replay": replay,
    "plot": plot,
    "compare": compare,
    "export": export,
    "roles": roles,
    "serve": serve,
    "doctor": doctor,
}
