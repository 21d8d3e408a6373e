"""`mw.parallelize`: shards a model for the user's own loop. It reads the plan as a user writes it, prices `auto`, and
then calls the runtime (train/trainer.py).

A plan by name may leave things open, which the runtime does not: `fsdp` and `ddp` are over all ranks, and without `mb`
the micro-batch is all rows of a replica (`with_default_micro_batch`).
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import nn

from meshwright.analysis.example_inputs import bind_inputs
from meshwright.analysis.profile.model_spec import describe
from meshwright.core.codec import parse_text, validate_data
from meshwright.core.errors import InputError, MeshwrightError
from meshwright.core.language import choose_language
from meshwright.core.messages import Message, translate
from meshwright.planner.inputs.cluster_parser import read_cluster
from meshwright.planner.inputs.plans import AUTO_PLAN
from meshwright.planner.search.ranking import search_plans
from meshwright.runtime.optim.param_groups import OptimizerFactory
from meshwright.spec.job import Job
from meshwright.spec.plan import Plan, parse_plan
from meshwright.spec.plan_name import is_open
from meshwright.spec.precision import Recipe
from meshwright.spec.workload import Workload
from meshwright.train.step.batch_forms import named_batch
from meshwright.train.trainer import ParallelizeOptions, Trainer
from meshwright.train.trainer import parallelize as parallelize_as_planned


def parallelize(
    model: nn.Module,
    optimizer: OptimizerFactory,
    plan: Plan | str = AUTO_PLAN,
    *,
    precision: str | Recipe = "fp32",
    clip: float | None = None,
    seed: int = 1,
    **options: Unpack[ParallelizeOptions],
) -> Trainer:
    """Shards `model` over the ranks of the default process group as `plan` says, and returns its trainer.

    `plan` is a `Plan`, a name such as `dp8.tp2`, or `auto`. A name without `mb` takes all rows of a replica as one
    micro-batch; with pipeline stages, up to 4 micro-batches per stage. `auto` prices this model on these ranks, with
    the global batch `example`. A model that cannot be priced gets data parallelism, and a line says so.

    `model` is an ordinary module with all layers, identical on every rank. `optimizer` receives parameters and returns
    a torch optimizer with one or more groups of them, or of the model's parameters. Each parameter has the attributes
    `path`, `is_matrix` (neither bias nor norm) and `in_block` (it belongs to a repeated block).

    `precision` is a name or a recipe of `meshwright.recipe`. `clip` is the maximum norm of the gradient of all
    parameters. `loss(output, batch)` must return a mean over the rows of the batch; it is needed only if the model
    returns no logits. With `gather="batch"` it gets the outputs and the batch of all rows on all ranks, as a
    contrastive loss needs them, and returns the loss of the whole batch; a replica then has one micro-batch. `anatomy`
    describes the structure of the model, from `meshwright.analysis.analyze` or written by hand; by default the model is
    analysed here. `offload_to` is a folder on a local disk for states that the plan offloads to disk; the default is
    the system's temporary folder. `example` is a batch in the form that `step` takes. It is needed to analyse a model
    whose inputs cannot be inferred. `prove` says when a proof compares the plan with one device: 'auto', 'start',
    'never', or a number of steps.

    Raises:
        InputError: The world size differs from that of the plan, or a dimension is not divisible as the plan requires.
    """
    if dist.is_torchelastic_launched():
        _print_errors_once()
    if isinstance(optimizer, torch.optim.Optimizer):
        name = type(optimizer).__name__
        raise InputError(
            Message(
                "the optimizer is an {name} of the whole model; give the function that makes it: "
                "optimizer=lambda params: torch.optim.{name}(params, lr={lr})",
                name=name,
                lr=optimizer.defaults.get("lr", 1e-3),
            )
        )
    if isinstance(options.get("example"), tuple | list):
        options["example"] = named_batch(model, options["example"])  # type: ignore[typeddict-item]
    world = dist.get_world_size() if dist.is_initialized() else 1
    if plan == AUTO_PLAN:
        chosen = _choose_together(model, options, precision, world)
    else:
        chosen = parse_plan(plan, lambda: world) if isinstance(plan, str) else plan
    trainer = parallelize_as_planned(model, optimizer, chosen, precision=precision, clip=clip, seed=seed, **options)
    trainer.has_open_micro_batch = isinstance(plan, str) and is_open(chosen)
    return trainer


def _print_errors_once() -> None:
    """Makes the interpreter print an error of Meshwright that ends the script as one line, on rank 0 only, and end
    with its exit code. Every rank raises such an error. Other errors are printed as before, and all tracebacks if
    MESHWRIGHT_TRACEBACK is 1."""
    before = sys.excepthook
    if getattr(before, "prints_once", False) or os.environ.get("MESHWRIGHT_TRACEBACK") == "1":
        return

    def hook(kind: type[BaseException], error: BaseException, place: TracebackType | None) -> None:
        if not isinstance(error, MeshwrightError):
            return before(kind, error, place)
        if os.environ.get("RANK", "0") == "0":
            _say(Message("meshwright: {line}", line=str(error)))
        raise SystemExit(error.exit_code)

    hook.prints_once = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def _choose_together(model: nn.Module, options: ParallelizeOptions, precision: str | Recipe, world: int) -> Plan:
    """Returns the plan that rank 0 chooses, on every rank. Raises InputError on every rank if rank 0 raises it."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    found: list[Any] = [None, None]
    if rank == 0:
        try:
            found[0] = _choose(model, options, precision, world).to_json()
        except InputError as error:
            found[1] = str(error)
    if world > 1:
        dist.broadcast_object_list(found)
    if found[1] is not None:
        raise InputError(found[1])
    return validate_data(Plan, parse_text(found[0], "plan"), "plan")


