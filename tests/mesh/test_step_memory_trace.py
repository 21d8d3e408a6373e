"""The watch of one step names what ran at the peak: a module, the model's own code, or the loss, which is no module."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from meshwright.train.memory import MODULE_LABEL, StepMemoryTrace, _fill_trace, trace_memory

WORDS = 5000


class Wordy(nn.Module):
    """So many words that what the loss makes of them is the most of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(tokens))


class Squared(Wordy):
    """The most is made by the model's own code."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = super().forward(tokens)
        return (logits.square() + logits.exp()).mean(-1)


def test_the_loss_and_the_code_of_the_model_are_named_at_the_peak() -> None:
    tokens = torch.randint(WORDS, (256,))
    wordy, squared = Wordy(), Squared()
    with trace_memory(wordy) as watch:
        F.cross_entropy(wordy(tokens), tokens).backward()
    assert watch.place in ("forward of the loss", "backward of the loss")
    with torch.enable_grad(), trace_memory(wordy) as watch:
        held = F.cross_entropy(wordy(tokens), tokens)
    assert watch.place == "forward of the loss" and held.requires_grad
    with trace_memory(squared) as watch:
        held = squared(tokens)
    assert watch.place == "forward of the model itself"


def test_what_an_earlier_watch_saw_made_may_go_while_another_looks() -> None:
    gc.collect()  # nothing that tests before this one left is to go meanwhile
    with trace_memory():
        before = torch.ones(1000)
    with trace_memory() as watch:
        del before
        torch.ones(10)
    assert watch.remaining == -4000 and all(moment.buffers >= 0 and moment.activations >= 0 for moment in watch.moments)


TYPES = torch._C._profiler._EventType


def event(at: int, name: str, *children: Any, kind: Any = TYPES.TorchOp, sequence: int = -1) -> Any:
    """As the profiler's, with what lies in it."""
    return SimpleNamespace(
        start_time_ns=at,
        end_time_ns=at + 10,
        name=name,
        children=children,
        typed=(kind, SimpleNamespace(sequence_number=sequence)),
    )


def change(at: int, address: int, size: int, device: str) -> Any:
    details = SimpleNamespace(ptr=address, alloc_size=size, device=torch.device(device))
    return SimpleNamespace(
        start_time_ns=at, end_time_ns=at, name="[memory]", children=(), typed=(TYPES.Allocation, details)
    )


def test_the_memory_trace_of_an_accelerator_counts_its_memory_in_any_thread() -> None:
    """Events as torch hands them out: what a device allocates stands among what the host does meanwhile; backward has a
    thread of its own."""
    forward = event(
        0,
        f"{MODULE_LABEL}head",
        event(1, "aten::mm", change(2, 1, 100, "cuda:0"), change(3, 2, 9000, "cpu"), sequence=7),
        kind=TYPES.PyCall,
    )
    backward = event(
        20,
        "autograd::engine::evaluate_function: MmBackward",
        event(21, "aten::mm", change(22, 3, 200, "cuda:0")),
        sequence=7,
    )
    freed = event(40, "aten::free", change(41, 3, -200, "cuda:0"), change(42, 2, -9000, "cpu"))
    watch = StepMemoryTrace("cuda")
    _fill_trace(watch, [backward, freed, forward])
    assert (watch.peak, watch.remaining, watch.place) == (300, 100, "backward of head")
    assert watch.highest.activations == 300 and watch.highest.buffers == 0
    host = StepMemoryTrace()
    _fill_trace(host, [backward, freed, forward])
    assert (host.peak, host.remaining, host.place) == (9000, 0, "forward of head")
