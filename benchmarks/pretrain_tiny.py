"""Pretrain ``tiny-language-mdp``: a small model with the generic skills of the roles.

    python benchmarks/pretrain_tiny.py [--out FOLDER] [--steps 1000] [--json FILE]

It learns on random worlds, drawn from other random streams than those of ``LanguageMDPEnv`` and
with the names of the rooms shuffled anew each time, so it knows how worlds work but no map. What it
sees are the role templates ``language_mdp`` as the framework renders them: any exit as the action,
the place that an exit leads to with an ending at random, another exit where one is criticised.
Prints each role's loss while it trains and its skill on worlds that it was not trained on, and
fails if one is below its bound.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from nlac_lightning.analysis.lessons import TAUGHT, TRAINING, Lessons, Sheet, skills
from nlac_lightning.envs.language_mdp import LanguageMDPEnv
from nlac_lightning.envs.language_mdp.world import ROOMS
from nlac_lightning.models import TINY, TINY_FOLDER
from nlac_lightning.roles.roles import ROLES, RoleConfig, Roles, RolesConfig

PAD, UNKNOWN, END = "<pad>", "<unk>", "<eos>"
TEMPLATE_WORDS = ["is", "ends", "Verdict", "Then", "So", "solved", "failed", "End"]
BOUNDS = {
    "policy": 0.98,
    "successor": 0.98,
    "backup": 1.0,
    "evaluator": 1.0,
    "refinement": 0.95,
    "aggregation": 0.98,
    "hindsight": 0.95,
}
"""Least share of right answers of each role; a refined action is right if it is another exit."""


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
    alone: dict[str, Any] = {role: RoleConfig(context="none") for role in ROLES}
    return Roles(RolesConfig("language_mdp", "plain", "plain", **alone), tokenizer)


def next_logits(
    model: LlamaForCausalLM, sheets: Sequence[Sheet], rename: Tensor
) -> tuple[Tensor, Tensor]:
    """Logits [n, vocabulary] and ids [n] of all answers, sheet by sheet; ``rename`` maps ids."""
    size = max(len(sheet.tree.input_ids) for sheet in sheets)
    ids = torch.zeros(len(sheets), size, dtype=torch.long)
    positions = torch.zeros_like(ids)
    mask = torch.eye(size, dtype=torch.bool).repeat(len(sheets), 1, 1)
    for row, sheet in enumerate(sheets):
        n = len(sheet.tree.input_ids)
        ids[row, :n], positions[row, :n] = sheet.tree.input_ids, sheet.tree.position_ids
        mask[row, :n, :n] = sheet.tree.mask
    hidden = model.model(
        input_ids=rename[ids], position_ids=positions, attention_mask=mask[:, None], use_cache=False
    ).last_hidden_state
    chosen = torch.cat([hidden[row, sheet.sources] for row, sheet in enumerate(sheets)])
    return model.lm_head(chosen), rename[torch.cat([sheet.targets for sheet in sheets])]


def pretrain(
    model: LlamaForCausalLM, roles: Roles, steps: int, batch: int, lr: float, worlds: int
) -> None:
    """AdamW with a short rise and a cosine decay of the step size."""
    sheets = Lessons(roles, TRAINING).draw(worlds)
    tokenizer = roles.codec.tokenizer
    rooms = torch.tensor(tokenizer.convert_tokens_to_ids(list(ROOMS)))
    optimizer = torch.optim.AdamW(model.parameters(), lr, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, steps, pct_start=0.1)
    began = time.process_time()
    for step in range(steps):
        part = [sheets[int(i)] for i in torch.randint(len(sheets), (batch,))]
        rename = torch.arange(len(tokenizer))
        rename[rooms] = rooms[torch.randperm(len(rooms))]
        logits, targets = next_logits(model, part, rename)
        losses = F.cross_entropy(logits, targets, reduction="none")
        # the first id of an answer says what was asked, the others are mostly form
        weights = torch.cat([1.0 + 4.0 * sheet.first for sheet in part])
        (losses * weights / weights.sum()).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 50 == 49 or step == steps - 1:
            seconds = time.process_time() - began
            print(f"{step + 1:5}: {_by_role(part, losses)}, {seconds:.0f} CPU-s", flush=True)


def _by_role(sheets: Sequence[Sheet], losses: Tensor) -> str:
    """Mean loss of each role's answers, in nats per token."""
    names = [
        names[i]
        for sheet in sheets
        for names in [[q.role for q in sheet.questions for _ in q.answers]]
        for i in sheet.branches.tolist()
    ]
    where = torch.tensor([TAUGHT.index(name) for name in names])
    means = [losses.detach()[where == i].mean() for i in range(len(TAUGHT))]
    return ", ".join(f"{role} {mean:.3f}" for role, mean in zip(TAUGHT, means, strict=True))


def main() -> None:
    """Train, measure, save."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=TINY_FOLDER, help="where the model is saved")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=32, help="states of a step")
    parser.add_argument("--worlds", type=int, default=3000, help="states in all, renamed at will")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--start", help="go on from the model in this folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the skills to this file")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    tokenizer = make_tokenizer()
    roles = make_roles(tokenizer)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=True,  # half of what copying a word takes
        initializer_range=0.1,  # 1 / sqrt(width): at the usual 0.02 attention starts blind
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    if options.start:
        model = LlamaForCausalLM.from_pretrained(options.start, dtype=torch.float32)
        model.train()
    print(f"{TINY}: {model.num_parameters():,} parameters, {len(tokenizer)} words", flush=True)
    began, cpu = time.perf_counter(), time.process_time()
    pretrain(model, roles, options.steps, options.batch, options.lr, options.worlds)
    cost = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - cpu}
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    model.eval()
    same = torch.arange(len(tokenizer))
    found = skills(lambda sheet: next_logits(model, [sheet], same)[0], roles)
    for role, share in found.items():
        print(f"{role:12} {share:.4f}  (at least {BOUNDS[role]})")
    print(f"trained in {cost['seconds']:.0f} s, {cost['cpu_seconds']:.0f} CPU-seconds")
    if options.json:
        rows = [
            {"name": f"skill of {role}", "value": share, "unit": "share", "settings": {}}
            for role, share in found.items()
        ] + [{"name": name, "value": x, "unit": "s", "settings": {}} for name, x in cost.items()]
        options.json.write_text(json.dumps({"rows": rows}, indent=2) + "\n")
    low = [role for role, share in found.items() if share < BOUNDS[role]]
    if low:
        raise SystemExit(f"below its bound: {', '.join(low)}; give more --steps")


if __name__ == "__main__":
    main()
