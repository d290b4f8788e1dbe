"""The grader's own process: reads questions of equality on stdin, answers on stdout, line by line.

Run as a script, so that nothing but math-verify is loaded. The parent keeps the time: math-verify's
own limits turn a comparison that took too long into a wrong answer without a word.
"""

from __future__ import annotations

import json
import logging
import sys

from math_verify import parse, verify


def main() -> None:
    """Say that it is ready, then serve ``{"gold": TEXT, "answer": TEXT}`` until stdin ends."""
    logging.disable(logging.CRITICAL)
    answers = sys.stdout
    sys.stdout = sys.stderr  # nothing else may write among the answers
    # The first comparison loads a parser, which must not count as its time.
    half, same = (parse(text, parsing_timeout=None) for text in (r"$\frac{1}{2}$", "$0.5$"))
    ready = verify(half, same, timeout_seconds=None)
    print(json.dumps({"ready": ready}), file=answers, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        try:
            gold, answer = (parse(job[name], parsing_timeout=None) for name in ("gold", "answer"))
            equal = bool(gold) and verify(gold, answer, timeout_seconds=None)
            said = {"equal": equal, "error": None if gold else "the right answer is unreadable"}
        except Exception as error:  # whatever a model's text makes a parser do
            said = {"equal": False, "error": f"{type(error).__name__}: {error}"}
        print(json.dumps(said), file=answers, flush=True)


if __name__ == "__main__":
    main()
