"""Checks a plan against the workload: exact sums, DiLoCo replicas, preference pairs and the optimizer update. The
planner, the runtime and constraints.py apply these rules. The functions named *_violations yield a `Violation` for
every broken rule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from meshwright.core.messages import Message
from meshwright.spec.cluster import Cluster
from meshwright.spec.enums import (
    ACTIVATION_OFFLOADS,
    offloads_states,
    offloads_weights,
)
from meshwright.spec.model import LayerSpec
from meshwright.spec.plan import Plan
from meshwright.spec.precision import DilocoConfig, Recipe
from meshwright.spec.violation import Violation
from meshwright.spec.workload import PreferenceConfig, Workload


def exact_sum_violations(plan: Plan, exact: int) -> Iterator[Violation]:
    """Checks that exact sums use micro-batches of `exact` sequences, the size that the workload names; 0 means no exact
    sums."""
    if exact and plan.micro_batch_sizes:
        yield Violation(
            "exact sums need equal micro-batches",
            Message(
                "micro-batch sizes {list} are not workload.exact({exact}); use mb{exact}",
                list=list(plan.micro_batch_sizes),
                exact=exact,
            ),
        )
    elif exact and plan.micro_batch != exact:
        yield Violation(
            "exact sums need another micro-batch size",
            Message(
                "micro_batch({micro_batch}) is not workload.exact({exact}); use mb{exact}",
                micro_batch=plan.micro_batch,
                exact=exact,
            ),
        )


def preference_violations(plan: Plan, preference: PreferenceConfig | None) -> Iterator[Violation]:
    """Checks that both answers of a preference pair are on one rank, whose loss reads the logits of the whole row."""
    choices = (("cp", plan.cp), ("lc", plan.loss_chunks))
    other = [f"{name}{value}" for name, value in choices if value > 1]
    if preference is not None and other:
        yield Violation(
            "preference pairs need whole rows",
            Message(
                "{loss} compares the two answers of a row, which {other} divides: use cp1 without lc",
                loss=preference.loss,
                other=", ".join(other),
            ),
        )


def diloco_violations(plan: Plan, local: DilocoConfig | None) -> Iterator[Violation]:
    """Checks that dp_replicate is the number of DiLoCo replicas. DiLoCo also excludes expert parallelism, unequal
    numbers or sizes of micro-batches, every offload except that of activations, and context parallelism at ZeRO 0."""
    if local is None:
        return
    if plan.dp_replicate != local.replicas:
        yield Violation(
            "number of replicas differs",
            Message(
                "dp_replicate({dp_replicate}) is not workload.local.replicas({replicas}); use dp{replicas}, or "
                "dp{replicas}xN.z1",
                dp_replicate=plan.dp_replicate,
                replicas=local.replicas,
            ),
        )
    other = [
        name
        for name, there in (
            ("ep", plan.ep > 1),
            ("ga", plan.shares),
            ("unequal micro-batch sizes (mb)", plan.micro_batch_sizes),
            *((f"off-{what}", True) for what in offloaded_state_names(plan)),
            ("z0 with cp", plan.cp > 1 and not plan.zero),
        )
        if there
    ]
    if other:
        yield Violation(
            "not possible with local SGD",
            Message("workload.local cannot be combined with {other}: remove one of them", other=", ".join(other)),
        )


def offloaded_state_names(plan: Plan) -> tuple[str, ...]:
    """Returns the offloaded kinds of state that an optimizer update reads and writes.

    >>> from meshwright.spec.plan import parse_plan
    >>> offloaded_state_names(parse_plan("dp2.z1.off-optimizer-disk.off-activations"))
    ('optimizer-disk',)
    """
    return tuple(str(what) for what in plan.offload if what not in ACTIVATION_OFFLOADS)


class UpdateProperties(NamedTuple):
    """The properties of the optimizer update: the precision recipe, whether the optimizer updates some tensors as a
    whole, and the expert tensors among them. `on_cores`: whether the devices are CPU cores, whose memory is host
    memory."""

    recipe: Recipe
    whole: bool = False
    on_cores: bool = True
    experts: tuple[str, ...] = ()
    trains: bool = True
    """Whether this version must be able to train under the plan. Otherwise the plan is only estimated."""

    @property
    def there(self) -> bool:
        """Returns whether offloaded weights must be updated on the host. This is the case on an accelerator if the
        recipe has no main weights. The update then changes the weights themselves, and offloaded weights are not on the
        device."""
        return not (self.on_cores or self.recipe.master)

    @classmethod
    def of(cls, workload: Workload, cluster: Cluster, layers: Sequence[LayerSpec] = ()) -> UpdateProperties:
        """Returns the properties for a workload and a cluster. Expert tensors are known only if the `layers` of the
        model are given."""
        rule = workload.optimizer
        on_cores = all(group.device.name.lower().startswith("cpu") for group in cluster.groups)
        values = [(layer, each) for layer in layers for each in layer.parameters if each.experts and not each.frozen]
        experts = tuple(f"{layer.name}.{each.name}" for layer, each in values if rule.updates_whole(each.shape, True))
        return cls(workload.recipe, rule.whole, on_cores, experts)


def unsupported_float8(plan: Plan, recipe: Recipe) -> str:
    """Returns the part of the plan under which float8 products can be estimated but not run, or ''."""
    if recipe.products != "fp8":
        return ""
    return str(plan.schedule) if any(plan.splits_backward(stage) for stage in range(plan.stages)) else ""


def update_violations(plan: Plan, update: UpdateProperties) -> Iterator[Violation]:
    """Checks that the plan supports the optimizer update: its precision recipe, and whether it needs whole tensors."""
    recipe, offloaded = update.recipe, offloaded_state_names(plan)
    if update.trains and unsupported_float8(plan, recipe):
        yield Violation(
            "fp8 needs one backward action",
            Message("fp8 runs without zero-bubble schedules: use 1f1b, or bf16"),
        )
    if recipe.compression is not None and plan.shard_weights:
        yield Violation(
            "compressed gradients need equal shards",
            Message("compressed gradients need equal shards: remove zw from the plan, or the compression"),
        )
    if update.there and offloads_weights(plan.offload) and not offloads_states(plan.offload):
        yield Violation(
            "offloaded weights are updated on the host",
            Message(
                "{recipe} updates the weights themselves, which are offloaded to the host: add off-optimizer to "
                "update them there, or use bf16",
                recipe=recipe.name,
            ),
        )
    elif update.there and offloads_weights(plan.offload) and plan.offload_share < plan.weights_share:
        yield Violation(
            "offloaded weights are updated on the host",
            Message(
                "{recipe} updates the weights themselves: the offloaded percentage of states must be "
                "at least that of the weights ({weights_share}, not {offload_share}), so that "
                "offloaded weights are updated on the host; or use bf16",
                recipe=recipe.name,
                weights_share=plan.weights_share,
                offload_share=plan.offload_share,
            ),
        )
    if offloaded and (update.whole or recipe.rounds or recipe.eight):
        what = (
            Message("an optimizer that updates whole tensors")
            if update.whole
            else Message("precision {recipe}", recipe=recipe.name)
            if recipe.rounds
            else Message("the 8-bit optimizer state")
        )
        yield Violation(
            "the optimizer or precision does not support offload",
            Message(
                "{what} does not support offload: remove off-{offloaded}, or use AdamW with bf16",
                what=what,
                offloaded=offloaded[0],
            ),
        )
    if plan.ep > 1 and update.experts:
        yield Violation(
            "no rank has all experts",
            Message(
                "the optimizer updates whole tensors, but expert parallelism shards {experts} over ranks: use ep1, or "
                "AdamW",
                experts=update.experts[0],
            ),
        )


def workload_violations(
    plan: Plan, workload: Workload, cluster: Cluster, layers: Sequence[LayerSpec] = (), trains: bool = True
) -> Iterator[Violation]:
    """Checks every rule of a workload except the rules about its batch (`batch_violations`). `layers` are the layers of
    the model, if they are known. `trains`: see `UpdateProperties`."""
    yield from update_violations(plan, UpdateProperties.of(workload, cluster, layers)._replace(trains=trains))
    yield from exact_sum_violations(plan, workload.exact)
    yield from diloco_violations(plan, workload.local)
    yield from preference_violations(plan, workload.preference)
