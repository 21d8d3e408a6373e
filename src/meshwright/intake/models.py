"""`--model`: a catalog name, a folder with a Hugging Face `config.json`, an architecture file, or a size such as `200b`, to sizes and to `ModelSpec`.

`package.module:function` names live code, which this wing does not run: what runs models reads it, and folders of other families, and fills
the same `ModelSpec`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwright.base.codec import build, parse, read_text
from meshwright.base.errors import InputError, did_you_mean
from meshwright.base.files import path_named
from meshwright.catalog import read as catalog
from meshwright.intake.architecture import model_spec
from meshwright.intake.generic import generic_sizes, size_of
from meshwright.intake.huggingface import config_sizes, has_formulas, read_config
from meshwright.intake.sizes import Sizes, catalog_sizes
from meshwright.spec.model import ModelSpec
from meshwright.spec.workload import LIVE


def is_module(name: str) -> bool:
    """Whether `name` is live code, `package.module:function`."""
    return LIVE.fullmatch(name) is not None


def needs_running(name: str) -> bool:
    """Whether only a run shows what the model is: live code, or a folder of a Hugging Face family without formulas."""
    path = path_named(name)
    if path.is_dir():
        return not has_formulas(path) and catalog.find(catalog.models(), name) is None
    return is_module(name) and not path.is_file()


def read_sizes(name: str) -> Sizes:
    """The sizes behind `name`. InputError names the nearest known models."""
    rows = catalog.models()
    row = catalog.find(rows, name)
    if row is not None:
        return catalog_sizes(row)
    path = path_named(name)
    if path.is_dir():
        return read_config(path)
    if path.is_file():
        return read_architecture(path)
    if is_module(name):
        raise InputError(
            f"model {name!r} is live code, which planning from Python does not run: meshwright.probe.describe reads it, or give an architecture file"
        )
    parameters = size_of(name)
    if parameters is not None:
        return generic_sizes(parameters)
    known = catalog.names(rows)
    hint = did_you_mean(name.lower(), known) or "; `meshwright catalog models` lists the known ones"
    raise InputError(f"model {name!r} is neither in the catalog nor a folder with config.json nor a file{hint}")


def read_architecture(path: Path) -> Sizes:
    """An architecture file: the keys of `Sizes` in YAML or JSON, or a `config.json` by itself."""
    data = parse(read_text(path, "architecture"), str(path))
    if not isinstance(data, dict):
        raise InputError(f"{path}: expected sizes such as 'layers: 32'")
    if "model_type" in data:
        return config_sizes(data, str(path))
    return build(Sizes, data, str(path))


def read_model(name: str, **changes: Any) -> ModelSpec:
    """The model behind `name` as the planner sees it, with `changes` to its sizes.

    >>> read_model("llama2-7b").parameters
    6738415616
    """
    sizes = read_sizes(name)
    given = {key: value for key, value in changes.items() if value is not None}
    return model_spec(name, sizes.changed(given) if given else sizes)
