"""NLAC's targets and gradient step, with a tiny model in a real Trainer on the help desk."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch import Tensor, nn

from nlac_lightning.actors import OracleActor
from nlac_lightning.algorithms.config import OptimizerConfig
from nlac_lightning.algorithms.language_critic import CriticTarget
from nlac_lightning.algorithms.loss_config import LossConfig
from nlac_lightning.algorithms.nlac import NLAC
from nlac_lightning.algorithms.warmup import WarmupConfig
from nlac_lightning.backbone import BackboneConfig
from nlac_lightning.callbacks import RolloutCallback
from nlac_lightning.critic import Critique
from nlac_lightning.data import ReplayDataModule
from nlac_lightning.envs.help_desk import HelpDeskEnv
from nlac_lightning.errors import ConfigError
from nlac_lightning.generation.base import Completion, Request, Sampling
from nlac_lightning.improvement import Improvement
from nlac_lightning.replay.episode import Transition
from nlac_lightning.roles.roles import RoleConfig, Roles, RolesConfig
from nlac_lightning.rollout import Exploration, Rollout, RolloutLimits

ENV = HelpDeskEnv(level=0, n_train=4)
# A random model never ends a line; nearly each of its tokens holds one of these letters.
ENDS = Sampling(temperature=1.0, max_new_tokens=12, stop=("e", "a", "i", "o"))
NEVER_ENDS = Sampling(temperature=1.0, max_new_tokens=2, stop=("\x00",))


def build(
    path: str,
    sampling: Sampling = ENDS,
    roles: dict[str, Any] | None = None,
    endings: tuple[str, str] | None = None,
    **options: Any,
) -> NLAC:
    """NLAC with short answers."""
    settings = {role: RoleConfig(sampling=sampling) for role in ("policy", "successor")}
    settings |= {role: RoleConfig(sampling=sampling) for role in ("evaluator", "refinement")}
    settings |= {"backup": RoleConfig(adapter="target", sampling=sampling)} | (roles or {})
    return NLAC(
        roles=RolesConfig(
            templates="help_desk_small",
            format="plain",
            action="plain",
            endings=endings,
            **settings,
        ),
        backbone=BackboneConfig(path, lora_r=2, dtype="float32"),
        optimizer=OptimizerConfig(lr=1e-2, warmup_steps=0),
        **options,
    )


def shake(module: NLAC) -> None:
    """Adapters that are neither zero nor equal."""
    torch.manual_seed(1)
    for adapter in ("online", "target"):
        for parameter in module.backbone.adapter_parameters(adapter).values():
            nn.init.normal_(parameter, std=0.3)


def make(path: str, **options: Any) -> NLAC:
    """The module outside of a Trainer."""
    module = build(path, **options)
    module.configure_model()
    shake(module)
    return module


Call = list[tuple[Request, Completion]]


def record(module: NLAC) -> list[Call]:
    """The module's calls of its generator, which still answers itself."""
    calls: list[Call] = []
    generate = module.generator.generate

    def recorded(requests: Sequence[Request]) -> list[Completion]:
        outs = generate(requests)
        calls.append(list(zip(requests, outs, strict=True)))
        return outs

    module.generator.generate = recorded  # type: ignore[method-assign]
    return calls


def transitions(roles: Roles) -> list[Transition]:
    rollout = Rollout(ENV, roles, RolloutLimits())
    episodes = rollout.play([(ENV.tasks("train")[0], 0)], OracleActor(roles.codec))
    return next(episodes).transitions()


