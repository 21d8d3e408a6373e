"""Balances the load of experts by a balance loss, a router bias, and a capacity limit. The build passes install the
balance loss and the capacity limit, and the trainer updates the router bias after each step.

Balance loss (auxiliary loss). For one micro-batch of a model with E experts, of which a router chooses k per token:

    n     number of (token, layer) pairs
    F_e   number of these pairs for which expert e is among the k chosen experts
    P_e   sum of the router's probabilities of expert e over these pairs

    balance = E / n^2  sum_e F_e P_e
    loss = mean over labels + coefficient x mean of balance over the micro-batches

The loss equals that of one device, no matter how ranks divide the micro-batch. F is a count and has no gradient, so
balance is linear in P. Each rank needs the F of all ranks, and computes the terms with the P of its own tokens. Each
pipeline stage sends F, P and n, summed over the layers so far, with the hidden state. The last stage computes the loss.
Autograd sends the gradient of P back with the gradient of the hidden state. Context ranks sum F and n over the
sequence. With sequence parallelism, tensor ranks also sum F and n.

The loss depends on how the batch is divided into micro-batches. It equals that of one device which accumulates over the
plan's micro-batches. transformers declares which modules are routers and which of their outputs are logits
(`_can_record_outputs`). `check_aux_loss` verifies with real values that the model's own loss function computes this
formula. Source: Fedus et al., Switch Transformer, arXiv 2101.03961, equations 4 to 6.

Router bias (balance without a loss). A router adds a bias b_e to its scores to choose experts. After every step the
bias decreases for experts with a high load and increases for the others:

    b_e <- b_e + rate x sign(mean load - load_e)          load_e: number of tokens of the whole batch that chose e

The bias has no gradient and no effect on the routing weights: it only decides which experts are chosen. Loads are
counts, so their sums are exact, and the biases are bit for bit equal under every plan. The model or the workload
enables it (`model.expert_bias_rate`, `workload.expert_bias_rate`), because transformers' routers store the bias as a
buffer and leave its update to the trainer. Source: DeepSeek-V3, arXiv 2412.19437, section 2.1.2; Wang et al., arXiv
2408.15664.

Capacity. An expert processes a limited number of a sequence's tokens. Pairs of token and expert beyond this limit are
dropped. The token of a dropped pair still has its other experts and its residual connection.

In a sequence of T tokens with k experts each, each of E experts takes at most ceil(factor x T k / E) pairs, in order of
position. So the dropped pairs depend only on the sequence, and are the same under every plan. A limit changes the
result of the model, so there is a limit only if the model or the workload sets the factor. Ranks that have parts of a
sequence gather the indices of the chosen experts (without gradient). Each rank then selects the pairs of its tokens.
Sources: Lepikhin et al., GShard, arXiv 2006.16668, section 2.2 (whose groups of tokens are sequences here); Fedus et
al., Switch Transformer, arXiv 2101.03961, 2.2.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from meshwright.analysis.graph import ModelGraph, StackedExperts
from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.runtime.comm.group import linear_map
from meshwright.runtime.context_parallel.blocks import HeadTailSplit
from meshwright.runtime.loss import Batch
from meshwright.runtime.parallel_context import ParallelContext
from meshwright.runtime.tensor_parallel import collectives
from meshwright.spec.plan import Plan

ROUTER_LOGITS_FLAG = "output_router_logits"
AUX_LOSS_TOLERANCE = 1e-4


class AuxLoss:
    """Computes the balance loss (module docstring).

    `sums` is the concatenation of F (E values), P (E values) and n of the forward in progress. Between forwards it is
    None. `mask` contains the weight of each token. `share` is the number of labels by which the balance of a
    micro-batch is multiplied. `total` is the sum of the balance losses of the step on this rank. `cut` returns this
    context rank's piece of a mask (B, T).
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: ParallelContext,
        coefficient: float,
        routing: RouterSpec,
        cut: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> None:
        self.mesh, self.coefficient, self.routing, self.cut = mesh, coefficient, routing, cut
        self.sums: torch.Tensor | None = None
        self.mask: torch.Tensor | None = None
        self.share = 0.0
        self.total = torch.zeros((), dtype=torch.float64, device=mesh.device)
        for module in routing.routers(model):
            module.register_forward_hook(self._note)

    def begin_step(self, share: float) -> None:
        """Starts a step. `share`: the number of labels of the batch, divided by the number of micro-batches of all
        replicas."""
        self.share = share
        self.total.zero_()

    def begin(self, batch: Batch, received: torch.Tensor | None) -> None:
        """Starts a forward of a stage. `received`: the sums of the previous stages, None on the first stage."""
        mask = batch.get("attention_mask")
        self.mask = None if mask is None else self._own(mask).reshape(-1).double()
        zeros = torch.zeros(2 * self.routing.experts + 1, dtype=torch.float64, device=self.mesh.device)
        self.sums = zeros if received is None else received

    def end(self) -> torch.Tensor:
        """Ends the forward, so that later recompute is not counted. Returns the sums over all stages so far."""
        sums, self.sums = self.sums, None
        assert sums is not None
        return sums

    def loss(self, sums: torch.Tensor) -> torch.Tensor:
        """Returns the term that this rank adds to the sum of its labels' losses: coefficient x `share` x balance
        (float64 scalar). `sums`: the sums over all stages."""
        experts = self.routing.experts
        counted = torch.cat([sums[:experts], sums[-1:]]).detach().clone()
        parted = self.mesh.tp if self.mesh.plan.sequence_parallel else None
        for group in (self.mesh.group("cp"), parted):
            counted = counted if group is None else collectives.all_reduce_sum(counted, group)
        own = experts / counted[-1] ** 2 * (counted[:experts] * sums[experts:-1]).sum()
        added = collectives.reduce_from_region(own, parted) * (self.coefficient * self.share)
        self.total += added.detach()
        return added

    def _own(self, mask: torch.Tensor) -> torch.Tensor:
        """Returns the part of `mask` for the tokens that this rank's routers process."""
        mask = mask if self.cut is None else self.cut(mask)
        group = self.mesh.tp if self.mesh.plan.sequence_parallel else None
        return mask if group is None else mask.tensor_split(group.size, 1)[group.index]

    def _note(self, module: nn.Module, given: Any, output: Any) -> None:
        chosen, probabilities = count_routed(
            self.routing.logits(output), self.routing.chosen, None if self.sums is None else self.mask
        )
        if self.sums is not None:
            rows = chosen.sum(0, keepdim=True) / self.routing.chosen
            self.sums = self.sums + torch.cat([chosen, probabilities, rows])


