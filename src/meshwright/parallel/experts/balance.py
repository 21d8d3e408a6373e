"""The balance loss of a mixture of experts, that of one device: a product of two means over a micro-batch, whoever holds which part of it.

With n pairs of token and layer, F_e how often expert e was among the top k of these, and P_e the sum of its probabilities,

    balance = E / n^2  sum_e F_e P_e          loss = mean over labels + coefficient x mean over the micro-batches of balance

F is a count and has no gradient, so balance is linear in P: each rank needs the F of all, and adds its own tokens' P. Pipeline stages hand on
(F, P, n) of the layers so far beside the hidden state; the last one makes the loss, and autograd carries the gradient of P back the same way.
Context ranks, and tensor ranks that hold parts of a sequence, add up F and n.

A micro-batch is that of the plan, as on one device that accumulates over the same micro-batches: a mean over other tokens is another loss. Where
routers are and which output holds their logits transformers says (`_can_record_outputs`); that the model's own function is this formula is tried
with numbers. Source: Fedus et al., Switch Transformer, arXiv 2101.03961, equations 4 to 6.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from meshwright.base.errors import InputError
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.objective import Batch
from meshwright.parallel.tensor import collectives

FLAG = "output_router_logits"
TOLERANCE = 1e-4


class Balance:
    """`sums` of the pass that runs: F (E), P (E) and n, one after the other. `share`: of a micro-batch in the loss, in labels."""

    def __init__(
        self, model: nn.Module, mesh: Mesh, coefficient: float, routing: Routing, cut: Callable[[torch.Tensor], torch.Tensor] | None
    ) -> None:
        self.mesh, self.coefficient, self.routing, self.cut = mesh, coefficient, routing, cut
        self.sums: torch.Tensor | None = None
        self.mask: torch.Tensor | None = None
        self.share = 0.0
        self.total = torch.zeros((), dtype=torch.float64, device=mesh.device)
        for module in routing.routers(model):
            module.register_forward_hook(self._note)

    def begin_step(self, share: float) -> None:
        self.share = share
        self.total.zero_()

    def begin(self, batch: Batch, received: torch.Tensor | None) -> None:
        """A pass of a stage; `received`: the sums of the stages before."""
        mask = batch.get("attention_mask")
        self.mask = None if mask is None else self._own(mask).reshape(-1).double()
        zeros = torch.zeros(2 * self.routing.experts + 1, dtype=torch.float64, device=self.mesh.device)
        self.sums = zeros if received is None else received

    def end(self) -> torch.Tensor:
        """The sums of all stages so far. What a backward computes again behind it is not counted."""
        sums, self.sums = self.sums, None
        assert sums is not None
        return sums

    def loss(self, sums: torch.Tensor) -> torch.Tensor:
        """What this rank adds to the sum of the losses of its labels."""
        experts = self.routing.experts
        counted = torch.cat([sums[:experts], sums[-1:]]).detach().clone()
        parted = self.mesh.tp if self.mesh.plan.sequence_parallel else None
        for group in (self.mesh.group("cp"), parted):
            counted = counted if group is None else collectives.sum_over(counted, group)
        own = experts / counted[-1] ** 2 * (counted[:experts] * sums[experts:-1]).sum()
        added = collectives.leave(own, parted) * (self.coefficient * self.share)
        self.total += added.detach()
        return added

    def _own(self, mask: torch.Tensor) -> torch.Tensor:
        """The tokens that this rank's routers see."""
        mask = mask if self.cut is None else self.cut(mask)
        group = self.mesh.tp if self.mesh.plan.sequence_parallel else None
        return mask if group is None else mask.tensor_split(group.size, 1)[group.index]

    def _note(self, module: nn.Module, given: Any, output: Any) -> None:
        chosen, probabilities = counted(self.routing.logits(output), self.routing.chosen, None if self.sums is None else self.mask)
        if self.sums is not None:
            rows = chosen.sum(0, keepdim=True) / self.routing.chosen
            self.sums = self.sums + torch.cat([chosen, probabilities, rows])


