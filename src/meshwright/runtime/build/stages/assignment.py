"""Assigns layers, parameters and buffers of a model to pipeline stages. partition.py calls these functions before the
model is sharded.

They read a `DataflowRecord`: the operations of one forward of the whole model on an example batch.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from meshwright.analysis.dataflow import DataflowRecord, Obstacle, StageInterface, trace_stage_parameters
from meshwright.analysis.graph import ModelGraph
from meshwright.analysis.recompute_tape import OWN_CHECKPOINT_REASON
from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.runtime.pipeline.block_wrapper import BoundarySpec
from meshwright.spec.plan import Plan

ParamStages = Mapping[str, tuple[int, ...]]
"""For each parameter outside of the blocks, the indices of the stages that compute with it, in ascending order."""

NO_PARAM_STAGES: ParamStages = {}


def check_block_calls(record: DataflowRecord, graph: ModelGraph, plan: Plan) -> None:
    """Checks that a forward calls each block once, in the order of the blocks.

    Raises:
        InputError: A block is called more than once, never, out of order, without autograd, only in some forwards, or
            inside an activation checkpoint of the model's own code. Pipeline stages cannot begin and end at such calls.
    """
    paths, where = graph.block_paths, f"plan {plan.name}:"
    if record.obstacle is not None:
        what, block = record.obstacle
        reasons: dict[Obstacle, str] = {
            "again": OWN_CHECKPOINT_REASON,
            "no_grad": "runs inside a custom autograd function or torch.no_grad, where torch records no gradients",
            "random": "runs in some forwards and not in others (layers dropped at random?)",
        }
        raise InputError(
            Message(
                "{where} {paths} {reasons}, but pipeline stages must begin and end between blocks: use pp1",
                where=where,
                paths=paths[block],
                reasons=reasons[what],
            )
        )
    twice = next((block for block, times in Counter(record.calls).items() if times > 1), None)
    if twice is not None:
        raise InputError(
            Message(
                "{where} {paths} runs more than once in a pass, but pipeline stages must begin and end between "
                "blocks: use pp1",
                where=where,
                paths=paths[twice],
            )
        )
    missing = next((path for block, path in enumerate(paths) if block not in record.calls), None)
    if missing is not None:
        raise InputError(
            Message(
                "{where} {missing} did not run in the traced pass: give parallelize an example batch with which it "
                "runs, or use pp1",
                where=where,
                missing=missing,
            )
        )
    earlier = next((paths[after] for before, after in pairwise(record.calls) if after < before), None)
    if earlier is not None:
        raise InputError(
            Message(
                "{where} the model alternates between its lists of blocks ({earlier} runs after a block of a later "
                "list), but stages run all blocks of a list before the next list: use pp1"
                if len(graph.stacks) > 1
                else "{where} {earlier} runs after a later block of the same list, but stages run blocks in the order "
                "of the list: use pp1",
                where=where,
                earlier=earlier,
            )
        )


def _read_elsewhere(plan: Plan, name: str, stage: int, stored: int) -> InputError:
    """Returns the error for a parameter of a block on stage `stored` that is also read on `stage`."""
    return InputError(
        Message(
            "plan {plan}: stage {stage} reads {name}, which belongs to a block of stage {stored}: use pp1, or move "
            "the parameter out of the blocks",
            plan=plan.name,
            name=name,
            stage=stage,
            stored=stored,
        )
    )


def find_param_stages(
    record: DataflowRecord,
    graph: ModelGraph,
    boundary: BoundarySpec,
    bounds: Mapping[int, tuple[int, int]],
    plan: Plan,
    own_loss: bool,
) -> ParamStages:
    """Returns the stages that compute with each parameter outside of the blocks.

    Each stage stores the parameters of its blocks, and those parameters outside of blocks on which its outputs depend.
    If several stages store a parameter, such as a tied embedding, its gradients are summed over these stages.

    `bounds`: for each stage, its first block and the index after its last block. `own_loss`: whether the user passed a
    loss function.

    Raises:
        InputError: A stage reads a parameter of another stage's block, or a value that no earlier stage sends. Or a
            block needs a mask or integers that are computed from parameters, which stages cannot send.
    """
    if boundary.unsent:
        raise InputError(
            Message(
                "{unsent} gets a mask or integers computed from weights of another stage, but stages send only "
                "floats: use pp1, or pass them as floats",
                unsent=boundary.unsent,
            )
        )
    paths = graph.block_paths
    stage_of = {
        name: stage
        for stage, (start, stop) in bounds.items()
        for path in paths[start:stop]
        for name in record.names
        if name.startswith(f"{path}.")
    }
    found: dict[str, list[int]] = defaultdict(list)
    for number, (start, stop) in bounds.items():
        receives = boundary.message(start) if number else ()
        sends = boundary.message(stop) if number + 1 < len(bounds) else ()
        stage = StageInterface(
            start, stop, receives, tuple(key for key in sends if key not in receives), boundary.firsts
        )
        needed, lost = trace_stage_parameters(record, stage, paths, own_loss)
        if lost:
            raise InputError(
                Message(
                    "plan {plan}: stage {number} reads values that layers of an earlier stage compute but do not "
                    "send ({lost}): choose other layers per stage, or use pp1",
                    plan=plan.name,
                    number=number,
                    lost=lost,
                )
            )
        for name in sorted(needed):
            if name in stage_of:
                raise _read_elsewhere(plan, name, number, stage_of[name])
            found[name].append(number)
    return {name: tuple(stages) for name, stages in found.items()}


def find_buffer_stages(
    record: DataflowRecord,
    graph: ModelGraph,
    bounds: Mapping[int, tuple[int, int]],
    saved: Collection[str],
    plan: Plan,
) -> dict[str, int]:
    """Returns for each buffer that the forward writes to the stage that updates it.

    Code before the first block, or between two blocks, also runs on all later stages. On these it computes with
    placeholders, and writes wrong values to buffers. So a buffer is updated only by the first stage that writes to it.

    `saved`: the names of the state dict's entries.

    Raises:
        InputError: Several stages write to a buffer in `saved`, or code outside of the blocks replaces such a buffer by
            a new tensor. Or a stage reads a buffer that another stage has written to in the previous forward.
    """
    inside = tuple(f"{path}." for path in graph.block_paths)
    replaced = min((name for name in record.replaced & set(saved) if not name.startswith(inside)), default=None)
    if replaced is not None:
        raise InputError(
            Message(
                "plan {plan}: the forward replaces the buffer {replaced} with a new tensor, but each stage has its "
                "own copy of the buffer: write to it in place (copy_), register it with persistent=False, or use pp1",
                plan=plan.name,
                replaced=replaced,
            )
        )
    found = {}
    reads, writes = record.read_buffers, record.written_buffers
    for name, blocks in record.replaced_after.items():
        writes.setdefault(name, set()).update(blocks)
    for name, blocks in writes.items():
        stages = _stages_after(blocks, bounds)
        if len(stages) > 1 and name in saved:
            raise InputError(
                Message(
                    "plan {plan}: stages {first} and {second} both write to the buffer {name}: use pp1",
                    plan=plan.name,
                    first=stages[0],
                    second=stages[1],
                    name=name,
                )
            )
        found[name] = stages[0]
        _check_buffer_readers(name, stages[0], _stages_after(reads.get(name, ()), bounds), plan)
    return found


def _stages_after(blocks: Iterable[int], bounds: Mapping[int, tuple[int, int]]) -> list[int]:
    """Returns the stages, in ascending order, that run the code during or after each of `blocks`."""
    return sorted({next(stage for stage, (_, stop) in bounds.items() if block < stop) for block in blocks})


def _check_buffer_readers(name: str, writer: int, readers: Sequence[int], plan: Plan) -> None:
    """Raises InputError if a stage other than `writer` reads the buffer `name`."""
    stale = next((stage for stage in readers if stage != writer), None)
    if stale is not None:
        raise InputError(
            Message(
                "plan {plan}: stage {first} writes to the buffer {name}, and stage {second} reads it, but each stage "
                "has its own copy of the buffer: use pp1",
                plan=plan.name,
                first=writer,
                second=stale,
                name=name,
            )
        )


def check_value_changes(record: DataflowRecord, bounds: Mapping[int, tuple[int, int]], plan: Plan) -> None:
    """Checks that the forward changes no plain value that would differ between stages.

    Code before the end of the first stage, outside of the blocks, runs in the forward of every stage. A change by any
    other code is missing on some stages. A rank with several stages changes a counter once for each of them.

    Raises:
        InputError: the forward changes such a value.
    """
    for name, block, is_inside in sorted(record.value_changes):
        stage = next(stage for stage, (_, stop) in bounds.items() if block < stop)
        if stage or is_inside or (plan.stages > plan.pp and name in record.repeated_changes):
            raise InputError(
                Message(
                    "plan {plan}: the forward changes {name}, which stages other than {stage} may read, but each stage "
                    "runs only a part of the forward: give the value in the batch, change it between steps, or use pp1",
                    plan=plan.name,
                    name=name,
                    stage=stage,
                )
            )


@dataclass(frozen=True)
class StageLayer:
    """A layer of the model with the names of its parameters.

    `stage`: the stage that runs the layer. `also`: the other stages that compute with the layer's parameters.
    """

    name: str
    parameters: tuple[str, ...]
    stage: int
    also: tuple[int, ...] = ()

    @property
    def stages(self) -> tuple[int, ...]:
        """All stages that compute with the layer's parameters."""
        return (self.stage, *self.also)


