"""Drawn tokens follow the stated distribution, and completions end where they must."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from nlac_lightning import models
from nlac_lightning.errors import ConfigError
from nlac_lightning.generation.base import Request, Sampling
from nlac_lightning.generation.sampling import draw, stop_reached, uniforms

LOGITS = torch.tensor([1.0, -0.5, 2.0, 0.3, 1.7, -3.0, 0.31, 0.0])
DRAWS = 5_000

SETTINGS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.6),
    Sampling(temperature=2.0),
    Sampling(temperature=1.0, top_k=3),
    Sampling(temperature=1.0, top_p=0.7),
    Sampling(temperature=1.5, top_p=0.01),
    Sampling(temperature=1.3, top_k=4, top_p=0.8),
]


def distribution(sampling: Sampling) -> np.ndarray:
    """In the usual order: temperature, then the k best, then the nucleus of what is left."""
    p = np.exp(LOGITS.double().numpy() / sampling.temperature)
    order = np.argsort(-p)
    if sampling.top_k:
        p[order[sampling.top_k :]] = 0
    p /= p.sum()
    mass = 0.0
    for i in order:
        if mass >= sampling.top_p:
            p[i] = 0
        mass += p[i]
    return p / p.sum()


def chi_square(counts: np.ndarray, p: np.ndarray) -> None:
    """No deviation beyond five standard deviations of the statistic."""
    assert (counts[p == 0] == 0).all()
    expected = p[p > 0] * counts.sum()
    statistic = ((counts[p > 0] - expected) ** 2 / expected).sum()
    freedom = max(len(expected) - 1, 1)
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_tokens_and_logprobs_follow_the_distribution(sampling: Sampling) -> None:
    noise = np.random.default_rng(0).random(DRAWS).tolist()
    tokens, logprobs = draw(LOGITS.expand(DRAWS, -1), [sampling] * DRAWS, noise)
    p = distribution(sampling)
    chi_square(np.bincount(tokens, minlength=len(p)), p)
    np.testing.assert_allclose(logprobs, np.log(p)[tokens], atol=1e-5)


def test_rows_with_different_settings_do_not_mix() -> None:
    settings = [Sampling(), *SETTINGS]
    noise = [0.37] * len(settings)
    together = draw(LOGITS.expand(len(settings), -1), settings, noise)
    alone = [draw(LOGITS[None], [s], [n]) for s, n in zip(settings, noise, strict=True)]
    assert together[0] == [tokens[0] for tokens, _ in alone]
    assert together[1] == pytest.approx([scores[0] for _, scores in alone])


def test_greedy_takes_the_best_token_with_the_models_own_logprob() -> None:
    tokens, logprobs = draw(LOGITS[None], [Sampling(top_k=2, top_p=0.5)], [0.9])
    assert tokens == [2]
    assert logprobs == pytest.approx([LOGITS.log_softmax(-1)[2].item()])


@pytest.mark.parametrize("noise", [0.0, np.nextafter(1.0, 0.0)])
def test_extreme_noise_stays_among_the_kept_tokens(noise: float) -> None:
    for sampling in SETTINGS:
        tokens, logprobs = draw(LOGITS[None], [sampling], [noise])
        assert distribution(sampling)[tokens[0]] > 0 and math.isfinite(logprobs[0])


def test_noise_comes_from_the_seed_alone() -> None:
    def noise(seed: int, n: int = 5) -> list[float]:
        return uniforms(Request((1,), Sampling(1.0, max_new_tokens=n), seed=seed)).tolist()

    assert noise(3) == noise(3) == noise(3, 9)[:5]
    assert noise(3) != noise(4)
    assert len(noise(-1)) == len(noise(2**70)) == 5
    assert not uniforms(Request((1,), Sampling(0.0, max_new_tokens=3))).any()


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: str) -> Any:
    return models.load_tokenizer(smollm2_path)


@pytest.mark.parametrize(
    ("text", "stop", "ends"),
    [
        ("one line", "\n", False),
        ("one line\n", "\n", True),
        ("one line\n       ", "\n", True),  # a single token holds the line break and spaces
        ("two\n\n", "\n", True),
        ("call() END", " END", True),
        ("call() EN", " END", False),
        ("x é END", "é END", True),
    ],
)
def test_stop_strings_are_found_in_the_text(
    tokenizer: Any, text: str, stop: str, ends: bool
) -> None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    request = Request((1,), Sampling(stop=("never", stop)))
    assert stop_reached(tokenizer, ids, request) is ends
    assert not any(stop_reached(tokenizer, ids[:n], request) for n in range(1, len(ids)))


def test_one_token_that_holds_more_than_the_stop(tokenizer: Any) -> None:
    ids = tokenizer("\n       ", add_special_tokens=False)["input_ids"]
    assert len(ids) == 1 and ids != tokenizer("\n", add_special_tokens=False)["input_ids"]
    assert stop_reached(tokenizer, ids, Request((1,), Sampling(stop=("\n",))))


def test_stop_ids_end_a_completion_and_only_as_the_last_id(tokenizer: Any) -> None:
    request = Request((1,), Sampling(), stop_ids=(7, 9))
    assert stop_reached(tokenizer, [5, 9], request)
    assert not stop_reached(tokenizer, [9, 5], request)


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.1}, {"top_k": -1}, {"max_new_tokens": 0}],
)
def test_settings_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"sampling.{next(iter(wrong))}"):
        Sampling(**wrong)
