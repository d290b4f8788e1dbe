"""The grader's own process: reads questions of equality on stdin, answers on stdout, line by line.

Run as a script, so that nothing but math-verify is loaded. Its own time limit relies on signals,
which work in a main thread alone; this process has one thread, and its parent a harder limit.
"""

from __future__ import annotations

import json
import logging
import sys

from math_verify import parse, verify


def main() -> None:
    """Serve ``{"gold": TEXT, "answer": TEXT, "seconds": N}`` until stdin ends."""
    logging.disable(logging.CRITICAL)
    answers = sys.stdout
    sys.stdout = sys.stderr  # nothing else may write among the answers
    for line in sys.stdin:
        job = json.loads(line)
        try:
            gold, answer = (
                parse(job[name], parsing_timeout=job["seconds"]) for name in ("gold", "answer")
            )
            equal = bool(gold) and verify(gold, answer, timeout_seconds=job["seconds"])
            said = {"equal": equal, "error": None if gold else "the right answer is unreadable"}
        except Exception as error:  # whatever a model's text makes a parser do
            said = {"equal": False, "error": f"{type(error).__name__}: {error}"}
        print(json.dumps(said), file=answers, flush=True)


if __name__ == "__main__":
    main()
