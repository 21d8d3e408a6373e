"""Dispatches tokens to the ranks of their experts and combines the results, around the model's own router and experts.
The build pass `shard_tensors` makes one dispatcher per expert module.

The model routes as on one device. An expert module receives hidden states, the indices of each token's experts and the
routing weights. The dispatcher replaces the forward of the module. It sorts the (token, expert) pairs by expert and
sends each pair to the expert's rank in one all-to-all. There the module's original forward runs with the experts of the
rank, numbered from 0. The results return to the ranks of the tokens, where they are weighted and summed.

No pair is dropped unless the model limits its experts (load_balancing.py), so the result equals that of one device.
Tensor ranks split the inner features of each expert, or store different experts ([Note: expert ranks] in groups.py). If
they store different experts, each tensor rank dispatches a part of the tokens. Some expert modules (Llama 4) receive
one row for every token and every expert of the model. In this case each rank receives all rows of its experts.

Shapes: N tokens, C features, K experts per token, E experts of the model, e experts of this rank, P rows that are sent.

[Note: same steps everywhere] Ranks compute different numbers of pairs, possibly zero. Collectives must still run in the
same order on all ranks. So a rank that receives no pair gives its experts zero gradients in the usual order
(`_ZeroGradients`). The results are weighted after the second all-to-all, so autograd saves its output. If nothing after
this all-to-all were saved, recompute would stop before it on some ranks. Sources: Lepikhin et al., GShard, arXiv
2006.16668, section 2.2; Gale et al., MegaBlocks, arXiv 2211.15841 (dropless).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from meshwright.analysis.expert_modules import replaced_parameters, set_expert_count
from meshwright.analysis.graph import ModelGraph, StackedExperts, local_shard
from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.runtime.comm import async_collectives
from meshwright.runtime.comm.group import CommGroup, linear_map
from meshwright.runtime.expert_parallel.groups import EpGroups
from meshwright.runtime.expert_parallel.load_balancing import CapacityLimiter, check_expert_bias, make_capacity_limiter
from meshwright.runtime.expert_parallel.shared_experts import (
    RowExchange,
    SharedExpertOverlap,
    SharedExperts,
    end_exchange,
    find_shared_experts,
    start_exchange,
)
from meshwright.runtime.loss import Batch, num_rows
from meshwright.runtime.parallel_context import ParallelContext
from meshwright.runtime.tensor_parallel import collectives
from meshwright.runtime.tensor_parallel.random import TensorParallelRng, has_dropout
from meshwright.spec.plan import Plan

MAX_REPORTED_LOADS = 1024
"""Maximum number of experts, over all modules, for which the record of a step lists the load of each expert."""

RowCounts = tuple[tuple[int, ...], ...]
"""Element (i, j) is the number of rows that rank i sends to rank j."""


def check_expert_plan(anatomy: ModelGraph, plan: Plan) -> None:
    """Checks that the experts can be divided over the ranks of the plan.

    Raises:
        InputError: ep does not divide the number of ranks or of experts, the model has no routed experts, or tensor
            ranks cannot split an expert.
    """
    ep = plan.ep
    inner = plan.dp_shard * plan.cp * plan.tp
    if inner % ep:
        raise InputError(
            Message(
                "plan {plan}: ep({ep}) does not divide dp_shard({dp_shard}) * cp({cp}) * tp({tp}) = {inner}",
                plan=plan.name,
                ep=ep,
                dp_shard=plan.dp_shard,
                cp=plan.cp,
                tp=plan.tp,
                inner=inner,
            )
            + (
                Message("; at ZeRO 0 data ranks are replicas: use z1, z2 or z3")
                if plan.dp > 1 and not plan.zero
                else ""
            )
        )
    if ep > 1 and not anatomy.experts:
        why = anatomy.unsupported.get("experts", Message("the model has none"))
        raise InputError(
            Message(
                "plan {plan}: ep({ep}) needs routed experts (mixture of experts); {why}: use ep1",
                plan=plan.name,
                ep=ep,
                why=why,
            )
        )
    for experts in anatomy.experts:
        _check_experts(experts, plan)


def _check_experts(experts: StackedExperts, plan: Plan) -> None:
    """Checks that the experts of one module can be divided over the ranks of the plan."""
    ep, shares = plan.ep, plan.expert_tp
    if experts.count % ep:
        raise InputError(
            Message(
                "plan {plan}: ep({ep}) does not divide experts({count}) of {path}",
                plan=plan.name,
                ep=ep,
                count=experts.count,
                path=experts.path,
            )
        )
    if ep > 1 and shares > 1 and not experts.splits:
        raise InputError(
            Message(
                "plan {plan}: {shares} tensor ranks would shard each expert of {path}, but how to shard these "
                "experts is not known: use another ep",
                plan=plan.name,
                shares=shares,
                path=experts.path,
            )
        )
    if experts.splits and experts.width % shares:
        raise InputError(
            Message(
                "plan {plan}: {shares} tensor ranks do not divide the {width} inner features of {path}",
                plan=plan.name,
                shares=shares,
                width=experts.width,
                path=experts.path,
            )
        )


def local_dispatchers(model: nn.Module, mixtures: Sequence[ExpertDispatcher]) -> list[ExpertDispatcher]:
    """Returns the dispatchers whose expert modules are in the blocks that this rank stores."""
    here = {id(module) for module in model.modules()}
    return [mixture for mixture in mixtures if id(mixture.module) in here]


def shared_experts_by_path(model: nn.Module, anatomy: ModelGraph, ranks: EpGroups) -> dict[str, SharedExperts | None]:
    """Returns the shared experts of the mixture of each expert module (shared_experts.py). The layers must have their
    original forwards. The result is empty if ep is 1."""
    found: dict[type, SharedExperts | None] = {}
    by_path: dict[str, SharedExperts | None] = {}
    for experts in anatomy.experts if ranks.ranks > 1 else ():
        path, _, name = experts.path.rpartition(".")
        mixture = model.get_submodule(path)
        if path and type(mixture) not in found:
            found[type(mixture)] = find_shared_experts(mixture, name)
        by_path[experts.path] = found.get(type(mixture))
    return by_path


def shard_experts(
    model: nn.Module,
    anatomy: ModelGraph,
    ranks: EpGroups,
    mesh: ParallelContext,
    shared: Mapping[str, SharedExperts | None],
) -> list[ExpertDispatcher]:
    """Replaces the parameters of each expert module by the parameters of this rank's experts, and the forward by a
    dispatcher. Returns the dispatchers. `shared`: the result of `shared_experts_by_path`.

    If ep is above 1, the parameters must still be full. If ep is 1, tensor ranks must already have split them.

    Raises:
        InputError: an expert module is wrapped by an adapter, or its bias or capacity is refused (load_balancing.py).
    """
    found = []
    check_expert_bias(model, anatomy)
    capacity = make_capacity_limiter(model, sum(not experts.by_rows for experts in anatomy.experts), mesh)
    for experts in anatomy.experts:
        module = model.get_submodule(experts.path)
        if ranks.ranks > 1:
            for name in experts.names:
                owner, _, short = name.rpartition(".")
                stored = module.get_submodule(owner)._parameters
                if short not in stored:
                    raise InputError(
                        Message(
                            "{path} is wrapped by an adapter, and ep cannot distribute adapted experts: put adapters "
                            "on linear layers, or use ep1",
                            path=experts.path,
                        )
                    )
                full = stored[short]
                assert full is not None
                stored[short] = nn.Parameter(
                    local_experts(full.detach(), experts, name, ranks), requires_grad=full.requires_grad
                )
            set_expert_count(module, experts, experts.count // ranks.ranks)
        if mesh.tp is not None and not mesh.plan.sequence_parallel and has_dropout(module):
            # Tensor ranks compute different features or pairs, so each rank draws its own dropout.
            TensorParallelRng(mesh.tp, 1).attach([module], [module])
        dispatcher = ExpertDispatcher(module, experts, ranks, mesh.plan.sequence_parallel, capacity)
        each = shared.get(experts.path)
        if each is not None and ranks.group is not None and ranks.group.process_group is not None:
            mixture = model.get_submodule(experts.path.rpartition(".")[0])
            dispatcher.overlap = SharedExpertOverlap(mixture, each)
        found.append(dispatcher)
    return found


def local_experts(full: torch.Tensor, experts: StackedExperts, name: str, ranks: EpGroups) -> torch.Tensor:
    """Returns a copy of this rank's shard of the full parameter `name` (E, ...): this rank's experts, and this rank's
    part of each expert if tensor ranks split experts."""
    each = full.shape[0] // ranks.ranks
    mine = full.narrow(0, ranks.place.expert * each, each)
    split = experts.splits.get(name)
    return mine.clone() if split is None else local_shard(mine, split, ranks.place.share, ranks.shares)


def count_pairs_by_expert(
    mixtures: Sequence[ExpertDispatcher], anatomy: ModelGraph, device: torch.device
) -> torch.Tensor:
    """Counts the (token, expert) pairs of this rank's tokens in this step. Returns one flat float64 tensor. For each
    expert module of the model, it contains the number of pairs of each expert (zeros if another module has more
    experts), and then the number of dropped pairs.

    The sum over all ranks is the count of the whole batch, times the number of ranks that have the same token.
    """
    widest = max((experts.count for experts in anatomy.experts), default=0)
    table = torch.zeros(len(anatomy.experts), widest + 1, dtype=torch.float64, device=device)
    rows = {experts.path: row for row, experts in enumerate(anatomy.experts)}
    for mixture in mixtures:
        table[rows[mixture.experts.path], : mixture.load.numel()] = mixture.load.double()
        table[rows[mixture.experts.path], -1] = mixture.dropped
    return table.flatten()


def expert_loads(pairs: torch.Tensor, anatomy: ModelGraph) -> tuple[list[list[float]], float]:
    """Returns for each expert module the number of pairs of each expert, divided by the mean over the module's experts.
    Also returns the fraction of all pairs that was dropped. `pairs`: the result of `count_pairs_by_expert`, summed over
    ranks."""
    if not anatomy.experts:
        return [], 0.0
    table = pairs.detach().view(len(anatomy.experts), -1)
    requested, dropped = table[:, :-1], float(table[:, -1].sum())
    mean = requested.sum(1, keepdim=True).clamp_min(1)
    by_expert = [
        (row * experts.count)[: experts.count].tolist()
        for row, experts in zip(requested / mean, anatomy.experts, strict=True)
    ]
    return by_expert, dropped / max(float(requested.sum()), 1.0)


def summarize_loads(loads: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
    """Returns the loads in the form that the record of a step stores: rounded, and with more than MAX_REPORTED_LOADS
    experts only the smallest and the largest load of each module."""
    few = sum(map(len, loads)) <= MAX_REPORTED_LOADS
    return tuple(tuple(round(load, 3) for load in (row if few else (min(row), max(row)))) for row in loads)


def is_expert_tensor_split(ranks: EpGroups, name: str) -> bool:
    """Returns whether tensor ranks can split the expert parameter with the full name `name`."""
    experts = ranks.dealt[name]
    return name.removeprefix(f"{experts.path}.") in experts.splits


class ExpertDispatcher:
    """Replaces the forward of one expert module. For this rank's tokens since the step began, `load` (E) is the number
    of pairs of each expert, and `dropped` is the number of dropped pairs."""

    def __init__(
        self,
        module: nn.Module,
        experts: StackedExperts,
        ranks: EpGroups,
        sequence_parallel: bool,
        capacity: CapacityLimiter | None = None,
    ) -> None:
        self.module, self.experts, self.ranks = module, experts, ranks
        self.inner = module.forward
        self.each = experts.count // ranks.ranks
        self.shared = ranks.tensor if experts.splits else None
        self.sequence_parallel, self.capacity = sequence_parallel, capacity
        self.load, self.dropped, self.counting = torch.zeros(0), 0.0, False
        self.overlap: SharedExpertOverlap | None = None
        module.forward = self  # type: ignore[method-assign]

    def begin_step(self, batches: Sequence[Batch]) -> None:
        """Resets the counts of a step.

        Raises:
            InputError: experts have a capacity, and micro-batches have different sizes.
        """
        self.load, self.dropped = torch.zeros(0), 0.0
        if self.capacity is not None and len({num_rows(batch) for batch in batches}) > 1:
            raise InputError(
                Message(
                    "expert capacity: the micro-batches have {batches} rows: give all of them the same number of rows",
                    batches=[num_rows(batch) for batch in batches],
                )
            )

    def begin_pass(self, batch: Batch) -> None:
        """Starts a forward with the micro-batch `batch`. Its pairs are counted."""
        self.counting = True
        if self.capacity is not None:
            self.capacity.rows = num_rows(batch)

    def end_pass(self) -> None:
        """Ends the forward, so that later recompute is not counted."""
        self.counting = False

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        given = [*args, *kwargs.values()]
        if self.experts.by_rows:
            return self._by_rows(given[0])
        index = next(at for at, tensor in enumerate(given) if not tensor.is_floating_point())
        hidden, weights = [at for at, tensor in enumerate(given) if tensor.is_floating_point()]
        if self.counting:
            count = torch.bincount(given[index].flatten(), minlength=self.experts.count)[: self.experts.count]
            self.load = count if not self.load.numel() else self.load + count
        if self.capacity is not None:
            given[index], given[weights] = self._drop_over_capacity(given[index], given[weights], self.capacity)
        if self.ranks.ranks == 1 and self.shared is None:
            return self.inner(*given[: len(args)], **dict(zip(kwargs, given[len(args) :], strict=True)))
        shape = given[hidden].shape
        given[hidden] = given[hidden].reshape(-1, shape[-1])
        # Each rank computes a partial sum of the gradient of the routing weights. So the routing weights use the wider
        # of their own dtype and the dtype of the hidden states.
        given[weights] = given[weights].to(torch.promote_types(given[weights].dtype, given[hidden].dtype))
        given = self._enter(given, (hidden, weights))
        if self.ranks.ranks == 1:
            output = self._compute(given[: len(args)], dict(zip(kwargs, given[len(args) :], strict=True)))
        else:
            output = self._exchange_pairs(given[hidden], given[index], given[weights])
        return self._leave(output, shape[:-1].numel()).reshape(shape)

    def _by_rows(self, given: torch.Tensor) -> torch.Tensor:
        """Sends rows (E N, C), which are grouped by expert, to the ranks of the experts. Returns the results (E N, C)
        in the order of the rows."""
        count, width = self.experts.count, given.shape[-1]
        if self.counting:
            requested = given.detach().view(count, -1, width).ne(0).any(2).sum(1)
            self.load = requested if not self.load.numel() else self.load + requested
        if self.ranks.ranks == 1 and self.shared is None:
            return self.inner(given)
        tokens = given.view(count, -1, width).transpose(0, 1).flatten(1)
        (mine,) = self._enter([tokens], (0,))
        output = self._run_local_experts(mine) if self.ranks.ranks == 1 else self._exchange_all_rows(mine)
        whole = self._leave(output, len(tokens))
        return whole.view(-1, count, width).transpose(0, 1).reshape(given.shape)

    def _run_local_experts(self, tokens: torch.Tensor) -> torch.Tensor:
        """Runs each of this rank's e experts on one row of each token. Maps (N, e C) to (N, e C)."""
        rows = tokens.view(len(tokens), self.each, -1).transpose(0, 1)
        return self._compute([rows.flatten(0, 1)], {}).view(rows.shape).transpose(0, 1).flatten(1)

    def _exchange_all_rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """Sends one row per token and expert to the rank of the expert, and receives the results. Maps (N, E C) to
        (N, E C)."""
        group = self.ranks.group
        assert group is not None
        counts = _gather_counts(torch.tensor([len(tokens)], device=tokens.device), group).flatten().tolist()
        rows = tuple((count,) * group.size for count in counts)
        received = self._dispatch(tokens.view(len(tokens), group.size, -1).transpose(0, 1).flatten(0, 1), rows, group)
        back = _all_to_all_rows(self._run_local_experts(received), tuple(zip(*rows, strict=True)), group)
        return back.view(group.size, len(tokens), -1).transpose(0, 1).flatten(1)

    def _drop_over_capacity(
        self, index: torch.Tensor, weights: torch.Tensor, capacity: CapacityLimiter
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns `index` and `weights` without the pairs beyond the capacity of an expert. The weight of a dropped
        pair is 0. With several expert ranks the index of a dropped pair is E, so that the pair is not sent."""
        saved = capacity.mask(index.reshape(-1, index.shape[-1]), self.experts.count).view(index.shape)
        self.dropped += float((~saved).sum()) if self.counting else 0.0
        return index if self.ranks.ranks == 1 else index.masked_fill(~saved, self.experts.count), weights * saved

    def _enter(self, given: list[torch.Tensor], differentiable: tuple[int, ...]) -> list[torch.Tensor]:
        """Returns the tokens that this rank processes. Under sequence parallelism, tensor ranks that split an expert
        gather the tokens of all these ranks. Otherwise all tensor ranks have the same tokens, and tensor ranks with
        different experts process one part each.

        `differentiable`: the indices in `given` of tensors with gradients.
        """
        if self.sequence_parallel:
            return given if self.shared is None else [_all_gather_tokens(tensor, self.shared) for tensor in given]
        joined = self.ranks.joined
        if joined is not None:
            missing = -given[0].shape[0] % joined.size
            given = [collectives.scatter_sequence(F.pad(tensor, (0, 0, 0, missing)), joined, 0) for tensor in given]
        if self.shared is None:
            return given
        return [
            _identity_with_grad_sum(tensor, self.shared) if at in differentiable else tensor
            for at, tensor in enumerate(given)
        ]

    def _leave(self, output: torch.Tensor, tokens: int) -> torch.Tensor:
        if self.sequence_parallel:
            return collectives.reduce_scatter_from_region(output, self.shared, 0)
        return collectives.gather_replicated(collectives.reduce_from_region(output, self.shared), self.ranks.joined, 0)[
            :tokens
        ]

    def _compute(self, args: list[torch.Tensor], kwargs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Runs the module's original forward. The results of tensor ranks that split an expert are summed later. So a
        parameter that all these ranks store in full, such as a bias, is divided by their number."""
        if self.shared is None or not self.experts.replicated:
            return self.inner(*args, **kwargs)
        once = {name: self.module.get_parameter(name) / self.ranks.shares for name in self.experts.replicated}
        with replaced_parameters(self.module, once):
            return self.inner(*args, **kwargs)

    def _exchange_pairs(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Sends hidden states (N, C) to the experts `index` (N, K) on all ranks. Returns the sum of their results,
        weighted by `weights` (N, K): (N, C)."""
        group = self.ranks.group
        assert group is not None
        chosen = index.flatten()
        own = torch.bincount(chosen, minlength=self.experts.count)[: self.experts.count]
        counts = _gather_counts(own, group)
        # The sort puts pairs without an expert (dropped, or index out of range) last, and the slice excludes them.
        order = chosen.argsort(stable=True)[: int(counts[group.index].sum())]
        rows = tuple(tuple(each.view(group.size, -1).sum(1).tolist()) for each in counts)
        received = self._dispatch(hidden[order // index.shape[1]], rows, group)
        mine = counts.view(group.size, group.size, -1)[:, group.index].flatten()
        # The indices are computed on the host and copied, since the device would report the size of the result.
        local = torch.arange(self.each).repeat(group.size).repeat_interleave(mine).to(index.device, non_blocking=True)
        if len(local):
            ones = weights.new_ones(len(local), 1)
            computed = self._compute([received, local.unsqueeze(1), ones], {}).reshape(received.shape)
        else:
            computed = _ZeroGradients.apply(received, *self.module.parameters())
        back = _all_to_all_rows(computed, tuple(zip(*rows, strict=True)), group)
        place = torch.full_like(chosen, len(order))  # pairs without an expert get the row of zeros at the end
        place[order] = torch.arange(len(order), device=order.device)
        back = F.pad(back, (0, 0, 0, 1)) if len(order) < len(chosen) else back
        pairs = back[place].view(*index.shape, hidden.shape[1])
        return (pairs * weights.unsqueeze(2)).sum(1).to(hidden.dtype)

    def _dispatch(self, sent: torch.Tensor, rows: RowCounts, group: CommGroup) -> torch.Tensor:
        """Sends the rows `sent` to the ranks of their experts. Computes the shared experts in the meantime. Returns the
        rows that arrive."""
        if self.overlap is None:
            return _all_to_all_rows(sent, rows, group)
        exchange = RowExchange(rows, group)
        started = start_exchange(sent, exchange)
        self.overlap.compute()
        return end_exchange(started, exchange)


def _gather_counts(counts: torch.Tensor, group: CommGroup) -> torch.Tensor:
    """Returns the counts of all ranks, (ranks, experts), on the CPU: the only wait of the host for the device in a
    layer. `counts`: this rank's number of pairs for each expert."""
    table = torch.empty(group.size, len(counts), dtype=counts.dtype, device=counts.device)
    async_collectives.all_gather(table.view(-1), counts, group).wait()
    return table.cpu()


def _all_to_all_rows(sent: torch.Tensor, rows: RowCounts, group: CommGroup) -> torch.Tensor:
    """Sends the rows `sent` (P, C), sorted by destination rank. Returns the rows that all ranks sent to this rank,
    sorted by source rank. Backward sends the gradients in the reverse direction."""
    again = tuple(zip(*rows, strict=True))
    return linear_map(
        sent,
        lambda x: async_collectives.exchange_rows(x, rows, group),
        lambda gradient: async_collectives.exchange_rows(gradient, again, group),
    )


def _identity_with_grad_sum(x: torch.Tensor, group: CommGroup) -> torch.Tensor:
    """Returns `x`, which is equal on all ranks. Backward sums the gradients of all ranks."""

    def summed(gradient: torch.Tensor) -> torch.Tensor:
        return collectives.all_reduce_sum(gradient.clone(memory_format=torch.contiguous_format), group)

    return linear_map(x, lambda x: x.view_as(x), summed)


def _all_gather_tokens(x: torch.Tensor, group: CommGroup) -> torch.Tensor:
    """Returns the tokens of all ranks. Backward sums the gradients of all ranks."""
    return linear_map(
        x,
        lambda x: collectives.all_gather_dim(x, group, 0),
        lambda gradient: collectives.reduce_scatter_dim(gradient, group, 0),
    )


class _ZeroGradients(torch.autograd.Function):
    """Gives parameters zero gradients if this rank received no rows ([Note: same steps everywhere])."""

    @staticmethod
    def forward(ctx: Any, received: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*parameters)
        return received.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        wanted = ctx.needs_input_grad[1:]
        return gradient, *(
            torch.zeros_like(tensor) if requested else None
            for tensor, requested in zip(ctx.saved_tensors, wanted, strict=True)
        )
