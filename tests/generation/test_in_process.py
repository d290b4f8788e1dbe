"""The packed, cached, batched generator against transformers' own generate and plain forwards."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from nlac_lightning.backbone import Backbone, BackboneConfig
from nlac_lightning.generation.base import ADAPTERS, Completion, Request, Sampling
from nlac_lightning.generation.in_process import InProcessGenerator
from nlac_lightning.prefix_tree import PackedTree

GREEDY = Sampling(max_new_tokens=6)
RANDOM = Sampling(temperature=0.8, max_new_tokens=6)
COMMON = (11, 12, 13, 14, 15)
PROMPTS = [
    (*COMMON, 20, 21, 22),
    (*COMMON, 20, 21),
    COMMON,
    (*COMMON, 30),
    (*COMMON, 20, 21, 22),
    (40,),
    (40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51),
]


def shake(backbone: Backbone, seed: int) -> None:
    """New adapter weights, as a training step would make: the version counts it."""
    torch.manual_seed(seed)
    for adapter in ("online", "target"):
        for parameter in backbone.adapter_parameters(adapter).values():
            nn.init.normal_(parameter, std=0.4)
        backbone.versions[adapter] += 1


@pytest.fixture(scope="module")
def backbone(tiny_llama_path: str) -> Backbone:
    backbone = Backbone(BackboneConfig(tiny_llama_path, lora_r=4, dtype="float32"))
    shake(backbone, 1)
    return backbone.eval()


@torch.no_grad()
def reference(backbone: Backbone, request: Request) -> tuple[int, ...]:
    """Greedy ids by transformers, one prompt at a time."""
    prompt = torch.tensor([request.ids])
    with backbone.use(request.adapter):
        out = backbone.model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=request.sampling.max_new_tokens,
            eos_token_id=list(request.stop_ids) or None,
            pad_token_id=0,
        )
    return tuple(out[0, len(request.ids) :].tolist())


@torch.no_grad()
def log_p(backbone: Backbone, request: Request, ids: Sequence[int]) -> Tensor:
    """Log-probabilities before each of ``ids`` by one plain forward pass."""
    with backbone.use(request.adapter):
        logits = backbone.model(torch.tensor([[*request.ids, *ids]])).logits[0]
    logits = logits / (request.sampling.temperature or 1.0)
    return logits.log_softmax(-1)[len(request.ids) - 1 : -1]


def check_logprobs(backbone: Backbone, request: Request, out: Completion) -> None:
    expected = log_p(backbone, request, out.ids).gather(1, torch.tensor(out.ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(out.logprobs), expected, atol=1e-4, rtol=1e-4)


def requests(prompts: Iterable[tuple[int, ...]] = PROMPTS, **fields: object) -> list[Request]:
    return [replace(Request(ids, GREEDY), **fields) for ids in prompts]


@pytest.mark.parametrize(
    ("max_batch", "pack_tokens", "cache_tokens"),
    [(64, 1024, 1000), (64, 1024, 0), (3, 1024, 1000), (64, 8, 1000), (1, 1, 5), (2, 9, 0)],
)
def test_greedy_equals_transformers_generate(
    backbone: Backbone, max_batch: int, pack_tokens: int, cache_tokens: int
) -> None:
    generator = InProcessGenerator(backbone, max_batch, pack_tokens, cache_tokens)
    asked = requests()
    for _ in range(2):  # the second call meets a warm cache
        for request, out in zip(asked, generator.generate(asked), strict=True):
            assert out.ids == reference(backbone, request)
            assert out.finish_reason == "length" and not out.complete
            check_logprobs(backbone, request, out)
    assert all(cache.tokens <= cache_tokens for cache in generator._caches.values())


def test_no_requests_no_completions(backbone: Backbone) -> None:
    assert InProcessGenerator(backbone).generate([]) == []


def test_all_adapters_answer_in_one_call_and_differ(backbone: Backbone) -> None:
    asked = [replace(r, adapter=a) for r in requests() for a in ADAPTERS]
    outs = InProcessGenerator(backbone).generate(asked)
    for request, out in zip(asked, outs, strict=True):
        assert out.ids == reference(backbone, request)
        assert out.version == backbone.versions[request.adapter]
        check_logprobs(backbone, request, out)
    online, target, base = (outs[n::3] for n in range(3))
    assert online != target and online != base and target != base


def test_a_changed_adapter_never_meets_a_stale_cache(tiny_llama_path: str) -> None:
    backbone = Backbone(BackboneConfig(tiny_llama_path, lora_r=4, dtype="float32")).eval()
    generator = InProcessGenerator(backbone)
    asked = [replace(r, adapter=a, extend=True) for r in requests() for a in ("online", "target")]
    before = None
    for seed in range(2):
        shake(backbone, seed)
        outs = generator.generate(asked)
        for request, out in zip(asked, outs, strict=True):
            assert out.version == backbone.versions[request.adapter]
            assert out.ids == reference(backbone, request)
            check_logprobs(backbone, request, out)
        assert outs != before
        before = outs


def test_a_moved_target_is_not_stale_either(tiny_llama_path: str) -> None:
    backbone = Backbone(BackboneConfig(tiny_llama_path, lora_r=4, dtype="float32")).eval()
    shake(backbone, 5)
    generator = InProcessGenerator(backbone)
    asked = requests(adapter="target")
    generator.generate(asked)
    backbone.copy_online_to_target(0.9)
    for request, out in zip(asked, generator.generate(asked), strict=True):
        check_logprobs(backbone, request, out)


def test_samples_depend_on_their_seed_and_not_on_company(backbone: Backbone) -> None:
    asked = [Request(ids, RANDOM, seed=n) for n, ids in enumerate(PROMPTS)]
    together = InProcessGenerator(backbone).generate(asked)
    crowd = [Request((*COMMON, 60 + n), RANDOM, seed=99) for n in range(5)]
    small = InProcessGenerator(backbone, 2, 4, 0)
    for n, request in enumerate(asked):
        check_logprobs(backbone, request, together[n])
        mixed = small.generate([*crowd, request, *requests()])
        assert mixed[5].ids == together[n].ids
        assert mixed[5].logprobs == pytest.approx(together[n].logprobs, abs=1e-4)
    other = InProcessGenerator(backbone).generate([replace(r, seed=r.seed + 50) for r in asked])
    assert [o.ids for o in other] != [t.ids for t in together]


def test_first_tokens_are_distributed_as_the_model_says(backbone: Backbone) -> None:
    n, k = 400, 5
    sampling = Sampling(temperature=0.3, max_new_tokens=1)
    asked = [Request(COMMON, sampling, seed=seed) for seed in range(n)]
    outs = InProcessGenerator(backbone, max_batch=32).generate(asked)
    best = log_p(backbone, asked[0], [0])[0].exp().topk(k)
    p = [*best.values.tolist(), 1 - best.values.sum().item()]
    tokens = best.indices.tolist()
    counts = [sum(out.ids[0] == token for out in outs) for token in tokens]
    counts.append(n - sum(counts))
    statistic = sum((c - n * q) ** 2 / (n * q) for c, q in zip(counts, p, strict=True))
    assert statistic < k + 5 * np.sqrt(2 * k)
    for out in outs[:5]:
        check_logprobs(backbone, asked[0], out)


def test_a_stop_id_is_kept_in_the_ids_and_not_in_the_text(backbone: Backbone) -> None:
    free = InProcessGenerator(backbone).generate(requests([PROMPTS[0]]))[0]
    stop = free.ids[2]
    asked = requests([PROMPTS[0]], stop_ids=(stop,))[0]
    out = InProcessGenerator(backbone).generate([asked])[0]
    end = free.ids.index(stop) + 1
    assert out.ids == free.ids[:end] == reference(backbone, asked)
    assert out.finish_reason == "stop" and len(out.logprobs) == end
    assert out.text == backbone.tokenizer.decode(free.ids[: end - 1])


def test_a_stop_in_the_last_allowed_token_is_a_stop(backbone: Backbone) -> None:
    free = InProcessGenerator(backbone).generate(requests([PROMPTS[3]]))[0]
    end = free.ids.index(free.ids[-1]) + 1
    sampling = replace(GREEDY, max_new_tokens=end)
    asked = requests([PROMPTS[3]], sampling=sampling, stop_ids=(free.ids[-1],))
    assert InProcessGenerator(backbone).generate(asked)[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("text", "stop", "shown", "kept"),
    [
        ("go on\n       then", "\n", "go on", "go on\n      "),  # more than the stop in a token
        ("go on\n\n", "\n", "go on", "go on\n\n"),
        ("a b END c", " END", "a b", "a b END"),
        ("a b END c", "b E", "a ", "a b END"),  # the stop ends inside a token
    ],
)
def test_stop_strings_cut_the_text_and_keep_the_ids(
    backbone: Backbone,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    stop: str,
    shown: str,
    kept: str,
) -> None:
    ids = tuple(backbone.tokenizer(text, add_special_tokens=False)["input_ids"])
    request = Request(COMMON, Sampling(max_new_tokens=len(ids) + 3, stop=("@@", stop)))
    steps = iter(ids)

    def logits(hidden: Tensor) -> Tensor:  # the head writes the text
        one = torch.zeros(len(hidden), len(backbone.tokenizer))
        one[:, next(steps)] = 10.0
        return one

    monkeypatch.setattr(backbone, "logits", logits)
    out = InProcessGenerator(backbone).generate([request])[0]
    assert out.text == shown and out.finish_reason == "stop"
    assert out.ids == ids[: len(out.ids)] and backbone.tokenizer.decode(out.ids) == kept


def test_equal_requests_are_answered_once(backbone: Backbone) -> None:
    generator = InProcessGenerator(backbone)
    twice = requests([PROMPTS[0]]) * 2 + requests([PROMPTS[0]], seed=7)
    outs = generator.generate(twice)
    assert outs[0] == outs[1] == outs[2]
    assert generator.counts["generated_tokens"] == GREEDY.max_new_tokens
    sampled = requests([PROMPTS[0]], sampling=replace(RANDOM, temperature=2.0))
    outs = generator.generate(sampled * 2 + [replace(sampled[0], seed=1)])
    assert outs[0] == outs[1] != outs[2]


def test_a_prefix_is_prefilled_once_per_version(backbone: Backbone) -> None:
    generator = InProcessGenerator(backbone)
    generator.generate(requests([(*COMMON, 20, 21), (*COMMON, 30)]))
    assert generator.counts["prompt_tokens"] == 7 + 6
    assert generator.counts["prefilled_tokens"] == 5 + 2 + 1
    generator.generate(requests([(*COMMON, 20, 22)]))
    assert generator.counts["prefilled_tokens"] == 8 + 1
    generator.generate(requests([(*COMMON, 20, 22)], adapter="target"))
    assert generator.counts["prefilled_tokens"] == 9 + 7


def test_a_dialogue_goes_on_from_its_cache(backbone: Backbone) -> None:
    """Also where rows of unequal length finish at different steps and leave the batch."""
    generator = InProcessGenerator(backbone)
    lengths = [2, 3, 5, 6, 9, 12]
    asked = [
        Request((*COMMON, *range(70, 70 + n)), replace(GREEDY, max_new_tokens=n), extend=True)
        for n in lengths
    ]
    for _ in range(3):
        outs = generator.generate(asked)
        for request, out in zip(asked, outs, strict=True):
            assert out.ids == reference(backbone, request)
            check_logprobs(backbone, request, out)
        before = generator.counts["prefilled_tokens"]
        asked = [
            replace(request, ids=request.ids + out.ids + (80 + n, 81))
            for n, (request, out) in enumerate(zip(asked, outs, strict=True))
        ]
        generator.generate([replace(r, sampling=Sampling(max_new_tokens=1)) for r in asked])
        # The last sampled id was never fed to the model; the two new ones follow it.
        assert generator.counts["prefilled_tokens"] - before == 3 * len(asked)


def test_no_padding_is_computed(backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    """Distinct prompt tokens once, then one row for each text that is still being written."""
    lengths = [1, 2, 2, 5, 9, 9, 12, 12]
    asked = [
        Request((*COMMON, *range(70, 70 + 3 * n + i)), Sampling(max_new_tokens=n))
        for i, n in enumerate(lengths)
    ]
    steps: list[int] = []
    prompts: list[int] = []
    step, tree = backbone.forward_step, backbone.forward_tree

    def counted_step(ids: Tensor, *args: Tensor) -> Tensor:
        steps.append(ids.numel())
        return step(ids, *args)

    def counted_tree(packed: PackedTree, *args: Tensor) -> Tensor:
        prompts.append(len(packed.input_ids))
        return tree(packed, *args)

    monkeypatch.setattr(backbone, "forward_step", counted_step)
    monkeypatch.setattr(backbone, "forward_tree", counted_tree)
    outs = InProcessGenerator(backbone).generate(asked)
    assert [len(out.ids) for out in outs] == lengths
    assert sum(steps) == sum(lengths) - len(lengths), "the first token comes from the prompt"
    assert len(steps) == max(lengths) - 1
    distinct = {r.ids[:n] for r in asked for n in range(1, len(r.ids) + 1)}
    assert sum(prompts) == len(distinct)


def test_without_extend_only_the_prompt_is_kept(backbone: Backbone) -> None:
    generator = InProcessGenerator(backbone)
    out = generator.generate(requests([PROMPTS[0]]))[0]
    before = generator.counts["prefilled_tokens"]
    generator.generate(requests([PROMPTS[0] + out.ids]))
    assert generator.counts["prefilled_tokens"] - before == len(out.ids)


def test_the_cache_is_bounded(backbone: Backbone) -> None:
    generator = InProcessGenerator(backbone, cache_tokens=12)
    for n in range(5):
        asked = requests([(n, *range(90, 96)), (n, 97, 98)], extend=True)
        for request, out in zip(asked, generator.generate(asked), strict=True):
            assert out.ids == reference(backbone, request)
        assert 0 < generator._caches["online"].tokens <= 12


def test_dropout_is_off_while_generating_and_the_mode_returns(tiny_llama_path: str) -> None:
    config = BackboneConfig(tiny_llama_path, lora_r=4, lora_dropout=0.5, dtype="float32")
    backbone = Backbone(config)
    shake(backbone, 3)
    backbone.model.train()
    asked = requests()
    outs = InProcessGenerator(backbone).generate(asked)
    assert backbone.model.training
    backbone.model.eval()
    assert [out.ids for out in outs] == [reference(backbone, request) for request in asked]


def test_completions_name_the_version_in_use(backbone: Backbone) -> None:
    backbone.versions["online"] = 123
    assert InProcessGenerator(backbone).generate(requests([COMMON]))[0].version == 123
