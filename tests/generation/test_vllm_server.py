"""A server with vLLM's paths, whose answers PEFT computes; it starts anew and fails as planned."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nlac_lightning.backbone import Backbone, BackboneConfig
from nlac_lightning.errors import ConfigError
from nlac_lightning.generation import vllm
from nlac_lightning.generation.base import ADAPTERS, TOO_LONG, EngineError, Request, Sampling
from nlac_lightning.generation.in_process import InProcessGenerator
from nlac_lightning.generation.vllm import VLLMGenerator
from nlac_lightning.generation.vllm_engines import GenerationConfig

REQUEST = Request((11, 12, 13, 14, 15), Sampling(max_new_tokens=3))


class FakeServer:
    """Knows adapters by name until it starts anew; ``plan`` says how requests fail."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.known, self.plan = engine, dict[str, str](), list[str]()
        self.loads: list[str] = []
        lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.reply(200, {"data": [{"id": "base", "max_model_len": 48}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                match outer.plan.pop(0) if outer.plan else "":
                    case "500":
                        return self.reply(500, {"error": "EngineDeadError"})
                    case "400":
                        return self.reply(400, {"error": "no such token"})
                    case "html":
                        return self.reply(200, "<html>502 Bad Gateway</html>")
                    case "drop":
                        return self.close_connection()
                    case "hang":
                        time.sleep(5)
                with lock:
                    self.reply(*getattr(outer, self.path.rpartition("/")[2])(body))

            def close_connection(self) -> None:  # type: ignore[override]
                self.connection.close()

            def reply(self, status: int, body: Any) -> None:
                data = (body if isinstance(body, str) else json.dumps(body)).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: Any) -> None:
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def load_lora_adapter(self, body: dict[str, Any]) -> tuple[int, Any]:
        name = body["lora_name"]
        self.loads.append(name)
        if name in self.known:
            return 400, {"error": f"The lora adapter '{name}' has already been loaded."}
        self.known[name] = body["lora_path"]
        return 200, "Success"

    def unload_lora_adapter(self, body: dict[str, Any]) -> tuple[int, Any]:
        return (200, "Success") if self.known.pop(body["lora_name"], None) else (404, "unknown")

    def completions(self, body: dict[str, Any]) -> tuple[int, Any]:
        if body["model"] not in self.known:
            return 404, {"error": f"The model `{body['model']}` does not exist."}
        lora = {"lora_path": self.known[body["model"]]}
        [answer] = self.engine.complete([{"ids": body["prompt"], "lora": lora, "sampling": body}])
        choice = {
            "token_ids": answer["ids"],
            "logprobs": {"token_logprobs": answer["logprobs"]},
            "finish_reason": answer["reason"],
        }
        if "prompt" in answer:
            pairs = zip(body["prompt"][1:], answer["prompt"], strict=True)
            choice["prompt_logprobs"] = [None, *({str(i): {"logprob": p}} for i, p in pairs)]
        return 200, {"choices": [choice], "usage": {"prompt_tokens_details": None}}


@pytest.fixture
def server(tiny_llama_path: str, peft_engine: Any) -> Iterator[FakeServer]:
    fake = FakeServer(peft_engine(tiny_llama_path))
    threading.Thread(target=fake.server.serve_forever, args=(0.02,), daemon=True).start()
    yield fake
    fake.server.shutdown()
    fake.server.server_close()


@pytest.fixture
def backbone(tiny_llama_path: str) -> Backbone:
    backbone = Backbone(BackboneConfig(tiny_llama_path, lora_r=4, dtype="float32"))
    shake(backbone)
    return backbone


def shake(backbone: Backbone) -> None:
    for adapter in ("online", "target"):
        for parameter in backbone.adapter_parameters(adapter).values():
            nn.init.normal_(parameter, std=0.4)
        backbone.versions[adapter] += 1


def on(server: FakeServer, backbone: Backbone, seconds: float = 60.0) -> VLLMGenerator:
    return VLLMGenerator(
        backbone, GenerationConfig("vllm_server", server=server.url, seconds=seconds)
    )


def test_it_answers_like_the_model_itself_and_old_versions_leave_it(
    server: FakeServer, backbone: Backbone
) -> None:
    torch.manual_seed(0)
    own, generator = InProcessGenerator(backbone), on(server, backbone)
    for _ in range(2):
        asked = [Request(REQUEST.ids, REQUEST.sampling, adapter) for adapter in ADAPTERS]
        for ours, theirs in zip(own.generate(asked), generator.generate(asked), strict=True):
            assert (theirs.ids, theirs.version) == (ours.ids, ours.version)
            assert theirs.logprobs == pytest.approx(ours.logprobs, abs=1e-4)
        assert len(server.known) == 3 and all(Path(p).exists() for p in server.known.values())
        shake(backbone)
    assert len(server.loads) == len(set(server.loads)) == 5
    [long] = generator.generate([Request((7,) * 48, REQUEST.sampling)])
    assert long.finish_reason == TOO_LONG


def test_another_run_s_adapters_are_never_taken_for_ours(
    server: FakeServer, backbone: Backbone
) -> None:
    """A resumed run has versions that the server has seen before, with other weights."""
    on(server, backbone).generate([REQUEST])
    shake(backbone)
    backbone.versions["online"] -= 1
    [theirs] = on(server, backbone).generate([REQUEST])
    assert theirs.ids == InProcessGenerator(backbone).generate([REQUEST])[0].ids


@pytest.mark.parametrize("fault", ["500", "html", "drop", "hang", "anew"])
def test_a_failing_server_costs_one_call(
    server: FakeServer, backbone: Backbone, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    generator = on(server, backbone, seconds=1.0)
    before = generator.generate([REQUEST])

    def fail() -> None:
        if fault == "anew":
            server.known.clear()
        else:
            server.plan.append(fault)

    fail()
    with pytest.raises(EngineError, match="the vLLM server http://127"):
        generator.generate([Request(REQUEST.ids, REQUEST.sampling, once=True)])
    assert generator.generate([REQUEST]) == before
    fail()
    monkeypatch.setattr(vllm, "PAUSES", (0.01,))
    assert generator.generate([REQUEST]) == before, "what is no rollout is asked again"
    server.plan += ["500"] * 9
    with pytest.raises(EngineError, match="answered 500"):
        generator.generate([REQUEST])


def test_a_refused_request_does_not_harm_the_others(server: FakeServer, backbone: Backbone) -> None:
    generator = on(server, backbone)
    generator.generate([REQUEST])
    server.plan.append("400")
    once = Request(REQUEST.ids, REQUEST.sampling, once=True)
    outs = generator.generate([once, once, once])
    assert sorted(out.finish_reason for out in outs) == ["failed", "length", "length"]
    [text] = [out.text for out in outs if out.finish_reason == "failed"]
    assert "no such token" in text


@pytest.mark.parametrize(
    ("fault", "says"), [("500", "answered 500"), ("html", "not vLLM's"), ("400", "answered 400")]
)
def test_a_failure_before_the_first_answer_is_a_wrong_setting(
    server: FakeServer, backbone: Backbone, fault: str, says: str
) -> None:
    server.plan += ["", fault]  # after the adapter is loaded
    with pytest.raises(ConfigError, match=says) as raised:
        on(server, backbone).generate([REQUEST])
    assert "--enable-lora" in str(raised.value)


def test_a_server_that_is_down_is_a_wrong_setting(backbone: Backbone) -> None:
    config = GenerationConfig("vllm_server", server="http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"model\.compute\.generation\.server"):
        VLLMGenerator(backbone, config).generate([REQUEST])
