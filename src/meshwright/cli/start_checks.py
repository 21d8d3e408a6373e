"""Checks a job before its ranks start: the devices, the data, and the packages that it needs. What can be refused
here takes a second instead of the half minute in which ranks start.

Guarantees: nothing is written, and no package of these is imported.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.cli.device_checks import check_devices
from meshwright.core.errors import InputError
from meshwright.core.messages import Message

if TYPE_CHECKING:
    from meshwright.spec.job import Job, LaunchSpec

IMAGES_SOURCE = "shapes"
TABLE_SUFFIXES = (".parquet", ".arrow", ".feather")


def check_before_ranks(launch: LaunchSpec, question: Job | None, allow_cpu: bool, ranks: int) -> None:
    """Raises InputError if this machine lacks the devices of the cluster, a file of the data or a package. Ranks that
    another launcher has started check the same, each on its own machine. `question`: the job, None if its model has no
    estimate. `allow_cpu`: whether a cluster with GPUs may be trained on CPUs. `ranks`: the number of ranks that this
    command starts on this machine, 0 if another launcher starts them."""
    if not allow_cpu:
        check_devices(question, ranks)
    _check_packages(launch)
    _check_tokenizer(launch)
    begin = launch.run.resume_from
    if begin and not Path(begin).exists():
        raise InputError(
            Message(
                "checkpoint {folder!r} does not exist; `meshwright checkpoint list FOLDER` shows those that do",
                folder=begin,
            )
        )
    if IMAGES_SOURCE not in launch.data.sources:
        _check_data(launch)


def _has_only_cpus(question: Job) -> bool:
    return all(group.device.name.lower().startswith("cpu") for group in question.cluster.groups)


def _check_packages(launch: LaunchSpec) -> None:
    from meshwright.data.tokens import tokenizer_file

    tokenizer, work = launch.data.tokenizer, launch.workload
    is_sentencepiece = (tokenizer_file(Path(tokenizer).expanduser()) or Path(tokenizer)).suffix == ".model"
    needed = [
        ("transformers", "huggingface", bool(launch.model.folder), Message("a model folder")),
        ("peft", "peft", work.lora is not None, "LoRA"),
        ("torchao", "lowbit", work.optimizer.state is not None, Message("8-bit optimizer states")),
        ("sentencepiece", "sentencepiece", is_sentencepiece, Message("tokenizer.model")),
        (
            "tokenizers",
            "tokenizers",
            tokenizer not in ("auto", "bytes") and not is_sentencepiece,
            Message("the tokenizer"),
        ),
        (
            "pyarrow",
            "parquet",
            any(source.endswith(TABLE_SUFFIXES) for source in launch.data.sources),
            Message("a table as data"),
        ),
        *((name, name, name != "prometheus", Message("run.track={name}", name=name)) for name in launch.run.track),
    ]
    for package, extra, is_needed, what in needed:
        if is_needed and find_spec(package) is None:
            raise InputError(
                Message(
                    "{what} needs the package {package}: pip install 'meshwright[{extra}]'",
                    what=what,
                    package=package,
                    extra=extra,
                )
            )


def _check_tokenizer(launch: LaunchSpec) -> None:
    """Raises InputError if pretrained weights would be trained on the token ids of a new tokenizer."""
    from meshwright.data.corpus import ARRAY_SUFFIXES

    folder, sources = Path(launch.model.folder or "."), launch.data.sources
    has_ids = all(source == IMAGES_SOURCE or source.endswith(ARRAY_SUFFIXES) for source in sources)
    if not launch.model.folder or launch.data.tokenizer != "auto" or has_ids or not any(folder.glob("*.safetensors")):
        return
    other = next((name for name in ("vocab.json", "vocab.txt") if (folder / name).is_file()), "")
    raise InputError(
        Message(
            "model folder {folder!r} has pretrained weights, but {what}, so their token ids are unknown: {remedy}",
            folder=str(folder),
            what=Message("of its tokenizer only {other}", other=other) if other else Message("no tokenizer.json"),
            remedy=Message(
                "write tokenizer.json with transformers: AutoTokenizer.from_pretrained(F).save_pretrained(F), or name "
                "another folder with --set data.tokenizer=FOLDER"
            )
            if other
            else Message(
                "copy tokenizer.json from where the weights are from, or name its folder with --set "
                "data.tokenizer=FOLDER; data.tokenizer=bytes trains on bytes all the same"
            ),
        )
    )


def _check_data(launch: LaunchSpec) -> None:
    """Raises InputError if a file does not exist, or if the records are pairs and the job is no preference training, or
    the reverse. Tables are not read, because their library would have to be imported."""
    from meshwright.data.corpus import ARRAY_SUFFIXES, STDLIB_SOURCE, find_files
    from meshwright.data.record_form import form_of_records
    from meshwright.data.records import first_record

    for source in launch.data.sources:
        files = find_files((str(Path(source).expanduser()),)) if source != STDLIB_SOURCE else []
        if not any(path.suffix.lower() in (*TABLE_SUFFIXES, *ARRAY_SUFFIXES) for path in files):
            fields = first_record(files) or {}
            form_of_records(fields, launch.data.field, source, launch.workload.preference is not None)


def cluster_mismatches(question: Job) -> list[str]:
    """Compares the cluster of a job with this machine, on which all ranks of the job will start. Returns a line if the
    cluster has several nodes, and a line if either the cluster or this machine has GPUs, but not both."""
    from meshwright.planner.inputs.cluster_parser import cuda_device_names

    cluster = question.cluster
    found: list[str] = []
    nodes, devices = (
        sum(group.nodes for group in cluster.groups),
        dict.fromkeys(group.device.name for group in cluster.groups),
    )
    if nodes > 1:
        found.append(
            Message(
                "cluster {cluster!r} has {nodes} nodes, but this command starts all ranks on this node: `meshwright "
                "launch` writes the script that starts them on each node",
                cluster=cluster.name,
                nodes=nodes,
            )
        )
    if _has_only_cpus(question) == bool(cuda_device_names()):
        here = Message("CUDA devices") if cuda_device_names() else Message("cores")
        found.append(
            Message(
                "cluster {cluster!r} has {devices}, but this machine has {here}: predicted times and memory do not "
                "apply to this machine",
                cluster=cluster.name,
                devices=" and ".join(devices),
                here=here,
            )
        )
    return found