def test_the_bootstrap_draws_action_description_and_backup(tiny_llama_path: str) -> None:
    module = make(tiny_llama_path)
    roles = module.roles
    batch = transitions(roles)
    calls = record(module)
    targets = module.critic_targets(batch, 0)
    policy, successor, backup = calls
    going = [t for t in batch if not t.terminal]
    assert len(going) == len(batch) - 1 == len(policy) == len(successor)
    for transition, (asked, said), (described, _) in zip(going, policy, successor, strict=True):
        # a_{t+1} ~ pi_theta in s_{t+1}, drawn anew
        assert asked.adapter == "online"
        assert asked.ids == transition.next_state_ids + roles.codec.header()
        # d_{t+1} ~ M_theta-bar for that very action
        assert described.adapter == "target"
        action = roles.action(said.text)
        expected = roles.prompt("successor", transition.next_state_ids, [], action=action)
        assert described.ids == expected.ids
    assert len({request.seed for request, _ in policy}) == len(policy)
    for n, (transition, (request, drawn), some) in enumerate(
        zip(batch, backup, targets, strict=True)
    ):
        assert request.adapter == "target"
        asked = roles.codec.decode(request.ids[len(transition.state_ids) :])
        assert " ".join(m["content"] for m in transition.turn.replies) in asked
        if transition.terminal:
            assert "the customer is happy" in asked.rsplit("Now: ", 1)[1]
        else:
            assert " ".join(successor[n][1].text.split()) in asked
        if not drawn.complete:
            assert not some
            continue
        (target,) = some
        assert target.weight == 1.0
        assert target.ids[target.forced :] == drawn.ids
        assert target.ids[: target.forced] == request.ids[len(request.ids) - target.forced :]
        assert target.teacher == request.ids + drawn.ids
    assert module.counts["backup_dropped"] == sum(not some for some in targets)


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_a_terminal_transition_has_nothing_to_bootstrap(
    tiny_llama_path: str, reward: float
) -> None:
    module = make(tiny_llama_path)
    last = transitions(module.roles)[-1]
    assert last.terminal
    last = replace(last, turn=replace(last.turn, reward=reward))
    calls = record(module)
    module.critic_targets([last, last], 0)
    assert [len(call) for call in calls if call] == [2], "neither a next action nor a future"
    backup = calls[-1]
    asked = module.roles.codec.decode(backup[0][0].ids).rsplit("Now: ", 1)[1]
    assert ("unhappy" not in asked) == (reward > 0)


@pytest.mark.parametrize(
    ("kind", "returns", "happy"),
    [
        ("outcome", (1.0, 1.0), True),
        ("outcome", (0.0, 1.0), False),  # an equal action led further in another episode
        ("best_outcome", (0.0, 1.0), True),
        ("best_outcome", (0.0, 0.0), False),
    ],
)
def test_monte_carlo_targets_tell_the_return_and_bootstrap_nothing(
    tiny_llama_path: str, kind: Any, returns: tuple[float, float], happy: bool
) -> None:
    module = make(tiny_llama_path)
    first = transitions(module.roles)[0]
    assert not first.terminal
    first = replace(first, return_to_go=returns[0], best_return=returns[1])
    calls = record(module)
    module.critic_targets([first], 0, kind)
    assert [len(call) for call in calls if call] == [1], "neither a next action nor a future"
    asked = module.roles.codec.decode(calls[-1][0][0].ids).rsplit("Now: ", 1)[1]
    assert ("unhappy" not in asked) == happy


@pytest.mark.parametrize("best", [0.0, 1.0])
def test_what_once_led_to_a_return_bounds_the_bootstrapped_target_from_below(
    tiny_llama_path: str, best: float
) -> None:
    first = replace(transitions(make(tiny_llama_path).roles)[0], return_to_go=0.0, best_return=best)
    for bound in (False, True):
        module = make(tiny_llama_path, loss=LossConfig(lower_bound=bound))
        calls = record(module)
        module.critic_targets([first], 0)
        bootstrapped = [len(call) for call in calls if call] == [1, 1, 1]
        assert bootstrapped == (not bound or best == 0)
        if not bootstrapped:
            asked = module.roles.codec.decode(calls[-1][0][0].ids).rsplit("Now: ", 1)[1]
            assert "unhappy" not in asked


ENDINGS = ("happy", "sad")


class Ends:
    """Answers futures with written endings, each of whose tokens has probability 0.6."""

    def __init__(self, module: NLAC, futures: list[str]) -> None:
        self.module, self.futures = module, list(futures)
        self.asked: list[Request] = []
        self.generate = module.generator.generate
        module.generator.generate = self  # type: ignore[method-assign, assignment]

    def __call__(self, requests: Sequence[Request]) -> list[Completion]:
        self.asked += requests
        outs = self.generate(requests)
        if requests and "leads to:" in self.module.roles.codec.decode(requests[0].ids)[-20:]:
            for i in range(len(outs)):
                text = self.futures.pop(0)
                ids = self.module.roles.codec.text(text)
                outs[i] = Completion(ids, text, (math.log(0.6),) * len(ids), "stop")
        return outs


