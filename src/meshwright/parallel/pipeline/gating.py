"""Where gates stand: on every block, and at ZeRO 3 on the modules outside of blocks whose weights are gathered for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from torch import nn

from meshwright.anatomy import Anatomy
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.pipeline.absent import Absent
from meshwright.parallel.pipeline.gates import Gate, Run
from meshwright.parallel.tensor.layers import SequenceRegion
from meshwright.parallel.zero.flat import FlatUnit
from meshwright.spec.plan import Plan

COPY = "embedding's copy"
"""The tied weight as the last stage holds it."""


def set_gates(
    model: nn.Module, anatomy: Anatomy, mesh: Mesh, run: Run, by_layer: dict[str, list[FlatUnit]], table: Mapping[str, Sequence[str]]
) -> list[Gate]:
    plan = mesh.plan
    gates: list[Gate] = []
    if anatomy.blocks is not None:
        region = SequenceRegion(mesh.tp) if plan.sequence_parallel else None
        for index in range(anatomy.count):
            block = model.get_submodule(anatomy.block(index))
            if isinstance(block, Absent) and run.carry is None and not anatomy.returns:
                continue
            gate = Gate(block, run, index, anatomy.returns)
            held = [unit for name in (f"block.{index}", f"block.{index}.experts") for unit in by_layer.get(name, ())]
            gate.units = held if plan.zero == 3 else []
            if region is not None:
                gate.before = region.enter if index == 0 else None
                gate.after = region.leave if index == anatomy.count - 1 else None
            gates.append(gate)
    if plan.zero == 3:
        gates += _outer_gates(plan, model, anatomy, run, by_layer, table)
        blocks = [gate for gate in gates if gate.index is not None]
        for gate in gates:
            for unit in gate.units:
                unit.gated = True
        for first, second in pairwise(blocks):
            first.following, second.previous = second.units, first.units
    return gates


def _outer_gates(
    plan: Plan, model: nn.Module, anatomy: Anatomy, run: Run, by_layer: dict[str, list[FlatUnit]], table: Mapping[str, Sequence[str]]
) -> list[Gate]:
    """ZeRO 3 outside of the blocks: a gate on the one module that holds all of a layer's parameters, where there is one."""
    gates = []
    modules = dict(model.named_modules(remove_duplicate=False))
    by_path: dict[str, list[FlatUnit]] = {}
    for layer, parameters in table.items():
        if layer in by_layer and not (anatomy.blocks and layer.startswith("block.")):
            owners = {name.rpartition(".")[0] for name in parameters}
            sharing = _sharing_table(model, anatomy) if layer == "embedding" else []
            for path in sharing or [_common_path(owners)]:
                by_path.setdefault(path, []).extend(by_layer[layer])
    if anatomy.tied and anatomy.head is not None:
        by_path.setdefault(anatomy.head, []).extend(by_layer.get(COPY, by_layer.get("embedding", ())))
    around = tuple(anatomy.block(index) for index in range(anatomy.count)) if anatomy.blocks is not None else ()
    for path, held in by_path.items():
        module = modules.get(path)
        if plan.stages > 1 and any(block.startswith(f"{path}.") for block in around):
            continue  # such a module is left in the middle, at the end of a stage: what it needs stays whole through the step
        if path and module is not None and not isinstance(module, nn.ModuleList | nn.ModuleDict | Absent):
            gate = Gate(module, run)
            gate.units = held
            gates.append(gate)
    return gates


def _sharing_table(model: nn.Module, anatomy: Anatomy) -> list[str]:
    """Every embedding that looks up the vocabulary: an encoder and a decoder have one each, with the same weight."""
    found = model.get_submodule(anatomy.embedding) if anatomy.embedding else None
    weight = found._parameters.get("weight") if found is not None else None
    return [
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.Embedding) and weight is not None and module.weight is weight
    ]


def _common_path(paths: set[str]) -> str:
    """
    >>> _common_path({"head.norm", "head.dense"})
    'head'
    """
    parts = [path.split(".") for path in sorted(paths)]
    common = []
    for step in zip(*parts, strict=False):
        if len(set(step)) > 1:
            break
        common.append(step[0])
    return ".".join(common)
