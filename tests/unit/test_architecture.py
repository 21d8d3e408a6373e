"""The architecture, enforced: package layers, no import cycles, size limits, no shared state, unique names, plain
prose.

Each check compares what it finds with `golden/architecture_allowed.json`, a list that may only shrink: a new violation
fails, and so does an
entry of the list that is no longer needed. MESHWRIGHT_SHRINK=1 removes such entries.
"""

from __future__ import annotations

import ast
import io
import json
import os
import re
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "meshwright"
TEXTS = {path.relative_to(SOURCE).as_posix(): path.read_text(encoding="utf-8") for path in sorted(SOURCE.rglob("*.py"))}
TREES = {path: ast.parse(text) for path, text in TEXTS.items()}
ALLOWED = ROOT / "tests" / "unit" / "golden" / "architecture_allowed.json"

PLANNING = {"core": 0, "catalog": 1, "spec": 1, "planner": 2, "report": 3, "elastic": 3, "interop": 3}
"""Layers of the planning packages, which never import torch."""
EXECUTION = {
    "models": 2,
    "analysis": 2,
    "runtime": 3,
    "data": 3,
    "checkpoint": 3,
    "train": 4,
    "interop.recording": 5,
    "adapters": 5,
}
"""Layers of the packages that run a plan. Of the planning packages they import only `core` and `spec`.
`interop.recording` needs torch, the rest of `interop` does not."""
SHARED = ("core", "spec")
NO_NUMPY = ("core", "catalog", "spec", "planner/inputs")
SUBLAYERS = {
    "planner": {"inputs": 0, "cost": 0, "search": 1, "simulate": 1, "validation": 2},
    "spec": {"": 1, "schedules": 0},
    "runtime": {
        "backend": 0,
        "host_process": 0,
        "error_propagation": 0,
        "comm": 1,
        "deferred_init": 2,
        "offload": 2,
        "shard": 3,
        "weight_gradients": 3,
        "parallel_context": 3,
        "stage_placeholder": 4,
        "loss_divisors": 3,
        "softmax": 3,
        "loss": 4,
        "batch_loss": 5,
        "preference_loss": 5,
        "non_tensor_state": 4,
        "tensor_parallel": 5,
        "context_parallel": 5,
        "activation_recompute": 5,
        "float8": 4,
        "zero": 6,
        "expert_parallel": 6,
        "optim": 7,
        "pipeline": 8,
        "compile": 9,
        "engine": 10,
        "state_dict": 11,
        "gather_service": 12,
        "parameter_access": 12,
        "preflight": 13,
        "build": 14,
        "profiler": 15,
    },
}
"""Layers inside a package, by the first part of a file's path in it (a folder, or a file's stem). A file imports its
own part and lower layers."""

FILE_LINES, FUNCTION_LINES, CLASS_LINES, METHODS, FIELDS, PARAMETERS = 500, 60, 300, 20, 20, 8
TIGHTER = {"train/loop.py": 250, "cli/main.py": 120}
MANY_FIELDS = {
    "ArchitectureSizes": "the columns of the published table of architectures, one field each",
    "LayerSpec": "the quantities of a layer in a model file, one field each (decisions/019)",
    "Plan": "the fields of a plan file, one field each",
}
MANY_PARAMETERS = {
    "parallelize": "the public function, one documented keyword argument each (decisions/019)",
}
POOR_NAMES = re.compile(r"(^|_)(utils?|helpers?|common|managers?|misc)(_|$)|^base_")