def told(module: NLAC, target: CriticTarget) -> str:
    """What a target's backup was told of the future."""
    return module.roles.codec.decode(target.teacher).rsplit("Now: ", 1)[1]


def test_endings_weigh_a_target_for_each_way_it_may_end(tiny_llama_path: str) -> None:
    loss = LossConfig(discount=0.5, next_actions=3)
    module = make(tiny_llama_path, loss=loss, endings=ENDINGS)
    first = transitions(module.roles)[0]
    futures = [" he is asleep", " ok, he is happy", " no, he is sad"]
    written = Ends(module, futures)
    (targets,) = module.critic_targets([first], 0)
    assert len([r for r in written.asked if r.adapter == "online"]) == 3, "next actions"
    p_happy = 0.6 ** len(module.roles.codec.text(" happy"))
    p_sad = 0.6 ** len(module.roles.codec.text(" sad"))
    p = 0.5 * (p_happy + 1 - p_sad) / 2
    assert [t.weight for t in targets] == pytest.approx([p, 1 - p])
    assert "ok, he is happy" in told(module, targets[0])
    assert "ok, he is sad" in told(module, targets[1])
    examples = module.critic_examples([first, first], [targets, targets])
    assert [e.weight for e in examples] == pytest.approx([p / 2, (1 - p) / 2] * 2)


def test_without_an_ending_the_future_is_taken_as_it_is(tiny_llama_path: str) -> None:
    module = make(tiny_llama_path, endings=ENDINGS)
    first = transitions(module.roles)[0]
    Ends(module, [" he is asleep"])
    ((target,),) = module.critic_targets([first], 0)
    assert target.weight == 1.0 and "he is asleep" in told(module, target)


def test_half_of_a_target_that_was_cut_off_teaches_nothing(tiny_llama_path: str) -> None:
    module = make(tiny_llama_path, endings=ENDINGS)
    first = transitions(module.roles)[0]
    keep = module.critic_target
    seen: list[Any] = []

    def second_is_cut(*args: Any) -> Any:
        seen.append(args)
        return keep(*args) if len(seen) != 2 else None

    module.critic_target = second_is_cut  # type: ignore[method-assign]
    Ends(module, [" he is happy"])
    assert module.critic_targets([first], 0) == [[]] and len(seen) == 2


@pytest.mark.parametrize(("reward", "weights"), [(1.0, [0.25, 0.75]), (0.0, [1.0])])
def test_a_stored_outcome_is_discounted_by_the_turns_until_then(
    tiny_llama_path: str, reward: float, weights: list[float]
) -> None:
    module = make(tiny_llama_path, loss=LossConfig(discount=0.5), endings=ENDINGS)
    first = replace(transitions(module.roles)[0], return_to_go=reward, turns_left=2)
    (targets,) = module.critic_targets([first], 0, "outcome")
    assert [t.weight for t in targets] == weights
    assert ("unhappy" in told(module, targets[0])) == (reward == 0)
    assert all("unhappy" in told(module, t) for t in targets[1:])


def test_a_truncated_transition_is_bootstrapped(tiny_llama_path: str) -> None:
    module = make(tiny_llama_path)
    last = transitions(module.roles)[-1]
    cut = replace(last, turn=replace(last.turn, terminated=False, truncated=True))
    calls = record(module)
    module.critic_targets([cut], 0)
    assert [len(call) for call in calls] == [1, 1, 1]


def test_critic_examples_set_the_students_prompt_before_the_same_tokens(
    tiny_llama_path: str,
) -> None:
    base = RoleConfig(adapter="base", sampling=ENDS)
    cases: list[tuple[Any, str, dict[str, Any]]] = [
        ("kl", "target", {}),
        ("kl", "base", {"backup": base}),
        ("nll", "", {}),
    ]
    for kind, adapter, roles in cases:
        module = make(tiny_llama_path, roles=roles, loss=LossConfig(critic=kind, critic_weight=3.0))
        batch = transitions(module.roles)
        targets = module.critic_targets(batch, 0)
        kept = [(t, x) for t, some in zip(batch, targets, strict=True) for x in some]
        examples = module.critic_examples(batch, targets)
        assert len(examples) == len(kept) > 0
        assert sum(e.weight for e in examples) == pytest.approx(3.0)
        for example, (transition, target) in zip(examples, kept, strict=True):
            prompt = module.roles.prompt(
                "successor", transition.state_ids, [], action=transition.turn.action
            )
            assert example.ids == prompt.ids + target.ids and example.start == len(prompt.ids)
            assert example.forced == target.forced
            if kind == "nll":
                assert example.teacher is None
            else:
                assert example.teacher is not None and example.teacher.adapter == adapter
                assert example.teacher.ids[-len(target.ids) :] == target.ids


