"""The packed training pass against each example alone through the plain model."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from nlac_lightning.algorithms.examples import Example, Reader, Teacher, accumulate, weigh
from nlac_lightning.backbone import Backbone, BackboneConfig
from nlac_lightning.generation.base import Request, Sampling
from nlac_lightning.generation.in_process import InProcessGenerator

EOS = 2
COMMON = (11, 12, 13)
TARGET = (30, 31, EOS)  # the end of a turn is trained, and this tokenizer pads with the same id

EXAMPLES = [
    Example("policy", (*COMMON, 20, *TARGET), 4, weight=0.7),
    Example("policy", (*COMMON, 21, EOS), 4, weight=0.2),
    Example(
        "critic",
        (*COMMON, 22, *TARGET),
        4,
        teacher=Teacher("target", (50, 51, *TARGET)),
        weight=1.3,
    ),
    Example("critic", (*COMMON, 22, *TARGET), 4, 2, Teacher("base", (60, *TARGET)), 0.5),
    Example("critic", (*COMMON, 23, *TARGET), 4, 3, Teacher("target", (61, *TARGET)), 0.4),
    Example("role_replay", (70, 71, 72), 1, teacher=Teacher("base", (70, 71, 72)), weight=0.3),
    Example("policy", (*COMMON, 20, *TARGET), 4, weight=0.7),
]


@pytest.fixture(scope="module")
def backbone(tiny_llama_path: str) -> Backbone:
    backbone = Backbone(BackboneConfig(tiny_llama_path, lora_r=4, dtype="float32")).eval()
    torch.manual_seed(1)
    for adapter in ("online", "target"):
        for parameter in backbone.adapter_parameters(adapter).values():
            nn.init.normal_(parameter, std=0.3)
    return backbone.double()  # in float32 such large adapters alone cost 3e-5 of the gradient


def log_p(backbone: Backbone, adapter: str, ids: Sequence[int], n: int) -> Tensor:
    """[n, vocabulary] log-probabilities before the last ``n`` ids, by the plain forward pass."""
    with backbone.use(adapter):
        logits = backbone.model(torch.tensor([list(ids)])).logits[0]
    return logits.log_softmax(-1)[-n - 1 : -1]


def plain_loss(backbone: Backbone, example: Example) -> Tensor:
    """Mean over the trained tokens, from the definition."""
    targets = torch.tensor(example.ids[example.start :])
    n = len(targets)
    student = log_p(backbone, "online", example.ids, n)
    nll = -student[range(n), targets]
    if example.teacher is None:
        return nll.mean()
    with torch.no_grad():
        teacher = log_p(backbone, example.teacher.adapter, example.teacher.ids, n)
    kl = (teacher.exp() * (teacher - student)).sum(-1)
    return torch.cat([nll[: example.forced], kl[example.forced :]]).mean()


def gradients(backbone: Backbone) -> dict[str, Tensor]:
    found = {n: p.grad.clone() for n, p in backbone.named_parameters() if p.grad is not None}
    backbone.zero_grad()
    return found


def warm_reader(backbone: Backbone) -> Reader:
    """An engine that knows some teachers' prompts, and one of them with its answer."""
    generator = InProcessGenerator(backbone)
    warm = [("target", (50, 51, 3)), ("target", (61, *TARGET, 9)), ("base", (60, 9))]
    generator.generate([Request(ids, Sampling(max_new_tokens=2), adapter) for adapter, ids in warm])
    return generator.read


@pytest.mark.parametrize(("pack_tokens", "warm"), [(1, False), (9, True), (1000, False)])
def test_loss_and_gradient_equal_the_plain_computation(
    backbone: Backbone, pack_tokens: int, warm: bool
) -> None:
    total = 0.0
    by_name: dict[str, list[float]] = {}
    for example in EXAMPLES:
        loss = plain_loss(backbone, example)
        (loss * example.weight).backward()
        total += loss.item() * example.weight
        by_name.setdefault(example.name, []).append(loss.item())
    expected = gradients(backbone)
    losses: list[float] = []

    def backward(loss: Tensor) -> None:
        losses.append(loss.item())
        loss.backward()

    read = warm_reader(backbone) if warm else None
    metrics = accumulate(backbone, EXAMPLES, pack_tokens, backward, read)
    found = gradients(backbone)
    assert sum(losses) == pytest.approx(total, rel=1e-5)  # the head's part is in float32
    for name, values in by_name.items():
        assert metrics[name] == pytest.approx(sum(values) / len(values), rel=1e-5, abs=1e-6)
    assert found.keys() == expected.keys()
    whole = torch.cat([gradient.flatten() for gradient in expected.values()])
    error = torch.cat([found[name].flatten() for name in expected]) - whole
    assert error.norm() < 1e-6 * whole.norm()
    assert metrics["example_tokens"] == sum(len(example.ids) for example in EXAMPLES)
    if pack_tokens == 1000:
        assert len(losses) == 1
        prefixes = {e.ids[: n + 1] for e in EXAMPLES for n in range(len(e.ids))}
        assert metrics["packed_tokens"] == len(prefixes)