def count_routed(logits: torch.Tensor, chosen: int, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns two float64 tensors (E,). For each expert, the first tensor counts the rows of `logits` (N, E) in which
    the expert is among the `chosen` highest. The second tensor sums the expert's probabilities over the rows. `mask`
    (N) weights the rows; None weights them by 1.

    Backward uses the mask of the original call, also if the block is recomputed: during recompute, the mask of
    `AuxLoss` may be that of another micro-batch.

    Raises:
        InputError: `mask` and `logits` have different numbers of tokens.
    """
    logits = logits.reshape(-1, logits.shape[-1])
    precise = torch.promote_types(logits.dtype, torch.float32)
    probabilities = logits.softmax(-1, dtype=precise)
    if mask is not None and len(mask) != len(logits):
        raise InputError(
            Message(
                "balance loss: the attention mask has {tokens} tokens, but the routers get {seen}: leave the mask out",
                tokens=len(mask),
                seen=len(logits),
            )
        )
    weight = logits.new_ones(len(logits), dtype=torch.float64) if mask is None else mask
    picked = torch.zeros_like(probabilities, dtype=torch.float64).scatter_(
        1, probabilities.detach().topk(chosen, -1).indices, 1.0
    )
    total = linear_map(
        probabilities.double(), lambda each: weight @ each, lambda gradient: weight.unsqueeze(1) * gradient
    )
    return weight @ picked, total


class RouterSpec:
    """Describes the routers of a transformers model: modules of class `kind`. Element `index` of a router's output
    contains the logits of `experts` experts. A router selects `chosen` experts for each token."""

    def __init__(self, kind: type[nn.Module], index: int, experts: int, chosen: int) -> None:
        self.kind, self.index, self.experts, self.chosen = kind, index, experts, chosen

    def routers(self, model: nn.Module) -> list[nn.Module]:
        """Returns the router modules of `model`."""
        return [module for module in model.modules() if isinstance(module, self.kind)]

    def logits(self, output: Any) -> torch.Tensor:
        """Returns the logits (N, E) in the output of a router."""
        found: torch.Tensor = output[self.index] if isinstance(output, tuple | list) else output
        return found


def make_aux_loss(
    model: nn.Module, loss: object | None, mesh: ParallelContext, cut: Callable[[torch.Tensor], torch.Tensor] | None
) -> AuxLoss | None:
    """Returns the balance loss of a model whose own loss has a balance loss, otherwise None. `loss`: the user's loss
    function; if given, there is no balance loss. Raises as `check_aux_loss` does."""
    routing = check_aux_loss(model, loss, mesh.plan)
    return None if routing is None else AuxLoss(model, mesh, aux_loss_coefficient(model), routing, cut)


def check_aux_loss(model: nn.Module, loss: object | None, plan: Plan) -> RouterSpec | None:
    """Returns the routers of a model whose own loss adds a balance loss, otherwise None.

    Raises:
        InputError: the balance loss has an unknown formula, or micro-batches have different sizes.
    """
    config: Any = getattr(model, "config", None)
    coefficient = aux_loss_coefficient(model)
    if loss is not None or not coefficient:
        return None
    if plan.micro_batch_sizes:
        raise InputError(
            Message(
                "plan {plan}: the balance loss of {type} is a mean over micro-batches, which must have equal sizes: "
                "use mb{micro_batch_sizes}, or set {router_logits_flag} to false",
                plan=plan.name,
                type=type(model).__name__,
                micro_batch_sizes=min(plan.micro_batch_sizes),
                router_logits_flag=ROUTER_LOGITS_FLAG,
            )
        )
    theirs = getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)
    routing = None if theirs is None else _find_routers(model, config)
    if routing is None or not _is_same_formula(theirs, routing):
        raise InputError(
            Message(
                "{router_logits_flag} is true, but the balance loss of {type} (router_aux_loss_coef {coefficient}) "
                "has an unknown formula; set {router_logits_flag} to false, or pass loss=function(output, batch) "
                "with your own balance loss",
                router_logits_flag=ROUTER_LOGITS_FLAG,
                type=type(model).__name__,
                coefficient=coefficient,
            )
        )
    return routing


def aux_loss_coefficient(model: nn.Module) -> float:
    """Returns the coefficient of the balance loss in the model's own loss, 0 without a balance loss."""
    config: Any = getattr(model, "config", None)
    coefficient = getattr(model, "router_aux_loss_coef", getattr(config, "router_aux_loss_coef", 0))
    return float(coefficient or 0) if getattr(config, ROUTER_LOGITS_FLAG, False) else 0.0


def _find_routers(model: nn.Module, config: Any) -> RouterSpec | None:
    """Returns the routers that transformers declares for `model`, None if it declares no class of routers."""
    for module in model.modules():
        recorder = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits")
        if recorder is None:
            continue
        kind, index = (
            (recorder, 0)
            if isinstance(recorder, type)
            else (getattr(recorder, "target_class", None), getattr(recorder, "index", 0))
        )
        chosen = getattr(model, "num_experts_per_tok", getattr(config, "num_experts_per_tok", 0))
        experts = getattr(model, "num_experts", getattr(config, "num_local_experts", getattr(config, "num_experts", 0)))
        if isinstance(kind, type) and not getattr(recorder, "layer_name", None) and chosen and experts:
            return RouterSpec(kind, index, int(experts), int(chosen))
    return None


def _is_same_formula(theirs: Any, routing: RouterSpec) -> bool:
    """Returns whether the model's balance function `theirs` computes the formula of this module, with and without a
    mask. Compares both for random logits."""
    generator = torch.Generator().manual_seed(0)
    layers = tuple(torch.randn(6, routing.experts, generator=generator) for _ in range(2))
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    for given in (None, mask):
        weights = None if given is None else given.flatten().double()
        parts = [count_routed(logits, routing.chosen, weights) for logits in layers]
        picked, probabilities = (sum(column[1:], column[0]) for column in zip(*parts, strict=True))
        ours = routing.experts * float(picked @ probabilities) / (2 * (6 if given is None else int(given.sum()))) ** 2
        try:
            found = float(theirs(layers, routing.experts, routing.chosen, given))
        except Exception:
            return False
        if abs(found / ours - 1) > AUX_LOSS_TOLERANCE:
            return False
    return True


BIAS_RATE_ATTRIBUTE = "expert_bias_rate"
"""The model attribute that enables the router bias update."""


def check_expert_bias(model: nn.Module, anatomy: ModelGraph) -> None:
    """Checks that every router has a bias buffer, if the model enables the bias update. Called before the model is
    sharded.

    Raises:
        InputError: a router does not have exactly one bias buffer, or the model has no experts.
    """
    rate: Any = getattr(model, BIAS_RATE_ATTRIBUTE, None)
    if rate and not anatomy.experts:
        raise InputError(
            Message(
                "{bias_rate_attribute} {rate:g} updates router biases, but the model has no experts: leave it out",
                bias_rate_attribute=BIAS_RATE_ATTRIBUTE,
                rate=rate,
            )
        )
    for experts in anatomy.experts if rate else ():
        there = len(_bias_buffers(model, experts))
        if there != 1:
            raise InputError(
                Message(
                    "{bias_rate_attribute} {rate:g}: the router of {path} has {there} buffers with one number for "
                    "each expert, but must have exactly 1: leave it out",
                    bias_rate_attribute=BIAS_RATE_ATTRIBUTE,
                    rate=rate,
                    path=experts.path,
                    there=there,
                )
            )


@torch.no_grad()
def update_expert_bias(
    model: nn.Module, anatomy: ModelGraph, here: Collection[str], loads: Sequence[Sequence[float]]
) -> None:
    """Updates the router biases after a step. `here`: the paths of the expert modules on this rank. `loads`: for each
    expert module of the model, the load of each expert divided by the mean load (`expert_loads`)."""
    rate: Any = getattr(model, BIAS_RATE_ATTRIBUTE, None)
    for experts, load in zip(anatomy.experts, loads, strict=True) if rate else ():
        if experts.path in here:
            (bias,) = _bias_buffers(model, experts)
            bias += rate * (1.0 - torch.tensor(load, dtype=torch.float64, device=bias.device)).sign().to(bias.dtype)


def _bias_buffers(model: nn.Module, experts: StackedExperts) -> list[torch.Tensor]:
    around = model.get_submodule(experts.path.rpartition(".")[0])
    return [buffer for buffer in around.buffers() if buffer.shape == (experts.count,) and buffer.is_floating_point()]


CAPACITY_ATTRIBUTE = "expert_capacity"
"""The model attribute that contains the capacity factor."""


class CapacityLimiter:
    """Limits the number of (token, expert) pairs of each expert. `rows` is the number of sequences in the current
    micro-batch, and is set by `ExpertDispatcher`."""

    def __init__(self, factor: float, mesh: ParallelContext) -> None:
        self.factor, self.rows = factor, 1
        self.parts = mesh.tp if mesh.plan.sequence_parallel else None
        self.pieces = mesh.group("cp")

    def mask(self, index: torch.Tensor, experts: int) -> torch.Tensor:
        """Returns a mask (N, k) that is True for those pairs of this rank's tokens that are within the capacity.
        `index` (N, k): the chosen experts. `experts`: the number of experts."""
        whole = index.view(self.rows, -1, index.shape[-1])
        if self.parts is not None:
            whole = collectives.all_gather_dim(whole, self.parts, 1)
        cut = HeadTailSplit(self.pieces.size, self.pieces.index) if self.pieces is not None else None
        if cut is not None and self.pieces is not None:
            whole = cut.in_order(collectives.all_gather_dim(whole, self.pieces, 1), 1)
        saved = within_capacity(whole, experts, self.factor)
        saved = saved if cut is None else cut.cut(saved, 1)
        saved = saved if self.parts is None else collectives.slice_dim(saved, self.parts, 1)
        return saved.reshape(index.shape)


def within_capacity(index: torch.Tensor, experts: int, factor: float) -> torch.Tensor:
    """Returns a mask (B, T, k) that is True for the pairs within the capacity. `index` (B, T, k): the expert indices of
    whole sequences.

    A pair is within the capacity if fewer than ceil(factor T k / `experts`) earlier pairs of its sequence have the same
    expert. An index of `experts` or more means no expert, and such a pair is always within the capacity.

    >>> within_capacity(torch.tensor([[[0], [0], [1], [0]]]), 2, 1.0).flatten().tolist()  # two pairs per expert
    [True, True, True, False]
    >>> within_capacity(torch.tensor([[[2], [2], [0], [0]]]), 2, 0.5).flatten().tolist()  # one pair; 2 is no expert
    [True, True, True, False]
    """
    rows, length, chosen = index.shape
    flat = index.reshape(rows, -1).clamp(max=experts)
    place = F.one_hot(flat, experts + 1).cumsum(1).gather(2, flat.unsqueeze(2)).squeeze(2)
    return ((place <= math.ceil(factor * length * chosen / experts)) | (flat == experts)).view(index.shape)


def make_capacity_limiter(model: nn.Module, mixtures: int, mesh: ParallelContext) -> CapacityLimiter | None:
    """Returns the capacity limiter that the model's attribute `expert_capacity` requests, None without this attribute.
    `mixtures`: the number of expert modules that can have a limit.

    Raises:
        InputError: the factor is not above 0, or the model has no such expert module.
    """
    factor: Any = getattr(model, CAPACITY_ATTRIBUTE, None)
    if factor is None:
        return None
    if not mixtures:
        raise InputError(
            Message(
                "{capacity_attribute} {factor:g} limits the tokens of routed experts, but the model has no such "
                "experts: leave it out",
                capacity_attribute=CAPACITY_ATTRIBUTE,
                factor=factor,
            )
        )
    if not factor > 0:
        raise InputError(
            Message(
                "{capacity_attribute} {factor:g} must be above 0: it is the largest load of an expert as a multiple "
                "of the mean load",
                capacity_attribute=CAPACITY_ATTRIBUTE,
                factor=factor,
            )
        )
    return CapacityLimiter(float(factor), mesh)


def drop_over_capacity(model: nn.Module, mixtures: Sequence[StackedExperts], length: int) -> None:
    """Applies the capacity limit on one device, for comparisons with a plan. `length`: the number of tokens of a
    sequence."""
    factor = float(getattr(model, CAPACITY_ATTRIBUTE))

    def drop(count: int, module: nn.Module, args: tuple[torch.Tensor, ...], kwargs: dict[str, torch.Tensor]) -> Any:
        index = next(tensor for tensor in (*args, *kwargs.values()) if not tensor.is_floating_point())
        saved = within_capacity(index.view(-1, length, index.shape[-1]), count, factor).view(index.shape)
        limited = lambda tensor: (
            tensor * saved if tensor.shape == index.shape and tensor.is_floating_point() else tensor
        )
        return tuple(map(limited, args)), {name: limited(tensor) for name, tensor in kwargs.items()}

    for experts in mixtures:
        model.get_submodule(experts.path).register_forward_pre_hook(partial(drop, experts.count), with_kwargs=True)
