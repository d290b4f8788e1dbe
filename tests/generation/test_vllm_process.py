"""Both ends of the worker's pipe: against a script that dies, hangs and lies as it is asked, and
the worker itself with a package that stands in for vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nlac_lightning.errors import ConfigError
from nlac_lightning.generation.base import EngineError
from nlac_lightning.generation.vllm_engines import GenerationConfig
from nlac_lightning.generation.vllm_process import Worker
from nlac_lightning.interrupts import time_limit

SCRIPT = f"""#!{sys.executable}
import json, os, subprocess, sys, time
for line in sys.stdin:
    message = json.loads(line)
    answer = {{"id": message["id"], "max_tokens": 64, "completions": []}}
    for request in message.get("complete", ()):
        match request.get("do"):
            case "die":
                subprocess.Popen(["sleep", "600"])  # it holds the pipe open
                os._exit(3)
            case "hang":
                time.sleep(600)
            case "lie":
                answer["id"] -= 1
            case "garbage":
                print("INFO starting", flush=True)
        answer["completions"].append({{"ids": request["ids"]}})
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def python(tmp_path: Path) -> str:
    path = tmp_path / "python"
    path.write_text(SCRIPT)
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def worker(python: str) -> Iterator[Worker]:
    worker = Worker(GenerationConfig("vllm", python, seconds=1.5), {})
    assert worker.complete(asks()) == [{"ids": [7]}]
    yield worker
    worker.close()


def asks(do: str | None = None, n: int = 1) -> list[dict[str, Any]]:
    return [{"ids": [7] * n, "do": do}]


def pid(worker: Worker) -> int:
    assert worker._process is not None
    return worker._process.pid


def members(session: int) -> list[str]:
    """Processes of a session that are no zombies."""
    lines = subprocess.run(["ps", "-eo", "sid=,stat="], capture_output=True, text=True).stdout
    found = [line.split() for line in lines.splitlines()]
    return [stat for sid, stat in found if sid == str(session) and not stat.startswith("Z")]


def gone(session: int) -> bool:
    """Whether all its processes end now; those that were killed need a moment."""
    until = time.monotonic() + 5
    while members(session) and time.monotonic() < until:
        time.sleep(0.05)
    return not members(session)


@pytest.mark.parametrize(
    ("do", "says"),
    [
        ("die", "ended with status 3"),
        ("hang", r"no answer within 1\.5 s"),
        ("lie", "ended with status"),
        ("garbage", "ended with status"),
    ],
)
def test_a_failure_costs_its_call_and_the_next_one_starts_anew(
    worker: Worker, do: str, says: str
) -> None:
    before, began = pid(worker), time.monotonic()
    with pytest.raises(EngineError, match=says):
        worker.complete(asks(do))
    assert time.monotonic() - began < 10
    assert gone(before), "nor does anything that it started go on"
    assert worker.complete(asks(n=3)) == [{"ids": [7, 7, 7]}]
    assert pid(worker) != before


def test_a_failure_before_the_first_answer_is_a_wrong_setting(python: str) -> None:
    worker = Worker(GenerationConfig("vllm", python), {})
    with pytest.raises(ConfigError, match=r"model\.compute\.generation: vLLM: .*status 3"):
        worker.complete(asks("die"))


def test_an_interrupted_call_leaves_no_answer_to_the_next_question(worker: Worker) -> None:
    before = pid(worker)
    with pytest.raises(TimeoutError), time_limit(0.3):
        worker.complete(asks("hang"))
    assert gone(before)
    assert worker.complete(asks(n=2)) == [{"ids": [7, 7]}]


def test_a_ctrl_c_does_not_reach_it(worker: Worker) -> None:
    assert os.getsid(pid(worker)) == pid(worker) != os.getsid(0)


def test_messages_larger_than_a_pipe_pass_both_ways(worker: Worker) -> None:
    [answer] = worker.complete(asks(n=10**6))
    assert len(answer["ids"]) == 10**6


def test_closing_ends_it_until_the_next_call(worker: Worker) -> None:
    before = pid(worker)
    worker.close()
    assert gone(before)
    assert worker.complete(asks()) == [{"ids": [7]}]


