"""Parses `--model`: a catalog name, a folder with a Hugging Face `config.json`, an architecture file, or a size such as
`200b`.

The result is architecture sizes and a `ModelSpec`. `package.module:function` names Python code, which the planner does
not run. For such code, and for folders of other model families, `cli/trace_model.py` runs the model to create the
`ModelSpec`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwright.catalog import read as catalog
from meshwright.core.codec import parse_text, read_text_file, validate_data
from meshwright.core.errors import InputError, did_you_mean
from meshwright.core.files import path_from_text
from meshwright.core.messages import Message
from meshwright.planner.inputs.architecture import model_spec
from meshwright.planner.inputs.architecture_sizes import ArchitectureSizes, sizes_from_catalog
from meshwright.planner.inputs.huggingface import has_formulas, read_hf_config, sizes_from_hf_config
from meshwright.planner.inputs.sized_model import parse_model_size, sizes_for_parameters
from meshwright.spec.model import ModelSpec
from meshwright.spec.workload import USER_FUNCTION_PATTERN


def is_user_code(name: str) -> bool:
    """Returns whether `name` is user code, `package.module:function`."""
    return USER_FUNCTION_PATTERN.fullmatch(name) is not None


def needs_tracing(name: str) -> bool:
    """Returns whether the model must be traced: user code, or a folder of a Hugging Face family without formulas."""
    path = path_from_text(name)
    if path.is_dir():
        return not has_formulas(path) and catalog.find_entry(catalog.models(), name) is None
    return is_user_code(name) and not path.is_file()


def read_sizes(name: str) -> ArchitectureSizes:
    """Returns the sizes of the model `name`. If the name is unknown, it raises InputError with the most similar known
    models."""
    rows = catalog.models()
    row = catalog.find_entry(rows, name)
    if row is not None:
        return sizes_from_catalog(row)
    path = path_from_text(name)
    if path.is_dir():
        return read_hf_config(path)
    if path.is_file():
        return read_architecture(path)
    if is_user_code(name):
        raise InputError(
            Message(
                "model {name!r} is Python code, which planning from Python does not run: "
                "meshwright.analysis.profile.describe reads it, or give an architecture file",
                name=name,
            )
        )
    parameters = parse_model_size(name)
    if parameters is not None:
        return sizes_for_parameters(parameters)
    known = catalog.all_names(rows)
    hint = did_you_mean(name.lower(), known) or Message("; `meshwright catalog models` lists the known ones")
    raise InputError(
        Message(
            "model {name!r} is neither in the catalog nor a folder with config.json nor a file{hint}",
            name=name,
            hint=hint,
        )
    )


def read_architecture(path: Path) -> ArchitectureSizes:
    """Reads an architecture file: the fields of `ArchitectureSizes` in YAML or JSON, or a `config.json`."""
    data = parse_text(read_text_file(path, "architecture"), str(path))
    if not isinstance(data, dict):
        raise InputError(Message("{path}: expected sizes such as 'layers: 32'", path=path))
    if "model_type" in data:
        return sizes_from_hf_config(data, str(path))
    return validate_data(ArchitectureSizes, data, str(path))


def read_model(name: str, **changes: Any) -> ModelSpec:
    """Returns the model spec of `name`, with `changes` to its sizes.

    >>> read_model("llama2-7b").parameters
    6738415616
    """
    sizes = read_sizes(name)
    given = {key: value for key, value in changes.items() if value is not None}
    return model_spec(name, sizes.changed(given) if given else sizes)
