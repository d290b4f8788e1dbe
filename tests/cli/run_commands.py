"""Runs ``nlac`` for each command line in the JSON on stdin, each in a process of its own.

The processes are forks that find all imports done, which saves seconds for each. Results go to
stdout as JSON: exit status, stdout and stderr of each.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from typing import Any

import nlac_lightning.lightning_cli  # noqa: F401  what every command imports
from nlac_lightning import cli


def run(arguments: list[str], folder: str) -> dict[str, Any]:
    """One command in ``folder``."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if not child:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            os.chdir(folder)
            sys.argv = ["nlac", *arguments]
            cli.main()
            sys.exit(0)
        _, status = os.waitpid(child, 0)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    return {"code": os.waitstatus_to_exitcode(status), "out": texts[0], "err": texts[1]}


def main() -> None:
    jobs = json.load(sys.stdin)
    results: list[dict[str, Any]] = []
    for folder, arguments in jobs:
        results.append(run(arguments, folder))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
