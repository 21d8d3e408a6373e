"""Records the formulas of the cost model as small programs, so that another program can evaluate them for other values
of some inputs. The page of `plan --page` evaluates them in the browser.

The cost model computes with NumPy arrays. If an input is a `SymbolicArray`, each operation on it is appended to a
`Program` instead of being computed, and the result is again a `SymbolicArray`. Operations without symbols are computed
as usual, so a program contains only what depends on its inputs. Equal operations are recorded once.

Guarantees: a program that was recorded without an error computes the same values as the cost model, except for the
rounding of reordered sums. A branch of Python code on a symbol raises TypeError; it never selects one side in silence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

OPERATIONS = (
    *("add", "subtract", "multiply", "true_divide", "maximum", "minimum", "sqrt", "greater", "where"),
    *("ceil", "floor_divide", "greater_equal", "equal"),
)
"""The operations of a program, by the names of the NumPy functions. Their indices are the codes in `Program.code`."""

Operand = Any
"""A number, or a `Symbol`."""


class Symbol:
    """The result of one operation of a program, or one of its inputs."""

    __slots__ = ("at", "program")

    def __init__(self, program: Program, at: int) -> None:
        self.program, self.at = program, at

    def __add__(self, other: Operand) -> Operand:
        return self.program.record("add", self, other)

    def __mul__(self, other: Operand) -> Operand:
        return self.program.record("multiply", self, other)

    __radd__, __rmul__ = __add__, __mul__

    def __hash__(self) -> int:
        return self.at

    def __eq__(self, other: object) -> bool:
        """Returns whether both are the same value of a program."""
        return isinstance(other, Symbol) and other.at == self.at and other.program is self.program

    def __bool__(self) -> bool:
        raise TypeError("the value of a symbol is not known when a program is recorded")

    __float__ = __int__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__  # type: ignore[assignment]


class Program:
    """A list of operations on the inputs `names`. The first values are the inputs; each operation adds one value.

    `code` has one tuple for each operation: the index in `OPERATIONS`, then the operands. An operand is the index of a
    value, or -1 - i for `constants[i]`.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.code: list[tuple[int, ...]] = []
        self.constants: list[float] = []
        self._known: dict[tuple[int, ...], int] = {}
        self._places: dict[float, int] = {}

    def inputs(self) -> dict[str, SymbolicArray]:
        """Returns the inputs by name, as arrays without axes."""
        return {name: symbolic_array(Symbol(self, at)) for at, name in enumerate(self.names)}

    def operand(self, value: Operand) -> int:
        """Returns the operand of a symbol of this program or of a number.

        Raises: AssertionError if a number is not finite.
        """
        if isinstance(value, Symbol):
            return value.at
        number = float(value)
        assert math.isfinite(number), number
        place = self._places.setdefault(number, len(self.constants))
        self.constants += [number] if place == len(self.constants) else []
        return -1 - place

    def record(self, operation: str, *operands: Operand) -> Operand:
        """Returns the result of an operation: a symbol, or a number if no operand is a symbol."""
        if not any(isinstance(each, Symbol) for each in operands):
            return getattr(np, operation)(*operands)[()]
        known = self._simplified(operation, operands)
        if known is not None:
            return known
        row = (OPERATIONS.index(operation), *map(self.operand, operands))
        if operation in ("add", "multiply", "maximum", "minimum"):
            row = (row[0], *sorted(row[1:]))
        if row not in self._known:
            self._known[row] = len(self.names) + len(self.code)
            self.code.append(row)
        return Symbol(self, self._known[row])

    def _simplified(self, operation: str, operands: Sequence[Operand]) -> Operand | None:
        """Returns the result of an operation with 0 or 1 as one operand, and of products of several constants, without
        a new operation. Returns None for other operations."""
        first, *rest = operands
        second = rest[0] if rest else None
        if operation in ("maximum", "minimum"):
            pairs: tuple[tuple[Any, Any], ...] = ((first, second), (second, first))
            for one, other in pairs:
                if not isinstance(one, Symbol) and math.isinf(one):
                    return other if (one > 0) == (operation == "minimum") else one
        if operation in ("maximum", "minimum", "greater") and self.operand(first) == self.operand(second):
            return False if operation == "greater" else first
        if operation == "where":
            same = self.operand(operands[1]) == self.operand(operands[2])
            return operands[1] if same else None if isinstance(first, Symbol) else operands[1 if first else 2]
        if operation in ("add", "multiply") and isinstance(second, Symbol):
            first, second = second, first
        if not isinstance(first, Symbol):
            return 0.0 if operation == "true_divide" and first == 0 else None
        if isinstance(second, Symbol) or second is None:
            return None
        if second == (0 if operation in ("add", "subtract") else 1) and operation in OPERATIONS[:4]:
            return first
        if operation == "multiply" and second == 0:
            return 0.0
        if operation == "true_divide" and math.frexp(second)[0] == 0.5:  # otherwise the reciprocal is rounded
            return self.record("multiply", first, 1.0 / second)
        if operation == "multiply" and (inner := self._scaled(first)) is not None:
            return self.record("multiply", Symbol(self, inner[0]), inner[1] * second)
        return None

    def _scaled(self, value: Symbol) -> tuple[int, float] | None:
        """Returns a value as a pair: another value, and the constant with which it is multiplied."""
        at = value.at - len(self.names)
        if at < 0 or OPERATIONS[self.code[at][0]] != "multiply" or self.code[at][1] >= 0:
            return None
        return self.code[at][2], self.constants[-1 - self.code[at][1]]

    def evaluate(self, inputs: Mapping[str, float]) -> list[float]:
        """Returns all values of the program for the given inputs."""
        values: list[Any] = [inputs[name] for name in self.names]
        for code, *operands in self.code:
            numbers = [values[at] if at >= 0 else self.constants[-1 - at] for at in operands]
            values.append(getattr(np, OPERATIONS[code])(*numbers)[()])
        return values


