"""The losses against their formulas in float64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from nlac_lightning.losses import token_kl, token_nll

N, D, VOCABULARY = 7, 6, 11


@pytest.fixture
def head() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(D, VOCABULARY, bias=False)


def states(seed: int, n: int = N) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, D, generator=generator).requires_grad_()


def log_p(hidden: Tensor, head: nn.Linear) -> Tensor:
    logits = hidden.double() @ head.weight.detach().double().T
    return logits - logits.exp().sum(-1, keepdim=True).log()


def nll_formula(hidden: Tensor, head: nn.Linear, targets: Tensor) -> Tensor:
    return -log_p(hidden, head)[range(len(targets)), targets]


def kl_formula(teacher: Tensor, student: Tensor, head: nn.Linear) -> Tensor:
    p, q = log_p(teacher, head).detach(), log_p(student, head)
    return (p.exp() * (p - q)).sum(-1)


def compare(
    make: Callable[[Tensor], Tensor], formula: Callable[[Tensor], Tensor], hidden: Tensor
) -> None:
    """Values and the gradient of an uneven weighting agree."""
    weights = torch.arange(1.0, len(hidden) + 1)
    reference = hidden.detach().double().requires_grad_()
    value, truth = make(hidden), formula(reference)
    torch.testing.assert_close(value.double(), truth, atol=1e-5, rtol=1e-5)
    (value * weights).sum().backward()
    (truth * weights).sum().backward()
    assert hidden.grad is not None and reference.grad is not None
    torch.testing.assert_close(hidden.grad.double(), reference.grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("chunk", [1, 3, N, 1000])
def test_nll(head: nn.Linear, chunk: int) -> None:
    targets = torch.tensor([0, 3, 3, 10, 1, 7, 5])
    compare(
        lambda h: token_nll(h, head, targets, chunk),
        lambda h: nll_formula(h, head, targets),
        states(1),
    )


@pytest.mark.parametrize("chunk", [1, 3, N, 1000])
def test_kl(head: nn.Linear, chunk: int) -> None:
    teacher = states(2)
    compare(
        lambda h: token_kl(teacher, h, head, chunk),
        lambda h: kl_formula(teacher, h, head),
        states(3),
    )
    assert teacher.grad is None


def test_kl_of_a_distribution_to_itself_is_zero(head: nn.Linear) -> None:
    same = states(4)
    torch.testing.assert_close(token_kl(same, same, head), torch.zeros(N), atol=1e-6, rtol=0)


def test_kl_is_teacher_to_student_and_not_the_reverse(head: nn.Linear) -> None:
    a, b = states(5), states(6)
    forward, reverse = kl_formula(a, b, head), kl_formula(b, a, head)
    assert (forward - reverse).abs().max() > 0.01
    torch.testing.assert_close(token_kl(a, b, head).double(), forward, atol=1e-5, rtol=1e-5)


def test_zero_positions_have_no_loss_but_a_graph(head: nn.Linear) -> None:
    for make in (
        lambda h: token_nll(h, head, torch.zeros(0, dtype=torch.long)),
        lambda h: token_kl(states(8, 0), h, head),
    ):
        empty = states(7, 0)
        value = make(empty)
        assert value.shape == (0,) and value.dtype == torch.float32
        value.sum().backward()
        assert empty.grad is not None


@pytest.mark.parametrize("kind", ["nll", "kl"])
def test_logits_exist_for_a_chunk_at_a_time_only(kind: str) -> None:
    rows = []

    def head(hidden: Tensor) -> Tensor:
        rows.append(len(hidden))
        return hidden.repeat(1, 2)

    hidden = states(9)
    if kind == "nll":
        token_nll(hidden, head, torch.zeros(N, dtype=torch.long), chunk=2).sum().backward()
    else:
        token_kl(states(10), hidden, head, chunk=2).sum().backward()
    heads = 1 if kind == "nll" else 2  # the teacher's logits are made chunk by chunk as well
    assert max(rows) == 2 and sum(rows) == N * heads, "none is computed twice"
