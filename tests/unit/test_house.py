"""The architecture, enforced: floors, wings, budgets, no shared state, no knots, plain names, and the frozen face of the command line."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "meshwright"
TREES = {path.relative_to(SOURCE).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in sorted(SOURCE.rglob("*.py"))}

PLANNING = {
    "base": 0,
    "catalog": 0,
    "spec": 1,
    "schedules": 1,
    "words": 2,
    "cost": 2,
    "intake": 2,
    "search": 3,
    "simulate": 3,
    "report": 4,
    "elastic": 4,
    "launch": 4,
    "emulate": 4,
    "validation": 4,
}
RUNNING = {"models": 2, "anatomy": 2, "parallel": 3, "data": 3, "checkpoint": 3, "probe": 4, "train": 5}
GROUND = ("base", "spec", "schedules")
"""What the running wing may import of the planning wing."""
NO_NUMPY = ("base", "catalog", "spec", "schedules", "words", "intake")
LINES, FUNCTION, CLASS, METHODS, FIELDS, PARAMETERS = 400, 60, 300, 20, 20, 8
TIGHTER = {"train/loop.py": 250, "parallel/mesh.py": 150, "cli/main.py": 120}
MANY_FIELDS = {"intake/sizes.py:Sizes"}
"""Columns of the published table of architectures: one field each."""
POOR_NAMES = re.compile(r"(^|_)(utils?|helpers?|common|managers?|misc)(_|$)|^base_")


def room_of(name: str) -> str:
    """The room of a module path ('cost/step.py') or a dotted name ('meshwright.cost.step'); '' for the package's face."""
    parts = name.removeprefix("meshwright").strip(".").split(".") if name.startswith("meshwright") else name.split("/")
    return "" if parts[0] in ("", "__init__.py", "__main__.py") else parts[0]


def imports_of(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every absolute import with its line, those for type checkers only left out."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            inside = [f"{node.module}.{alias.name}" for alias in node.names if file_of(f"{node.module}.{alias.name}")]
            if len(inside) < len(node.names):
                yield (node.module or "", node.lineno)
            yield from ((name, node.lineno) for name in inside)
        yield from imports_of(node)


def ours(tree: ast.AST) -> Iterator[tuple[str, int]]:
    return ((name, line) for name, line in imports_of(tree) if name == "meshwright" or name.startswith("meshwright."))


def rooms() -> Iterator[tuple[str, str, ast.AST]]:
    """Modules that stand on a floor: everything but the face and the command line."""
    for path, tree in TREES.items():
        if room_of(path) not in ("", "cli"):
            yield path, room_of(path), tree


def test_every_room_has_a_floor() -> None:
    assert {room for _, room, _ in rooms()} <= PLANNING.keys() | RUNNING.keys()


def test_a_room_imports_only_rooms_on_lower_floors_of_its_wing() -> None:
    wrong = []
    for path, room, tree in rooms():
        floors = PLANNING if room in PLANNING else RUNNING
        for name, line in ours(tree):
            other = room_of(name)
            if other in (room, ""):
                continue
            allowed = floors.get(other, 99) < floors[room] if other in floors else room in RUNNING and other in GROUND
            if not allowed:
                wrong.append(f"{path}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_no_room_imports_the_command_line() -> None:
    assert not [path for path, _, tree in rooms() for name, _ in ours(tree) if room_of(name) == "cli"]


def test_the_planning_wing_never_names_torch_and_its_ground_floors_no_numpy() -> None:
    wrong = []
    for path, room, tree in rooms():
        for name, line in imports_of(tree):
            top = name.split(".")[0]
            if (room in PLANNING and top == "torch") or (room in NO_NUMPY and top == "numpy"):
                wrong.append(f"{path}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_commands_import_rooms_only_when_they_run() -> None:
    """At the top of a command's file stand the standard library, cyclopts, base, and its neighbours."""
    wrong = []
    for path, tree in TREES.items():
        if room_of(path) != "cli":
            continue
        assert isinstance(tree, ast.Module)
        for name, line in imports_of(ast.Module([node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)], [])):
            if name.split(".")[0] in ("torch", "numpy", "rich") or (
                name.startswith("meshwright.") and room_of(name) not in ("cli", "base", "__version__")
            ):
                wrong.append(f"{path}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_the_planning_wing_imports_and_plans_with_torch_blocked() -> None:
    modules = [
        "meshwright." + path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for path, room, _ in rooms()
        if room in PLANNING
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


def test_no_module_imports_itself_round_a_circle() -> None:
    graph = {path: {target for name, _ in ours(tree) if (target := file_of(name)) and target != path} for path, tree in TREES.items()}
    done: set[str] = set()

    def visit(path: str, trail: tuple[str, ...]) -> None:
        assert path not in trail, " -> ".join((*trail[trail.index(path) :], path))
        if path not in done:
            for target in graph[path]:
                visit(target, (*trail, path))
            done.add(path)

    for path in graph:
        if path != "__init__.py":
            visit(path, ())


def file_of(name: str) -> str | None:
    """The file of a dotted module name. The face is no module of the house: it imports everything lazily."""
    inner = name.removeprefix("meshwright").strip(".").replace(".", "/")
    return next((path for path in (f"{inner}.py", f"{inner}/__init__.py") if inner and path in TREES), None)


def test_no_file_function_or_class_is_over_its_budget() -> None:
    wrong = []
    for path, tree in TREES.items():
        length = len((SOURCE / path).read_text(encoding="utf-8").splitlines())
        if length > TIGHTER.get(path, LINES):
            wrong.append(f"{path}: {length} lines")
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                wrong += [f"{path}:{node.lineno} {node.name}: {what}" for what in over_function(node)]
            elif isinstance(node, ast.ClassDef):
                wrong += [f"{path}:{node.lineno} {node.name}: {what}" for what in over_class(node, f"{path}:{node.name}")]
    assert not wrong, "\n".join(wrong)


def over_function(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    assert node.end_lineno is not None
    if node.end_lineno - node.lineno + 1 > FUNCTION:
        yield f"{node.end_lineno - node.lineno + 1} lines"
    given = node.args
    count = sum(argument.arg not in ("self", "cls") for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs))
    if count > PARAMETERS:
        yield f"{count} parameters"


def over_class(node: ast.ClassDef, place: str) -> Iterator[str]:
    assert node.end_lineno is not None
    methods = [item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)]
    own = {item.target.id for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)}
    for method in methods:
        if method.name == "__init__":
            own |= {
                target.attr
                for item in ast.walk(method)
                if isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Store)
                for target in (item,)
                if isinstance(target.value, ast.Name) and target.value.id == "self"
            }
    if node.end_lineno - node.lineno + 1 > CLASS:
        yield f"{node.end_lineno - node.lineno + 1} lines"
    if len(methods) > METHODS:
        yield f"{len(methods)} methods"
    if len(own) > FIELDS and place not in MANY_FIELDS:
        yield f"{len(own)} fields"


def test_every_module_says_what_it_is() -> None:
    assert not [path for path, tree in TREES.items() if not ast.get_docstring(tree)]  # type: ignore[arg-type]


def test_no_module_holds_mutable_state() -> None:
    """Module level knows constants (in capitals), functions and classes. `global` occurs nowhere, and nothing writes to a constant."""
    wrong = []
    for path, tree in TREES.items():
        assert isinstance(tree, ast.Module)
        for node in tree.body:
            targets = (
                node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) and node.value else []
            )
            for target in targets:
                if isinstance(target, ast.Name) and is_container(node.value) and not is_constant(target.id):  # type: ignore[union-attr]
                    wrong.append(f"{path}:{node.lineno} {target.id} is mutable and not a constant")
        constants = {
            target.id for node in tree.body if isinstance(node, ast.Assign) for target in node.targets if isinstance(target, ast.Name)
        }
        constants |= {node.target.id for node in tree.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
        for node in ast.walk(tree):
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
    changing = ("append", "add", "update", "setdefault", "pop", "clear", "extend", "insert", "remove", "discard", "popitem")
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del) and isinstance(node.value, ast.Name):
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
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and any(inner is node for inner in ast.walk(function)):
            arguments = {argument.arg for argument in ast.walk(function.args) if isinstance(argument, ast.arg)}
            stored = {inner.id for inner in ast.walk(function) if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store)}
            if name in arguments | stored:
                return True
    return False


