"""One base, two adapters, chosen by argument: against weights merged by hand."""

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.pytorch_utils import Conv1D

from nlac_lightning import models
from nlac_lightning.backbone import Backbone, BackboneConfig
from nlac_lightning.errors import ConfigError
from nlac_lightning.prefix_tree import pack_tree

SEQUENCES = [[5, 6, 7, 8], [5, 6, 9], [5, 6, 7, 8], [3, 4]]
SMALL = {"vocab_size": 49152, "bos_token_id": 1, "eos_token_id": 2}


@pytest.fixture(scope="module")
def paths(tiny_llama_path: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A random model of each kind: untied head, biases and tied head, learned positions."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    qwen2 = Qwen2Config(
        **SMALL, **sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True
    )
    gpt2 = GPT2Config(**SMALL, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    found = {"llama": tiny_llama_path}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made: dict[str, PreTrainedModel] = {
            "qwen2": Qwen2ForCausalLM(qwen2),
            "gpt2": GPT2LMHeadModel(gpt2),
        }
    for kind, model in made.items():
        folder: Path = tmp_path_factory.mktemp(kind)
        model.save_pretrained(folder)
        models.load_tokenizer(tiny_llama_path).save_pretrained(folder)
        found[kind] = str(folder)
    return found


def make(path: str, **options: object) -> Backbone:
    """A backbone whose adapters are neither zero nor equal."""
    backbone = Backbone(BackboneConfig(path, lora_r=4, dtype="float32", **options))
    torch.manual_seed(1)
    for adapter in ("online", "target"):
        for parameter in backbone.adapter_parameters(adapter).values():
            nn.init.normal_(parameter, std=0.2)
    return backbone.eval()


def merged(backbone: Backbone, adapter: str) -> PreTrainedModel:
    """The plain model with W + scale * B A computed here."""
    config = backbone.config
    model = AutoModelForCausalLM.from_pretrained(config.name, dtype=torch.float32).eval()
    found = backbone.adapter_parameters(adapter)
    for name, down in found.items():
        if "lora_A" not in name:
            continue
        up = found[name.replace("lora_A", "lora_B")]
        path = name.removeprefix("base_model.model.").partition(".lora_A")[0]
        update = (up @ down).detach() * config.lora_alpha / config.lora_r
        layer = model.get_submodule(path)
        layer.weight.data += update.T if isinstance(layer, Conv1D) else update
    return model


@torch.no_grad()
def tree_logits(backbone: Backbone, adapter: str) -> list[Tensor]:
    tree = pack_tree(SEQUENCES)
    with backbone.use(adapter):
        hidden = backbone.forward_tree(tree)
    return [
        backbone.logits(hidden[tree.rows(n, 0, len(sequence))])
        for n, sequence in enumerate(SEQUENCES)
    ]


@torch.no_grad()
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
def test_each_adapter_equals_the_model_with_merged_weights(
    paths: dict[str, str], kind: str
) -> None:
    backbone = make(paths[kind])
    plain = AutoModelForCausalLM.from_pretrained(paths[kind], dtype=torch.float32).eval()
    truth = {"online": merged(backbone, "online"), "target": merged(backbone, "target")}
    for adapter, model in {**truth, "base": plain}.items():
        for sequence, logits in zip(SEQUENCES, tree_logits(backbone, adapter), strict=True):
            expected = model(torch.tensor([sequence])).logits[0]
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    online, target, base = (tree_logits(backbone, a)[0] for a in ("online", "target", "base"))
    assert min((online - base).abs().max(), (target - base).abs().max()) > 1e-2
    assert (online - target).abs().max() > 1e-2


def test_use_gives_back_what_was_active_also_after_an_error(tiny_llama_path: str) -> None:
    backbone = make(tiny_llama_path)
    online = tree_logits(backbone, "online")[0]
    with backbone.use("online"):
        with pytest.raises(RuntimeError), backbone.use("base"), backbone.use("target"):
            raise RuntimeError
        tree = pack_tree(SEQUENCES)
        with torch.no_grad():
            hidden = backbone.forward_tree(tree)
            again = backbone.logits(hidden[tree.rows(0, 0, 4)])
    torch.testing.assert_close(again, online)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
def test_the_fingerprint_tells_bases_of_one_shape_apart(
    paths: dict[str, str], tmp_path: Path, kind: str
) -> None:
    other = shutil.copytree(paths[kind], tmp_path / kind)
    model = AutoModelForCausalLM.from_pretrained(paths[kind])
    nn.init.normal_(model.get_input_embeddings().weight)
    model.save_pretrained(other)
    found = [
        Backbone(BackboneConfig(str(path), dtype=dtype)).base_fingerprint
        for path, dtype in ((paths[kind], "float32"), (paths[kind], "bfloat16"), (other, "float32"))
    ]
    assert found[0] == found[1] != found[2]


def test_a_fresh_backbone_trains_only_online_and_all_adapters_agree(tiny_llama_path: str) -> None:
    backbone = Backbone(BackboneConfig(tiny_llama_path, lora_r=4, dtype="float32")).eval()
    trained = {n for n, p in backbone.model.named_parameters() if p.requires_grad}
    assert trained and all(".online." in name for name in trained)
    online, target = (backbone.adapter_parameters(a) for a in ("online", "target"))
    assert len(online) == len(trained) and online.keys() == target.keys()
    for name, parameter in online.items():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, target[name])
    for one, base in zip(
        tree_logits(backbone, "online"), tree_logits(backbone, "base"), strict=True
    ):
        torch.testing.assert_close(one, base)