def test_it_ends_with_the_process_that_started_it(python: str) -> None:
    code = (
        "import sys, os\n"
        "from nlac_lightning.generation.vllm_engines import GenerationConfig\n"
        "from nlac_lightning.generation.vllm_process import Worker\n"
        f"worker = Worker(GenerationConfig('vllm', {python!r}), {{}})\n"
        "print(worker._process.pid, flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert gone(int(done.stdout))


VLLM = {
    "__init__.py": """
import subprocess, time
from types import SimpleNamespace as N
from vllm.exceptions import VLLMClientError

print("vLLM prints to standard output")

class SamplingParams:
    def __init__(self, max_tokens, logprobs, prompt_logprobs=None):
        self.max_tokens, self.prompt_logprobs = max_tokens, prompt_logprobs

class LLM:
    def __init__(self, max_model_len):
        self.llm_engine = N(model_config=N(max_model_len=max_model_len))
        self.child = subprocess.Popen(["sleep", "600"])

    def generate(self, prompts, params, lora_request, use_tqdm):
        if [0] in [p["prompt_token_ids"] for p in prompts]:
            print("hangs", flush=True)
            time.sleep(600)
        if [1] in [p["prompt_token_ids"] for p in prompts]:
            raise VLLMClientError("token 1 is out of vocabulary")
        if [2] in [p["prompt_token_ids"] for p in prompts]:
            raise RuntimeError("EngineDeadError")
        return [self.answer(*x) for x in zip(prompts, params, lora_request)]

    def answer(self, prompt, params, lora):
        ids = prompt["prompt_token_ids"]
        new = [lora.lora_int_id] * params.max_tokens
        table = lambda ids: [{i: N(logprob=-float(i))} for i in ids]
        first = N(token_ids=new, logprobs=table(new), finish_reason="length")
        prompt_logprobs = None if params.prompt_logprobs is None else [None, *table(ids[1:])]
        return N(outputs=[first], prompt_token_ids=ids, prompt_logprobs=prompt_logprobs,
                 num_cached_tokens=None)
""",
    "exceptions.py": "class VLLMClientError(Exception): ...",
    "lora/__init__.py": "",
    "lora/request.py": """
from dataclasses import dataclass

@dataclass
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str
""",
}


@pytest.fixture
def real_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    """The worker as it is, started by this interpreter, with another vLLM."""
    for name, text in VLLM.items():
        path = tmp_path / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    worker = Worker(GenerationConfig("vllm", sys.executable, seconds=2.0), {"max_model_len": 48})
    yield worker
    worker.close()


def request(*ids: int, **sampling: int) -> dict[str, Any]:
    lora = {"lora_name": "online-3", "lora_int_id": 5, "lora_path": "/adapters/online-3"}
    return {"ids": ids, "lora": lora, "sampling": {"max_tokens": 2, "logprobs": 0, **sampling}}


def test_the_worker_imports_vllm_itself_and_keeps_its_prints_apart(real_worker: Worker) -> None:
    """Its own folder has a ``vllm.py`` too."""
    assert real_worker.max_tokens == 48
    plain = {"ids": [5, 5], "logprobs": [-5.0, -5.0], "reason": "length", "cached": 0}
    found = real_worker.complete([request(7, 8, 9), request(7, 8, 9, prompt_logprobs=0)])
    assert found == [plain, plain | {"prompt": [-8.0, -9.0]}]


def test_a_refused_request_does_not_harm_the_others(real_worker: Worker) -> None:
    before = pid(real_worker)
    found = real_worker.complete([request(7), request(1), request(9)])
    assert [a.get("reason") for a in found] == ["length", None, "length"]
    assert found[1] == {"error": "token 1 is out of vocabulary"}
    assert pid(real_worker) == before


def test_a_broken_engine_ends_the_worker_with_all_its_processes(real_worker: Worker) -> None:
    real_worker.complete([request(7)])
    before = pid(real_worker)
    assert len(members(before)) == 2
    with pytest.raises(EngineError, match="ended with status 1"):
        real_worker.complete([request(7), request(2)])
    assert gone(before)
    assert real_worker.complete([request(7)])[0]["ids"] == [5, 5]


def test_a_worker_in_the_middle_of_an_answer_ends_with_its_run(real_worker: Worker) -> None:
    """As when the process that asks was killed: nobody else would end it."""
    process = real_worker._process
    assert process is not None and process.stdin is not None
    call = {"id": 9, "complete": [request(0)]}
    os.write(process.stdin.fileno(), json.dumps(call).encode() + b"\n")
    process.stdin.close()
    assert process.wait(10) == -9
    assert gone(process.pid)
