"""Speed as ratios, each measured in one run on this machine.

    python benchmarks/speed.py [--rows a,c] [--model NAME] [--threads N] [--json FILE]

    a  one NLAC update on tau-retail-shaped batches, against the naive way with the same model
    b  rollout tokens a second, against re-prefilling every turn and against TRL's GRPOTrainer
    c  an SFT-shaped step and its memory, against TRL's SFTTrainer (loss nll)
    d  a GRPO loss step, against TRL's
    e  the losses' share of the machine's matrix-product rate
    f  the replay buffer by size
    g  growth of an update with the length of states and the size of batches

The default model is two random layers of Qwen2.5-0.5B's shape, so that the naive side of (a) ends
in ten minutes on one core. Both sides must give equal tokens or losses, or the program stops.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from speed_common import Bench, Row, make_bench
from speed_peers import policy_rows, rollout_rows, sft_rows
from speed_replay import replay_rows
from speed_update import Shape, growth_rows, share_rows, update_rows


def main() -> None:
    """Print the table, row by row as they are measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="f,a,b,c,d,e,g", help="letters with commas between them")
    parser.add_argument("--model", help="a real model by name or folder")
    parser.add_argument("--threads", type=int, help="of PyTorch; default: its own choice")
    parser.add_argument("--system", type=int, default=Shape.system, help="(a): rules and tools")
    parser.add_argument("--dialogue", type=int, default=Shape.dialogue, help="(a): dialogue")
    parser.add_argument("--sizes", default="1000,100000,1000000", help="(f): transitions")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    if options.threads:
        torch.set_num_threads(options.threads)
    shape = Shape(system=options.system, dialogue=options.dialogue)
    measures: dict[str, Callable[[Bench], list[Row]]] = {
        "a": lambda bench: update_rows(bench, shape),
        "b": rollout_rows,
        "c": sft_rows,
        "d": policy_rows,
        "e": share_rows,
        "f": lambda bench: replay_rows([int(size) for size in options.sizes.split(",")]),
        "g": growth_rows,
    }
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        bench = make_bench(options.model, Path(folder))
        for letter in options.rows.split(","):
            if letter not in measures:
                parser.error(f"there is no row '{letter}': choose from {', '.join(measures)}")
            for row in measures[letter](bench):
                print(
                    f"{row.name:<44}{row.value:>12,.2f} {row.unit:<14} {row.settings}", flush=True
                )
                rows.append(row)
    if options.json:
        options.json.write_text(json.dumps({"rows": [vars(row) for row in rows]}, indent=1))


if __name__ == "__main__":
    main()
