"""What odd models are trained on and by: batches, losses, optimizers, and what a user's own loop does between steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from odd_models import MARK, WORDS, Job
from torch import nn
from torch.nn import functional as F

ROWS, LENGTH, STEPS = 8, 8, 3
LATE_STEPS, LATE = 9, 6
"""Steps of a job in which something comes late, and the step, counted from 0, from which on it is there: no schedule
checks it."""


def batches(job: Job) -> list[dict[str, Any]]:
    """One batch a step, rows first; the same on every rank."""
    found, kind = [], job.one("batch")
    steps = LATE_STEPS if job.one("late") or kind in ("longer-late", "labels-late") else STEPS
    for step in range(steps):
        dice = torch.Generator().manual_seed(1000 * job.seed + step)
        rows = ROWS - 3 if kind == "odd-last" and step == steps - 1 else ROWS
        length = LENGTH + {
            "lengths": (0, 2, -2)[step % 3],
            "longer": 4 * (step > 0),
            "longer-late": 4 * (step == LATE),
        }.get(kind, 0)
        given, length = data(job, dice, rows, length)
        if job.one("late"):
            given = marked(given, ROWS if job.one("late") != "one-row" else 1, step >= LATE)
        labels = torch.randint(0, WORDS, (rows, length), generator=dice)
        if (kind in ("labels-uneven", "odd-last") or (kind == "labels-late" and step >= LATE)) and job.one(
            "loss"
        ) != "inside":
            for row in range(rows):
                labels[row, : (row * 2 + step) % (length - 1)] = -100
        batch: dict[str, Any] = {"given": given, "labels": labels}
        if kind == "mask" or (kind == "mask-later" and step) or (kind == "mask-gone" and not step):
            batch["mask"] = torch.randint(0, 2, (rows, length), generator=dice)
        if kind == "boolean":
            batch["mask"] = torch.randint(0, 2, (rows, length), generator=dice).bool()
        if job.one("loss").startswith("row-weights"):
            batch["row_weights"] = torch.rand(rows, generator=dice).double() + 0.5
        if kind == "number":
            batch["factor"] = 1.0 + 0.25 * step
        if kind == "scalar":
            batch["factor"] = torch.tensor(1.0 + 0.25 * step)
        if kind == "text":
            batch["kind"] = "train"
        found.append(batch)
    return found


def marked(given: torch.Tensor, rows: int, is_late: bool) -> torch.Tensor:
    """`given`, with MARK in the last `rows` rows where `is_late`, and nowhere else."""
    given = torch.where(given == MARK, torch.zeros_like(given), given)
    given[len(given) - rows if is_late else len(given) :, ..., 0] = MARK
    return given


def data(job: Job, dice: torch.Generator, rows: int, length: int) -> tuple[torch.Tensor, int]:
    """What the model reads, and how many places it makes of it."""
    kind = job.one("input")
    if kind == "floats":
        return torch.randn(rows, length, 5, generator=dice).double(), length
    if kind == "image":
        return torch.randn(rows, 3, 8, 8, generator=dice).double(), 4
    ids = torch.randint(0, WORDS, (rows, length), generator=dice)
    return ids.int() if kind == "int32" else ids, length


class OwnLoss:
    """A loss of the user's own over what the model returns."""

    def __init__(self, job: Job, model: nn.Module) -> None:
        self.kind, self.model, self.calls = job.one("loss"), model, 0
        self.captured: list[torch.Tensor] = []
        self.mean = torch.ones((), dtype=torch.float64)
        blocks = list(model.blocks())  # type: ignore[operator]
        inside = [one for block in blocks for one in block.modules() if isinstance(one, nn.Linear)]
        for one in {"captured": blocks, "captured-inside": inside}.get(self.kind, []):
            one.register_forward_hook(lambda module, given, output: self.captured.append(output))

    def __call__(self, output: Any, batch: dict[str, Any]) -> torch.Tensor:
        if self.kind == "inside":
            return output["loss"]
        output = output[0] if isinstance(output, tuple) else output["logits"] if isinstance(output, dict) else output
        logits, labels = getattr(output, "logits", output), batch["labels"]
        if logits.ndim == 2:
            logits, labels = logits.unsqueeze(1), labels[:, -1:].clamp(min=0)
        smoothing = 0.1 if self.kind == "smooth" else 0.0
        each = F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), reduction="none", label_smoothing=smoothing, ignore_index=-100
        )
        by_row = each.view_as(labels).mean(1)
        loss = by_row.mean()
        if self.kind == "tokens":
            loss = each.sum() / (labels != -100).sum()
        if self.kind == "l2":
            loss = loss + 0.01 * sum(one.square().sum() for one in self.model.parameters() if not one.is_complex())
        if self.kind == "penalty":
            loss = loss + 0.1 * logits.mean(0).square().sum()
        if self.kind == "contrast":
            ends = logits[:, -1]
            loss = loss + 0.1 * F.cross_entropy(ends @ ends.t(), torch.arange(len(ends)))
        if self.kind == "row-weights":
            loss = (by_row * batch["row_weights"]).sum() / batch["row_weights"].sum()
        if self.kind == "row-weights-mean":
            loss = (by_row * batch["row_weights"]).mean()
        if self.kind.startswith("captured"):
            loss = loss + 0.05 * sum(first_tensor(each).square().mean() for each in self.captured)
            self.captured.clear()
        if self.kind == "running":
            self.mean = 0.9 * self.mean + 0.1 * loss.detach()
            loss = loss / self.mean
        if self.kind == "grows":
            loss = loss + 0.02 * self.calls * logits.mean(0).square().sum()
            self.calls += self.model.training
        return loss