BANNED_IN_NAMES = frozenset(
    [
        "alike",
        "alone",
        "apart",
        "asked",
        "away",
        "beside",
        "besides",
        "fullest",
        "ghost",
        "gone",
        "hears",
        "held",
        "holds",
        "keeps",
        "kept",
        "late",
        "lent",
        "lies",
        "stands",
        "tells",
        "told",
        "unlike",
        "wants",
    ]
)
"""Words of an older vocabulary. GLOSSARY: say offloaded, saved, stored, heterogeneous, requested, overlapped,
recomputed, deferred."""
STANDARD_NAMES = re.compile("held_out")
"""Standard terms with such a word: the held-out data and the held-out loss of machine learning, also keys of JSON."""
BANNED_IN_PROSE = re.compile(
    r"\b(alike|apart|beside|besides|deeds?|elsewhere|promis(?:e|es|ed)|fullest|ghosts?|hears|lies|lent|nouns?|stands|tells|told|unlike"
    r"|want of memory|wings?"
    r"|goes its own way|for certain|put off|puts off|handed on|makes? (it |them )?again|made again|made anew"
    r"|in its turn|by turns"
    r"|without memory|is let in|as it was|is through|(states|weights|gradients|activations|what) waits?"
    r"|wait in (host|files|memory)|shares? of (states|weights)|is gone|are gone|goes away"
    r"|pretended ranks|played device)\b",
    re.IGNORECASE,
)


# What the source tree contains. Cached functions compute it on first use, so that collection of the tests stays fast.


@cache
def nodes(tree: ast.Module) -> list[ast.AST]:
    """All nodes of a file."""
    return list(ast.walk(tree))


@cache
def comments(path: str) -> list[tuple[int, str]]:
    """Line and text of each comment of a file."""
    tokens = tokenize.generate_tokens(io.StringIO(TEXTS[path]).readline)
    return [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]


def package_of(name: str) -> str:
    """The package of a module path ('planner/cost/step.py') or a dotted name ('meshwright.planner.cost'); '' for
    top-level files."""
    if name.startswith("meshwright"):
        parts = name.removeprefix("meshwright").strip(".").split(".")
    else:
        parts = name.removesuffix(".py").split("/")
    known = PLANNING.keys() | EXECUTION.keys() | {"cli"}
    if (inner := ".".join(parts[:2])) in known:
        return inner
    return parts[0] if parts[0] in known else ""


def file_of(name: str) -> str | None:
    """The file of a dotted module name, None for a name that is no module. The package's own `__init__.py` imports
    lazily and is left out."""
    inner = name.removeprefix("meshwright").strip(".").replace(".", "/")
    return next((path for path in (f"{inner}.py", f"{inner}/__init__.py") if inner and path in TREES), None)


