"""The build pass that determines how the optimizer updates parameters, before the model is sharded."""

from __future__ import annotations

from meshwright.runtime.build.passes.record import Build, build_pass
from meshwright.runtime.optim.full_tensor import FullTensorNeeds
from meshwright.runtime.optim.param_groups import ParamGroups
from meshwright.runtime.optim.rule_probe import check_update_rule, probe_update_rule


@build_pass(reads=("model", "base", "recipe", "make_optimizer", "partition"), writes=("param_groups", "full_tensors"))
def probe_optimizer(build: Build) -> None:
    """Makes the parameter groups of the optimizer, and determines which parameters the optimizer needs as full tensors.

    Raises:
        InputError: The optimizer refuses the parameters of the model, or the plan does not support its update rule.
    """
    in_block = {name: layer.startswith("block.") for layer, names in build.partition.layers.items() for name in names}
    own = dict(build.model.named_parameters())
    trained = {name: tensor.shape for name, tensor in own.items() if tensor.requires_grad}
    groups = ParamGroups(build.make_optimizer, trained, in_block, {id(tensor): name for name, tensor in own.items()})
    rule = probe_update_rule(groups)
    check_update_rule(build.base.device.type, rule, build.recipe, build.base.plan)
    build.param_groups, build.full_tensors = groups, FullTensorNeeds.from_groups(groups, rule)
