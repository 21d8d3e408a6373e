"""Reads and writes the file formats of other systems. Each file becomes a flat mapping of keys to values: an option of
a command line keeps its dashes (`--tensor-model-parallel-size`), and nested keys are joined by dots
(`zero_optimization.stage`)."""

from __future__ import annotations

import ast
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from meshwright.core.codec import parse_text, read_text_file
from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.interop.shell import Conditional, argument_values, read_command

LAUNCHER_KEYS = {
    "--nproc-per-node": "devices_per_node",
    "--nproc_per_node": "devices_per_node",
    "--nnodes": "nodes",
    "--num_gpus": "devices_per_node",
    "--num_nodes": "nodes",
    "--num_processes": "world",
    "--num-processes": "world",
    "--num_machines": "nodes",
    "--num-machines": "nodes",
}
"""The options of torchrun, deepspeed and accelerate with numbers of machines and devices."""


FILE_OPTIONS = ("--config-file", "--config_file", "--config", "--job.config_file", "--deepspeed_config")
"""Options that name another file of the configuration."""


class ConfigFile(NamedTuple):
    """A configuration file of another system. `keys` are its keys and values. `launcher` are the numbers of devices of
    its launch command. `conditional` are keys and numbers of devices that depend on conditions without a value."""

    path: str
    keys: dict[str, Any]
    launcher: dict[str, Any]
    conditional: tuple[Conditional, ...] = ()


def read_config(path: str | Path) -> ConfigFile:
    """Reads a configuration file. The suffix determines the format: .json, .toml, .yaml, .yml, .py; any other file is a
    shell script or an argument list. An option with a dot, such as `--training.steps`, is the key `training.steps`.

    Raises: InputError if the file cannot be read, or has no mapping of keys.
    """
    text, suffix = read_text_file(path, "configuration"), Path(path).suffix
    if suffix in (".json", ".yaml", ".yml"):
        data = parse_text(text, str(path))
    elif suffix == ".toml":
        try:
            data = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise InputError(Message("{path}: {error}", path=path, error=error)) from None
    elif suffix == ".py":
        data = _python_settings(text, str(path))
    else:
        command = read_command(text)
        options = argument_values(command.launcher)
        launcher = {field: options[name] for name, field in LAUNCHER_KEYS.items() if name in options}
        keys = argument_values(command.arguments)
        files = () if "--module" in keys else FILE_OPTIONS
        keys = {_option_key(name): value for name, value in keys.items() if name not in files}
        conditional = tuple(each._replace(option=_option_key(each.option)) for each in command.conditional)
        return ConfigFile(str(path), keys, launcher, conditional)
    if not isinstance(data, dict) or not data:
        raise InputError(Message("{path}: expected keys and values of a configuration", path=path))
    return ConfigFile(str(path), flatten(data), {})


def _option_key(name: str) -> str:
    """Returns the key of an option: `--training.local-batch-size` is that of `training.local_batch_size`."""
    return name.lstrip("-").replace("-", "_") if "." in name else name


def _python_settings(text: str, path: str) -> dict[str, Any]:
    """Returns the settings that a Python script states: the constants that it assigns at its top level, or what its
    only function assigns or returns, where `Config(a=Section(b=1))` is the key `a.b`. The script is not executed.
    """
    try:
        body = ast.parse(text).body
    except SyntaxError as error:
        raise InputError(
            Message("{path}: line {line}: {error}", path=path, line=error.lineno or 0, error=error.msg)
        ) from None
    found = {}
    for node in body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            try:
                found[node.targets[0].id] = ast.literal_eval(node.value)
            except ValueError:
                continue
    functions = [node for node in body if isinstance(node, ast.FunctionDef)]
    if found or not functions:
        return found
    if len(functions) > 1:
        raise InputError(
            Message(
                "{path} has {count} functions: keep the one that returns your configuration",
                path=path,
                count=len(functions),
            )
        )
    return _function_settings(functions[0])


def _function_settings(function: ast.FunctionDef) -> dict[str, Any]:
    """Returns the settings of a function. `config` is the function that it begins with, or its own name."""
    found: dict[str, Any] = {"config": function.name}
    for node in function.body:
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Call):
            found |= _call_settings("", node.value)
        elif isinstance(node, ast.Assign) and len(node.targets) == 1:
            name = ast.unparse(node.targets[0]).partition(".")[2] or ast.unparse(node.targets[0])
            found |= _call_settings(name, node.value)
    return found


def _call_settings(name: str, value: ast.expr) -> dict[str, Any]:
    """Returns a value as keys: the keyword arguments of a call, or under `name` the called name or a literal. Other
    values are left out."""
    if isinstance(value, ast.Call):
        prefix = f"{name}." if name else ""
        found: dict[str, Any] = {}
        for each in value.keywords:
            found |= _call_settings(f"{prefix}{each.arg}", each.value)
        return found or {name: ast.unparse(value.func).removesuffix(".Config")}
    try:
        literal = ast.literal_eval(value)
    except ValueError:
        return {}
    return {name: tuple(literal) if isinstance(literal, list) else "None" if literal is None else literal}


def flatten(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested mappings as one mapping with dotted keys. A list becomes a tuple.

    >>> flatten({"a": {"b": 1, "c": [2, 3]}, "d": 4})
    {'a.b': 1, 'a.c': (2, 3), 'd': 4}
    """
    found: dict[str, Any] = {}
    for name, value in data.items():
        if isinstance(value, Mapping):
            found |= flatten(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = tuple(value) if isinstance(value, list) else value
    return found


def nest(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Returns dotted keys as nested mappings, the inverse of `flatten`."""
    found: dict[str, Any] = {}
    for name, value in keys.items():
        *sections, last = name.split(".")
        inner = found
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = list(value) if isinstance(value, tuple) else value
    return found


def write_json(keys: Mapping[str, Any]) -> str:
    """Returns the keys as a JSON file."""
    return json.dumps(nest(keys), indent=2) + "\n"


def write_yaml(keys: Mapping[str, Any]) -> str:
    """Returns the keys as a YAML file."""
    return str(yaml.safe_dump(nest(keys), sort_keys=False, default_flow_style=False))


def write_toml(keys: Mapping[str, Any]) -> str:
    """Returns the keys as a TOML file with one table for each section."""
    lines: list[str] = []
    for section, values in nest(keys).items():
        lines += ["", f"[{section}]", *(f"{name} = {json.dumps(value)}" for name, value in values.items())]
    return "\n".join(lines[1:]) + "\n"


def torchrun_line(settings: Mapping[str, Any], script: str) -> str:
    """Returns the launch line of `script`, which may have arguments, on the devices of `settings`."""
    return f"torchrun --nnodes {settings['nodes']} --nproc-per-node {settings['devices_per_node']} {script}"


def split_options(keys: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the keys of a configuration file, and the options of a command line."""
    options = {name: value for name, value in keys.items() if name.startswith("--")}
    return {name: value for name, value in keys.items() if name not in options}, options


def argument_words(keys: Mapping[str, Any]) -> list[str]:
    """Returns options as words of a command line, one option with its values each.

    >>> argument_words({"--tp": 2, "--bf16": True, "--betas": (0.9, 0.95)})
    ['--tp 2', '--bf16', '--betas 0.9 0.95']
    """
    return [
        name if value is True else f"{name} {' '.join(map(_word, value if isinstance(value, tuple) else (value,)))}"
        for name, value in keys.items()
    ]


def _word(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)
    return f"'{text}'" if set(text) & set(" |*()&;<>$") else text
