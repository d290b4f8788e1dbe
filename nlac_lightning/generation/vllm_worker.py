"""A vLLM engine behind a pipe: run by the Python of vLLM's own environment, with nothing of this
package installed there.

Reads JSON lines and answers each with one that has its ``id``. What vLLM prints goes to standard
error. When the pipe closes, so does this process, in the middle of a text as well.

    {"id", "start": settings}        ->  {"id", "max_tokens"}
    {"id", "complete": [request]}    ->  {"id", "completions": [answer]}
    {"id", "sleep": true or false}   ->  {"id"}

Requests and answers are those of :mod:`vllm_engines`.
"""

import json
import os
import queue
import signal
import sys
import threading
from typing import Any


def main() -> None:
    """Serve until the pipe closes."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever prints to standard output from here on
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if path != here]  # the vllm.py here is not vLLM
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    open_calls: list[None] = []
    threading.Thread(target=_read, args=(lines, open_calls), daemon=True).start()
    engine: Any = None
    while line := lines.get():
        message = json.loads(line)
        answer: dict[str, Any] = {"id": message["id"]}
        if "start" in message:
            from vllm import LLM

            engine = LLM(**message["start"])
            answer["max_tokens"] = engine.llm_engine.model_config.max_model_len
        elif "sleep" in message:
            engine.sleep(level=1) if message["sleep"] else engine.wake_up()
        else:
            answer["completions"] = complete(engine, message["complete"])
        open_calls.pop()
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _read(lines: "queue.SimpleQueue[str]", open_calls: list[None]) -> None:
    """Pass on what is asked; nobody waits for an answer once the pipe is closed."""
    rest = b""
    while piece := os.read(0, 2**20):  # a file object's lock would be held at this process's end
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            open_calls.append(None)
            lines.put(line.decode())
    if open_calls and os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)  # vLLM's own processes as well
    lines.put("")


def complete(engine: Any, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Answers in their order; those that vLLM refuses do not harm the others."""
    try:
        return generate(engine, requests)
    except _refusals() as error:
        if len(requests) == 1:
            return [{"error": str(error)}]
        return [answer for request in requests for answer in complete(engine, [request])]


def _refusals() -> tuple[type[BaseException], ...]:
    """What vLLM raises for a request that it cannot take; anything else ends this process."""
    try:
        from vllm.exceptions import VLLMClientError
    except ImportError:  # an older one
        return (ValueError,)
    return (ValueError, VLLMClientError)


def generate(engine: Any, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One call of vLLM."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    outputs = engine.generate(
        [{"prompt_token_ids": request["ids"]} for request in requests],
        [SamplingParams(**request["sampling"]) for request in requests],
        lora_request=[LoRARequest(**request["lora"]) for request in requests],
        use_tqdm=False,
    )
    return [completion(output) for output in outputs]


def completion(output: Any) -> dict[str, Any]:
    """Ids, the log-probability of each (and of the prompt's, if asked for), how many of the
    prompt's tokens were cached, and why it ended."""
    first = output.outputs[0]
    answer = {
        "ids": list(first.token_ids),
        "logprobs": chosen(first.token_ids, first.logprobs),
        "reason": first.finish_reason,
        "cached": output.num_cached_tokens or 0,
    }
    if output.prompt_logprobs:  # the first token has none
        answer["prompt"] = chosen(output.prompt_token_ids[1:], output.prompt_logprobs[1:])
    return answer


def chosen(ids: Any, logprobs: Any) -> list[float]:
    """The log-probability of each id, out of vLLM's table for its position."""
    return [at[token].logprob for token, at in zip(ids, logprobs, strict=True)]


if __name__ == "__main__":
    main()