def test_a_reader_computes_what_is_not_known_and_what_is_asked(backbone: Backbone) -> None:
    """Known prefixes end at different places, and the states of some cached tokens are wanted."""
    generator = InProcessGenerator(backbone)
    state = tuple(range(20, 60))
    warm = [(*state, 5, 6, 7, 8), (*state, 9)]
    generator.generate([Request(ids, Sampling(max_new_tokens=1), "target") for ids in warm])
    sequences = [(*state, 5, 6, 7, 70), (*state, 9, 71), (*state, 5, 6, 80), (*state, 5, 6, 7, 8)]
    counts = [4, 1, 2, 3]
    states = generator.read("target", sequences, counts)
    assert generator.counts["read_tokens"] == 8, "of 173: 5, 6; 7; 59, 5, 6, 7; 9"
    for ids, count, found in zip(sequences, counts, states, strict=True):
        with backbone.use("target"):
            hidden = backbone._decoder(torch.tensor([ids])).last_hidden_state[0]
        torch.testing.assert_close(found, hidden[-count - 1 : -1], rtol=1e-9, atol=1e-9)


def test_only_the_online_adapter_gets_gradients(backbone: Backbone) -> None:
    accumulate(backbone, EXAMPLES, 1000, Tensor.backward)
    found = gradients(backbone)
    assert found and all(".online." in name for name in found)
    assert len(found) == len(backbone.adapter_parameters("online"))


def test_a_teacher_that_reads_the_same_prompt_with_online_weights_teaches_nothing(
    backbone: Backbone,
) -> None:
    ids = EXAMPLES[0].ids
    metrics = accumulate(
        backbone, [Example("x", ids, 4, teacher=Teacher("online", ids))], 99, Tensor.backward
    )
    assert metrics["x"] == pytest.approx(0.0, abs=1e-6)
    assert all(g.abs().max() < 1e-5 for g in gradients(backbone).values())


def test_the_end_of_a_turn_is_learned_though_it_is_the_pad_token(backbone: Backbone) -> None:
    assert backbone.tokenizer.pad_token_id == EOS
    short = Example("policy", (*COMMON, 20, EOS), 4)
    metrics = accumulate(backbone, [short], 99, Tensor.backward)
    gradients(backbone)
    expected = -log_p(backbone, "online", short.ids, 1)[0, EOS].item()
    assert metrics["policy"] == pytest.approx(expected, rel=1e-5)


def test_weights_scale_the_gradient_and_not_the_reported_loss(backbone: Backbone) -> None:
    metrics = accumulate(backbone, EXAMPLES[:1], 99, Tensor.backward)
    one = gradients(backbone)
    doubled = [replace(EXAMPLES[0], weight=2 * EXAMPLES[0].weight)]
    assert accumulate(backbone, doubled, 99, Tensor.backward) == pytest.approx(metrics)
    for name, gradient in gradients(backbone).items():
        torch.testing.assert_close(gradient, 2 * one[name], rtol=1e-5, atol=1e-8)


def test_no_examples_is_no_work(backbone: Backbone) -> None:
    metrics = accumulate(backbone, [], 99, Tensor.backward)
    assert metrics == {"packed_tokens": 0.0, "example_tokens": 0.0}
    assert not gradients(backbone)
    assert weigh([], 1.0) == []


def test_weigh_shares_the_weight_in_proportion() -> None:
    same = [replace(example, weight=1.0) for example in EXAMPLES[:4]]
    assert [e.weight for e in weigh(same, 2.0)] == [0.5] * 4
    given = [e.weight for e in EXAMPLES[:4]]
    shares = [2.0 * weight / sum(given) for weight in given]
    assert [e.weight for e in weigh(EXAMPLES[:4], 2.0)] == pytest.approx(shares)
    assert weigh([], 2.0) == []
