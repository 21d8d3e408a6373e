"""Writes a checkpoint of Meshwright in the form of another system, for `meshwright checkpoint export --form`.

Guarantees: the files are written into a temporary folder, which gets its final name when all of them are durable. A
failed export leaves no files, and an existing folder is never changed.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from meshwright.checkpoint.export_folder import check_export_folder
from meshwright.checkpoint.formats.dcp_write import write_dcp
from meshwright.checkpoint.formats.deepspeed import write_deepspeed
from meshwright.checkpoint.formats.megatron_write import write_megatron
from meshwright.checkpoint.formats.torch_state import TorchState, read_torch_state
from meshwright.checkpoint.huggingface import export_error
from meshwright.checkpoint.safetensors_writer import DTYPE_BY_NAME
from meshwright.core import storage
from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.core.units import show_bytes

WRITERS: Mapping[str, Callable[[TorchState, Path], None]] = MappingProxyType(
    {"dcp": write_dcp, "deepspeed": write_deepspeed, "megatron": write_megatron}
)
"""For each form, the function that writes the content of a checkpoint into a new folder."""


def export_checkpoint(
    path: Path, folder: Path, form: str, weights_only: bool = False, config: Mapping[str, Any] | None = None
) -> TorchState:
    """Writes the checkpoint of Meshwright at `path` as `folder` in the form `form` (a key of WRITERS). Returns its
    content. `config` is the config.json of the model, which the form megatron needs.

    Raises:
        InputError: `folder` exists, or the form cannot express the optimizer states of the checkpoint.
        MeshwrightError: there is not enough free space.
    """
    check_export_folder(folder, form)
    content = read_torch_state(path, weights_only)._replace(config=config)
    if any(one.dtype == "uint8" for one in content.weights.values()):
        raise InputError(
            Message(
                "checkpoint {path!r} has weights in 4 bits, which --form {form} does not have: leave --form out, which "
                "converts them",
                path=str(path),
                form=form,
            )
        )
    lazy = [*content.weights.values(), *(one for kinds in content.states.values() for one in kinds.values())]
    needs = sum(one.numel * DTYPE_BY_NAME[one.dtype].itemsize for one in lazy)
    temporary = folder.with_name(f".{folder.name}.tmp")
    try:
        storage.make_folder(folder.parent)
        if needs > (free := storage.free_bytes(folder.parent)):
            raise OSError(
                errno.ENOSPC,
                Message("the files need {needs}, {free} are free", needs=show_bytes(needs), free=show_bytes(free)),
            )
        storage.remove(temporary)
        WRITERS[form](content, temporary)
        storage.sync_folder(temporary)
        storage.rename(temporary, folder)
        storage.sync_folder(folder.parent)
    except BaseException as error:
        storage.remove_if_possible(temporary)
        if isinstance(error, OSError):
            raise export_error(folder, error) from None
        raise
    return content