def test_names_say_what_things_are() -> None:
    stems = {path: Path(path).stem for path in TREES} | {path: Path(path).parent.name for path in TREES if path.endswith("__init__.py")}
    assert not [path for path, stem in stems.items() if POOR_NAMES.search(stem)]


def test_nothing_is_left_to_do() -> None:
    """No marks of unfinished work in comments, no function whose whole body is `...` or NotImplementedError outside protocols."""
    wrong = []
    for path in TREES:
        with (SOURCE / path).open("rb") as file:
            for token in tokenize.tokenize(file.readline):
                if token.type == tokenize.COMMENT and re.search(r"\b(TODO|FIXME|XXX|HACK)\b", token.string):
                    wrong.append(f"{path}:{token.start[0]} {token.string}")
    assert not wrong, "\n".join(wrong)


def test_importing_meshwright_imports_neither_torch_nor_numpy() -> None:
    script = "import sys, meshwright; sys.exit(bool({'torch', 'numpy', 'pydantic', 'cyclopts'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", script], timeout=900).returncode == 0


FROZEN = ROOT / "tests" / "unit" / "golden" / "commands.json"


def commands_now() -> dict[str, list[str]]:
    """Every command and its options, as the command line itself lists them."""
    from meshwright.cli.main import COMMANDS, application

    found = {}
    for name, _ in COMMANDS:
        command = application([name])[name]
        inside = {f"{name} {word}": command[word] for word in command if not word.startswith("-")}
        for words, app in (inside or {name: command}).items():
            found[words] = sorted(
                {flag for argument in app.assemble_argument_collection(parse_docstring=False) for flag in argument.names if flag != "*"}
            )
    return found


def test_commands_and_options_are_those_that_were_promised() -> None:
    """A change here breaks somebody's script: it needs a line in CHANGELOG.md, then MESHWRIGHT_FREEZE=1 writes the new list."""
    now = commands_now()
    if os.environ.get("MESHWRIGHT_FREEZE"):
        FROZEN.write_text(json.dumps(now, indent=2) + "\n", encoding="utf-8")
    assert now == json.loads(FROZEN.read_text(encoding="utf-8"))


@pytest.mark.parametrize("text", ["import meshwright.cost.step", "from meshwright.cost import step"])
def test_the_checker_sees_both_forms_of_import(text: str) -> None:
    assert {room_of(name) for name, _ in ours(ast.parse(text))} == {"cost"}


def test_every_file_of_tests_has_a_name_of_its_own() -> None:
    """pytest imports them by name alone: two of one name end the whole run before it begins."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_checks_set_seeds_without_torch_manual_seed() -> None:
    """torch.manual_seed stores the caller's stack for each kind of device that was not started: 3 ms a call, hundreds of calls before the first step."""
    allowed = {"anatomy/seeding.py", "parallel/later.py", "train/model.py", "train/trainer.py", "train/agreement.py"}
    found = {str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if "torch.manual_seed" in path.read_text()}
    assert found <= allowed
