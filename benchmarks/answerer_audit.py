"""Does the answerer of 20 Questions agree with itself? Asked twice, and asked the opposite.

    python benchmarks/answerer_audit.py --config configs/twenty_questions_things.yaml \\
        [--pairs 200] [--seed 0] [--json FILE] [--KEY VALUE ...]

Pairs of an object of the config and a question of the built-in table are drawn by seed. A cache is
taken off the answerer first: it would answer the same in any case. Other options are those of
`nlac fit`. The built-in table takes a second; a language model three answers for each pair.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np

from nlac_lightning.cli import with_config_paths
from nlac_lightning.envs.twenty_questions import Answerer, CachedAnswerer, TwentyQuestionsEnv
from nlac_lightning.envs.twenty_questions.answerer import Audit, NoAnswer, audit
from nlac_lightning.envs.twenty_questions.table import load_table
from nlac_lightning.lightning_cli import NLACCommandLine

LABELS = {
    "repeated": "same answer when asked again",
    "negated": "opposite answer to the opposite",
    "clear": "answered yes or no",
}


def run(env: TwentyQuestionsEnv, pairs: int, seed: int) -> Audit:
    """Audit the environment's answerer on ``pairs`` drawn pairs."""
    answerer: Answerer = env.answerer
    while isinstance(answerer, CachedAnswerer):
        answerer = answerer.answerer
    rng = np.random.default_rng(seed)
    questions = [attribute.question for attribute in load_table().attributes]
    drawn = [rng.choice(names, pairs).tolist() for names in (env.objects, questions)]
    return audit(answerer, zip(*drawn, strict=True))


def main() -> None:
    """Print the table; write the rows with ``--json``."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--pairs", type=int, default=200, help="objects and questions drawn")
    parser.add_argument("--seed", type=int, default=0, help="which pairs")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options, rest = parser.parse_known_args()
    env = NLACCommandLine.run_from(with_config_paths(rest), run=False).datamodule.env
    if not isinstance(env, TwentyQuestionsEnv):
        sys.exit(f"{env.name} is not 20 Questions: give --config of a game")
    try:
        found = asdict(run(env, options.pairs, options.seed))
    except NoAnswer as error:
        sys.exit(f"the answerer gave no answer: {error}")
    settings = {"env": env.name, "pairs": found.pop("pairs"), "seed": options.seed}
    rows = [
        {"name": name, "value": value, "unit": "share", "settings": settings}
        for name, value in found.items()
    ]
    print(f"{env.name}: {settings['pairs']} objects and questions")
    for row in rows:
        print(f"{LABELS[row['name']]:32}  {row['value']:.3f}")
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
