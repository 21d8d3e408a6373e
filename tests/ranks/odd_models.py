"""Odd models by number: `sample(seed)` draws the features of a job and `Odd(job)` is its model; odd_data.py has the
rest.

A feature is `slot:choice`, such as `between:cumsum` or `head:tied`. A job without features is the plainest model, so a
job
that fails stays a job when a feature is dropped. Slots of places (`front`, `block`, `between`, `once`, `back`) may hold
several tricks of odd_grammar.py: before the blocks, inside each block, between all blocks, behind the second block
only,
and before the head. The other slots hold one choice.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from odd_bodies import BODIES, INNERS, Perceptron
from odd_grammar import BLOCKS, WIDTH, zeroed
from odd_state import TRICKS
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WORDS, INNER_HEAD = 24, 12
MARK = WORDS - 1
"""What no batch holds before the step in which a branch goes the other way."""
LATE = 0.15
"""Share of jobs in which something comes late."""
PLACES = ("front", "block", "between", "once", "back")
SLOTS: dict[str, dict[str, str]] = {
    "input": {"floats": "", "image": "stages sequence", "frequency": "any", "max-norm": "writes", "int32": ""},
    "body": {name: against for name, (_, against) in BODIES.items() if name != "mlp"},
    "inner": {name: against for name, (_, against) in INNERS.items()},
    "stack": {
        "sequential": "",
        "two": "",
        "mixed": "",
        "reversed": "stages",
        "reused": "stages",
        "twice": "stages",
        "skip": "stages",
        "shared-module": "any",
        "shared-weight": "stages",
        "left-out": "any",
        "called-by-name": "stages tensor",
        "dict": "stages tensor",
    },
    "style": {"modules": ""},
    "flow": {
        "pair": "sequence",
        "keyword": "sequence",
        "index": "",
        "boolean": "sequence stages",
        "dict": "stages",
        "object": "any",
        "earlier": "stages sequence",
        "store": "any",
        "checkpoint": "any",
        "reentrant": "any",
        "without-gradient": "any",
        "skipped-in-eval": "any",
    },
    "hook": {
        "block-forward": "stages",
        "block-pre": "stages",
        "block-backward": "any",
        "weights": "tensor",
        "weights-bent": "any",
        "accumulated": "any",
        "model": "",
    },
    "head": {
        "tied": "",
        "functional": "",
        "product": "",
        "zero": "",
        "deep": "",
        "bias-free": "",
        "mean": "sequence",
        "last": "sequence",
        "first": "sequence",
    },
    "output": {"dict": "", "tuple": "", "object": "", "with-hidden": ""},
    "loss": {
        "rows": "sequence",
        "smooth": "sequence",
        "l2": "any",
        "penalty": "rows sequence",
        "contrast": "rows sequence",
        "grows": "any",
        "inside": "rows sequence",
        "tokens": "rows sequence",
        "row-weights": "rows sequence",
        "row-weights-mean": "sequence",
        "captured": "any",
        "captured-inside": "any",
        "running": "any",
        "module": "sequence",
        "shift": "",
    },
    "batch": {
        "mask": "sequence",
        "mask-later": "sequence",
        "mask-gone": "sequence",
        "odd-last": "",
        "labels-late": "",
        "labels-uneven": "",
        "lengths": "",
        "number": "",
        "scalar": "",
        "text": "",
        "longer": "",
        "longer-late": "",
        "boolean": "sequence",
    },
    "late": {
        "scale": "values",
        "rows": "values rows",
        "sequence": "values sequence",
        "one-row": "values rows",
        "no-gradient": "values",
    },
    "train": {
        "frozen": "",
        "frozen-block": "",
        "thaw": "any",
        "freeze": "any",
        "clamp": "any",
        "read": "any",
        "put-back": "any",
        "groups": "",
        "sgd": "",
        "clip": "",
        "no-example": "",
        "evaluate": "",
        "schedule": "",
        "schedule-buffer": "",
        "block-in-eval": "any",
        "scaled-weights": "any",
    },
}
"""The other slots; each choice with what the documentation does not promise for it."""
LATER = ("batch:longer-late", "batch:labels-late", *(f"late:{name}" for name in SLOTS["late"]))
"""Drawn by themselves, since such a job has more steps than others."""


@dataclass(frozen=True)
class Job:
    """A model with what it is trained on and by. `seed` draws its numbers."""

    seed: int
    features: tuple[str, ...] = ()

    def has(self, feature: str) -> bool:
        return feature in self.features

    def one(self, slot: str) -> str:
        return next((each.partition(":")[2] for each in self.features if each.startswith(slot + ":")), "")

    def tricks(self, place: str) -> list[str]:
        return [each.partition(":")[2] for each in self.features if each.startswith(place + ":")]

    @property
    def against(self) -> set[str]:
        """What the documentation does not promise for it, as words of odd_grammar.AGAINST."""
        parts = [each.partition(":") for each in self.features]
        return {
            word
            for slot, _, name in parts
            for word in (TRICKS[name].against if slot in PLACES else SLOTS[slot][name]).split()
        }

    @property
    def own_loss(self) -> bool:
        return self.one("loss") not in ("", "shift") or self.one("head") in ("mean", "last", "first")


def sample(seed: int) -> Job:
    """The job of a number: two to six features, at most one of a slot that is no place."""
    dice = random.Random(seed)
    features: list[str] = []
    for _ in range(dice.choice((2, 3, 3, 4, 4, 5, 6))):
        if dice.random() < 0.5:
            feature = f"{dice.choice(PLACES)}:{dice.choice(list(TRICKS))}"
        else:
            slot = dice.choice([each for each in SLOTS if each != "late"])
            if any(each.startswith(slot + ":") for each in features):
                continue
            feature = f"{slot}:{dice.choice([each for each in SLOTS[slot] if f'{slot}:{each}' not in LATER])}"
        features += [feature] if feature not in features else []
    late = random.Random(f"late {seed}")
    if late.random() < LATE:
        feature = late.choice(LATER)
        features = [each for each in features if not each.startswith(feature.partition(":")[0] + ":")] + [feature]
    return Job(seed, tuple(sorted(features)))


LATE_BRANCHES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "scale": lambda x: torch.tanh(x),
    "rows": lambda x: x + 0.5 * x.mean(0, keepdim=True),
    "sequence": lambda x: x + 0.5 * x.mean(1, keepdim=True),
    "one-row": lambda x: torch.tanh(x),
    "no-gradient": lambda x: 0.5 * x + 0.5 * x.detach(),
}
"""What is done to the hidden state from the step on in which a batch has a mark."""


def add_hooks(kind: str, model: Any) -> None:
    """Hooks on modules and on gradients of weights."""
    for block in model.blocks() if kind.startswith("block") else ():
        if kind == "block-forward":
            block.register_forward_hook(lambda module, given, output: each_tensor(lambda x: x * 1.1, output))
        elif kind == "block-pre":
            block.register_forward_pre_hook(lambda module, given: (given[0] * 0.9, *given[1:]))
        else:
            block.register_full_backward_hook(lambda module, inner, outer: (0.5 * inner[0], *inner[1:]))
    if kind == "model":
        model.register_forward_hook(lambda module, given, output: each_tensor(lambda x: x * 1.1, output))
    for weight in model.parameters() if kind in ("weights", "weights-bent", "accumulated") else ():
        if kind == "accumulated":
            weight.register_post_accumulate_grad_hook(halve_gradient)
        else:
            weight.register_hook((lambda g: 0.5 * g) if kind == "weights" else lambda g: torch.tanh(50 * g) / 50)


def halve_gradient(weight: torch.Tensor) -> None:
    weight.grad.mul_(0.5)  # type: ignore[union-attr]


def each_tensor(change: Callable[[torch.Tensor], torch.Tensor], output: Any) -> Any:
    """`output` with its first floating-point tensor changed."""
    if isinstance(output, torch.Tensor):
        return change(output)
    if isinstance(output, tuple):
        return (change(output[0]), *output[1:])
    if isinstance(output, dict):
        return {name: change(each) if name in ("hidden", "logits") else each for name, each in output.items()}
    return output


# --- the model ------------------------------------------------------------------------------------------------------


class Wrapped(nn.Module):
    """A trick as a module of its own."""

    def __init__(self, trick: str) -> None:
        super().__init__()
        self.trick = trick
        TRICKS[trick].setup(self)

    def forward(self, x: torch.Tensor, index: int = 0) -> torch.Tensor:
        return TRICKS[self.trick].apply(self, x, index)


class Block(nn.Module):
    def __init__(self, body: str, inner: str, tricks: list[str], flow: str) -> None:
        super().__init__()
        self.norm, self.tricks, self.flow = nn.LayerNorm(WIDTH), tricks, flow
        self.body = Perceptron(inner) if body == "mlp" else BODIES[body][0]()
        for trick in tricks:
            TRICKS[trick].setup(self)

    def forward(self, x: torch.Tensor, *more: Any, **named: Any) -> Any:
        """With what the flow of the model gives besides the hidden state, and returns with it."""
        x = x + self.body(self.norm(x))
        for trick in self.tricks:
            x = TRICKS[trick].apply(self, x, 0)
        return x if not self.flow else after_block(self.flow, x, *more, **named)


def after_block(flow: str, x: torch.Tensor, given: Any = None, scale: Any = None) -> Any:
    """What a block does with `given` or `scale` and what it returns."""
    match flow:
        case "pair":
            return x * (1 + 0.1 * given.tanh()), given + x.mean(-1, keepdim=True)
        case "keyword":
            return x * scale
        case "index":
            return x * (1 + 0.1 * given)
        case "boolean":
            return torch.where(given, x, 0.9 * x)
        case "dict":
            return {"hidden": x}
        case "object":
            return SimpleNamespace(hidden=x)
        case "earlier":
            return x + 0.1 * sum(given)
        case "store":
            given["sum"] = given.get("sum", 0.0) + 0.1 * x
            return x + 0.1 * given["sum"]
    return x


class Odd(nn.Module):
    def __init__(self, job: Job) -> None:
        super().__init__()
        torch.manual_seed(job.seed)
        self.job, self.shift_labels = job, job.one("loss") == "shift"
        given = job.one("input")
        if given == "floats":
            self.words = nn.Linear(5, WIDTH)
        elif given == "image":
            self.words = nn.Conv2d(3, WIDTH, 4, 4)
        else:
            self.words = nn.Embedding(
                WORDS, WIDTH, scale_grad_by_freq=given == "frequency", max_norm=1.0 if given == "max-norm" else None
            )
        self.make_blocks()
        self.norm = nn.LayerNorm(WIDTH)
        self.make_head(job.one("head"))
        if job.one("batch") in ("mask", "mask-later", "mask-gone", "boolean"):
            self.masked = nn.Parameter(torch.randn(WIDTH))
        for place in PLACES:
            for trick in job.tricks(place) if place != "block" else ():
                if job.has("style:modules"):
                    setattr(self, f"{place}_{trick.replace('-', '_')}", Wrapped(trick))
                else:
                    TRICKS[trick].setup(self)
        if job.one("flow") == "keyword":
            self.by_keyword = nn.Parameter(torch.ones(WIDTH))
        if job.has("train:schedule"):
            self.schedule = 1.0
        if job.has("train:schedule-buffer"):
            self.register_buffer("schedule", torch.ones(()))
        add_hooks(job.one("hook"), self)
        if job.has("train:frozen") or job.has("train:thaw"):
            self.words.requires_grad_(False)
        if job.has("train:frozen-block"):
            next(iter(self.blocks())).requires_grad_(False)

    def make_blocks(self) -> None:
        job, stack = self.job, self.job.one("stack")
        bodies = [job.one("body") or "mlp"] * BLOCKS
        if stack == "mixed":
            bodies = [body if index % 2 else "mlp" for index, body in enumerate(bodies)]
        blocks = [Block(body, job.one("inner"), job.tricks("block"), job.one("flow")) for body in bodies]
        if stack == "shared-module":
            for block in blocks[1:]:
                block.norm = blocks[0].norm
        if stack == "shared-weight" and isinstance(next(blocks[0].body.parameters()), nn.Parameter):
            inner = next(
                name for name, _ in blocks[0].body.named_parameters() if name.rpartition(".")[2].startswith("weight")
            )
            path, _, name = inner.rpartition(".")
            setattr(blocks[3].body.get_submodule(path), name, blocks[0].body.get_parameter(inner))
        if stack == "two":
            self.layers, self.later = nn.ModuleList(blocks[:2]), nn.ModuleList(blocks[2:])
        elif stack == "sequential":
            self.layers = nn.Sequential(*blocks)
        elif stack == "dict":
            self.layers = nn.ModuleDict(OrderedDict((f"b{index}", block) for index, block in enumerate(blocks)))
        elif stack == "called-by-name":
            for index, block in enumerate(blocks):
                setattr(self, f"block{index}", block)
        else:
            self.layers = nn.ModuleList(blocks)

    def blocks(self) -> list[nn.Module]:
        """In the order in which they run."""
        stack = self.job.one("stack")
        if stack == "called-by-name":
            return [getattr(self, f"block{index}") for index in range(BLOCKS)]
        if stack == "two":
            return [*self.layers, *self.later]
        found = list(self.layers.values()) if stack == "dict" else list(self.layers)
        orders = {
            "reversed": (3, 2, 1, 0),
            "reused": (0, 1, 0, 1, 2, 3),
            "twice": (0, 0, 1, 2, 3, 3),
            "left-out": (0, 1, 3),
            "skip": (1, 0, 2, 3),
        }
        return [found[index] for index in orders.get(stack, range(BLOCKS))]

    def make_head(self, kind: str) -> None:
        if kind in ("functional", "product") and isinstance(self.words, nn.Embedding):
            return
        head = nn.Linear(WIDTH, WORDS, bias=kind not in ("tied", "bias-free"))
        if kind == "tied" and isinstance(self.words, nn.Embedding):
            head.weight = self.words.weight
        self.head = (
            nn.Sequential(nn.Linear(WIDTH, INNER_HEAD), nn.Tanh(), nn.Linear(INNER_HEAD, WORDS))
            if kind == "deep"
            else zeroed(head)
            if kind == "zero"
            else head
        )

    def change(self, place: str, x: torch.Tensor, index: int) -> torch.Tensor:
        for trick in self.job.tricks(place):
            if self.job.has("style:modules"):
                x = getattr(self, f"{place}_{trick.replace('-', '_')}")(x, index)
            else:
                x = TRICKS[trick].apply(self, x, index)
        return x

    def forward(
        self,
        given: torch.Tensor,
        labels: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        weight: torch.Tensor | None = None,
        row_weights: torch.Tensor | None = None,
        factor: float = 1.0,
        kind: str = "",
    ) -> Any:
        x = self.words(given)
        x = x.flatten(2).transpose(1, 2) if x.ndim == 4 else x
        if mask is not None:
            x = torch.where(mask.bool().unsqueeze(-1), self.masked, x)
        if weight is not None:
            x = x * weight.view(-1, 1, 1)
        x = self.change("front", x * factor, 0)
        if self.job.has("train:schedule") or self.job.has("train:schedule-buffer"):
            x = x * self.schedule
        calls = self.job.tricks("between") or self.job.tricks("once") or self.job.one("flow")
        if self.job.one("stack") == "sequential" and not calls:
            x = self.layers(x)
        else:
            carried = self.before_blocks(x)
            for index, block in enumerate(self.blocks()):
                x, carried = self.run_block(block, x, carried, index)
                x = self.change("between", x, index % BLOCKS)
                x = self.change("once", x, index % BLOCKS) if index == 1 else x
        x = self.change("back", x, BLOCKS)
        if self.job.one("late") and bool((given == MARK).any()):
            x = LATE_BRANCHES[self.job.one("late")](x)
        return self.finish(x, labels)

    def before_blocks(self, x: torch.Tensor) -> Any:
        """What the flow carries besides the hidden state, before the first block."""
        match self.job.one("flow"):
            case "pair":
                return x.mean(-1, keepdim=True)
            case "boolean":
                return x.detach()[..., :1] > 0
            case "earlier":
                return [x]
            case "store":
                return {}
        return None

    def run_block(self, block: nn.Module, x: torch.Tensor, given: Any, index: int) -> tuple[torch.Tensor, Any]:
        """The hidden state behind the block, and what the flow carries to the next one."""
        match self.job.one("flow"):
            case "pair":
                return block(x, given)  # type: ignore[no-any-return]
            case "keyword":
                return block(x, scale=self.by_keyword), given
            case "index":
                return block(x, index), given
            case "boolean" | "store":
                return block(x, given), given
            case "dict":
                return block(x)["hidden"], given
            case "object":
                return block(x).hidden, given
            case "earlier":
                x = block(x, given)
                return x, [*given, x]
            case "checkpoint" | "reentrant" as kind:
                return checkpoint(block, x, use_reentrant=kind == "reentrant"), given
            case "without-gradient" if index == 0:
                with torch.no_grad():
                    return block(x), given
            case "skipped-in-eval" if index == 2 and not self.training:
                return x, given
        return block(x), given

    def finish(self, x: torch.Tensor, labels: torch.Tensor | None) -> Any:
        kind, x = self.job.one("head"), self.norm(x)
        x = x.mean(1) if kind == "mean" else x[:, -1] if kind == "last" else x[:, 0] if kind == "first" else x
        if kind == "functional" and isinstance(self.words, nn.Embedding):
            logits = F.linear(x, self.words.weight)
        elif kind == "product" and isinstance(self.words, nn.Embedding):
            logits = x @ self.words.weight.t()
        else:
            logits = self.head(x)
        if self.job.one("loss") == "inside" and labels is not None:
            return {
                "loss": F.cross_entropy(
                    logits.flatten(0, -2), labels.flatten() if logits.ndim == 3 else labels[:, 0], ignore_index=-100
                ),
                "logits": logits,
            }
        output = self.job.one("output")
        return {
            "dict": {"logits": logits}, "tuple": (logits,), "with-hidden": (logits, x),
            "object": SimpleNamespace(logits=logits),
        }.get(output, logits)  # fmt: skip