def imports_of(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Every absolute import with its line, type-only imports included."""
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            modules = [f"{node.module}.{alias.name}" for alias in node.names if file_of(f"{node.module}.{alias.name}")]
            if len(modules) < len(node.names):
                yield (node.module or "", node.lineno)
            yield from ((name, node.lineno) for name in modules)


def own_imports(tree: ast.Module) -> Iterator[tuple[str, int]]:
    return ((name, line) for name, line in imports_of(tree) if name.split(".")[0] == "meshwright")


@cache
def imports() -> dict[str, set[str]]:
    """The files that each file imports."""
    return {
        path: {target for name, _ in own_imports(tree) if (target := file_of(name)) and target != path}
        for path, tree in TREES.items()
    }


def part_of(path: str, package: str) -> str:
    """The first part of a path inside its package: the folder or the file's stem ('' for files of `spec` itself)."""
    inner = path.removeprefix(package + "/").removesuffix(".py").split("/")[0]
    return inner if inner in SUBLAYERS[package] or "" not in SUBLAYERS[package] else ""


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    for path, tree in TREES.items():
        yield from ((path, node) for node in nodes(tree) if isinstance(node, ast.ClassDef))


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for path, tree in TREES.items():
        yield from ((path, node) for node in nodes(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def expect_only_allowed(check: str, violations: list[str]) -> None:
    """Compares violations with the allow-list: equal texts are counted."""
    allowed = json.loads(ALLOWED.read_text(encoding="utf-8"))
    now, before = Counter(violations), Counter(allowed.get(check, {}))
    if os.environ.get("MESHWRIGHT_SHRINK"):
        allowed[check] = dict(sorted((now & before).items()))
        ALLOWED.write_text(
            json.dumps({name: rows for name, rows in sorted(allowed.items()) if rows}, indent=1) + "\n",
            encoding="utf-8",
        )
        before &= now
    new, unneeded = now - before, before - now
    assert not new, "new violations:\n" + "\n".join(sorted(new))
    assert not unneeded, "the allow-list is longer than needed (MESHWRIGHT_SHRINK=1 shrinks it):\n" + "\n".join(
        sorted(unneeded)
    )


# Layers and cycles.


def test_every_package_has_a_layer() -> None:
    folders = {path.split("/")[0] for path in TREES if "/" in path}
    assert folders <= PLANNING.keys() | EXECUTION.keys() | {"cli"}


def test_a_package_imports_only_lower_layers() -> None:
    wrong = []
    for path, tree in TREES.items():
        package = package_of(path)
        if package in ("", "cli"):
            continue
        layers = PLANNING if package in PLANNING else EXECUTION
        for name, _ in own_imports(tree):
            other = package_of(name)
            if other in (package, "") and file_of(name) != "api.py":
                continue
            if not (layers[other] < layers[package] if other in layers else package in EXECUTION and other in SHARED):
                wrong.append(f"{path} imports {name}")
    expect_only_allowed("package layers", wrong)


@pytest.mark.parametrize("package", SUBLAYERS)
def test_parts_of_a_package_import_only_lower_layers(package: str) -> None:
    layers = SUBLAYERS[package]
    wrong = []
    for path in TREES:
        if not path.startswith(package + "/") or path == f"{package}/__init__.py":
            continue
        part = part_of(path, package)
        assert part in layers, f"{path}: {part} has no layer in {package}"
        for target in imports()[path]:
            other = (
                part_of(target, package)
                if target.startswith(package + "/") and target != f"{package}/__init__.py"
                else part
            )
            if other != part and layers[other] >= layers[part]:
                wrong.append(f"{path} imports {target}")
    expect_only_allowed(f"layers of {package}", wrong)


def components(graph: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected components of more than one node, by Tarjan's algorithm."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    result = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(graph[node]):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            cut = stack.index(node)
            if len(members := stack[cut:]) > 1:
                result.append(sorted(members))
            del stack[cut:]

    for node in graph:
        if node not in index:
            visit(node)
    return result


def test_no_import_cycle_between_files() -> None:
    graph = {path: targets & TREES.keys() for path, targets in imports().items() if path != "__init__.py"}
    expect_only_allowed(
        "cycles", [" <-> ".join(members) for members in components({p: t - {"__init__.py"} for p, t in graph.items()})]
    )


def test_no_import_cycle_between_folders() -> None:
    """A file at the top of a layered package is a part of its own."""

    def folder_of(path: str) -> str:
        folder = os.path.dirname(path)
        return path if folder in SUBLAYERS and not path.endswith("__init__.py") else folder

    graph: dict[str, set[str]] = defaultdict(set)
    for path, targets in imports().items():
        folder = folder_of(path)
        graph[folder] |= {folder_of(target) for target in targets} - {folder, ""}
    graph.pop("", None)
    expect_only_allowed("folder cycles", [" <-> ".join(members) for members in components(dict(graph))])


def test_only_api_and_the_command_line_import_the_command_line() -> None:
    wrong = [
        path
        for path, tree in TREES.items()
        for name, _ in own_imports(tree)
        if package_of(name) == "cli" and package_of(path) != "cli"
    ]
    assert sorted(set(wrong) - {"__main__.py", "api.py", "__init__.py"}) == []


def test_planning_packages_never_name_torch() -> None:
    wrong = []
    for path, tree in TREES.items():
        for name, _ in imports_of(tree):
            top = name.split(".")[0]
            if (package_of(path) in PLANNING and top == "torch") or (path.startswith(NO_NUMPY) and top == "numpy"):
                wrong.append(f"{path} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_commands_import_packages_only_when_they_run() -> None:
    """At the top of a command's file: the standard library, cyclopts, core, and other files of `cli`."""
    wrong = []
    for path, tree in TREES.items():
        if package_of(path) != "cli":
            continue
        for name, line in imports_of(
            ast.Module([node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)], [])
        ):
            ours = name.startswith("meshwright.") and name != "meshwright.__version__"
            if name.split(".")[0] in ("torch", "numpy", "rich") or (ours and package_of(name) not in ("cli", "core")):
                wrong.append(f"{path}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_planning_packages_import_and_plan_with_torch_blocked() -> None:
    modules = [
        "meshwright." + path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for path in TREES
        if package_of(path) in PLANNING
    ]
    script = (
        "import sys, importlib\n"
        "sys.modules['torch'] = None\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "import meshwright as mw\n"
        "from meshwright.cli.main import main\n"
        "sys.exit(main(['plan', '--cluster', '1x4:cpu', '--json']))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout)["chosen"]["name"]


def test_importing_meshwright_imports_neither_torch_nor_numpy() -> None:
    script = "import sys, meshwright; sys.exit(bool({'torch', 'numpy', 'pydantic', 'cyclopts'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", script], timeout=900).returncode == 0


def test_the_options_of_plan_are_read_without_pydantic() -> None:
    script = (
        "import sys\n"
        "from meshwright.cli.application import build_application\n"
        "tokens = ['plan', '--batch', '4k', '--seq', '4096']\n"
        "build_application(tokens).parse_args(tokens, exit_on_error=False)\n"
        "sys.exit('pydantic' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=900).returncode == 0


# Sizes.


def test_files_functions_and_classes_keep_to_their_limits() -> None:
    wrong = [
        f"{path}: more than {limit} lines"
        for path, text in TEXTS.items()
        if len(text.splitlines()) > (limit := TIGHTER.get(path, FILE_LINES))
    ]
    for path, function in functions():
        if lines_of(function) > FUNCTION_LINES:
            wrong.append(f"{path} {function.name}: more than {FUNCTION_LINES} lines")
        if (count := parameters_of(function)) > PARAMETERS and function.name not in MANY_PARAMETERS:
            wrong.append(f"{path} {function.name}: {count} parameters")
    for path, node in classes():
        methods = [item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)]
        if lines_of(node) > CLASS_LINES:
            wrong.append(f"{path} {node.name}: more than {CLASS_LINES} lines")
        if len(methods) > METHODS:
            wrong.append(f"{path} {node.name}: {len(methods)} methods")
        if (count := len(fields_of(node.name))) > FIELDS and node.name not in MANY_FIELDS:
            wrong.append(f"{path} {node.name}: {count} fields")
    expect_only_allowed("limits", wrong)


def lines_of(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


CLASSES: dict[str, ast.ClassDef] = {node.name: node for _, node in classes()}


def parameters_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Parameters without `self` and `cls`; `**options: Unpack[T]` counts as the fields of T."""
    arguments = node.args
    count = sum(
        argument.arg not in ("self", "cls")
        for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    )
    given = arguments.kwarg and arguments.kwarg.annotation
    if isinstance(given, ast.Subscript) and ast.unparse(given.value).endswith("Unpack"):
        count += len(fields_of(ast.unparse(given.slice)))
    return count


def fields_of(name: str, seen: frozenset[str] = frozenset()) -> set[str]:
    """Names of all fields of a class: annotated in its body, set on `self` in any method, and those of its base
    classes."""
    node = CLASSES.get(name)
    if node is None or name in seen:
        return set()
    fields = {
        item.target.id for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    for method in node.body:
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
            fields |= {
                item.attr
                for item in ast.walk(method)
                if isinstance(item, ast.Attribute)
                and isinstance(item.ctx, ast.Store)
                and isinstance(item.value, ast.Name)
                and item.value.id == "self"
            }
    for base in node.bases:
        fields |= fields_of(ast.unparse(base).split("[")[0].split(".")[-1], seen | {name})
    return fields


# Names and prose.


def test_class_names_are_unique() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path, node in classes():
        places[node.name].append(path)
    expect_only_allowed(
        "class names", [f"{name}: {', '.join(sorted(paths))}" for name, paths in places.items() if len(paths) > 1]
    )


def test_file_names_name_things() -> None:
    stems = {path: Path(path).stem for path in TREES} | {
        path: Path(path).parent.name for path in TREES if path.endswith("__init__.py")
    }
    assert not [path for path, stem in stems.items() if POOR_NAMES.search(stem)]


def words_of(name: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)}


def defined_names(tree: ast.Module) -> Iterator[str]:
    for node in nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr


def test_identifiers_use_standard_terms() -> None:
    wrong = [
        f"{path}: {name}"
        for path, tree in TREES.items()
        for name in sorted(set(defined_names(tree)))
        if words_of(STANDARD_NAMES.sub("", name)) & BANNED_IN_NAMES
    ]
    expect_only_allowed("words in names", wrong)


def prose_of(path: str) -> Iterator[str]:
    """Comments and docstrings, the strings that follow assignments included."""
    yield from (text for _, text in comments(path))
    for node in nodes(TREES[path]):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value


def test_prose_uses_standard_terms() -> None:
    wrong = [
        f"{path}: {match.group(0).lower()}"
        for path in TREES
        for text in prose_of(path)
        for match in BANNED_IN_PROSE.finditer(text)
    ]
    expect_only_allowed("words in prose", wrong)


def test_public_functions_have_docstrings() -> None:
    wrong = []
    for path, tree in TREES.items():
        bodies = [(path, tree.body)] + [
            (path, node.body) for node in tree.body if isinstance(node, ast.ClassDef) and node.name[0] != "_"
        ]
        for _, body in bodies:
            for node in body:
                public = isinstance(
                    node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
                ) and not node.name.startswith("_")
                if public and not ast.get_docstring(node) and not is_short_property(node):
                    wrong.append(f"{path}: {node.name}")
    expect_only_allowed("docstrings", wrong)


def is_short_property(node: ast.AST) -> bool:
    """An override, an overload, or a visitor named by its framework needs no docstring of its own."""
    decorators = {ast.unparse(item).split("(")[0].split(".")[-1] for item in getattr(node, "decorator_list", [])}
    return bool(decorators & {"overload", "override", "setter"}) or getattr(node, "name", "") in (
        "forward",
        "backward",
        "setup_context",
    )


def test_every_module_has_a_docstring() -> None:
    assert not [path for path, tree in TREES.items() if not ast.get_docstring(tree)]


# State.


def test_no_module_holds_mutable_state() -> None:
    """Module level has constants (in capitals), functions and classes. `global` occurs nowhere, and nothing writes to a
    constant."""
    wrong = []
    for path, tree in TREES.items():
        for node in tree.body:
            targets = (
                node.targets
                if isinstance(node, ast.Assign)
                else [node.target]
                if isinstance(node, ast.AnnAssign) and node.value
                else []
            )
            for target in targets:
                if isinstance(target, ast.Name) and is_container(node.value) and not is_constant(target.id):  # type: ignore[union-attr]
                    wrong.append(f"{path}:{node.lineno} {target.id} is mutable and not a constant")
        constants = {
            target.id
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        constants |= {
            node.target.id
            for node in tree.body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        }
        for node in nodes(tree):
            if isinstance(node, ast.Global):
                wrong.append(f"{path}:{node.lineno} global {', '.join(node.names)}")
            elif (name := mutated(node)) in constants and not bound_inside(tree, name, node):
                wrong.append(f"{path}:{node.lineno} changes {name}")  # type: ignore[attr-defined]
    assert not wrong, "\n".join(wrong)


def is_container(value: ast.expr | None) -> bool:
    made = (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Name)
        and value.func.id in ("list", "dict", "set", "defaultdict", "deque")
    )
    return made or isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp)


def is_constant(name: str) -> bool:
    return name.upper() == name or name in ("__all__",)


def mutated(node: ast.AST) -> str | None:
    """The plain name that `node` changes in place: `x[...] = `, `del x[...]`, `x.append(...)` and the like."""
    changing = (
        "append",
        "add",
        "update",
        "setdefault",
        "pop",
        "clear",
        "extend",
        "insert",
        "remove",
        "discard",
        "popitem",
    )
    if (
        isinstance(node, ast.Subscript)
        and isinstance(node.ctx, ast.Store | ast.Del)
        and isinstance(node.value, ast.Name)
    ):
        return node.value.id
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in changing
        and isinstance(node.func.value, ast.Name)
    ):
        return node.func.value.id
    return None


def bound_inside(tree: ast.Module, name: str, node: ast.AST) -> bool:
    """Whether `name` at `node` is a local name of a function that shadows the module's."""
    for function in nodes(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and any(
            inner is node for inner in ast.walk(function)
        ):
            arguments = {argument.arg for argument in ast.walk(function.args) if isinstance(argument, ast.arg)}
            stored = {
                inner.id
                for inner in ast.walk(function)
                if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store)
            }
            if name in arguments | stored:
                return True
    return False


def test_nothing_is_left_to_do() -> None:
    """No marks of unfinished work in comments."""
    wrong = [
        f"{path}:{line} {text}"
        for path in TREES
        for line, text in comments(path)
        if re.search(r"\b(TODO|FIXME|XXX|HACK)\b", text)
    ]
    assert not wrong, "\n".join(wrong)


OWNERS = (
    "Engine",
    "StageExecutor",
    "ScheduleRunner",
    "BlockWrapper",
    "FlatParamGroup",
    "FlatLayout",
    "GroupWeights",
    "GroupGradients",
    "GradReducer",
    "StageReducer",
    "Updater",
)
"""Classes of the runtime whose fields only their own methods set."""
OWNER_NAMES = frozenset(
    [
        "engine",
        "executor",
        "pipeline",
        "runner",
        "gate",
        "wrapper",
        "unit",
        "flat",
        "group",
        "weights",
        "gradients",
        "zero",
        "reducer",
        "stage",
        "updater",
    ]
)
"""What instances of these classes are called."""


def test_only_their_own_methods_set_fields_of_the_engine_and_its_parts() -> None:
    """An engine, a parameter group or a wrapper is complete when it exists."""
    others = set(CLASSES) - set(OWNERS)
    shared = {field for name in others for field in fields_of(name)}
    fields = {field for name in OWNERS for field in fields_of(name)}
    wrong = []
    for path, tree in TREES.items():
        if package_of(path) not in ("runtime", "train", "checkpoint"):
            continue
        for node in nodes(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del) and node.attr in fields:
                owner = ast.unparse(node.value)
                named = re.split(r"[.\[(]", owner)[-1] in OWNER_NAMES
                if owner not in ("self", "cls", "build") and (named or node.attr not in shared):
                    wrong.append(f"{path}:{node.lineno} {owner}.{node.attr}")
    assert not wrong, "\n".join(wrong)


# The public command line, and the tests.

FROZEN = ROOT / "tests" / "unit" / "golden" / "commands.json"


def commands_now() -> dict[str, list[str]]:
    """Every command and its options, as the command line itself lists them."""
    from meshwright.cli.application import build_application, command_lines

    found = {}
    for name in command_lines():
        command = build_application([name])[name]
        inside = {f"{name} {word}": command[word] for word in command if not word.startswith("-")}
        for words, app in (inside or {name: command}).items():
            found[words] = sorted(
                {
                    flag
                    for argument in app.assemble_argument_collection(parse_docstring=False)
                    for flag in argument.names
                    if flag != "*"
                }
            )
    return found


def test_commands_and_options_are_the_documented_ones() -> None:
    """A change here breaks somebody's script: it needs a line in CHANGELOG.md, then MESHWRIGHT_FREEZE=1 writes the new
    list."""
    now = commands_now()
    if os.environ.get("MESHWRIGHT_FREEZE"):
        FROZEN.write_text(json.dumps(now, indent=2) + "\n", encoding="utf-8")
    assert now == json.loads(FROZEN.read_text(encoding="utf-8"))


@pytest.mark.parametrize("text", ["import meshwright.planner.cost", "from meshwright.planner import cost"])
def test_the_checker_sees_both_forms_of_import(text: str) -> None:
    assert {package_of(name) for name, _ in own_imports(ast.parse(text))} == {"planner"}


def test_the_checker_counts_type_only_imports_and_unpacked_fields() -> None:
    tree = ast.parse("if TYPE_CHECKING:\n    from meshwright.spec.plan import Plan")
    assert [name for name, _ in own_imports(tree)] == ["meshwright.spec.plan"]
    function = ast.parse("def build(a, **options: Unpack[Plan]): ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    assert parameters_of(function) == 1 + len(fields_of("Plan"))


def test_every_test_file_has_a_unique_name() -> None:
    """pytest imports test files by name alone: two of one name end the whole run before it begins."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


# The build.

PASS_FILES = [path for path in TREES if path.startswith("runtime/build/passes/")]


def passes_in_order() -> list[str]:
    """The names of the passes, as `PASSES` lists them."""
    lists = {
        target.id: [ast.unparse(item) for item in node.value.elts]
        for node in TREES["runtime/build/parallelize.py"].body
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Tuple)
        for target in [node.target]
        if isinstance(target, ast.Name)
    }
    return [*lists["CHECKS"], *lists["CHANGES"]]


def declared_passes() -> dict[str, tuple[ast.FunctionDef, set[str], set[str]]]:
    """Each pass with the fields of `Build` that it says it reads and writes."""
    found = {}
    for path in PASS_FILES:
        for node in TREES[path].body:
            if isinstance(node, ast.FunctionDef) and node.decorator_list:
                call = node.decorator_list[0]
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "build_pass":
                    fields = {item.arg: set(ast.literal_eval(item.value)) for item in call.keywords}
                    assert Path(path).stem == node.name, f"{path}: a file is named as its pass"
                    found[node.name] = node, fields["reads"], fields.get("writes", set())
    return found


def test_build_passes_use_only_the_fields_that_they_declare() -> None:
    for name, (node, reads, writes) in declared_passes().items():
        used = [
            item
            for item in ast.walk(node)
            if isinstance(item, ast.Attribute) and isinstance(item.value, ast.Name) and item.value.id == "build"
        ]
        loads = {item.attr for item in used if isinstance(item.ctx, ast.Load)}
        stores = {item.attr for item in used if isinstance(item.ctx, ast.Store)}
        assert (loads - writes, stores) == (reads & loads, writes), name


def test_build_passes_read_what_earlier_passes_wrote() -> None:
    passes, written = declared_passes(), {"model", "base", "recipe", "make_optimizer", "hints"}
    assert sorted(passes_in_order()) == sorted(passes)
    for name in passes_in_order():
        _, reads, writes = passes[name]
        assert reads <= written, f"{name} reads {reads - written} before it is written"
        assert not writes & written, f"{name} writes {writes & written} again"
        written |= writes
    fields = {
        target.id
        for node in CLASSES["Build"].body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    assert fields == written


def test_build_pass_files_have_at_most_150_lines() -> None:
    passes = declared_passes()
    assert not [path for path in PASS_FILES if Path(path).stem in passes and len(TEXTS[path].splitlines()) > 150]