def counted(logits: torch.Tensor, chosen: int, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """How often each expert is among the `chosen` highest of a row of `logits` (N, E), and the sum of its probabilities; in float64.

    A block that is computed again does this again, in the pass of another micro-batch: backward keeps the weights of tokens by itself.
    """
    logits = logits.reshape(-1, logits.shape[-1])
    precise = torch.promote_types(logits.dtype, torch.float32)
    probabilities = logits.softmax(-1, dtype=precise)
    if mask is not None and len(mask) != len(logits):
        raise InputError(f"balance loss: the attention mask holds {len(mask)} tokens and the routers see {len(logits)}: leave the mask out")
    weight = logits.new_ones(len(logits), dtype=torch.float64) if mask is None else mask
    picked = torch.zeros_like(probabilities, dtype=torch.float64).scatter_(1, probabilities.detach().topk(chosen, -1).indices, 1.0)
    total = collectives.linear(probabilities.double(), lambda each: weight @ each, lambda gradient: weight.unsqueeze(1) * gradient)
    return weight @ picked, total


class Routing:
    """Where a model of transformers routes: modules of a class, whose output number `index` holds the logits of `experts`, of which `chosen` win."""

    def __init__(self, kind: type[nn.Module], index: int, experts: int, chosen: int) -> None:
        self.kind, self.index, self.experts, self.chosen = kind, index, experts, chosen

    def routers(self, model: nn.Module) -> list[nn.Module]:
        return [module for module in model.modules() if isinstance(module, self.kind)]

    def logits(self, output: Any) -> torch.Tensor:
        found: torch.Tensor = output[self.index] if isinstance(output, tuple | list) else output
        return found


def balance_of(model: nn.Module, loss: object | None, mesh: Mesh, cut: Callable[[torch.Tensor], torch.Tensor] | None) -> Balance | None:
    """What adds the balance loss that the model would; None where it adds none. Raises InputError for one of another form."""
    config: Any = getattr(model, "config", None)
    coefficient = coefficient_of(model)
    if loss is not None or not coefficient:
        return None
    if mesh.plan.micro_batch_sizes:
        raise InputError(
            f"plan {mesh.plan.name}: the balance loss of {type(model).__name__} is a mean over micro-batches, which are of one size: "
            f"use mb{min(mesh.plan.micro_batch_sizes)}, or set {FLAG} to false"
        )
    theirs = getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)
    routing = None if theirs is None else _routing(model, config)
    if routing is None or not _same(theirs, routing):
        raise InputError(
            f"{FLAG} is true, but the balance loss of {type(model).__name__} (router_aux_loss_coef {coefficient}) is not understood; "
            f"set {FLAG} to false, or pass loss=function(output, batch) with one of your own"
        )
    return Balance(model, mesh, coefficient, routing, cut)


def coefficient_of(model: nn.Module) -> float:
    """Of the balance loss in the model's own loss; 0 where it adds none."""
    config: Any = getattr(model, "config", None)
    coefficient = getattr(model, "router_aux_loss_coef", getattr(config, "router_aux_loss_coef", 0))
    return float(coefficient or 0) if getattr(config, FLAG, False) else 0.0


def _routing(model: nn.Module, config: Any) -> Routing | None:
    """What transformers says of where routers are, if that is one class of modules."""
    for module in model.modules():
        recorder = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits")
        if recorder is None:
            continue
        kind, index = (
            (recorder, 0) if isinstance(recorder, type) else (getattr(recorder, "target_class", None), getattr(recorder, "index", 0))
        )
        chosen = getattr(model, "num_experts_per_tok", getattr(config, "num_experts_per_tok", 0))
        experts = getattr(model, "num_experts", getattr(config, "num_local_experts", getattr(config, "num_experts", 0)))
        if isinstance(kind, type) and not getattr(recorder, "layer_name", None) and chosen and experts:
            return Routing(kind, index, int(experts), int(chosen))
    return None


def _same(theirs: Any, routing: Routing) -> bool:
    """Whether the model's function is the formula, with and without a mask."""
    generator = torch.Generator().manual_seed(0)
    layers = tuple(torch.randn(6, routing.experts, generator=generator) for _ in range(2))
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    for given in (None, mask):
        weights = None if given is None else given.flatten().double()
        parts = [counted(logits, routing.chosen, weights) for logits in layers]
        picked, probabilities = (sum(column[1:], column[0]) for column in zip(*parts, strict=True))
        ours = routing.experts * float(picked @ probabilities) / (2 * (6 if given is None else int(given.sum()))) ** 2
        try:
            found = float(theirs(layers, routing.experts, routing.chosen, given))
        except Exception:
            return False
        if abs(found / ours - 1) > TOLERANCE:
            return False
    return True
