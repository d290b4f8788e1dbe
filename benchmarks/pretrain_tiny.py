"""Pretrain ``tiny-language-mdp``: a small model with the generic skills of the five roles.

    python benchmarks/pretrain_tiny.py [--out FOLDER] [--steps 500] [--json FILE]

It learns on random worlds, drawn from other random streams than those of ``LanguageMDPEnv`` and
with names and ways shuffled anew each time, so it knows how worlds work but no map. What it sees
are the role templates ``language_mdp`` as the framework renders them: any exit as the action, the
place that an exit leads to with an ending at random, another exit where one is criticised. Prints
each role's skill on worlds that it was not trained on, and fails if one is below its bound.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from nlac_lightning.envs.base import OracleCritique
from nlac_lightning.envs.language_mdp import LanguageMDPEnv
from nlac_lightning.envs.language_mdp.levels import LEVELS
from nlac_lightning.envs.language_mdp.texts import (
    dark_text,
    goal_text,
    reason_text,
    said,
    state_text,
    trap_text,
    wall_text,
)
from nlac_lightning.envs.language_mdp.world import DIRECTIONS, TRAP, World, draw_world
from nlac_lightning.models import TINY, TINY_FOLDER
from nlac_lightning.roles.roles import ROLES, RoleConfig, Roles, RolesConfig

PAD, UNKNOWN, END = "<pad>", "<unk>", "<eos>"
TEMPLATE_WORDS = ["leads", "to", "is", "Verdict", "Then", "So", "solved", "failed", "End"]
TRAINING, TESTING = 1, 2
"""Streams of worlds; ``LanguageMDPEnv`` draws its own from neither."""
BOUNDS = {"policy": 0.98, "successor": 0.98, "backup": 1.0, "evaluator": 1.0, "refinement": 0.95}
"""Least share of right answers of each role; a refined action is right if it is another exit."""

Item = tuple[str, tuple[int, ...], str, tuple[str, ...]]
"""Role, prompt, the answer to learn, and all answers that are right."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each word and mark; a line break is a word, spaces are not."""
    words = sorted({*LanguageMDPEnv.vocabulary(), *TEMPLATE_WORDS, "\n", *".,:"})
    vocabulary = {word: i for i, word in enumerate([PAD, UNKNOWN, END, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\n|\w+|[^\w\s]"), "isolated"),
            pre_tokenizers.Split(Regex(r"[^\S\n]+"), "removed"),
        ]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.WordPiece(prefix="##", cleanup=True),
            decoders.Fuse(),
            decoders.Replace(" :", ":"),
            decoders.Replace(Regex(r" ?\n ?"), "\n"),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, unk_token=UNKNOWN, eos_token=END
    )


def make_roles(tokenizer: PreTrainedTokenizerFast) -> Roles:
    """The roles as ``configs/language_mdp.yaml`` has them."""
    alone = {role: RoleConfig(context="none") for role in ROLES}
    return Roles(RolesConfig("language_mdp", "plain", "plain", **alone), tokenizer)


class Lessons:
    """Draws questions to the roles, with their answers."""

    def __init__(self, roles: Roles, stream: int) -> None:
        self.roles = roles
        self.rng = np.random.Generator(np.random.Philox(np.random.SeedSequence([7_001, stream])))

    def draw(self, count: int) -> list[Item]:
        """``count`` items, the roles that have to look something up more often."""
        items: list[Item] = []
        while len(items) < count:
            level = LEVELS[int(self.rng.integers(1, 4))]
            world = draw_world(level.shape, self.rng)
            rooms = list(world.exits)
            for role in self.rng.choice(ROLES, 16, p=(0.2, 0.35, 0.1, 0.1, 0.25)):
                room, goal = (str(x) for x in self.rng.choice(rooms, 2, replace=False))
                items.append(getattr(self, f"_{role}")(world, room, goal))
        return items[:count]

    def _item(self, role: str, seen: str, answers: Sequence[str], **fields: object) -> Item:
        prompt = self.roles.prompt(role, (), [said(seen)], **fields)
        answer = str(self.rng.choice(list(answers)))
        return role, prompt.ids, answer, tuple(answers)

    def _seen(self, world: World, room: str, goal: str) -> str:
        text = wall_text if self.rng.random() < 0.1 else state_text
        return text(world, room, goal)

    def _policy(self, world: World, room: str, goal: str) -> Item:
        return self._item("policy", self._seen(world, room, goal), list(world.exits[room]))

    def _successor(self, world: World, room: str, goal: str) -> Item:
        anywhere = self.rng.random() < 0.1
        action = str(self.rng.choice(DIRECTIONS if anywhere else list(world.exits[room])))
        target = world.exits[room].get(action, "no such exit")
        ending = "failed" if target == TRAP or self.rng.random() < 0.5 else "solved"
        ending = "solved" if target == goal else ending
        answers = [f"{target}. End: {ending}."]
        return self._item("successor", self._seen(world, room, goal), answers, action=action)

    def _backup(self, world: World, room: str, goal: str) -> Item:
        solved = bool(self.rng.random() < 0.5)
        terminal = bool(self.rng.random() < 0.4)
        answers = ["solved." if solved else "failed."]
        after = f"{self.rng.choice([*world.exits, TRAP, 'no such exit'])}. End: {answers[0]}"
        replies = self._seen(world, room, goal)
        if terminal and self.rng.random() < 0.5:
            lost = str(self.rng.choice([trap_text(), dark_text(room)]))
            replies = goal_text(goal) if solved else lost
        return self._item(
            "backup",
            "",
            answers,
            replies=replies,
            terminal=terminal,
            reward=float(solved),
            next_description=after,
        )

    def _evaluator(self, world: World, room: str, goal: str) -> Item:
        k = int(self.rng.choice([1, 1, 3]))
        solved = self.rng.random(k) < 0.5
        places = [*world.exits, TRAP, "no such exit"]
        futures = [
            f"{self.rng.choice(places)}. End: {'solved' if s else 'failed'}." for s in solved
        ]
        answers = ["good." if 2 * solved.sum() > k else "bad."]
        return self._item("evaluator", "", answers, descriptions=futures)

    def _refinement(self, world: World, room: str, goal: str) -> Item:
        exits = list(world.exits[room])
        action = str(self.rng.choice(exits))
        others = [way for way in exits if way != action]
        told = self.rng.random() < 0.3
        good = bool(self.rng.random() < 0.25)
        better = action if good else str(self.rng.choice(others))
        reason = reason_text(good, world.exits[room][action])
        critique = OracleCritique(good, reason, better).text()
        if not told:
            critique = "good." if good else "bad."
        answers = [action] if good else [better] if told else others
        seen = self._seen(world, room, goal)
        return self._item("refinement", seen, answers, action=action, critique=critique)


def batch_of(items: Sequence[Item], roles: Roles) -> tuple[Tensor, Tensor]:
    """Ids and labels [n, length], padded on the right; only answers are learned."""
    answers = [roles.codec.text(f" {item[2]}\n") for item in items]
    longest = max(len(item[1]) + len(a) for item, a in zip(items, answers, strict=True))
    ids = torch.zeros(len(items), longest, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for row, (item, answer) in enumerate(zip(items, answers, strict=True)):
        start, end = len(item[1]), len(item[1]) + len(answer)
        ids[row, :end] = torch.tensor(item[1] + answer)
        labels[row, start:end] = ids[row, start:end]
    return ids, labels


def pretrain(model: LlamaForCausalLM, roles: Roles, steps: int, batch: int, lr: float) -> None:
    """AdamW with a short rise and a cosine decay of the step size."""
    lessons = Lessons(roles, TRAINING)
    optimizer = torch.optim.AdamW(model.parameters(), lr, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, steps, pct_start=0.05)
    began = time.perf_counter()
    for step in range(steps):
        ids, labels = batch_of(lessons.draw(batch), roles)
        hidden = model.model(ids).last_hidden_state[:, :-1]
        wanted = labels[:, 1:]
        learned = wanted >= 0
        loss = torch.nn.functional.cross_entropy(model.lm_head(hidden[learned]), wanted[learned])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 50 == 49:
            seconds = time.perf_counter() - began
            print(f"step {step + 1}: loss {loss.item():.3f}, {seconds:.0f} s", flush=True)


@torch.no_grad()
def skills(model: LlamaForCausalLM, roles: Roles, count: int = 2000) -> dict[str, float]:
    """Share of each role's sampled (policy, refinement) or greedy answers that are right."""
    model.eval()
    hits: dict[str, list[bool]] = {role: [] for role in ROLES}
    generator = torch.Generator().manual_seed(0)
    items = Lessons(roles, TESTING).draw(count)
    for role, prompt, answer, right in items:
        ids = list(prompt)
        # an ending is a matter of chance, what the successor can know is the place
        length = len(roles.codec.text(answer)) - (3 if role == "successor" else 0)
        for _ in range(length):
            logits = model(torch.tensor([ids])).logits[0, -1]
            if role in ("policy", "refinement"):
                token = int(torch.multinomial(logits.softmax(-1), 1, generator=generator))
            else:
                token = int(logits.argmax())
            ids.append(token)
        said_ids = tuple(ids[len(prompt) :])
        hits[role].append(said_ids in {roles.codec.text(a)[:length] for a in right})
    return {role: float(np.mean(values)) for role, values in hits.items()}


def main() -> None:
    """Train, measure, save."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=TINY_FOLDER, help="where the model is saved")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the skills to this file")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    tokenizer = make_tokenizer()
    roles = make_roles(tokenizer)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=96,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=2048,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )
    print(f"{TINY}: {model.num_parameters():,} parameters, {len(tokenizer)} words", flush=True)
    began = time.perf_counter()
    cpu = time.process_time()
    pretrain(model, roles, options.steps, options.batch, options.lr)
    cost = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - cpu}
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    found = skills(model, roles)
    for role, share in found.items():
        print(f"{role:10} {share:.3f}  (at least {BOUNDS[role]})")
    print(f"trained in {cost['seconds']:.0f} s, {cost['cpu_seconds']:.0f} CPU-seconds")
    if options.json:
        options.json.write_text(json.dumps({"skills": found, **cost}, indent=2) + "\n")
    low = [role for role, share in found.items() if share < BOUNDS[role]]
    if low:
        raise SystemExit(f"below its bound: {', '.join(low)}; give more --steps")


if __name__ == "__main__":
    main()
