"""Defines the dataflow record of one forward, and derives from it what each pipeline stage can compute. A stack is a
list of blocks that pipeline stages cut (block_lists.py).

dataflow_recorder.py makes a `DataflowRecord`. The runtime reads it when it builds stages (runtime/build), wraps blocks
(runtime/pipeline/block_wrapper.py) and checks the first step (runtime/preflight). A module may read a weight that it
does not own. For example, MobileBERT concatenates its vocabulary table with another matrix, and many models use
`self.table.weight` in their own forward. So the record also contains the modules that read each parameter, because the
runtime must gather the parameter for them.

[Note: stage dataflow] Every stage runs the code of the whole model. Blocks of other stages return placeholders. At the
call of its first block, a stage replaces the arguments that depend on parameters by received tensors. At the call of
the first block of the next stage, it sends the arguments of this block and ends. So code between two blocks belongs to
the stage of the earlier block. A stage is correct if no tensor that it sends comes from a placeholder. On the last
stage, no tensor that the loss reads may come from a placeholder. `StageDataflow` checks this operation by operation.
For each storage it tracks from which placeholders and from which parameters outside of the stage's blocks its values
come. These parameters are replicated on each stage that needs them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from meshwright.analysis.example_inputs import DATA_DEPENDENT_OPS
from meshwright.analysis.value_changes import ValueChange


class WeightUse(NamedTuple):
    """One use of a weight: the path of the innermost running module, and the number of blocks that had begun."""

    path: str
    blocks_begun: int


WeightUses = Mapping[str, set[WeightUse]]
"""The uses of each parameter, by parameter name."""


def is_within(path: str, paths: Iterable[str]) -> bool:
    """Returns whether `path` is one of `paths` or inside one.

    >>> is_within("head.dense", ["head"]), is_within("header", ["head"]), is_within("", ["head"])
    (True, False, False)
    """
    return any(f"{path}.".startswith(f"{one}.") for one in paths)


VALUE_EXTRACTING_OPS = DATA_DEPENDENT_OPS | {
    "tolist",
    "numpy",
    "__array__",
    "__dlpack__",
    "nonzero",
    "argwhere",
    "unique",
    "unique_consecutive",
    "masked_select",
}
"""Functions that return tensor values to Python, or whose result shape depends on values."""


class TracedOp(NamedTuple):
    """One call of a torch function.

    `reads` and `writes` are storage indices. `changed` are the indices of the storages that the call changed in place.
    `block` is the index of the calling block, -1 outside of all blocks. `blocks_begun` is the number of blocks that had
    begun. `path` is the path of the innermost running module.
    """

    name: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    block: int
    blocks_begun: int
    path: str
    changed: tuple[int, ...] = ()
    is_unknown: bool = False
    """Whether this entry represents a tensor that no recorded function made."""


class BlockInput(NamedTuple):
    """A block argument that depends on parameters or comes from another block.

    `tensor` is the Python id of the argument, and `storage` the index of its storage. `copied` is the storage index of
    the copy that the block received. `made_from` has one bit for each parameter that the argument depends on.
    `is_sent`: whether stages can send the argument to each other, which requires a floating-point or complex dtype.
    """

    tensor: int
    storage: int
    copied: int
    made_from: int
    is_sent: bool


class BlockEntry(NamedTuple):
    """A call of a block. `leaves` maps positions in the flattened arguments to their `BlockInput`."""

    block: int
    leaves: Mapping[int, BlockInput]


class BlockExit(NamedTuple):
    """The return of a block. `writes` are the storage indices of the returned tensors. `values` is the length of the
    returned tuple, 0 for any other result.
    """

    block: int
    writes: tuple[int, ...]
    values: int


Obstacle = Literal["again", "no_grad", "random"]


@dataclass
class DataflowRecord:
    """The record of one forward."""

    keys: tuple[str, ...]
    """Names of the inputs of the model."""
    is_training: bool
    names: tuple[str, ...]
    """Parameter names by index. The storage of parameter n has index n."""
    events: list[TracedOp | BlockEntry | BlockExit] = field(default_factory=list)
    reads: WeightUses = field(default_factory=dict)
    buffer_names: dict[int, str] = field(default_factory=dict)
    """Names of buffers by storage."""
    outputs: tuple[int, ...] = ()
    """Storage indices of the outputs of the model, the logits first."""
    made_from: dict[int, int] = field(default_factory=dict)
    """Maps each storage to the parameters that its values depend on, one bit per parameter."""
    params_without_grad: frozenset[str] = frozenset()
    """Names of parameters that get no gradient."""
    obstacle: tuple[Obstacle, int] | None = None
    """Why stages cannot begin and end at calls of blocks, and the block at which the reason was detected.

    'again': the model itself checkpoints activations; 'no_grad': no gradient is recorded; 'random': which blocks the
    model calls, or in which order, depends on the random seed.
    """

    @property
    def calls(self) -> tuple[int, ...]:
        """Returns the indices of the blocks in the order of their calls."""
        return tuple(event.block for event in self.events if isinstance(event, BlockEntry))

    replaced: frozenset[str] = frozenset()
    """Names of buffers that the forward replaced by another tensor."""
    replaced_after: dict[str, set[int]] = field(default_factory=dict)
    """For buffers outside of the blocks that the forward replaced: as `written_buffers`."""
    value_changes: frozenset[ValueChange] = frozenset()
    """Changes of plain values that several stages may read."""
    repeated_changes: frozenset[str] = frozenset()
    """Names of the values of `value_changes` that a second forward changes again, such as counters."""

    @property
    def written_buffers(self) -> dict[str, set[int]]:
        """Returns the buffers that the forward writes to in place. Each name maps to the indices of the blocks during
        or after which the buffer is written. -1 means before the first block.
        """
        return self._buffer_uses(lambda op: op.changed)

    @property
    def read_buffers(self) -> dict[str, set[int]]:
        """Returns the buffers whose values from before the forward it reads, as `written_buffers`."""
        return self._buffer_uses(lambda op: set(op.reads) - set(op.changed))

    def _buffer_uses(self, used: Callable[[TracedOp], Iterable[int]]) -> dict[str, set[int]]:
        found: dict[str, set[int]] = {}
        last = -1
        for event in self.events:
            if isinstance(event, BlockEntry):
                last = event.block
            elif isinstance(event, TracedOp):
                for at in self.buffer_names.keys() & used(event):
                    found.setdefault(self.buffer_names[at], set()).add(last)
        return found

    @property
    def written_params(self) -> set[str]:
        """Returns the names of the parameters that the forward writes to."""
        return {
            self.names[at]
            for event in self.events
            if isinstance(event, TracedOp)
            for at in event.changed
            if at < len(self.names)
        }


def names_from_bits(names: Sequence[str], made: int) -> set[str]:
    """Returns the elements of `names` whose bits are set in `made`.

    >>> sorted(names_from_bits(["a", "b", "c"], 0b101))
    ['a', 'c']
    """
    return {name for number, name in enumerate(names) if made >> number & 1}


BlockArgument = tuple[int, int]
"""(block, position): an argument of a block."""


@dataclass(frozen=True)
class StageInterface:
    """Describes the stage with the blocks [start, stop). `receives` are the block arguments that arrive from the
    previous stage. `sends` are the block arguments that this stage sends to the next one.
    """

    start: int
    stop: int
    receives: tuple[BlockArgument, ...]
    sends: tuple[BlockArgument, ...]
    stack_starts: tuple[int, ...] = (0,)
    """Index of the first block of each stack."""

    def stack(self, block: int) -> int:
        """Returns the index of the stack of a block."""
        return max(at for at, first in enumerate(self.stack_starts) if first <= block)


@dataclass
class StageDataflow:
    """Follows one stage through a record ([Note: stage dataflow]).

    After `run`, `needed` is a bit mask of the parameters that the stage needs in addition to those of its blocks.
    `missing` describes the first tensor that the stage needs and cannot compute, '' if there is none.
    """

    record: DataflowRecord
    stage: StageInterface
    own: int
    """Bit mask of the parameters of the stage's blocks."""
    any_output: bool
    """Whether the user supplies the loss. Such a loss may read all outputs of the model."""
    is_present: Callable[[str], bool]
    """Returns whether the module at a path exists on this stage. A module without parameters of this stage is a
    placeholder, whose code does not run.
    """
    sources: dict[int, int] = field(default_factory=dict)
    """Maps each storage to a bit mask of what its values are computed from: one bit for each parameter outside of the
    stage, and one for each placeholder.
    """
    arrived: set[tuple[int, int, int]] = field(default_factory=set)
    """Received tensors as (stack, argument position, tensor id). If a later block of the same stack gets the tensor at
    the same position, it also reads the received tensor.
    """
    needed: int = 0
    missing: str = ""

    def run(self) -> StageDataflow:
        """Follows all events of the record. Returns this object."""
        record, stage = self.record, self.stage
        # `stand_in << n` is the bit of the output of block n. `unseen` marks tensors that no recorded function made.
        self.stand_in = 1 << len(record.names)
        self.unseen = self.stand_in << (1 + max(record.calls, default=0))
        self.sources = {number: 1 << number & ~self.own for number in range(len(record.names))}
        left = set(stage.sends)
        for event in record.events:
            if isinstance(event, TracedOp):
                self._op(event)
            elif isinstance(event, BlockEntry):
                left = self._enter(event, left)
                if stage.sends and not left:
                    return self
            elif not stage.start <= event.block < stage.stop:
                self.sources.update(dict.fromkeys(event.writes, self.stand_in << event.block))
        for storage in record.outputs if self.any_output else record.outputs[:1]:
            found = self.sources.get(storage, 0)
            # A user's loss may ignore an output. So an output that comes from a block of another stage is not an error
            # here. The dry run of the stages checks the outputs that the loss reads.
            if not self.any_output or found < self.stand_in:
                self._need(found, "what the model returns")
        return self

    def _is_here(self, block: int) -> bool:
        return self.stage.start <= block < self.stage.stop

    def _op(self, op: TracedOp) -> None:
        if op.block >= 0 and not self._is_here(
            op.block
        ):  # a cache that depends on no parameter is made where it is read
            made = {storage: self.stand_in << op.block for storage in op.writes if self.record.made_from.get(storage)}
            self.sources.update(made)
            return
        found = 0
        for storage in op.reads:
            found |= self.sources.get(storage, 0)
        if op.is_unknown and not self._is_here(op.block if op.block >= 0 else max(op.blocks_begun - 1, 0)):
            found |= self.unseen
        if op.name in VALUE_EXTRACTING_OPS and op.block < 0 and self.is_present(op.path):
            self._need(found, f"a value that {op.path or 'the forward of the model'} asks for ({op.name})")
        for storage in op.writes:
            self.sources[storage] = found
            if found >= self.stand_in and storage in self.record.buffer_names and op.blocks_begun:
                self._write(op, storage, found)

    def _write(self, op: TracedOp, storage: int, found: int) -> None:
        """Marks the sources of the values that `op` writes to a buffer as needed by the stage. Does nothing unless the
        module of the buffer has no parameters or is the model itself. Such a module runs on every stage.
        """
        name = self.record.buffer_names[storage]
        owner = name.rpartition(".")[0]
        if not any(parameter.rpartition(".")[0] == owner for parameter in self.record.names) or not owner:
            self._need(found, f"what is written to {name}")

    def _enter(self, entry: BlockEntry, left: set[BlockArgument]) -> set[BlockArgument]:
        block, stage = entry.block, self.stage
        for place, leaf in entry.leaves.items():
            key = (block, place)
            arrived = stage.stack(block), place, leaf.tensor
            if key in stage.receives or arrived in self.arrived:
                self.arrived.add(arrived)
                self.sources[leaf.copied] = 0
            elif key in left:
                self._need(self.sources.get(leaf.copied, 0), f"what block {block} is given")
        return {key for key in left if key[0] != block}

    def _need(self, found: int, what: str) -> None:
        if found >= self.stand_in and not self.missing:
            bits = found // self.stand_in
            block = (bits & -bits).bit_length() - 1
            source = "an operation that was not seen" if self.stand_in << block == self.unseen else f"block {block}"
            self.missing = f"{what} comes from {source}"
        self.needed |= found & (self.stand_in - 1)


