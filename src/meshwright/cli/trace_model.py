"""Makes the description (`ModelSpec`) of models without closed formulas: user code, and Hugging Face folders of
families that the formulas do not support. The model is traced on the meta device. Every command that reads a job uses
the module.

Guarantees: torch is imported only to trace a model. The description of a folder is cached for the user. The key is a
digest of its configuration, the sequence, the precision and the tensor-parallel rules. The digest also covers the code
in `analysis/` and the versions of torch and transformers. User code is traced each time, because changes of the code
cannot be detected.
"""

from __future__ import annotations

from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.core.errors import InputError
from meshwright.core.messages import Message

if TYPE_CHECKING:
    from meshwright.planner.inputs.job import JobFile
    from meshwright.spec.job import ModelSource
    from meshwright.spec.model import ModelSpec, TpRule

SPEC_FILE = "spec.json"
ANALYSIS_PACKAGES = ("analysis",)
"""Packages whose code determines the description of a model."""


def trace_job_model(file: JobFile) -> JobFile:
    """Returns `file` unchanged if a closed formula describes its model. Otherwise returns it with the traced
    `ModelSpec` in the field `described`, or with a text that says why the model cannot be traced.

    Raises: InputError if the job sets sizes or rules that this model does not accept.
    """
    from meshwright.planner.inputs.job import resolve_precision
    from meshwright.planner.inputs.model_parser import is_model_folder, needs_tracing
    from meshwright.spec.job import ModelSource

    name = file.model.source
    rules = file.model.rules
    if not file.model.module and not needs_tracing(name) and not (rules and is_model_folder(name)):
        if rules:
            raise InputError(Message("$.model.rules: model {name!r} needs no rules: leave them out", name=name))
        return file
    if file.model.sizes:
        first = next(iter(file.model.sizes))
        raise InputError(
            Message(
                "$.model.sizes: {first!r} cannot be set for {name!r}, which defines its own sizes; change that "
                "definition",
                first=first,
                name=name,
            )
        )
    sequence, precision = file.workload.sequence, resolve_precision(file)
    has_folder = not file.model.module and is_model_folder(name)
    folder = Path(name).expanduser().resolve()
    if not has_folder:
        _check_function(name)
    try:
        if has_folder:
            found = _cached_spec(ModelSource(name=name, folder=str(folder), rules=rules), sequence, precision)
        else:
            found = _trace_spec(ModelSource(name=name, module=name, rules=rules), sequence, precision)
    except InputError as error:
        return file.but(described=str(error))
    return file.but(described=found)


def _check_function(name: str) -> None:
    """Raises InputError if the function `name` of the user's model does not exist. Errors of the user's code are left
    to the trace, which describes them."""
    from meshwright.train.model import load_user_function

    try:
        load_user_function(name, "model")
    except InputError:
        raise
    except Exception:
        return


def _trace_spec(source: ModelSource, sequence: int, precision: str) -> ModelSpec:
    from meshwright.analysis.profile.model_spec import describe
    from meshwright.train.model import build_model

    return describe(lambda: build_model(source, 0, weights=False), sequence, name=source.name, precision=precision)


def _cached_spec(source: ModelSource, sequence: int, precision: str) -> ModelSpec:
    """Returns the description of the model from the cache, and traces the model on a cache miss."""
    from meshwright.core.codec import read_as
    from meshwright.data.cache import cached_folder
    from meshwright.spec.model import ModelSpec

    def make(folder: Path) -> None:
        (folder / SPEC_FILE).write_text(_trace_spec(source, sequence, precision).to_json(), encoding="utf-8")

    name = f"model-{_source_digest(Path(source.folder) / 'config.json', sequence, precision, source.rules)}"
    return read_as(ModelSpec, cached_folder(name, make, lambda folder: (folder / SPEC_FILE).is_file()) / SPEC_FILE).but(
        name=source.name
    )


def _source_digest(config: Path, sequence: int, precision: str, rules: tuple[TpRule, ...]) -> str:
    digest = sha256(config.read_bytes() + f"{sequence}{precision}{rules or ''}".encode())
    for library in ("torch", "transformers"):
        try:
            digest.update(version(library).encode())
        except PackageNotFoundError:
            digest.update(b"none")
    for package in ANALYSIS_PACKAGES:
        for path in sorted((Path(__file__).parents[1] / package).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
