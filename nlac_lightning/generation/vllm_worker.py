"""A vLLM engine behind a pipe: run by the Python of vLLM's own environment, with nothing of this
package installed there.

Reads a JSON line, answers with a JSON line; the first line is the engine's settings. What vLLM
prints goes to standard error.

    {"complete": [{"ids", "lora", "sampling"}, ...]}  ->  {"completions": [{"ids", "logprobs",
                                                           "reason"}, ...]}
"""

import json
import os
import sys
from typing import IO, Any


def main() -> None:
    """Serve until the pipe closes."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever prints to standard output from here on
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    engine = LLM(**json.loads(sys.stdin.readline()))
    answer(answers, {"ready": True})
    for line in sys.stdin:
        message = json.loads(line)
        if "sleep" in message:
            engine.sleep(level=1) if message["sleep"] else engine.wake_up()
            answer(answers, {"sleep": message["sleep"]})
            continue
        requests = message["complete"]
        outputs = engine.generate(
            [{"prompt_token_ids": request["ids"]} for request in requests],
            [SamplingParams(**request["sampling"]) for request in requests],
            lora_request=[
                LoRARequest(**request["lora"]) if request["lora"] else None for request in requests
            ],
            use_tqdm=False,
        )
        answer(answers, {"completions": [completion(output.outputs[0]) for output in outputs]})


def completion(output: Any) -> dict[str, Any]:
    """Ids, the log-probability of each, and why it ended."""
    ids = list(output.token_ids)
    logprobs = [at[token].logprob for at, token in zip(output.logprobs, ids, strict=True)]
    return {"ids": ids, "logprobs": logprobs, "reason": output.finish_reason}


def answer(pipe: IO[str], message: dict[str, Any]) -> None:
    """One line."""
    pipe.write(json.dumps(message) + "\n")
    pipe.flush()


if __name__ == "__main__":
    main()
