"""Checks the output folder of an export. It imports no torch, so the command line refuses a wrong folder at once. The
exports themselves check again."""

from __future__ import annotations

import fnmatch
from pathlib import Path

from meshwright.core import storage
from meshwright.core.errors import InputError
from meshwright.core.messages import Message

ADAPTER_WEIGHTS_FILE = "adapter_model.safetensors"
HUGGINGFACE_FORM = "huggingface"


def check_export_folder(folder: Path, form: str = HUGGINGFACE_FORM, adapter: bool = False) -> None:
    """Raises InputError if an export in the form `form` cannot write into `folder`: a form with optimizer states needs
    a new folder. A Hugging Face folder must not have weights, or with `adapter` no adapter, and must not be a file."""
    if not storage.path_exists(folder):
        return
    if form != HUGGINGFACE_FORM or not storage.is_folder(folder):
        raise InputError(Message("folder {folder!r} already exists; name a new one", folder=str(folder)))
    names = storage.list_names(folder)
    if adapter and ADAPTER_WEIGHTS_FILE in names:
        raise InputError(
            Message("folder {folder!r} already holds an adapter; name another, or remove it first", folder=str(folder))
        )
    if not adapter and fnmatch.filter(names, "model*.safetensors*"):
        raise InputError(
            Message("folder {folder!r} already holds weights; name another, or remove them first", folder=str(folder))
        )