def _recorded(operation: str) -> Callable[..., Operand]:
    def record(*operands: Operand) -> Operand:
        program = next((each.program for each in operands if isinstance(each, Symbol)), None)
        return program.record(operation, *operands) if program else getattr(np, operation)(*operands)[()]

    return record


_ELEMENTWISE = {
    getattr(np, name): np.frompyfunc(_recorded(name), 1 if name in ("sqrt", "ceil") else 2, 1)
    for name in OPERATIONS
    if name != "where"
}
_WHERE = np.frompyfunc(_recorded("where"), 3, 1)


def symbolic_array(values: Any) -> SymbolicArray:
    """Returns an array of numbers and symbols."""
    found = np.empty((), dtype=object)
    if isinstance(values, np.ndarray):
        found = np.asarray(values, dtype=object)
    else:
        found[()] = values
    return found.view(SymbolicArray)


class SymbolicArray(np.ndarray):
    """An array whose elements are numbers and symbols. NumPy operations on it are recorded in a `Program`."""

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, out: Any = None, **options: Any) -> Any:
        plain = [np.asarray(each, dtype=object) for each in inputs]
        if ufunc is np.matmul and method == "__call__":
            return symbolic_array(np.asarray(np.matmul(*plain), dtype=object))
        if ufunc.__name__ == "clip":
            return np.minimum(np.maximum(inputs[0], inputs[1]), inputs[2])
        if ufunc in (np.less, np.less_equal):
            ufunc, plain = np.greater if ufunc is np.less else np.greater_equal, plain[::-1]
        if ufunc is np.negative:
            ufunc, plain = np.multiply, [np.asarray(-1.0, dtype=object), *plain]
        if method == "reduce":
            found = _reduced(ufunc, plain[0], options.get("axis"), bool(options.get("keepdims")))
        else:
            assert method == "__call__"
            found = _ELEMENTWISE[ufunc](*plain)
        return symbolic_array(np.asarray(found, dtype=object))

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func is np.where:
            return symbolic_array(np.asarray(_WHERE(*(np.asarray(each, dtype=object) for each in args)), dtype=object))
        if func is np.take_along_axis:
            return _take_along_first(*args)
        plain = super().__array_function__(func, types, args, kwargs)
        if isinstance(plain, (list, tuple)):
            return type(plain)(symbolic_array(each) if each.dtype == object else each for each in plain)
        return symbolic_array(plain) if isinstance(plain, np.ndarray) and plain.dtype == object else plain

    def argmax(self, axis: Any = None, **options: Any) -> Any:  # type: ignore[override]
        """Returns the index of the largest element, the first one of equal elements, as an array of symbols."""
        assert axis in (None, 0)
        values = self.reshape(-1) if axis is None else self
        best, at = values[:1], symbolic_array(np.zeros(values[:1].shape))
        for index in range(1, len(values)):
            each = values[index : index + 1]
            best, at = np.maximum(best, each), np.where(each > best, float(index), at)  # type: ignore[assignment]
        return at[0] if at.ndim > 1 else symbolic_array(at[0])


def _reduced(ufunc: np.ufunc, values: Any, axis: int | None, keepdims: bool) -> Any:
    if axis is None:
        values, axis = values.reshape(-1), 0
    if not values.shape[axis]:
        return ufunc.reduce(np.zeros(values.shape), axis=axis, keepdims=keepdims)
    return _ELEMENTWISE[ufunc].reduce(values, axis=axis, keepdims=keepdims)


def _take_along_first(values: Any, at: Any, axis: int) -> SymbolicArray:
    """Returns the elements of `values` at the indices `at`, which has length 1 along the first axis."""
    assert axis == 0
    found = symbolic_array(np.asarray(values[:1], dtype=object))
    for index in range(1, len(values)):
        found = np.where(at > index - 0.5, values[index : index + 1], found)  # type: ignore[assignment]
    return found