def stage_bounds(graph: ModelGraph, plan: Plan) -> dict[int, tuple[int, int]]:
    """Returns for each stage the index of its first block, and the index after its last block."""
    bounds, first = {}, 0
    for stage, count in enumerate(plan.stage_layers(max(graph.count, 1))):
        bounds[stage] = (first, first + count)
        first += count
    return bounds


def assign_layers(
    named: list[tuple[str, list[str]]],
    graph: ModelGraph,
    plan: Plan,
    boundary: BoundarySpec | None,
    holders: ParamStages = NO_PARAM_STAGES,
) -> list[StageLayer]:
    """Returns the layers of the model with their stages. `named`: each layer's name and the names of its parameters.

    The index of a block determines its stage. `holders` determines the stages of other parameters. A parameter that is
    not in `holders` gets its stage from the name of its layer. Each parameter with several stages becomes a separate
    layer, except the embedding that is tied to the head.

    Raises:
        InputError: A tied embedding is read between blocks.
    """
    bounds = stage_bounds(graph, plan)
    last = plan.stages - 1

    def stage_of(name: str) -> int:
        if name.startswith("block.") and graph.blocks is not None:
            index = int(name.partition(".")[2])
            return next(stage for stage, (start, stop) in bounds.items() if start <= index < stop)
        if name.startswith("between.") and boundary is not None:
            return stage_of(f"block.{boundary.firsts[int(name.partition('.')[2]) + 1] - 1}")
        return last if name in ("back", "head") else 0

    table: list[StageLayer] = []
    for name, parameters in named:
        base = stage_of(name)
        by_stages: dict[tuple[int, ...], list[str]] = {}
        for parameter in parameters:
            stages = (
                (base,) if name.startswith("block.") else _stages_with_group(holders.get(parameter) or (base,), plan)
            )
            by_stages.setdefault(stages, []).append(parameter)
        for stages, some in by_stages.items():
            if name == "embedding" and graph.tied and set(stages) <= {0, last}:
                table.append(StageLayer(name, tuple(some), 0))  # the head stores the last stage's copy
            elif name == "embedding" and graph.tied:
                raise InputError(
                    Message(
                        "plan {plan}: the embedding {some} is tied to the head and is also read between blocks: use "
                        "pp1",
                        plan=plan.name,
                        some=some[0],
                    )
                )
            elif len(stages) > 1:
                table += [StageLayer(f"shared.{parameter}", (parameter,), stages[0], stages[1:]) for parameter in some]
            else:
                table.append(StageLayer(name if stages == (base,) else f"{name}.{stages[0]}", tuple(some), stages[0]))
    return table


def _stages_with_group(stages: tuple[int, ...], plan: Plan) -> tuple[int, ...]:
    """Returns `stages` if gradients can be summed over exactly these stages, otherwise all stages. Process groups exist
    only for the first and the last stage together, and for all stages. Stages of one rank need no group."""
    few = len({plan.stage_to_rank(stage) for stage in stages}) == 1 or set(stages) <= {0, plan.stages - 1}
    return stages if few else tuple(range(plan.stages))


def paths_run_on_every_stage(graph: ModelGraph, boundary: BoundarySpec | None) -> tuple[str, ...]:
    """Returns the paths of the modules that the model's own code calls on every stage: the blocks and the embedding.
    Returns () if stages send only the hidden state, or if `boundary` is None (one stage)."""
    return (
        (*graph.block_paths, *([graph.embedding] if graph.embedding else [])) if boundary and boundary.is_more else ()
    )