@pytest.mark.parametrize(("base_action", "every"), [("buffer", 1), ("mixed", 2), ("fresh", 0)])
def test_base_actions(tiny_llama_path: str, base_action: str, every: int) -> None:
    module = make(tiny_llama_path, base_action=base_action)
    batch = transitions(module.roles)
    stored = len(range(0, len(batch), every)) if every else 0
    calls = record(module)
    actions = module.base_actions(batch, 0, n=3)
    taken = [
        [a.ids == t.turn.action_ids for a in some] for some, t in zip(actions, batch, strict=True)
    ]
    assert {len(some) for some in taken} == {3}
    assert sum(some[0] for some in taken) == stored == sum(map(sum, taken)), "as a candidate once"
    assert sum(map(len, calls)) == 3 * len(batch) - stored
    assert all(request.adapter == "online" for call in calls for request, _ in call)


def test_every_token_of_the_distilled_actions_counts_alike(tiny_llama_path: str) -> None:
    module = make(tiny_llama_path, loss=LossConfig(policy_weight=2.0))
    batch = transitions(module.roles)
    actions = [module.roles.codec.given(text) for text in ("close", "offer the refund now")]
    accepted = [Improvement(action, "policy", "", Critique("good")) for action in actions]
    nothing = Improvement(None, "policy", "", Critique("bad"))
    improvements = (accepted + [nothing] * len(batch))[: len(batch)]
    examples = module._policy_examples(batch, improvements)
    lengths = [len(action.ids) for action in actions]
    assert lengths[0] < lengths[1] and [len(e.ids) - e.start for e in examples] == lengths
    # an example's loss is the mean over its tokens, so weight by length is the weight of a token
    assert examples[0].weight / lengths[0] == pytest.approx(examples[1].weight / lengths[1])
    assert sum(e.weight for e in examples) == pytest.approx(2.0 * 2 / len(batch))


def test_what_the_base_would_hardly_write_is_not_distilled(tiny_llama_path: str) -> None:
    module = make(tiny_llama_path)
    batch = transitions(module.roles)
    results = [
        Improvement(drawn, "policy", drawn.text, Critique("good"))
        for (drawn,) in module.base_actions(batch, seed=1)
    ]
    results.append(replace(results[0], target=None))
    batch = [*batch, batch[0]]
    least = []
    for state, result in zip(batch, results[:-1], strict=False):
        prompt = module.roles.prompt("policy", state.state_ids, state.state_messages)
        assert result.target is not None
        ids, start = prompt.ids + result.target.ids, len(prompt.ids)
        with torch.no_grad(), module.backbone.model.disable_adapter():
            logits = module.backbone.model(torch.tensor([ids])).logits[0].double()
        p = logits[start - 1 : -1].softmax(-1).gather(-1, torch.tensor(ids[start:])[:, None])
        least.append(float(p.min()))
    assert len(set(least)) > 1
    for bound in (0.0, *(p * way for p in least for way in (0.999, 1.001))):
        module.loss = LossConfig(support=min(bound, 1.0))
        module.counts.clear()
        kept = module._supported(batch, list(results))
        assert [x.target is not None for x in kept] == [p >= bound for p in least] + [False]
        assert module.counts["unsupported"] == sum(p < bound for p in least)


def weights(module: NLAC) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in module.backbone.model.named_parameters()}


class Start(lightning.Callback):
    """Shakes the model that the Trainer configured and remembers it."""

    def on_fit_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        assert isinstance(pl_module, NLAC)
        shake(pl_module)
        self.weights = weights(pl_module)
        self.version = pl_module.backbone.versions["online"]