def trace_stage_parameters(
    record: DataflowRecord, stage: StageInterface, blocks: Sequence[str], any_output: bool
) -> tuple[set[str], str]:
    """Returns the names of the parameters that `stage` needs in addition to those of its blocks. Also returns a
    description of the first tensor that the stage cannot compute, '' if it can compute all.

    `blocks` are the paths of all blocks. `any_output`: whether the user supplies the loss, which may read any output.
    """
    here = tuple(f"{path}." for path in blocks[stage.start : stage.stop])
    mine = {name for name in record.names if name.startswith(here)}
    own = sum(1 << number for number, name in enumerate(record.names) if name in mine)
    owners: dict[str, set[str]] = defaultdict(set)
    for name in record.names:
        for end in (at for at, letter in enumerate(name) if letter == "."):
            owners[name[:end]].add(name)
    leading = {path[:end] for path in blocks for end in (at for at, letter in enumerate(path) if letter == ".")}
    assigned: set[str] = set()

    def is_present(path: str) -> bool:
        """Returns whether the module at `path` and all modules around it exist on this stage. A module exists if it
        contains blocks, has a parameter of this stage, or has no parameters.
        """
        parts = path.split(".")
        ancestors = [".".join(parts[: count + 1]) for count in range(len(parts))]
        return all(one in leading or not owners[one] or owners[one] & (assigned | mine) for one in ancestors if one)

    while True:  # the module of an added parameter runs on the stage and may need more parameters
        found = StageDataflow(record, stage, own, any_output, is_present).run()
        needed = names_from_bits(record.names, found.needed)
        if found.missing or needed == assigned:
            return needed, found.missing
        assigned = needed
