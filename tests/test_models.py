from __future__ import annotations

import itertools
import json
import os
import pickle
import platform
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import regex
import torch
from filelock import FileLock
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

from nlac_lightning import models
from nlac_lightning.errors import ConfigError

IDS = torch.tensor([[5, 6, 7, 8]])


@pytest.fixture
def no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """pip finds nothing, as on a machine without network."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.delenv("NLAC_SMOLLM2_GGUF", raising=False)


@pytest.fixture
def broken(tiny_llama_path: str, tmp_path: Path) -> Path:
    """A copy of the tiny model to damage."""
    return shutil.copytree(tiny_llama_path, tmp_path / "broken")


# --- names ---------------------------------------------------------------------------------------


def test_a_model_folder_is_returned(tiny_llama_path: str) -> None:
    assert models.resolve(tiny_llama_path) == tiny_llama_path


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        models.resolve(str(tmp_path))


@pytest.mark.parametrize("name", ["gpt2", "Qwen/Qwen2.5-0.5B-Instruct", "a_b/c-d.e"])
def test_hub_ids_pass_unchanged(name: str) -> None:
    assert models.resolve(name) == name


@pytest.mark.parametrize("name", ["./nowhere", "/no/where", "a/b/c", "../up", "two words"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="neither an existing folder nor a hub id"):
        models.resolve(name)


# --- fetching ------------------------------------------------------------------------------------


def cached_folder(cache: Path) -> Path:
    return cache / f"{models.SMOLLM2}-{models.SMOLLM2_SHA256[:8]}"


def test_without_network_and_cache_the_error_names_the_way_out(
    no_index: None, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"run once with network.*NLAC_SMOLLM2_GGUF"):
        models.resolve(models.SMOLLM2, tmp_path)


def test_what_a_killed_conversion_left_is_not_taken(no_index: None, tmp_path: Path) -> None:
    aside = tmp_path / f"{cached_folder(tmp_path).name}.partial"
    (aside / "model").mkdir(parents=True)
    (aside / "model" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot download"):
        models.resolve(models.SMOLLM2, tmp_path)
    assert not aside.exists()
    assert not cached_folder(tmp_path).exists()


def test_a_truncated_gguf_is_refused_with_both_checksums(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gguf = tmp_path / "cut.gguf"
    gguf.write_bytes(b"abc")
    monkeypatch.setenv("NLAC_SMOLLM2_GGUF", str(gguf))
    with pytest.raises(ConfigError) as caught:
        models.resolve(models.SMOLLM2, tmp_path / "cache")
    assert models.SMOLLM2_SHA256 in str(caught.value)
    # SHA-256 of "abc", from FIPS 180-2
    assert "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad" in str(caught.value)
    assert not cached_folder(tmp_path / "cache").exists()


def test_a_missing_gguf_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NLAC_SMOLLM2_GGUF", str(tmp_path / "absent.gguf"))
    with pytest.raises(ConfigError, match=r"absent\.gguf"):
        models.resolve(models.SMOLLM2, tmp_path)


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("NLAC_CACHE", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"NLAC_CACHE: cannot write"):
        models.resolve(models.SMOLLM2)


def test_the_second_of_two_processes_waits_for_the_first(no_index: None, tmp_path: Path) -> None:
    folder = cached_folder(tmp_path)
    found: list[str] = []
    second = threading.Thread(
        target=lambda: found.append(models.resolve(models.SMOLLM2, tmp_path)), daemon=True
    )
    with FileLock(tmp_path / f"{folder.name}.lock"):
        second.start()
        second.join(timeout=0.5)
        assert second.is_alive()
        folder.mkdir()
    second.join(timeout=30)
    assert found == [str(folder)]  # a fetch of its own would have failed


# --- the fetched model ---------------------------------------------------------------------------


def test_weights_are_plain_float32(smollm2_path: str) -> None:
    config = json.loads((Path(smollm2_path) / "config.json").read_text())
    assert "quantization_config" not in config
    with safe_open(Path(smollm2_path) / "model.safetensors", "pt") as file:
        kinds = {file.get_slice(key).get_dtype() for key in file.keys()}  # noqa: SIM118
    assert kinds == {"F32"}


def test_the_model_knows_its_language(smollm2_path: str) -> None:
    model = models.load_model(smollm2_path, torch.float32)
    tokenizer = models.load_tokenizer(smollm2_path)
    assert not model.training
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    ids = model.generate(**prompt, max_new_tokens=1, do_sample=False)
    assert tokenizer.decode(ids[0, -1:]) == " Paris"


def test_special_tokens(smollm2_path: str) -> None:
    tokenizer = models.load_tokenizer(smollm2_path)
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert tokenizer.convert_tokens_to_ids(names) == [0, 1, 2]
    assert tokenizer("<|im_start|>user").input_ids[0] == 1
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 2
    assert tokenizer("hi").input_ids == tokenizer("hi", add_special_tokens=False).input_ids
    assert tokenizer.model_max_length == 8192
    assert len(tokenizer) == 49152


def test_chat_template(smollm2_path: str) -> None:
    tokenizer = models.load_tokenizer(smollm2_path)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi."}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    turns = ["<|im_start|>system\nBe brief.", "<|im_start|>user\nHi.", "<|im_start|>assistant\n"]
    assert text == "<|im_end|>\n".join(turns)


@pytest.mark.parametrize(
    "text",
    [
        "Hello, world! It's Ann's.",
        "order #A-1042 costs $12.50",
        "two  5 spaces\n\n12 lines\t\t3",
        "Zoë paid 3€, 二つ 🙂",
        "  indented\n    more   \n",
        "x²+1¾",
    ],
)
def test_tokens_equal_a_plain_byte_pair_encoder(smollm2_path: str, text: str) -> None:
    ids = models.load_tokenizer(smollm2_path)(text).input_ids
    assert ids == byte_pair_encode(text, Path(smollm2_path) / "tokenizer.json")
    assert models.load_tokenizer(smollm2_path).decode(ids) == text


def byte_pair_encode(text: str, tokenizer_file: Path) -> list[int]:
    """Reference: digits stand alone, GPT-2's pattern splits the rest, then the best merge first."""
    data = json.loads(tokenizer_file.read_text())["model"]
    vocab = data["vocab"]
    ranks = {tuple(pair): rank for rank, pair in enumerate(data["merges"])}
    pattern = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    letters = bytes_to_unicode()
    ids = []
    for part in regex.findall(r"\p{N}|\P{N}+", text):
        for word in regex.findall(pattern, part):
            symbols = [letters[byte] for byte in word.encode()]
            while len(symbols) > 1:
                rank, i = min(
                    (ranks.get(pair, len(ranks)), i)
                    for i, pair in enumerate(itertools.pairwise(symbols))
                )
                if rank == len(ranks):
                    break
                symbols[i : i + 2] = ["".join(symbols[i : i + 2])]
            ids += [vocab[symbol] for symbol in symbols]
    return ids


