"""A model's tables against plain forward passes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nlac_lightning.analysis.language_model import critic_scores, critic_table, policy_table
from nlac_lightning.analysis.lessons import TAUGHT, TESTING, Lessons
from nlac_lightning.backbone import Backbone, BackboneConfig
from nlac_lightning.envs.language_mdp import LanguageMDPEnv
from nlac_lightning.envs.language_mdp.solve import evaluate
from nlac_lightning.envs.language_mdp.texts import state_text, wall_text
from nlac_lightning.envs.language_mdp.world import DIRECTIONS

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "pretrain_tiny.py"
spec = importlib.util.spec_from_file_location("pretrain_tiny", SCRIPT)
assert spec and spec.loader
pretrain_tiny = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pretrain_tiny)


@pytest.fixture(scope="module")
def roles():
    return pretrain_tiny.make_roles(pretrain_tiny.make_tokenizer())


@pytest.fixture(scope="module")
def backbone(roles, tmp_path_factory):
    """A random model with the word-level tokenizer."""
    folder = tmp_path_factory.mktemp("words")
    tokenizer = roles.codec.tokenizer
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.5,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Backbone(BackboneConfig(str(folder), dtype="float32"))


@pytest.fixture(scope="module")
def env():
    return LanguageMDPEnv(1)


def test_the_tokenizer_gives_texts_back_and_knows_every_word(roles):
    codec = roles.codec
    for level in (1, 2, 3):
        exact = LanguageMDPEnv(level).world.exact
        for room, goal in exact.states:
            for text in (state_text, wall_text):
                line = f"World: {text(exact.world, room, goal)}\nAgent: north\n"
                ids = codec.text(line)
                assert codec.decode(ids) == line
                assert codec.tokenizer.unk_token_id not in ids


def test_lessons_use_known_words_and_can_be_answered(roles):
    unknown = roles.codec.tokenizer.unk_token_id
    seen = set()
    for sheet in Lessons(roles, TESTING).draw(60):
        for question in sheet.questions:
            seen.add(question.role)
            assert question.answers
            for answer in question.answers:
                assert unknown not in question.prompt + answer
                assert 0 < question.asked <= len(answer)
    assert seen == set(TAUGHT)


def test_a_sheet_asks_what_its_questions_say(roles):
    sheet = Lessons(roles, TESTING).draw(1)[0]
    branch = 0
    for question in sheet.questions:
        for answer in question.answers:
            mine = sheet.branches == branch
            assert tuple(sheet.targets[mine].tolist()) == answer
            first = int(sheet.sources[mine][0])
            assert int(sheet.tree.input_ids[first]) == question.prompt[-1]
            assert int(sheet.tree.position_ids[first]) == len(question.prompt) - 1
            branch += 1


def test_policy_table_equals_plain_forward_passes(backbone, roles, env):
    table = policy_table(backbone, roles, env)
    np.testing.assert_allclose(table.sum(-1), 1.0, atol=1e-12)
    exact = env.world.exact
    for s in (0, 7):
        text = f"{state_text(exact.world, *exact.states[s])}\nAgent:"
        for a, direction in enumerate(DIRECTIONS):
            # where nonsense is counted, the table holds more than the direction itself
            if a != exact.mdp.allowed[s].argmin():
                expected = np.exp(_logprob(backbone, roles, text, f" {direction}\n"))
                assert table[s, a] == pytest.approx(expected, rel=1e-3)


def test_critic_table_equals_plain_forward_passes(backbone, roles, env):
    table = critic_table(backbone, roles, env)
    exact = env.world.exact
    np.testing.assert_array_equal(np.isnan(table), ~exact.mdp.allowed)
    room, goal = exact.states[3]
    for direction, target in exact.world.exits[room].items():
        text = f"{state_text(exact.world, room, goal)}\n{direction}:"
        solved, failed = (
            _logprob(backbone, roles, text, f" {target}. End: {ending}.\n")
            for ending in ("solved", "failed")
        )
        expected = np.exp(solved) / (np.exp(solved) + np.exp(failed))
        assert table[3, DIRECTIONS.index(direction)] == pytest.approx(expected, rel=1e-3)


def _logprob(backbone, roles, prompt, answer):
    start, ids = len(roles.codec.text(prompt)), roles.codec.text(prompt + answer)
    with torch.no_grad():
        logits = backbone.model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    return sum(float(logits[i - 1, ids[i]]) for i in range(start, len(ids)))


def test_an_exact_critic_scores_one_and_a_blind_or_reversed_one_does_not(env):
    policy = env.world.exact.mdp.uniform()
    q = evaluate(env.world.exact.mdp, policy).q
    scores = critic_scores(env, q, q)
    assert scores["spearman"] == pytest.approx(1.0) and scores["calibration"] == 0.0
    assert scores["auroc"] > 0.8
    reverse = critic_scores(env, q, 1 - q)
    assert reverse["spearman"] == pytest.approx(-1.0) and reverse["auroc"] < 0.2
    blind = critic_scores(env, q, np.full_like(q, 0.3))
    assert blind["auroc"] == 0.5