def _choose(model: nn.Module, options: ParallelizeOptions, precision: str | Recipe, world: int) -> Plan:
    """Returns the fastest plan of the planner for `model` on `world` ranks like those of this machine."""
    example: Any = options.get("example")
    if not isinstance(example, Mapping):
        raise InputError(
            Message(
                "plan 'auto' needs the size of a batch: give example=BATCH, the first global batch of the loader, or "
                "name a plan such as dp{world}",
                world=world,
            )
        )
    tensors = [value for value in example.values() if isinstance(value, torch.Tensor) and value.ndim]
    rows = max((len(value) for value in tensors), default=1)
    length = max((value.shape[1] for value in tensors if value.ndim == 2 and not value.is_floating_point()), default=1)
    name = precision if isinstance(precision, str) else precision.name
    inputs = bind_inputs(
        model, {key: value for key, value in example.items() if key != "labels"}, options.get("loss") is not None
    )
    try:
        gather = options.get("gather") is not None
        spec = describe(lambda: _meta_copy(model), length, inputs, type(model).__name__, name, gather)
    except InputError as error:
        plan = parse_plan(f"dp{world}")
        _say(Message("plan {plan}, because the model cannot be priced: {error}", plan=plan.name, error=error))
        return plan
    here = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    cluster = read_cluster(f"local:{here}")
    if world != here:
        cluster = cluster.but(groups=(cluster.groups[0].but(nodes=world // here),))
    work = Workload.model_validate({"batch": rows, "sequence": length, "precision": name})
    # A loss function needs the output of whole sequences.
    pins: dict[str, Any] = {} if options.get("loss") is None else {"cp": 1}
    answer = search_plans(Job(model=spec, cluster=cluster, workload=work, pins=pins), 1, runnable=True).chosen
    expected = {"seconds": answer.estimate.time.step, "size": answer.estimate.memory.reserved}
    _say(
        Message(
            "plan {plan}: {seconds:step} a step and {size:bytes} on the peak rank expected",
            plan=answer.plan.name,
            **expected,
        )
    )
    return answer.plan


def _say(line: Message) -> None:
    sys.stderr.write(translate(line, choose_language(None, os.environ)) + "\n")


def _meta_copy(model: nn.Module) -> nn.Module:
    """Returns a copy of `model` on the meta device. No memory is allocated for its tensors."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, memo)