def first_tensor(output: Any) -> torch.Tensor:
    output = output[0] if isinstance(output, tuple) else output["hidden"] if isinstance(output, dict) else output
    return getattr(output, "hidden", output)


class LossModule(nn.Module):
    """The same as a module, with a temperature that is trained by nobody."""

    def __init__(self, job: Job, model: nn.Module) -> None:
        super().__init__()
        self.of_logits = OwnLoss(job, model)
        self.temperature = nn.Parameter(torch.ones((), dtype=torch.float64), requires_grad=False)

    def forward(self, output: Any, batch: dict[str, Any]) -> torch.Tensor:
        return self.of_logits(output, batch) * self.temperature


def loss_of(job: Job, model: nn.Module) -> Callable[[Any, dict[str, Any]], torch.Tensor] | None:
    """What `parallelize` is given as loss; None where labels and logits say it."""
    return LossModule(job, model) if job.one("loss") == "module" else OwnLoss(job, model) if job.own_loss else None


def plain_loss(job: Job, output: Any, labels: torch.Tensor) -> torch.Tensor:
    """The mean over valid labels of the whole batch, by torch's own loss."""
    output = output[0] if isinstance(output, tuple) else output["logits"] if isinstance(output, dict) else output
    logits = getattr(output, "logits", output)
    if job.one("loss") == "shift":
        labels = F.pad(labels[:, 1:], (0, 1), value=-100)
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100)


def optimizer_of(job: Job) -> Callable[[Any], torch.optim.Optimizer]:
    """AdamW with an epsilon that leaves rounding small, or SGD with momentum; both decay weights."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        given: Any = list(parameters)
        if job.has("train:groups"):
            given = [
                {"params": [one for one in given if one.ndim < 2], "weight_decay": 0.0},
                {"params": [one for one in given if one.ndim > 1]},
            ]
        if job.has("train:sgd"):
            return torch.optim.SGD(given, lr=0.05, momentum=0.9, weight_decay=0.1)
        return torch.optim.AdamW(given, lr=1e-2, eps=1e-3, weight_decay=0.1)

    return make


def between_steps(job: Job, model: nn.Module, step: int, start: dict[str, torch.Tensor]) -> None:
    """What the user's own loop does after a step: `start` is the model's first state dict."""
    kind = job.one("train")
    if kind == "clamp":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.3, 0.3)
    elif kind == "read":
        assert all(
            float(parameter.detach().sum()) == float(parameter.detach().sum())
            for _, parameter in model.named_parameters()
        )
    elif kind == "put-back" and step == 0:
        model.load_state_dict(start)
    elif kind == "schedule":
        model.schedule = 1.0 + 0.1 * step  # type: ignore[assignment]
    elif kind == "schedule-buffer":
        model.schedule.fill_(1.0 + 0.1 * step)  # type: ignore[operator]
    elif kind == "block-in-eval" and step == 0:
        next(iter(model.blocks())).eval()  # type: ignore[operator]
    elif kind == "scaled-weights":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.99)


def before_steps(job: Job, model: nn.Module) -> None:
    """What the user does to the model behind `parallelize`."""
    if job.one("train") in ("freeze", "thaw"):
        for name, parameter in model.named_parameters():
            if name.startswith("words"):
                parameter.requires_grad_(job.one("train") == "thaw")
