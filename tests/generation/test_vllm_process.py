"""The worker's side of the pipe played by a script that dies, hangs and lies as it is asked."""

from __future__ import annotations

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
    assert not members(before), "nor does anything that it started go on"
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
    assert not members(before)
    assert worker.complete(asks(n=2)) == [{"ids": [7, 7]}]


def test_a_ctrl_c_does_not_reach_it(worker: Worker) -> None:
    assert os.getsid(pid(worker)) == pid(worker) != os.getsid(0)


def test_messages_larger_than_a_pipe_pass_both_ways(worker: Worker) -> None:
    [answer] = worker.complete(asks(n=10**6))
    assert len(answer["ids"]) == 10**6


def test_closing_ends_it_until_the_next_call(worker: Worker) -> None:
    before = pid(worker)
    worker.close()
    assert not members(before)
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
    assert not members(int(done.stdout))
