"""`Build`, the record through which the build passes exchange results, and `build_pass`, which declares a pass.

Each field of `Build` is written once, by one pass. An assertion fails if a field is read before that pass has run, or
written twice. Such a failure is a bug in the list of passes, not an error of the user.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypedDict, TypeVar, overload

from torch import nn

from meshwright.analysis.example_inputs import ExampleInputs
from meshwright.analysis.graph import ModelGraph
from meshwright.runtime.build.stages.local_stages import LocalStages
from meshwright.runtime.build.stages.partition import StagePartition
from meshwright.runtime.comm.group import CommGroup
from meshwright.runtime.context_parallel.blocks import ContextState
from meshwright.runtime.deferred_init import DeferredInit
from meshwright.runtime.engine import Engine
from meshwright.runtime.expert_parallel.groups import EpGroups
from meshwright.runtime.expert_parallel.load_balancing import AuxLoss
from meshwright.runtime.expert_parallel.token_dispatcher import ExpertDispatcher
from meshwright.runtime.float8 import Float8Casts
from meshwright.runtime.loss import ChunkedHead, LossFunction
from meshwright.runtime.non_tensor_state import ExtraState
from meshwright.runtime.optim.full_tensor import FullTensorNeeds
from meshwright.runtime.optim.param_groups import OptimizerFactory, ParamGroups
from meshwright.runtime.optim.updater import Updater
from meshwright.runtime.parallel_context import ParallelContext
from meshwright.runtime.pipeline.block_wrapper import BlockWrapper, StageCursor
from meshwright.runtime.preflight.evaluation_checks import EvaluationAnalysis
from meshwright.runtime.shard.shard_table import ShardTable
from meshwright.runtime.weight_gradients import StepBackward
from meshwright.runtime.zero.param_group import FlatParamGroup
from meshwright.runtime.zero.reducer import GradReducer, TiedParamGroup
from meshwright.spec.precision import Recipe

T = TypeVar("T")


class ModelHints(TypedDict, total=False):
    """Optional inputs from the caller: the loss, the structure of the model, and an example batch."""

    loss: LossFunction | None
    gather: str | None
    """'batch': the loss gets the outputs of all rows of the global batch (runtime/batch_loss.py)."""
    anatomy: ModelGraph | None
    example: ExampleInputs | None


class WriteOnce(Generic[T]):
    """A field of `Build` that one pass writes."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, build: None, owner: type) -> WriteOnce[T]: ...

    @overload
    def __get__(self, build: Build, owner: type) -> T: ...

    def __get__(self, build: Build | None, owner: type) -> Any:
        if build is None:
            return self
        assert self.name in vars(build), f"{self.name} is read before the pass that writes it"
        return vars(build)[self.name]

    def __set__(self, build: Build, value: T) -> None:
        assert self.name not in vars(build), f"{self.name} is written twice"
        vars(build)[self.name] = value


@dataclass(frozen=True)
class FlatGroups:
    """The flat parameter groups of this rank."""

    stages: dict[int, list[FlatParamGroup]]
    """The groups of each stage, in forward order."""
    tied: dict[int, TiedParamGroup]
    """By `id(group)` of each group whose weights several stages replicate: which stages these are."""
    layers: dict[str, list[FlatParamGroup]]
    """The groups of each layer, by the name of the layer."""


class Build:
    """The inputs and the results of the build passes. Inputs come first. A comment after each result names the pass
    that writes it."""

    model = WriteOnce[nn.Module]()
    base = WriteOnce[ParallelContext]()
    """The context with the groups that the plan alone determines. `context` also has the groups that depend on the
    model."""
    recipe = WriteOnce[Recipe]()
    make_optimizer = WriteOnce[OptimizerFactory]()
    hints = WriteOnce[ModelHints]()

    deferred = WriteOnce[DeferredInit]()  # analyze
    example = WriteOnce[ExampleInputs]()  # analyze
    graph = WriteOnce[ModelGraph]()  # analyze
    batch_norm = WriteOnce[str]()  # check_plan
    partition = WriteOnce[StagePartition]()  # partition_stages
    param_groups = WriteOnce[ParamGroups]()  # probe_optimizer
    full_tensors = WriteOnce[FullTensorNeeds]()  # probe_optimizer
    context = WriteOnce[ParallelContext]()  # create_groups
    experts = WriteOnce[EpGroups]()  # create_groups
    sequence = WriteOnce[ContextState | None]()  # create_groups
    evaluation = WriteOnce[EvaluationAnalysis | str]()  # create_groups
    tied_groups = WriteOnce[Mapping[tuple[int, ...], CommGroup | None]]()  # create_groups
    shards = WriteOnce[ShardTable]()  # describe_shards
    extra_state = WriteOnce[ExtraState]()  # describe_shards
    uninitialized = WriteOnce[frozenset[str]]()  # describe_shards
    trained = WriteOnce[tuple[str, ...]]()  # describe_shards
    dispatchers = WriteOnce[Sequence[ExpertDispatcher]]()  # shard_tensors
    local = WriteOnce[LocalStages]()  # drop_other_stages
    chunked_head = WriteOnce[ChunkedHead | None]()  # install_loss
    aux_loss = WriteOnce[AuxLoss | None]()  # install_loss
    flat = WriteOnce[FlatGroups]()  # flatten_parameters
    wgrad_accumulation = WriteOnce[StepBackward]()  # defer_weight_grads
    reducer = WriteOnce[GradReducer]()  # reduce_gradients
    updater = WriteOnce[Updater]()  # reduce_gradients
    float8_casts = WriteOnce[Float8Casts | None]()  # low_precision_matmul
    cursor = WriteOnce[StageCursor]()  # wrap_blocks
    wrappers = WriteOnce[Sequence[BlockWrapper]]()  # wrap_blocks
    engine = WriteOnce[Engine]()  # assemble


@dataclass(frozen=True)
class BuildPass:
    """One step of the build, with the fields of `Build` that it reads and writes."""

    run: Callable[[Build], None]
    reads: frozenset[str]
    writes: frozenset[str]

    @property
    def name(self) -> str:
        """The name of the function of the pass."""
        return self.run.__name__

    def __call__(self, build: Build) -> None:
        self.run(build)


def build_pass(*, reads: Sequence[str], writes: Sequence[str] = ()) -> Callable[[Callable[[Build], None]], BuildPass]:
    """Declares a build pass with the fields of `Build` that it reads and writes. `tests/unit/test_architecture.py`
    compares these fields with the code of the pass."""

    def declare(run: Callable[[Build], None]) -> BuildPass:
        return BuildPass(run, frozenset(reads), frozenset(writes))

    return declare
