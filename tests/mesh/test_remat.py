"""What a block keeps by operation: as little as can be, made again to the bit, never from numbers that were written
meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from meshwright.analysis.recompute_min_cut import RematPlan
from meshwright.analysis.recompute_tape import RematTape

WIDTH = 64
Block = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def gated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    gate, up = (x @ weight).chunk(2, -1)
    return (F.silu(gate) * up) @ weight[:, :WIDTH]


def gelu_by_hand(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x @ weight
    return (0.5 * wide * (1.0 + torch.tanh(0.8 * (wide + 0.04 * wide.pow(3))))) @ weight.t()


def normed_twice(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    def norm(x: torch.Tensor) -> torch.Tensor:
        wide = x.double()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    x = x + norm(x) @ weight[:, :WIDTH]
    return x + norm(x) @ weight[:, WIDTH:]


def repeated_heads(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = torch.sin(x @ weight[:, :WIDTH])
    return wide.unsqueeze(1).expand(-1, 4, -1).reshape(-1, WIDTH) @ weight


def dropped(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.tanh(F.dropout(x @ weight, 0.5)) @ weight.t()


def written_within(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x @ weight
    doubled = wide * 2.0
    doubled.add_(1.0)
    return torch.sigmoid(doubled) @ weight.t()


def run(block: Block, by_operation: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Gradients of what entered and of the weight; what was held."""
    torch.manual_seed(0)
    x = torch.randn(32, WIDTH, requires_grad=True)
    weight = torch.randn(WIDTH, 2 * WIDTH, requires_grad=True)
    held: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        held.append(tensor)
        return tensor

    if not by_operation:
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            block(x, weight).sum().backward()
    else:
        tape = RematTape([x], keep)
        with saved_tensors_hooks(tape.pack, tape.unpack), tape:
            made = block(x, weight)
        tape.finish({})
        made.sum().backward()
    there = {tensor.untyped_storage()._cdata for tensor in (x, weight)}
    found = {tensor.untyped_storage()._cdata: tensor for tensor in held if tensor.untyped_storage()._cdata not in there}
    assert x.grad is not None and weight.grad is not None
    return [x.grad, weight.grad], [*found.values()]


def rows(held: list[torch.Tensor]) -> float:
    """Elements of a width for each of the 32 rows, in float32."""
    return sum(tensor.untyped_storage().nbytes() for tensor in held) / (32 * WIDTH * 4)


@pytest.mark.parametrize(
    ("block", "plain", "least"),
    [
        (gated, 4.0, 2.0),  # gate and up of four
        (gelu_by_hand, 10.0, 2.0),  # the product alone
        (normed_twice, 6.06, 1.0),  # the sum between the norms, and not its copy in twice the bytes
        (repeated_heads, 5.0, 1.0),  # the sine, and neither its argument besides nor its four copies
    ],
)
def test_what_is_held_is_the_least_that_all_else_follows_from(block: Block, plain: float, least: float) -> None:
    (mine, held), (expected, kept) = run(block, True), run(block, False)
    assert all(torch.equal(one, other) for one, other in zip(mine, expected, strict=True))
    assert rows(kept) == pytest.approx(plain, abs=0.1)
    assert rows(held) == pytest.approx(least, abs=0.01)


@pytest.mark.parametrize("block", [dropped, written_within])
def test_chance_and_what_was_written_are_not_made_again(block: Block) -> None:
    (mine, held), (expected, kept) = run(block, True), run(block, False)
    assert all(torch.equal(one, other) for one, other in zip(mine, expected, strict=True))
    assert rows(held) <= rows(kept)


def taped(block: Block) -> tuple[torch.Tensor, torch.Tensor, RematPlan]:
    x, weight = torch.randn(32, WIDTH, requires_grad=True), torch.randn(WIDTH, 2 * WIDTH, requires_grad=True)
    hidden = x * 1.0
    tape = RematTape([hidden])
    with saved_tensors_hooks(tape.pack, tape.unpack), tape:
        made = block(hidden, weight)
    return hidden, made, tape.finish({})


def test_what_is_written_after_the_block_ends_the_backward_in_one_line() -> None:
    hidden, made, _ = taped(normed_twice)
    with torch.no_grad():
        hidden.add_(1.0)
    with pytest.raises(RuntimeError, match="modified in place after it was saved") as caught:
        made.sum().backward()
    assert "\n" not in str(caught.value)


def test_a_graph_that_is_kept_can_be_walked_twice_and_leaves_nothing_made_again() -> None:
    hidden, made, cut = taped(gelu_by_hand)
    first, second = (torch.autograd.grad(made.sum(), hidden, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert cut.recomputed and all(value.recomputed is None for value in cut.recomputed)


def test_what_only_others_that_are_made_again_read_goes_as_soon_as_these_are_there() -> None:
    """Of a gelu by hand the cube and two sums, half of what it makes: no tensor of backward."""
    x, weight = torch.randn(32, WIDTH, requires_grad=True), torch.randn(WIDTH, 2 * WIDTH, requires_grad=True)
    saved: list[Any] = []
    tape = RematTape([x])

    def pack(tensor: torch.Tensor) -> Any:
        saved.append(tape.pack(tensor))
        return saved[-1]

    with saved_tensors_hooks(pack, tape.unpack), tape:
        gelu_by_hand(x, weight)
    cut = tape.finish({})
    last = next(each for each in reversed(saved) if each.recomputes)
    tape.unpack(last)
    there, asked = (
        [value for value in cut.recomputed if value.recomputed is not None],
        {each.view.value for each in saved if each.view},
    )
    assert there and set(there) <= asked and len(cut.recomputed) > len(there) + 2


def two_ends(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x @ weight
    F.silu(wide)[:, :WIDTH] @ weight  # of which no loss hears
    return torch.tanh(wide * wide) @ weight.t()


def test_what_backward_never_asks_for_holds_on_to_nothing_that_was_made_for_others() -> None:
    _, made, cut = taped(two_ends)
    assert len(cut.recomputed) == 3
    made.sum().backward()
    assert all(value.recomputed is None for value in cut.recomputed)


def batched(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.vmap(lambda row: torch.tanh(row * 2.0))(x @ weight) @ weight.t()


def test_functions_of_parts_of_a_batch_are_kept_as_they_are() -> None:
    (mine, _), (expected, _) = run(batched, True), run(batched, False)
    assert all(torch.equal(one, other) for one, other in zip(mine, expected, strict=True))


def test_a_form_of_block_is_decided_once() -> None:
    cuts: dict[Any, tuple[int, ...]] = {}
    weight = torch.randn(WIDTH, 2 * WIDTH, requires_grad=True)
    for _ in range(3):
        x = torch.randn(32, WIDTH, requires_grad=True)
        tape = RematTape([x])
        with saved_tensors_hooks(tape.pack, tape.unpack), tape:
            made = gated(x, weight)
        tape.finish(cuts)
        made.sum().backward()
    assert len(cuts) == 1


def test_an_error_in_the_forward_leaves_no_mode_behind() -> None:
    x = torch.randn(4, WIDTH, requires_grad=True)
    tape = RematTape([x])
    with pytest.raises(RuntimeError), saved_tensors_hooks(tape.pack, tape.unpack), tape:
        torch.tanh(x) @ x
    assert torch.tanh(x).sum().backward() is None and x.grad is not None