def test_adapters_are_float32_on_a_bfloat16_base(tiny_llama_path: str) -> None:
    backbone = Backbone(BackboneConfig(tiny_llama_path, lora_r=4, dtype="bfloat16"))
    assert backbone.compute_dtype == torch.bfloat16
    for adapter in ("online", "target"):
        dtypes = {p.dtype for p in backbone.adapter_parameters(adapter).values()}
        assert dtypes == {torch.float32}


def test_target_moves_by_tau_in_place_and_gets_a_new_version(tiny_llama_path: str) -> None:
    backbone = make(tiny_llama_path)
    online, target = (backbone.adapter_parameters(a) for a in ("online", "target"))
    before = {name: p.detach().clone() for name, p in target.items()}
    version = backbone.versions["target"]
    backbone.copy_online_to_target(0.25)
    for name, parameter in backbone.adapter_parameters("target").items():
        assert parameter is target[name] and not parameter.requires_grad
        expected = 0.25 * online[name].double() + 0.75 * before[name].double()
        torch.testing.assert_close(parameter.double(), expected, atol=1e-6, rtol=1e-6)
    assert backbone.versions["target"] == version + 1


def test_checkpointing_recomputes_with_the_adapter_of_the_forward_pass(
    tiny_llama_path: str,
) -> None:
    gradients = []
    for checkpointing in (False, True):
        backbone = make(tiny_llama_path, gradient_checkpointing=checkpointing).train()
        tree_logits(backbone, "target")
        with backbone.use("online"):
            backbone.forward_tree(pack_tree(SEQUENCES)).square().sum().backward()
        gradients.append([p.grad for p in backbone.adapter_parameters("online").values()])
        assert all(p.grad is None for p in backbone.adapter_parameters("target").values())
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, recomputed, atol=1e-5, rtol=1e-4)


def test_wrong_settings_name_the_field(tiny_llama_path: str) -> None:
    with pytest.raises(ConfigError, match="target_modules"):
        Backbone(BackboneConfig(tiny_llama_path, target_modules=["no_such_layer"]))
    for options in ({"lora_r": 0}, {"lora_alpha": -1.0}, {"quantization": "int3"}):
        with pytest.raises(ConfigError, match=f"model.backbone.{next(iter(options))}"):
            BackboneConfig(tiny_llama_path, **options)
    with pytest.raises(ConfigError, match="adapter"), make(tiny_llama_path).use("other"):
        pass
