"""``nlac test`` with ReAct: local, behind a real HTTP server, retried, and with the server gone."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nlac_lightning.backbone import Backbone, BackboneConfig
from nlac_lightning.endpoint.serve import ChatServer
from nlac_lightning.generation.in_process import InProcessGenerator
from nlac_lightning.roles.codec import make_codec

ENDPOINT = "--model.init_args.endpoint"


@pytest.fixture(scope="module")
def address(tiny_llama_path: str) -> Iterator[str]:
    """A tiny model behind HTTP."""
    backbone = Backbone(BackboneConfig(tiny_llama_path, lora_r=1, dtype="float32"))
    codec = make_codec("auto", backbone.tokenizer)
    server = ChatServer(InProcessGenerator(backbone), codec, "tiny").listen("127.0.0.1", 0)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    server.shutdown()
    server.server_close()


def result(folder: Path, name: str) -> dict[str, Any]:
    (path,) = folder.glob(f"run/logs/version_*/evaluation/{name}.json")
    return json.loads(path.read_text())


def test_the_baseline_from_the_shell(
    config: str, address: str, commands: Any, tmp_path: Path
) -> None:
    folders = [tmp_path / name for name in ("local", "first", "again", "down", "fit", "key")]
    for folder in folders:
        folder.mkdir()
    base = ["--config", config, "--config", "algorithm/react.yaml"]
    remote = [
        *base,
        *(f"{ENDPOINT}.base_url", address),
        *(f"{ENDPOINT}.cache", str(tmp_path / "answers.sqlite")),
        *("--model.init_args.evaluation.retries", "1"),
    ]
    down = [
        *base,
        *(f"{ENDPOINT}.base_url", "http://127.0.0.1:9/v1", f"{ENDPOINT}.retries", "0"),
    ]
    runs = [["test", *base], ["test", *remote], ["test", *remote], ["test", *down], ["fit", *base]]
    runs.append(["test", *base, f"{ENDPOINT}.api_key_env", "NLAC_NO_SUCH_KEY"])
    local, first, again, gone, fit, key = commands(list(zip(folders, runs, strict=True)))

    for done in (local, first, again, gone):
        assert done.code == 0, done.err
    assert len(result(folders[0], "react")["episodes"]) == 2
    assert "trained" not in local.out and "give --ckpt_path" not in local.out

    assert " requests" in first.out and " requests" not in again.out and " cached" in again.out
    for name in ("react", "react_retry1"):
        assert result(folders[1], name) == result(folders[2], name), "free and identical"
    retried = result(folders[1], "react_retry1")["episodes"]
    assert len(retried) == 2
    assert any("Lessons from earlier" in e["opening"][0]["content"] for e in retried)

    lost = result(folders[3], "react")["episodes"]
    assert [e["reason"] for e in lost] == ["policy_failed"] * 2
    assert all(len(e["steps"]) == 1 and not e["success"] for e in lost)

    fit.refusal("ReAct trains nothing", "nlac test")
    key.refusal("NLAC_NO_SUCH_KEY")
