"""Gradients of a flat unit counted as they come. Each costs the same, however many the unit has: what is missing is counted down."""

from __future__ import annotations

from collections.abc import Iterable


class Arrivals:
    """Of a step in which `expected` passes bring a gradient of each parameter. `of`: how often that of each has come. `begun`: those that
    have something where their gradient is summed."""

    def __init__(self, names: Iterable[str]) -> None:
        self.of = dict.fromkeys(names, 0)
        self.begin(1)

    def begin(self, expected: int) -> None:
        self.expected, self.of = expected, dict.fromkeys(self.of, 0)
        self.begun: set[str] = set()
        self._all_there(0)

    def come(self, name: str) -> bool:
        """One more of `name`. Whether it was the last of a pass.

        >>> found = Arrivals("ab")
        >>> [found.come(name) for name in "abba"], found.passes
        ([False, True, False, True], 2)
        """
        self.of[name] += 1
        self._missing -= self.of[name] == self.passes + 1
        if self._missing:
            return False
        self._all_there(self.passes + 1)
        return True

    def end(self, passes: int) -> dict[str, int]:
        """No more of so many passes come: those that are missing count as there. Which they are, and how often each had come.

        >>> found = Arrivals("ab")
        >>> found.come("a"), found.end(1), found.passes, found.end(1)
        (False, {'b': 0}, 1, {})
        """
        if self.passes >= passes:
            return {}
        missing = {name: arrived for name, arrived in self.of.items() if arrived < passes}
        self.of |= dict.fromkeys(missing, passes)
        self._all_there(passes)
        return missing

    def _all_there(self, passes: int) -> None:
        self.passes, self._missing = passes, sum(arrived == passes for arrived in self.of.values())
