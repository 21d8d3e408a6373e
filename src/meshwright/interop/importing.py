"""Imports the configuration of another system: a job, a plan, and every key that is not carried over.

The system is the one whose table has the most keys of the files, unless the user names it. A key that no table has is
an error if it is probably mistyped; a key that another system has is an error, because the keys of two systems are
mixed. All other keys are listed as not carried over.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.catalog import read as catalog
from meshwright.core.codec import validate_data
from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.interop.exporting import describe_violation
from meshwright.interop.formats import LAUNCHER_KEYS, ConfigFile, read_config
from meshwright.interop.lost_keys import is_harmless, lost_key
from meshwright.interop.registry import SYSTEMS, find_system
from meshwright.interop.settings import Settings, degrees_of, plan_of, sizes_of, unstated_defaults, workload_of
from meshwright.interop.system import DecodedKeys, System, decode
from meshwright.planner.inputs.architecture_sizes import ArchitectureSizes
from meshwright.spec.plan import Plan
from meshwright.spec.reference_models import unsupported_sizes
from meshwright.spec.workload import Workload

MIN_KEYS = 2
"""Minimum number of keys by which a system is recognized."""
SIMILARITY = 0.88
"""Minimum similarity of an unknown key with a key of the table at which it counts as mistyped."""
NEAR_CONSTANT = 0.8
"""The same for a system without a list of all its keys, such as the constants of a script."""
EXPECTED_SETTINGS = {"attention_dropout": 0.0, "dropout": 0.0}
"""Settings that a job has no field for, with the value that the reference models have."""


class ImportedPlan(NamedTuple):
    """The result of an import. `job` has the sections of a job file. `sizes` are the sizes of the model if the files
    state them. `not_carried` are the keys without an equivalent that can change the result, each with the reason.
    `ignored` are the others. `carried` is the number of keys that were carried over, of all `keys`."""

    system: System
    plan: Plan
    job: dict[str, Any]
    sizes: dict[str, Any]
    carried: int
    not_carried: tuple[Message, ...]
    ignored: tuple[str, ...]
    settings: Settings
    keys: dict[str, Any]

    def job_options(self) -> dict[str, Any]:
        """Returns the model and the workload as options of `planner.inputs.job.read_job`, without the plan."""
        found = {name: section for name, section in self.job.items() if name != "plan"}
        if self.sizes:
            whole = validate_data(ArchitectureSizes, self.sizes, "model").model_dump(mode="json", exclude_none=True)
            found["model"] = {"name": "llama-tiny", "sizes": whole}
        return found

    def model_line(self) -> Message:
        """Returns why the job has no model."""
        return _unknown_model(self.settings)


def _unknown_model(settings: Settings) -> Message:
    if model := settings.get("model"):
        return Message(
            "model {model}: not in the catalog; --model: a catalog name, a folder or module:function", model=model
        )
    return Message("no file states the sizes of the model; --model: a catalog name, a folder or module:function")


def _check_conditions(files: Sequence[ConfigFile], system: System, devices: int) -> list[Message]:
    """Returns the keys without an equivalent that depend on conditions without a value.

    Raises: InputError if such a key has an equivalent, or states the number of devices and `devices` does not.
    """
    needed = system.own_keys | (frozenset() if devices else LAUNCHER_KEYS.keys())
    found = []
    for file in files:
        for line, condition, option in file.conditional:
            names = dict.fromkeys(re.findall(r"\$\{?([A-Za-z_]\w*)", condition))
            text = Message(
                "{path}:{line}: {key} depends on {condition}, which is not evaluated: {remedy}",
                path=file.path,
                line=line,
                key=option,
                condition=condition,
                remedy=Message("set {names} in the script, or remove the condition", names=", ".join(names))
                if names
                else Message("remove the condition"),
            )
            if option in needed:
                raise InputError(text)
            found.append(text)
    return found


def import_plan(
    *paths: str | Path,
    system: str | None = None,
    devices: int = 0,
    allow_unknown: bool = False,
    default_devices: int = 0,
) -> ImportedPlan:
    """Imports the configuration in the files `paths`, which belong together. `system` is the name of the system; None
    means that it is recognized. `devices` is the number of devices; it replaces that of the files. `default_devices` is
    the number if no file states one. `allow_unknown` lists unknown keys instead of refusing them.

    Raises: InputError if a file cannot be read, if a key is unknown or belongs to another system, or if the
    configuration contradicts itself.
    """
    if not paths:
        raise InputError(Message("name the configuration files of the other system"))
    files = _as_options([read_config(path) for path in paths])
    keys: dict[str, Any] = {}
    for file in files:
        _check_repeated(file, keys)
        keys |= file.keys
    found = find_system(system) if system is not None else _recognize(keys, paths)
    _check_constants(found, keys, paths)
    _check_versions(found, keys)
    lost, not_carried = _check_unknown(found, keys, allow_unknown)
    stated = _states_devices(found, keys, _launcher_settings(files, devices))
    decoded = decode(found, keys, _launcher_settings(files, devices if stated else devices or default_devices))
    settings = degrees_of(decoded.settings)
    is_idle = (lambda name: False) if settings.get("precision") == "fp16" else lambda name: name.startswith("fp16.")
    ignored = tuple(name for name in lost if is_harmless(name) or is_idle(name))
    not_carried += [lost_key(name) for name in lost if name not in ignored]
    not_carried += _check_conditions(files, found, devices)
    plan = plan_of(settings)
    _check_limits(found, plan)
    not_carried += _lost_values(decoded, settings, keys)
    workload = _checked_workload(settings, not_carried)
    not_carried += _lost_schedule(workload)
    sizes = _checked_sizes(settings, found, not_carried)
    job = _job_sections(settings, plan, workload, sizes)
    if not sizes_of(settings) and "model" not in job:
        not_carried.append(_unknown_model(settings))
    return ImportedPlan(
        system=found,
        plan=plan,
        job=job,
        sizes=sizes,
        carried=sum(name in keys and name not in decoded.unknown_values for name in found.own_keys),
        not_carried=tuple(not_carried),
        ignored=ignored,
        settings=settings,
        keys=keys,
    )


def _check_constants(system: System, keys: Mapping[str, Any], paths: Sequence[str | Path]) -> None:
    """Raises InputError if a script of FSDP2 states no constant."""
    if system.name == "fsdp2" and not system.own_keys & keys.keys():
        raise InputError(_no_constants(paths))


def _no_constants(paths: Sequence[str | Path]) -> Message:
    return Message(
        "{paths}: no constant of FSDP2 found: write {names} (page coming-from/fsdp2)",
        paths=", ".join(map(str, paths)),
        names="MODEL, DP_SHARD, MICRO_BATCH, SEQUENCE, LR",
    )


def _lost_values(decoded: DecodedKeys, settings: Settings, keys: Mapping[str, Any]) -> list[Message]:
    """Returns the values of known keys that are not carried over, and the remarks of the system."""
    lines = [
        Message("{key}={value}: no equivalent of this value", key=name, value=keys[name])
        for name in decoded.unknown_values
    ]
    lines += [
        Message("{name} {value} is not applied here", name=name, value=settings[name])
        for name, expected in EXPECTED_SETTINGS.items()
        if settings.get(name, expected) != expected
    ]
    return lines + settings.get("remarks", [])


def _lost_schedule(workload: Mapping[str, Any]) -> list[Message]:
    """Returns what the job does not take from the files: keys that they do not state, and a warmup that is too long."""
    unstated = unstated_defaults(workload)
    lines = []
    if unstated:
        values = ", ".join(f"{name} {'null' if value is None else value}" for name, value in unstated.items())
        lines.append(
            Message("no file states these keys; the job has the defaults of Meshwright: {values}", values=values)
        )
    warmup, steps = workload.get("optimizer", {}).get("warmup", 0), workload.get("steps")
    if steps and warmup > steps // 2:
        lines.append(
            Message(
                "warmup {warmup} of {steps} steps: at most half of the steps warm up here, {half}",
                warmup=warmup,
                steps=steps,
                half=steps // 2,
            )
        )
    return lines


def _as_options(files: list[ConfigFile]) -> list[ConfigFile]:
    """Returns the files. Together with a configuration of a launcher (accelerate, DeepSpeed), the keys of a file of
    TrainingArguments become options of the script. So they cannot be mistaken for keys of the launcher."""
    trainer = SYSTEMS["transformers"]
    systems = [_likely_system(file.keys) for file in files]
    if not any(
        system.open_arguments and system is not trainer and any(not name.startswith("-") for name in file.keys)
        for file, system in zip(files, systems, strict=True)
    ):
        return files
    return [
        file._replace(keys={f"--{name.lstrip('-')}": value for name, value in file.keys.items()})
        if system is trainer
        else file
        for file, system in zip(files, systems, strict=True)
    ]


def _check_repeated(file: ConfigFile, keys: Mapping[str, Any]) -> None:
    for name in file.keys.keys() & keys.keys():
        if keys[name] != file.keys[name]:
            raise InputError(
                Message(
                    "{path}: {key} is {value}, but {other} in another file",
                    path=file.path,
                    key=name,
                    value=file.keys[name],
                    other=keys[name],
                )
            )


def recognize_file(path: str | Path) -> str | None:
    """Returns the name of the system whose configuration the file `path` is, or None if it is of no known system."""
    try:
        keys = read_config(path).keys
        return _recognize(keys, [path]).name if len(keys) > 1 else None
    except InputError:
        return None


def _recognize(keys: Mapping[str, Any], paths: Sequence[str | Path]) -> System:
    """Returns the system whose table has the most of `keys`; keys of older versions count too."""
    system = _likely_system(keys)
    count = _count_keys(system, keys)
    if count < min(MIN_KEYS, len(keys)) or not count:
        if all(str(path).endswith(".py") for path in paths):
            raise InputError(_no_constants(paths))
        raise InputError(
            Message(
                "{paths}: not a configuration of {systems}; `--from SYSTEM` names the system",
                paths=", ".join(map(str, paths)),
                systems=", ".join(system.title for system in SYSTEMS.values()),
            )
        )
    return system


def _likely_system(keys: Mapping[str, Any]) -> System:
    """Returns the system whose table has the most of `keys`. Options that several systems have are those of the
    Trainer, which the others start."""
    return max(SYSTEMS.values(), key=lambda system: (_count_keys(system, keys), system.name == "transformers"))


def _count_keys(system: System, keys: Mapping[str, Any]) -> int:
    return len(keys.keys() & (system.own_keys | system.renamed.keys()))


def _check_versions(system: System, keys: Mapping[str, Any]) -> None:
    old = [name for name in system.renamed if name in keys]
    if old:
        raise InputError(
            Message(
                "{key} belongs to a version of {system} before {version}: write {new}",
                key=old[0],
                system=system.title,
                version=system.version,
                new=system.renamed[old[0]],
            )
        )


def _check_unknown(system: System, keys: Mapping[str, Any], allow_unknown: bool) -> tuple[list[str], list[Message]]:
    """Returns the keys of the system that have no equivalent, and lines for keys that are not its own.

    Raises: InputError for keys of another system, and for unknown keys.
    """
    catalogued = catalog.interop_keys()
    known = catalogued.get(system.name, frozenset())
    if system.open_arguments:
        known |= {f"--{name}" for name in catalogued["transformers"]}
    lost: list[str] = []
    not_carried: list[Message] = []
    unknown: list[str] = []
    for name in keys:
        if name in system.own_keys:
            continue
        owner = next((other for other in SYSTEMS.values() if name in other.own_keys), None)
        near = difflib.get_close_matches(name, system.own_keys, n=1, cutoff=SIMILARITY if known else NEAR_CONSTANT)
        mistyped = not known and name.isupper() and bool(near) and near[0] not in keys
        if (not known and not mistyped) or _is_known(name, known):
            lost.append(name)
        elif owner is not None:
            raise InputError(
                Message(
                    "{key} belongs to {owner}, the other keys to {system}: give the files of one system",
                    key=name,
                    owner=owner.title,
                    system=system.title,
                )
            )
        elif allow_unknown or (system.open_arguments and name.startswith("-") and not near):
            not_carried.append(
                Message("{key}: not a key of {system}, left to your script", key=name, system=system.title)
            )
        else:
            unknown.append(name)
    if unknown:
        cutoff = SIMILARITY if known else NEAR_CONSTANT
        near = difflib.get_close_matches(unknown[0], [*system.own_keys, *known], n=1, cutoff=cutoff)
        raise InputError(
            Message(
                "{system} {version} has no {keys}{hint}; --allow-unknown reads the other keys",
                system=system.title,
                version=system.version,
                keys=", ".join(unknown),
                hint=Message("; did you mean {names}?", names=repr(near[0])) if near else "",
            )
        )
    return lost, not_carried


def _is_known(name: str, known: frozenset[str]) -> bool:
    """Returns whether `name` or one of its sections is known. A section that ends with a dot has any keys."""
    parts = name.split(".")
    sections = (".".join(parts[:count]) + "." for count in range(1, len(parts)))
    dashes = name.replace("_", "-") if name.startswith("--") else name
    return (
        name in known
        or dashes in known
        or dashes.replace("--no-", "--") in known
        or any(section in known for section in sections)
    )


def _launcher_settings(files: Sequence[ConfigFile], devices: int) -> Settings:
    found: Settings = {}
    for file in files:
        found |= {name: value for name, value in file.launcher.items() if isinstance(value, int) and value > 0}
    if devices:
        nodes = found.get("nodes", 1)
        nodes = nodes if devices % nodes == 0 else 1
        found |= {"nodes": nodes, "devices_per_node": devices // nodes, "world": devices}
    return found


def _states_devices(system: System, keys: Mapping[str, Any], launcher: Settings) -> bool:
    """Returns whether the files state the number of devices or of data-parallel ranks."""
    stating = {
        name: keys[name]
        for key in system.keys
        if key.setting in ("world", "devices_per_node", "dp", "dp_shard")
        for name in (key.name, *key.also)
        if name in keys
    }
    given = {"world", "devices_per_node"} & launcher.keys()
    return bool(given) or any(isinstance(value, int) and value > 0 for value in stating.values())


def _check_limits(system: System, plan: Plan) -> None:
    """Raises InputError if `system` itself would refuse the plan."""
    limit = system.limit_of(plan)
    names = limit.violations(plan)
    reason = describe_violation(plan, names[0], system) if names else limit.rule(plan)
    if reason:
        raise InputError(
            Message("the configuration contradicts itself, plan {plan}: {reason}", plan=plan.name, reason=reason)
        )


def _checked_workload(settings: Settings, not_carried: list[Message]) -> dict[str, Any]:
    """Returns the section `workload`. An optimizer that is invalid here is left out and listed."""
    workload = workload_of(settings)
    try:
        validate_data(Workload, workload, "workload")
    except InputError as error:
        not_carried.append(Message("the optimizer: {error}", error=error))
        workload.pop("optimizer", None)
        validate_data(Workload, workload, "workload")
    return workload


def _checked_sizes(settings: Settings, system: System, not_carried: list[Message]) -> dict[str, Any]:
    sizes = sizes_of(settings)
    if not sizes:
        return {}
    if not sizes.get("vocab"):
        line = Message(
            "the sizes of the model are left out, because no file states the vocabulary: add {key} N (50257 for "
            "GPT-2), or name the model with --model",
            key=next((key.name for key in system.keys if key.setting == "vocab"), "vocab_size"),
        )
        not_carried.append(line)
        return {}
    try:
        found = validate_data(ArchitectureSizes, sizes, "model").model_dump(mode="json", exclude_defaults=True)
    except InputError as error:
        not_carried.append(Message("the sizes of the model: {error}", error=error))
        return {}
    if reason := unsupported_sizes(found):
        not_carried.append(Message("the job can be planned, not trained: {reason}", reason=reason))
    return found


def _job_sections(settings: Settings, plan: Plan, workload: dict[str, Any], sizes: dict[str, Any]) -> dict[str, Any]:
    """Returns the sections of the job file. A model of the catalog is named; other models get their sizes."""
    job: dict[str, Any] = {}
    name = str(settings.get("model") or "")
    row = next((row for each in (name, name.rpartition("/")[2]) if each and (row := _find_model(each))), None)
    if row is not None and not sizes:
        job["model"] = {"name": row}
    job["workload"] = workload
    job["plan"] = {"name": plan.name}
    return job


def _find_model(name: str) -> str | None:
    """Returns the name in the catalog of a model of the Hugging Face Hub, or None."""
    short = name.lower().removeprefix("meta-").replace("meta-llama-", "llama").replace("llama-", "llama")
    for each in (name, short, short.removesuffix("-hf"), short.removesuffix("-instruct")):
        row = catalog.find_entry(catalog.models(), each)
        if row is not None:
            return str(row["model"])
    return None


def import_lines(found: ImportedPlan) -> list[Message]:
    """Returns the output of an import: the plan, and every key that is not carried over."""
    lines = [
        Message(
            "{system}: plan {plan} on {devices:count device}, {count:count key} carried over",
            system=found.system.title,
            plan=found.plan.name,
            devices=found.plan.world,
            count=found.carried,
        )
    ]
    if found.not_carried:
        lines.append(Message("not carried over, the result can differ:"))
        lines += [Message("  {line}", line=line) for line in found.not_carried]
    if found.ignored:
        lines.append(Message("not carried over, without effect on the result: {keys}", keys=", ".join(found.ignored)))
    return lines
