"""Names the values of a batch by the parameters of forward, for the batches that a `DataLoader` yields.

A batch may be a mapping, a dataclass, a named tuple, a tensor, or a tuple or list of tensors. The values of a tuple or
list are the required parameters of forward in order; one value more is `labels`.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.runtime.loss import Batch
from meshwright.train.step.inputs import LocalBatch


def named_batch(model: nn.Module, batch: Any) -> Batch | LocalBatch:
    """Returns `batch` as a dict by the parameter names of the forward of `model`. A dict, a `LocalBatch` and what is
    none of the forms above are returned unchanged.

    Raises: InputError if a tuple or list has other than as many values as forward requires, or one more.
    """
    if isinstance(batch, dict | LocalBatch):
        return batch
    if isinstance(batch, Mapping):
        return dict(batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    if isinstance(batch, tuple) and hasattr(batch, "_asdict"):
        return dict(batch._asdict())
    if isinstance(batch, torch.Tensor):
        batch = (batch,)
    if not isinstance(batch, tuple | list) or not all(isinstance(value, torch.Tensor) for value in batch):
        return batch  # type: ignore[return-value]
    required = [
        name
        for name, each in inspect.signature(model.forward).parameters.items()
        if each.default is each.empty and each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
    names = [*(name for name in required if name != "labels"), "labels"]
    if len(batch) not in (len(names) - 1, len(names)):
        raise InputError(
            Message(
                "a batch of {count} values does not fit {type}.forward, which requires {names}: pass a dict by these "
                "names, with 'labels' for the loss",
                count=len(batch),
                type=type(model).__name__,
                names=", ".join(names[:-1]) or Message("nothing"),
            )
        )
    return dict(zip(names, batch, strict=False))
