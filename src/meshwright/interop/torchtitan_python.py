"""torchtitan 0.3: a configuration is a Python function that returns a `Trainer.Config`. The export writes such a file.

The function begins with the function of the model in torchtitan's own registry and replaces its sections. An import
reads the file by `formats.read_config`, which does not execute it: `TrainingConfig(steps=10)` becomes the key
`training.steps`.

Sources, at version 0.3.0 of pytorch/torchtitan: torchtitan/config/manager.py (--module, --config),
torchtitan/config/configs.py, torchtitan/trainer.py (sections), torchtitan/models/llama3/config_registry.py,
torchtitan/components/optimizer/optimizer.py:378 (`default_adamw`),
torchtitan/distributed/activation_checkpoint.py:332 (kinds of recompute).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from meshwright.interop.settings import Settings

RECOMPUTE = {"none": "None", "full": "FullAC.Config()", "selective": "SelectiveAC.Config()"}
"""The modes of version 0.2, with what replaces them in version 0.3."""
SECTIONS = {
    "training": "TrainingConfig",
    "parallelism": "ParallelismConfig",
    "compile": "CompileConfig",
    "lr_scheduler": "LRSchedulersContainer.Config",
    "optimizer": "default_adamw",
}
"""The sections of the keys, with the class or function that makes each."""
REMOVED = ("parallelism.expert_tensor_parallel_degree", "optimizer.name", "optimizer.beta1", "optimizer.beta2")
"""Keys of version 0.2 that version 0.3 has not, or has in another form."""
TEMPLATE = """from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.{module}.config_registry import {function}
from torchtitan.trainer import Trainer


def train() -> Trainer.Config:
    config = {function}()
{lines}
    return config
"""


def python_config(keys: Mapping[str, Any], settings: Settings) -> str:
    """Returns the Python file with the keys of version 0.2."""
    module, flavor = keys.get("model.name", "llama3"), keys.get("model.flavor", "debugmodel")
    groups: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    for name, value in keys.items():
        section, _, field = name.partition(".")
        if section in SECTIONS and name not in REMOVED:
            groups[section][field] = value
    groups["compile"].setdefault("enable", False)
    if settings["pp"] * settings["ep"] > 1:
        groups["training"]["disable_cuda_graphs"] = True
    groups["optimizer"]["betas"] = (settings["beta1"], settings["beta2"])
    lines = ["# for FP8, begin with a function that has a Float8LinearConverter"] if "model.converters" in keys else []
    lines += [_section_line(section, fields) for section, fields in groups.items()]
    if keys.get("optimizer.name") == "Adam":
        lines.append('config.optimizer.param_groups[0].optimizer_name = "Adam"')
    lines.append(f"config.activation_checkpoint = {RECOMPUTE[keys['activation_checkpoint.mode']]}")
    lines += [f"config.debug.seed = {keys['debug.seed']}"] if "debug.seed" in keys else []
    function = f"{module}_{str(flavor).lower().replace('.', '_')}"
    return TEMPLATE.format(module=module, function=function, lines="\n".join(f"    {line}" for line in lines))


def _section_line(section: str, fields: Mapping[str, Any]) -> str:
    arguments = "".join(f"        {name}={_literal(value)},\n" for name, value in fields.items())
    return f"config.{section} = {SECTIONS[section]}(\n{arguments}    )"


def _literal(value: Any) -> str:
    return "1e999" if value == math.inf else repr(value)  # a literal, as opposed to float("inf")
