"""Parses the option `--model`: a catalog name, a folder with a Hugging Face `config.json`, an architecture file, or a
size such as `200b`. The result is architecture sizes (`read_sizes`) or a `ModelSpec` (`read_model`).

`--model package.module:function` names Python code, which the planner does not run. For such code, and for Hugging Face
folders whose model family has no closed formulas, `cli/trace_model.py` traces the model and creates the `ModelSpec`.

`sizes_for_parameters` creates the model for a size such as `200b`. It scales the GPT model of the catalog with the
nearest number of parameters. (A catalog model that is itself named `200b` takes precedence.)

Let P be the requested number of parameters, and P0 the number of parameters of this catalog model. The hidden size is
multiplied by (P / P0)^(1/3) and rounded to a multiple of a step from HIDDEN_SIZE_STEPS. A head has 64 or 128 features.
The rounding makes the number of heads divisible by common tensor-parallel degrees. A layer has 12 hidden^2 parameters
(Narayanan et al., arXiv 2104.04473, equation 2). The number of layers is chosen to bring the total number of parameters
as close to P as possible. The embeddings of vocabulary and positions may leave too few parameters for half as many
layers as the catalog model has. Then the hidden size is reduced.

>>> sizes = sizes_for_parameters(200e9)
>>> sizes.layers, sizes.hidden, sizes.heads
(110, 12288, 96)
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.catalog import read as catalog
from meshwright.core.codec import parse_text, read_text_file, validate_data
from meshwright.core.errors import InputError, did_you_mean
from meshwright.core.files import path_from_text
from meshwright.core.hub_cache import is_hub_name, snapshot_name
from meshwright.core.messages import Message
from meshwright.core.units import show_count
from meshwright.planner.inputs.architecture import model_spec
from meshwright.planner.inputs.architecture_sizes import (
    ArchitectureSizes,
    has_formulas,
    read_hf_config,
    sizes_from_catalog,
    sizes_from_hf_config,
)
from meshwright.spec.model import ModelSpec
from meshwright.spec.reference_models import unsupported_sizes
from meshwright.spec.workload import USER_FUNCTION_PATTERN

MODEL_FILE_SUFFIXES = (".yaml", ".yml", ".json")
"""The ends of names of architecture files."""


def is_user_code(name: str) -> bool:
    """Returns whether `name` has the form `package.module:function`, a function of the user."""
    return USER_FUNCTION_PATTERN.fullmatch(name) is not None


def is_model_folder(name: str) -> bool:
    """Returns whether `name` is a model folder. A folder with a `config.json` is one, even if the catalog has a model
    of this name. Any other folder is one only if the catalog has no model of this name."""
    path = path_from_text(name)
    return path.is_dir() and ((path / "config.json").is_file() or catalog.find_entry(catalog.models(), name) is None)


def needs_tracing(name: str) -> bool:
    """Returns whether the model `name` must be traced. This is the case for a function (`package.module:function`), and
    for a Hugging Face folder whose model family has no closed formulas. An existing file needs no tracing."""
    if is_model_folder(name):
        return not has_formulas(path_from_text(name))
    return is_user_code(name) and not path_from_text(name).is_file()


def path_from_job_file(job: str | Path, text: str) -> str:
    """Returns the path of a model that the job file `job` states as `text`: relative to the folder of the job file if a
    model is there, else relative to the current folder."""
    relative = Path(job).parent / path_from_text(text)
    return str(relative) if text and relative.exists() else text


def read_sizes(name: str) -> ArchitectureSizes:
    """Returns the sizes of the model `name`. Raises InputError if the name is unknown or names Python code; the message
    suggests similar known names."""
    path = path_from_text(name)
    if is_model_folder(name):
        return read_hf_config(path)
    rows = catalog.models()
    row = catalog.find_entry(rows, name)
    if row is not None:
        return sizes_from_catalog(row)
    if path.is_file():
        return read_architecture(path)
    if is_user_code(name):
        raise InputError(
            Message(
                "model {name!r} is Python code, which this function does not run: use "
                "meshwright.analysis.profile.describe, or give an architecture file",
                name=name,
            )
        )
    parameters = parse_model_size(name)
    if parameters is not None:
        return sizes_for_parameters(parameters)
    known = catalog.all_names(rows)
    folders = [str(file.parent) for file in path.parent.glob("*/config.json")]
    hint = (
        did_you_mean(name, folders)
        or did_you_mean(name.lower(), known)
        or Message("; `meshwright catalog models` lists the known ones")
    )
    if path.suffix in MODEL_FILE_SUFFIXES:
        raise InputError(
            Message("model file {name!r} does not exist{hint}", name=name, hint=did_you_mean(name, folders))
        )
    if is_hub_name(name):
        raise InputError(
            Message(
                "model {name!r} is neither in the catalog nor in the local cache of the Hugging Face hub: download it "
                "with `hf download {name}`{hint}",
                name=name,
                hint=did_you_mean(name.lower(), known),
            )
        )
    raise InputError(
        Message(
            "model {name!r} is neither in the catalog nor a folder with config.json nor a file{hint}",
            name=name,
            hint=hint,
        )
    )


def read_architecture(path: Path) -> ArchitectureSizes:
    """Reads an architecture file: the fields of `ArchitectureSizes` in YAML or JSON, or a Hugging Face
    `config.json`. Raises InputError if the file does not contain one of these."""
    data = parse_text(read_text_file(path, "architecture"), str(path))
    if not isinstance(data, dict):
        raise InputError(Message("{path}: expected a mapping of model dimensions, such as 'layers: 32'", path=path))
    if "model_type" in data:
        return sizes_from_hf_config(data, str(path))
    return validate_data(ArchitectureSizes, data, str(path))


def read_model(name: str, **changes: Any) -> ModelSpec:
    """Returns the model spec of the model `name`. `changes` are sizes to replace, by name; a size whose new value is
    None stays unchanged.

    >>> read_model("llama2-7b").parameters
    6738415616
    """
    sizes = read_sizes(name)
    given = {key: value for key, value in changes.items() if value is not None}
    return spec_of_source(name, name, sizes.changed(given) if given else sizes)


def spec_of_source(title: str, source: str, sizes: ArchitectureSizes) -> ModelSpec:
    """Returns the model spec of `sizes`. Ranks build the module of a Hugging Face folder by transformers, and otherwise
    a reference model, which does not support all sizes."""
    fault = None if is_model_folder(source) else unsupported_sizes(sizes.model_dump())
    return model_spec(title, sizes).but(against_training=fault or "")


_SIZE_PATTERN = re.compile(r"(?:gpt-)?(\d+(?:\.\d+)?)([mbt])", re.IGNORECASE)
_SIZE_UNITS = {"m": 1e6, "b": 1e9, "t": 1e12}
SCALABLE_FAMILIES = ("GPT-3", "MT-NLG", "Megatron")
HIDDEN_SIZE_STEPS = ((8192, 2048), (4096, 1024), (1024, 512), (0, 64))
"""Pairs (minimum hidden size, step), largest first. A hidden size is rounded to a multiple of the step in the first
pair whose minimum it reaches."""
MIN_PARAMETERS, MAX_PARAMETERS = 4e6, 1e15
"""The smallest and the largest size that can be requested, in parameters. Below the minimum, the vocabulary embedding
alone would have more parameters than requested."""
LEARNED_POSITIONS = 8192
"""The number of learned positions of a scaled model. The catalog models that are scaled have fewer positions, too few
for common sequence lengths."""


def parse_model_size(name: str) -> float | None:
    """Returns the number of parameters of a size such as 200b, or None if `name` is not a size.

    >>> parse_model_size("200b"), parse_model_size("gpt-1.3B"), parse_model_size("gpt2"), parse_model_size("0b")
    (200000000000.0, 1300000000.0, None, None)
    """
    match = _SIZE_PATTERN.fullmatch(name.strip())
    return float(match[1]) * _SIZE_UNITS[match[2].lower()] or None if match else None


SizesByName = Mapping[str, ArchitectureSizes]
"""The sizes of models that can be scaled, by model name."""


def scalable_sizes() -> SizesByName:
    """Returns the sizes of the GPT models of the catalog that can be scaled, by model name."""
    return {
        name: sizes_from_catalog(row) for name, row in catalog.models().items() if row["family"] in SCALABLE_FAMILIES
    }


def nearest_size(parameters: float, known: SizesByName) -> str:
    """Returns the name of the model in `known` whose number of parameters is nearest to `parameters`, compared by
    ratio."""
    return min(known, key=lambda name: abs(math.log(count_weights(known[name]) / parameters)))


def count_weights(sizes: ArchitectureSizes) -> float:
    """Returns the number of parameters of a GPT model. Biases and norms, about a thousandth of the total, are not
    counted."""
    return 12.0 * sizes.layers * sizes.hidden**2 + (sizes.vocab + sizes.pos_rows) * sizes.hidden


def sizes_for_parameters(parameters: float, known: SizesByName | None = None) -> ArchitectureSizes:
    """Returns the sizes of a GPT model whose number of parameters is as close to `parameters` as whole layers allow.
    `known` are the models that may be scaled, by default the GPT models of the catalog.

    Raises: InputError if `parameters` is not between MIN_PARAMETERS and MAX_PARAMETERS.
    """
    if not MIN_PARAMETERS <= parameters <= MAX_PARAMETERS:
        raise InputError(
            Message(
                "a model of {parameters} parameters: the number must be between {min_parameters} and {max_parameters}",
                parameters=show_count(parameters),
                min_parameters=show_count(MIN_PARAMETERS),
                max_parameters=show_count(MAX_PARAMETERS),
            )
        )
    known = known or scalable_sizes()
    like = known[nearest_size(parameters, known)]
    wanted = like.hidden * (parameters / count_weights(like)) ** (1 / 3)
    step = next(step for least, step in HIDDEN_SIZE_STEPS if wanted >= least)
    hidden = max(round(wanted / step), 1) * step
    while hidden > step and parameters < (like.vocab + LEARNED_POSITIONS) * hidden + 6.0 * like.layers * hidden**2:
        hidden -= step
    layers = max(round((parameters - (like.vocab + LEARNED_POSITIONS) * hidden) / (12.0 * hidden**2)), 1)
    changes: dict[str, Any] = {
        "layers": layers,
        "hidden": hidden,
        "heads": hidden // (128 if hidden >= 1536 else 64),
        "kv_heads": hidden // (128 if hidden >= 1536 else 64),
        "head_dim": 0.0,
        "ffn": 4 * hidden,
        "seq": LEARNED_POSITIONS,
        "pos_rows": LEARNED_POSITIONS,
    }
    return validate_data(ArchitectureSizes, {**like.model_dump(), **changes}, "$.model")


def model_title(name: str) -> str:
    """Returns the display name of a model. For a size such as 200b, this name includes the catalog model that is
    scaled.

    >>> model_title("200b"), model_title("gpt3")
    ('gpt-200b (gpt3-175b scaled)', 'gpt3')
    """
    name = snapshot_name(name)
    parameters = parse_model_size(name)
    if (
        parameters is None
        or not MIN_PARAMETERS <= parameters <= MAX_PARAMETERS
        or catalog.find_entry(catalog.models(), name)
    ):
        return name
    return f"gpt-{name.strip().lower().removeprefix('gpt-')} ({nearest_size(parameters, scalable_sizes())} scaled)"
