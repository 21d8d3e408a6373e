"""Accepts the splits that numeric checks verify: regions over tensor ranks, and the hidden state along the sequence.
analyze.py calls `accept_verified_regions` with the candidates of all blocks. A region consists of column-parallel
layers and the row-parallel layers that read their outputs.

In a small model every block is checked. In a larger model only the first of several identical blocks is checked. A
region stays unsharded if its shards do not compute the same values and gradients as the full block. If the sequence
cannot be split, `AnalysisState.sequence_error` contains the reason.

Sequence parallelism scatters the hidden state at the first block and gathers it after the last block (Korthikanti et
al., 2022, section 4.2.2). So the code of the model between its blocks runs on slices. `sequence_parallel_objection`
checks this code with simulated ranks and without the blocks. Each block is replaced by a function that records its
inputs and returns random values, in full or as a slice. The inputs of blocks, the input of the head, and the gradients
of both must be slices of those of a full run. The gradient of a parameter must be the full gradient on every rank, or
must add up to the full gradient over ranks. Gradients add up if a parameter is applied to slices between the blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from meshwright.analysis.expert_modules import has_experts
from meshwright.analysis.regions import AnalysisState, OuterLayers, RegionCandidate, head_count_candidates
from meshwright.analysis.run_comparison import (
    MAX_COMPARED_NUMEL,
    BlockCall,
    GradProjection,
    ModuleSnapshot,
    RankRunRecord,
    compare_comm_points,
    compare_param_grads,
    find_hidden_states,
    identity,
    replace_first_tensor,
    run_backward,
    sequence_shard,
    skip_blocks,
)
from meshwright.analysis.run_conditions import (
    MAX_PARAMS_CHECK_ALL_BLOCKS,
    fresh_leaves,
    group_identical_blocks,
    leaf_copy,
    set_seed,
)
from meshwright.analysis.verify_sharding import (
    ShardingCheck,
    StopForward,
    open_sharding_check,
    verify_region,
    verify_together,
)

RegionResults = list[tuple[RegionCandidate, str | None]]
"""The regions of a block. Each comes with its verified counts, and with the reason why it stays unsharded (None if it
is sharded).
"""
KnownRegions = dict[str, tuple[str, RegionCandidate, str | None]]
"""Maps each region signature to the block in which a region with this signature was verified, and to the result."""


def accept_verified_regions(state: AnalysisState, outer: OuterLayers, use_random_weights: bool) -> None:
    """Removes the regions from `state.candidates` whose shards do not compute the same values and gradients as the full
    block, and records the reasons in `state`. In a large model, checks only the first of several identical blocks. On
    the meta device without random values, only shapes are compared. If the model does not run in the check, all regions
    from a trace are removed.
    """
    model, blocks = state.model, list(state.candidates)
    if not any(state.candidates.values()) and not has_experts(model):
        return
    parameters = {name: parameter.numel() for name, parameter in model.named_parameters()}
    numbers = group_identical_blocks([model.get_submodule(block) for block in blocks], _list_indices(model, blocks))
    kinds: list[Any] = list(blocks) if sum(parameters.values()) <= MAX_PARAMS_CHECK_ALL_BLOCKS else list(numbers)
    keys = {
        block: (kind, tuple(_region_signature(block, one) for one in state.candidates[block]))
        for block, kind in zip(blocks, kinds, strict=True)
    }
    first: dict[Any, str] = {}
    for block, key in keys.items():
        first.setdefault(key, block)
    patterns = list(first.values())
    needed = _runs_during_check(state, patterns)
    vocabulary = model.get_parameter(f"{outer.embedding}.weight").shape[0] if outer.embedding else 0
    answers: dict[str, RegionResults] = {}
    with ExitStack() as stack:
        stack.enter_context(skip_blocks(model, state.lists, patterns) if len(patterns) < len(blocks) else ExitStack())
        try:
            check = stack.enter_context(
                open_sharding_check(state, patterns, needed, use_random_weights, vocabulary, outer.head)
            )
        except Exception as error:
            why = (
                f"the model does not run with real values ({(str(error).splitlines() or [''])[0][:100]}), so no split "
                "is verified"
            )
            if state.trace is None:  # only the planner may use an unverified Hugging Face plan
                state.unverified_reason = f"base_model_tp_plan of the model is not verified: {why}"
            objection = why if state.trace is not None else None
            answers = {block: [(one, objection) for one in state.candidates[block]] for block in patterns}
            state.sequence_error = why
        else:
            if check.is_meta:
                state.unverified_reason = (
                    "tensor-parallel regions were checked by their shapes only: the model is on the meta device "
                    "here; a run checks them with real tensors"
                )
                state.findings.append(state.unverified_reason)
            answers = _verify_blocks(state, check, patterns, outer)
    for block in blocks:
        pattern = first[keys[block]]
        pairs = zip(state.candidates[block], answers[pattern], strict=True)
        state.candidates[block] = [
            found for one, answer in pairs if (found := _apply_result(state, block, one, pattern, *answer)) is not None
        ]
    _drop_dependent_regions(state)


def _list_indices(model: nn.Module, blocks: Sequence[str]) -> list[int]:
    """Returns the index of each of `blocks` in its list."""
    lists = [path.rpartition(".")[::2] for path in blocks]
    return [list(model.get_submodule(parent)._modules).index(name) for parent, name in lists]


def _verify_blocks(
    state: AnalysisState, check: ShardingCheck, patterns: list[str], outer: OuterLayers
) -> dict[str, RegionResults]:
    """Returns the results of each of the blocks `patterns`. Sets `state.sequence_error` if the sequence cannot be
    split.
    """
    known: KnownRegions = {}
    answers: dict[str, RegionResults] = {}
    sequence = len(state.lists) == 1 and not (state.trace and state.trace.repeated) and not check.is_meta
    for block in patterns:
        along = sequence and not state.sequence_error
        answers[block], why_along = _verify_block(state, check, block, known, along)
        if why_along is not None:
            state.sequence_error = f"{block}: {why_along}"
    if sequence and not state.sequence_error:
        state.sequence_error = _block_order_error(state)
    if sequence and not state.sequence_error:
        why, state.sequence_sliced = sequence_parallel_objection(check, list(state.candidates), outer.head)
        state.sequence_error = why or ""
    return answers


def _verify_block(
    state: AnalysisState, check: ShardingCheck, block: str, known: KnownRegions, sequence: bool
) -> tuple[RegionResults, str | None]:
    """Returns the results of the regions of `block`, and the reason why its hidden state cannot be split (None if it
    can).

    One check verifies all regions together. If it finds a difference, each region is verified separately.
    """
    regions = state.candidates[block]
    kinds = [_region_signature(block, one) for one in regions]
    counts = [head_count_candidates(state.model, block, one) for one in regions]
    if len(regions) > 1 and not known.keys() & set(kinds):
        tried = verify_together(check, block, regions, [guesses[0] for guesses in counts])
        if tried is not None:
            answers: RegionResults = [(one, None) for one in tried]
            why_along = _verify_training(check, block, answers, sequence)
            if all(why is None for _, why in answers):
                known.update({kind: (block, one, None) for kind, one in zip(kinds, tried, strict=True)})
                return answers, why_along
    answers = []
    for one, kind, guesses in zip(regions, kinds, counts, strict=True):
        if kind not in known:
            known[kind] = block, *verify_region(check, block, one, guesses)
        there, found, why = known[kind]
        answers.append((one if why is not None else _rebase_candidate(block, one, there, found), why))
    return answers, _verify_training(check, block, answers, sequence)


def _block_order_error(state: AnalysisState) -> str:
    """Returns why the order in which the blocks run rules out sequence parallelism, '' if they run in the order of
    their list.

    The hidden state is scattered before the first block of the list and gathered after the last one.
    """
    ran = list(state.candidates)
    listed = [
        path
        for name in state.model.get_submodule(state.lists[0])._modules
        if (path := f"{state.lists[0]}.{name}") in state.candidates
    ]
    shown = ", ".join([*ran[:4], *(["..."] if len(ran) > 4 else [])])
    return "" if ran == listed else f"its blocks run in another order than they are listed ({shown})"


def _verify_training(check: ShardingCheck, block: str, answers: RegionResults, sequence: bool) -> str | None:
    """Rejects in `answers` the regions whose training differs from that of the full block. Returns why the hidden state
    cannot be split along the sequence, None if it can or if `sequence` is False.
    """
    good = [number for number, (_, why) in enumerate(answers) if why is None]
    why, along = check.check_training(block, [answers[number][0] for number in good], sequence)
    if why is None:
        return along
    separate = (
        {number: check.check_training(block, [answers[number][0]], False)[0] for number in good}
        if len(good) > 1
        else {good[0]: why}
    )
    if all(one is None for one in separate.values()):
        separate = dict.fromkeys(good, why)
    for number, one in separate.items():
        answers[number] = (answers[number][0], one)
    left = [number for number, one in separate.items() if one is None]
    again, along = check.check_training(block, [answers[number][0] for number in left], sequence)
    for number in left if again is not None else ():
        answers[number] = (answers[number][0], again)
    return along if again is None else check.check_training(block, [], sequence)[1]


def _region_signature(block: str, one: RegionCandidate) -> str:
    """Returns a key that is equal for the corresponding regions of identical blocks."""
    text = (
        repr((one.region, sorted(one.splits.items()), one.sizes)).replace(f"'{block}.", "'").replace(f"'{block}'", "''")
    )
    return text


def _runs_during_check(state: AnalysisState, patterns: list[str]) -> Callable[[str], bool]:
    """Returns a function that takes a parameter name and returns whether the check runs the module of the parameter. It
    does if the parameter is outside of all blocks or in one of the blocks `patterns`.
    """
    run = tuple(f"{block}." for block in patterns)
    inside = tuple(f"{blocks}." for blocks in state.lists)
    return lambda path: not path.startswith(inside) or path.startswith(run)


def _apply_result(
    state: AnalysisState,
    block: str,
    one: RegionCandidate,
    pattern: str,
    answer: RegionCandidate,
    objection: str | None,
) -> RegionCandidate | None:
    """Returns `one`, a region of `block`, with the verified counts and sizes of `answer`, the corresponding region of
    the block `pattern`. If the check rejected `answer`, records the reason `objection` and returns None.
    """
    if objection is not None:
        state.unsharded |= dict.fromkeys((f"{path}.weight" for path in one.region.columns), objection)
        return None
    return _rebase_candidate(block, one, pattern, answer)


def _rebase_candidate(block: str, one: RegionCandidate, pattern: str, answer: RegionCandidate) -> RegionCandidate:
    """Returns `one`, a region of `block`, with the head counts, splits and sizes of `answer`, the corresponding region
    of the block at `pattern`.
    """

    def here(path: str) -> str:
        return block + path.removeprefix(pattern) if path.startswith(pattern) else path

    moved = tuple(type(count)(here(count.path), count.name, count.kind) for count in answer.region.head_counts)
    remaining = {here(name): split for name, split in answer.splits.items()}
    splits = {name: remaining.get(name, split) for name, split in one.splits.items()}
    region = type(one.region)(**{**vars(one.region), "head_counts": moved})
    return one._replace(region=region, splits=splits, sizes=answer.sizes)


def _drop_dependent_regions(state: AnalysisState) -> None:
    """Drops each region that reads a sharded tensor (such as a position bias) from a dropped region of another
    block.
    """
    changed = True
    while changed:
        good = {name for regions in state.candidates.values() for one in regions for name in one.splits}
        changed = False
        for block, regions in state.candidates.items():
            remaining = [one for one in regions if one.weights <= good]
            changed |= len(remaining) < len(regions)
            state.candidates[block] = remaining


SIMULATED_SEQUENCE_RANKS = 2


def sequence_parallel_objection(
    check: ShardingCheck, blocks: Sequence[str], head: str | None
) -> tuple[str | None, tuple[str, ...]]:
    """Returns why the code around `blocks`, the only stack, cannot run on slices of the sequence, None if it can.

    The second result has the names of the parameters outside of the blocks whose gradient is partial on each rank.
    `head` is the path of the vocabulary head, at which the runs stop, or None.
    """
    summed: dict[str, bool] = {}
    for call, reached in zip(check.calls, check.block_calls, strict=True):
        first = next((one for path, one in reached.items() if path in blocks), None)
        if first is None or first.output is None:
            return "its blocks were not seen to run", ()
        before = ModuleSnapshot(check.model)
        try:
            known = _run_between_blocks(check, call, blocks, head, first, 0, 1, None)
            before.restore()
            ranks = []
            for rank in range(SIMULATED_SEQUENCE_RANKS):
                ranks.append(
                    _run_between_blocks(check, call, blocks, head, first, rank, SIMULATED_SEQUENCE_RANKS, known)
                )
                before.restore()
        except Exception as error:
            before.restore()
            return (
                "what the model does around its blocks does not run on a slice "
                f"({(str(error).splitlines() or [type(error).__name__])[0][:100]})",
                (),
            )
        part = "on a slice of the sequence"
        if (
            why := compare_comm_points(known, ranks, part) or compare_param_grads(known, ranks, part, summed)
        ) is not None:
            return why, ()
    inside = tuple(f"{path}." for path in blocks)
    full = next((name for name, is_part in summed.items() if name.startswith(inside) and not is_part), None)
    if full is not None:
        return f"{full} is used outside of its block too, where the sequence is not split", ()
    return None, tuple(name for name, is_part in summed.items() if is_part and not name.startswith(inside))


def _run_between_blocks(
    check: ShardingCheck,
    call: Any,
    blocks: Sequence[str],
    head: str | None,
    form: BlockCall,
    rank: int,
    ranks: int,
    known: RankRunRecord | None,
) -> RankRunRecord:
    """Runs the model without its blocks and returns the record. If `ranks` is 1, the tensors between blocks are full.
    Otherwise they are the slices of `rank` of the tensors in the full run `known`.
    """
    record, model = RankRunRecord(), check.model
    part = sequence_shard(rank, ranks) if ranks > 1 else identity
    undo: list[tuple[nn.Module, Any]] = []

    def at_head(module: nn.Module, args: Any, kwargs: Any) -> None:
        record.contributed["the input of the head", 0] = (find_hidden_states(args, kwargs).clone(), identity)
        raise StopForward

    # This includes the parameters of the blocks, which the code between blocks may read. The blocks do not run here.
    parameters = {name: one for name, one in model.named_parameters() if not one.is_meta}
    inside = tuple(f"{path}." for path in blocks)
    large = {name: one for name, one in parameters.items() if one.numel() > MAX_COMPARED_NUMEL and one.ndim == 2}
    projected = GradProjection({name: one for name, one in large.items() if not name.startswith(inside)}, {})
    set_seed(0)
    with ExitStack() as stack:
        stack.enter_context(check.running())
        stack.enter_context(projected)
        if head is not None:
            stack.callback(model.get_submodule(head).register_forward_pre_hook(at_head, with_kwargs=True).remove)
        for place, path in enumerate(blocks):
            module = model.get_submodule(path)
            undo.append((module, vars(module).get("forward")))
            shards = (part if place else identity, part if place < len(blocks) - 1 else identity)
            module.forward = _random_block(path, place, shards, record, known, form)  # type: ignore[method-assign]
        try:
            args, kwargs = fresh_leaves(call)
            output = model(*args, **kwargs)
            for number, value in enumerate(one for one in tree_leaves(output) if isinstance(one, torch.Tensor)):
                record.contributed[f"output {number} of the model", 0] = (value, identity)
        except StopForward:
            pass
        finally:
            for module, own in undo:
                if own is None:
                    del module.forward
                else:
                    module.forward = own
        run_backward(record, known or record, parameters, projected)
    return record


def _random_block(
    path: str,
    seed: int,
    shards: tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]],
    record: RankRunRecord,
    known: RankRunRecord | None,
    form: BlockCall,
) -> Callable[..., Any]:
    """Returns a replacement for the forward of the block at `path`. The replacement records its inputs and returns
    random values with the structure of `form.output`.

    `shards` are two functions, which slice the segment of the rank out of the input and out of the output.
    """

    def returned(*args: Any, **kwargs: Any) -> Any:
        hidden = find_hidden_states(args, kwargs)
        record.contributed[f"the input of {path}", 0] = (hidden.clone(), shards[0])
        others = [
            value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor) and value is not hidden
        ]
        for number, value in enumerate(others):
            record.contributed[f"argument {number} of {path}", 0] = (value, identity)
        there = hidden if known is None else known.contributed[f"the input of {path}", 0][0]
        made = torch.randn(there.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(there)
        leaf = leaf_copy(shards[1](made))
        record.received[f"the output of {path}", 0] = (leaf, shards[1])
        return replace_first_tensor(fresh_leaves(form.output), leaf.clone())

    return returned