# --- loading -------------------------------------------------------------------------------------


def test_load_model_gives_the_saved_weights_in_the_asked_dtype(tiny_llama_path: str) -> None:
    saved = load_file(Path(tiny_llama_path) / "model.safetensors")
    loaded = models.load_model(tiny_llama_path, torch.bfloat16).state_dict()
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[key], saved[key].bfloat16()) for key in saved)


def test_nf4_quantises_all_but_embeddings_and_head(tiny_llama_path: str) -> None:
    model = models.load_model(tiny_llama_path, torch.float32, "nf4")
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    layers = [name for name in kinds if name.endswith("_proj")]
    assert len(layers) == 14
    assert {kinds[name] for name in layers} == {"Linear4bit"}
    assert kinds["lm_head"] == "Linear"
    # 4-bit weights change the logits, a little
    plain = LlamaForCausalLM.from_pretrained(tiny_llama_path)
    with torch.no_grad():
        exact, coarse = plain(IDS).logits.flatten(), model(IDS).logits.flatten()
    assert not torch.equal(exact, coarse)
    assert torch.corrcoef(torch.stack([exact, coarse]))[0, 1] > 0.95
    mask = torch.ones_like(IDS)
    out = model.generate(IDS, attention_mask=mask, max_new_tokens=1)
    assert out.shape == (1, 5)


@pytest.mark.parametrize("kept", [0, 100, 100_000])
def test_truncated_weights(broken: Path, kept: int) -> None:
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept])
    with pytest.raises(ConfigError, match="incomplete or damaged files in"):
        models.load_model(str(broken), torch.float32)


def test_missing_weights_are_never_made_up(broken: Path) -> None:
    weights = load_file(broken / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks the weights of model\.layers\.1\.mlp\.up_proj"):
        models.load_model(str(broken), torch.float32)


def test_pickled_weights_are_not_opened(broken: Path, tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "exploded"),)

    (broken / "model.safetensors").unlink()
    (broken / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ConfigError, match="cannot load"):
        models.load_model(str(broken), torch.float32)
    assert not (tmp_path / "exploded").exists()


def test_code_of_a_repository_runs_only_if_trusted(broken: Path, tmp_path: Path) -> None:
    config = json.loads((broken / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    (broken / "config.json").write_text(json.dumps(config))
    (broken / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(ConfigError, match=r"set model\.backbone\.trust_remote_code to true"):
        models.load_model(str(broken), torch.float32)
    assert not (tmp_path / "ran").exists()


def test_damaged_tokenizer(broken: Path) -> None:
    (broken / "tokenizer.json").write_text('{"version": "1.0", "model"')
    with pytest.raises(ConfigError, match="cannot load"):
        models.load_tokenizer(str(broken))


def test_offline_hub_model_gives_one_error_with_the_fix(tmp_path: Path) -> None:
    # a process of its own: the hub's client reads these settings when it is imported
    code = "import torch, nlac_lightning.models as m; m.load_model('gpt2', torch.float32)"
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1
    assert "ConfigError: model.backbone.name: cannot load 'gpt2'" in last
    assert "run once with network, or set model.backbone.name to a local folder" in last


# --- dtype ---------------------------------------------------------------------------------------


@pytest.mark.skipif(
    platform.machine() != "x86_64" or not Path("/proc/cpuinfo").exists(),
    reason="compares with the flags that Linux reports for x86",
)
def test_dtype_on_cpu_follows_the_processor() -> None:
    flags = set(Path("/proc/cpuinfo").read_text().split())
    expected = torch.bfloat16 if flags & {"avx512_bf16", "amx_tile"} else torch.float32
    dtype, reason = models.pick_dtype("cpu")
    assert dtype == expected
    assert str(expected).removeprefix("torch.") in reason


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_dtype_of_an_absent_gpu() -> None:
    with pytest.raises(ConfigError, match="'cuda:0' was not found"):
        models.pick_dtype("cuda:0")