def fit(module: NLAC, tmp_path: Path) -> tuple[lightning.Trainer, Start]:
    """Two steps on a buffer that a rollout fills."""
    start = Start()
    trainer = lightning.Trainer(
        max_steps=2,
        limit_val_batches=0,  # it would play all validation tasks
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        callbacks=[
            start,
            RolloutCallback(
                initial_episodes=2,
                episodes=1,
                exploration=Exploration("epsilon", 0.5),
                initial_exploration=Exploration("epsilon", 1.0),
                limits=RolloutLimits(max_turns=3),
            ),
        ],
    )
    trainer.fit(module, ReplayDataModule(ENV, batch_size=3))
    return trainer, start


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"loss": LossConfig(critic="nll", policy_kl=0.5, role_replay=0.5), "critic": "oracle"},
        {"improvement": "accept", "critic": "none", "base_action": "buffer"},
        {"improvement": "best_of_n", "n": 2, "k": 2, "loss": LossConfig(critic_weight=0.0)},
        {"improvement": "advantage", "n": 2, "base_action": "buffer"},
    ],
    ids=["paper", "guards", "accept", "best_of_n", "advantage"],
)
def test_a_gradient_step_changes_the_online_adapter_alone(
    tiny_llama_path: str, tmp_path: Path, options: dict[str, Any]
) -> None:
    module = build(tiny_llama_path, **options)
    trainer, start = fit(module, tmp_path)
    assert trainer.global_step == 2 and not module.counts["skipped_steps"]
    changed = {n for n, p in weights(module).items() if not torch.equal(p, start.weights[n])}
    assert changed == {n for n in start.weights if ".online." in n}
    assert module.backbone.versions["online"] == start.version + 2
    logged = {k for k in trainer.logged_metrics if k.startswith("train/")}
    assert {"train/grad_norm", "train/lr", "train/policy_learns"} <= logged
    critic = options.get("loss", LossConfig()).critic_weight > 0
    assert ("train/critic" in logged) == critic
    assert all(torch.isfinite(torch.as_tensor(trainer.logged_metrics[k])) for k in logged)


def test_a_step_in_which_all_is_cut_off_is_skipped_and_counted(
    tiny_llama_path: str, tmp_path: Path
) -> None:
    module = build(tiny_llama_path, NEVER_ENDS)
    trainer, start = fit(module, tmp_path)
    assert trainer.global_step == 2 and module.counts["skipped_steps"] == 2
    assert module.counts["backup_dropped"] == module.counts["nothing_to_distil"] == 6
    assert all(torch.equal(p, start.weights[n]) for n, p in weights(module).items())


def test_the_policy_waits_for_the_critic(tiny_llama_path: str, tmp_path: Path) -> None:
    module = build(tiny_llama_path, warmup=WarmupConfig(min_steps=2))
    trainer, _ = fit(module, tmp_path)
    assert trainer.logged_metrics["train/policy_learns"] == 0
    assert "train/policy" not in trainer.logged_metrics
    module = build(tiny_llama_path, warmup=WarmupConfig(min_steps=1))
    trainer, _ = fit(module, tmp_path / "later")
    assert trainer.logged_metrics["train/policy_learns"] == 1


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"improvement": "magic"}, r"model\.improvement"),
        ({"critic": "magic"}, r"model\.critic"),
        ({"base_action": "magic"}, r"model\.base_action"),
        ({"k": 0}, r"model\.k"),
        ({"m": 0}, r"model\.m"),
        ({"n": -1}, r"model\.n"),
        ({"loss": LossConfig(discount=0.9)}, r"model\.loss\.discount"),
        ({"loss": LossConfig(next_actions=2)}, r"model\.loss\.next_actions"),
        (
            {
                "loss": LossConfig(discount=0.9),
                "roles": RolesConfig(endings=ENDINGS),
                "warmup": WarmupConfig(targets="best_outcome"),
            },
            r"model\.warmup\.targets",
        ),
    ],
)
def test_wrong_settings_name_the_field(wrong: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        NLAC(**wrong)


def test_losses_without_weight_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.loss"):
        LossConfig(critic_weight=0.0, policy_weight=0.0)
    with pytest.raises(ConfigError, match=r"model\.loss\.critic"):
        LossConfig(critic="mse")  # type: ignore[arg-type]
    for wrong in ({"discount": 0.0}, {"discount": 1.1}, {"next_actions": 0}):
        with pytest.raises(ConfigError, match=rf"model\.loss\.{next(iter(wrong))}"):
            LossConfig(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"model\.loss\.lower_bound"):
        LossConfig(discount=0.9, lower_bound=True)
