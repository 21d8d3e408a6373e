"""From what a run showed of one block to its regions: which columns belong to which rows, where they are entered, what tp divides.

Rule: column layers whose shares meet in a row layer form a region. It is entered at the outermost module inside the block whose input is
read by its column layers alone ([Note: readers] in trace.py).
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from torch import nn

from meshwright.anatomy.nouns import Region, Split
from meshwright.anatomy.trace import Product, Trace

FEATURE_COUNTS = ("split_size", "all_head_size", "inner_dim")


class Found(NamedTuple):
    """A region of one block. Names in `splits` and `partial` are full; `counts` must be divided by tp."""

    region: Region
    splits: dict[str, Split]
    counts: dict[str, int]
    partial: tuple[str, ...]
    keeps_sequence: bool
    """Its layers read (batch, sequence, features)."""

    def __str__(self) -> str:
        return f"{', '.join(self.region.columns)} by columns, {', '.join(self.region.rows)} by rows"


def regions_of_block(model: nn.Module, block: str, seen: Trace) -> tuple[list[Found], list[str]]:
    """The regions of the block at path `block` in forward order, and what was left whole and why."""
    products = seen.products.get(block, [])
    used = Counter(product.weight for product in products)
    found: list[Found] = []
    left: list[str] = []
    for columns, rows in _groups(products):
        weights = frozenset(product.weight for product in columns)
        why = next((seen.problems[weight] for weight in sorted(weights) if weight in seen.problems), None)
        if any(used[product.weight] > 1 for product in [*columns, *rows]):
            why = "a weight is used twice"
        odd = next((row.owner for row in rows if row.bias and not is_plain(model.get_submodule(row.owner))), None)
        why = f"{odd} has a forward of its own" if odd and not why else why
        if why or not rows:
            names = ", ".join(sorted({_inside(product.owner, block) for product in columns}))
            left.append(f"{names} stay whole: {(why or 'no row layer follows').replace(block + '.', '')}")
        else:
            found.append(_found(model, block, columns, rows, seen))
    return found, left


def _found(model: nn.Module, block: str, columns: list[Product], rows: list[Product], seen: Trace) -> Found:
    splits: dict[str, Split] = {}
    for product in columns:
        splits[product.weight] = Split(product.dim, product.parts)
        if product.bias:
            splits[product.bias] = Split(0, product.parts)
    for product in rows:
        splits[product.weight] = Split(1 - product.dim)
    weights = frozenset(product.weight for product in columns)
    counts = _counts(block, weights, columns, seen)
    module = _entry(block, columns, seen)
    region = Region(
        _inside(module, block) if module else "",
        tuple(_inside(product.owner, block) for product in columns),
        tuple(_inside(product.owner, block) for product in rows),
        _attributes(model, block, [*columns, *rows], counts),
    )
    partial = tuple(name for name, origin in seen.mixed.items() if origin & weights and name not in splits)
    return Found(region, splits, counts, partial, all(product.keeps_sequence for product in [*columns, *rows]))


def is_plain(module: nn.Module) -> bool:
    """A bare product with a bias, whose forward may be replaced: Linear, or Conv1D of transformers."""
    return type(module).forward is nn.Linear.forward or type(module).__name__ == "Conv1D"


def _inside(path: str, block: str) -> str:
    return path.removeprefix(block + ".")


def _groups(products: list[Product]) -> list[tuple[list[Product], list[Product]]]:
    """Column layers joined by the row layers that read their shares."""
    groups: list[tuple[list[Product], list[Product]]] = []
    for product in products:
        if not product.columns:
            groups.append(([product], []))
            continue
        mine = [group for group in groups if any(column.weight in product.columns for column in group[0])]
        first = mine[0]
        for other in mine[1:]:
            first[0].extend(other[0])
            first[1].extend(other[1])
            groups.remove(other)
        first[1].append(product)
    return groups


def _entry(block: str, columns: list[Product], seen: Trace) -> str | None:
    """Path of the outermost module that only the columns read; None when each column has its own."""
    chosen = {_entry_of(block, column, seen) for column in columns}
    return chosen.pop() if len(chosen) == 1 else None


def _entry_of(block: str, column: Product, seen: Trace) -> str:
    columns = [product for product in seen.products[block] if not product.columns]
    weights, owners = {product.weight for product in columns}, {product.owner for product in columns}
    parts = column.owner.split(".")
    for end in range(block.count(".") + 2, len(parts)):
        module = ".".join(parts[:end])
        uses = [(stack, weight) for stack, weight in seen.uses[id(column.source)] if module in stack]
        if seen.inputs.get(module) is column.source and all(weight in weights or stack[-1] in owners for stack, weight in uses):
            return module
    return column.owner


def _counts(block: str, weights: frozenset[str], columns: list[Product], seen: Trace) -> dict[str, int]:
    """The sizes that a tensor degree must divide."""
    for attention in seen.attentions.get(block, []):
        if attention.columns & weights:
            return {"heads": attention.heads, "kv_heads": attention.kv_heads}
    return {"ffn": min(min(product.parts or (product.size,)) for product in columns)}


def _attributes(model: nn.Module, block: str, layers: list[Product], counts: dict[str, int]) -> tuple[tuple[str, str], ...]:
    """Integers that the forward methods use as counts of what is now shared: heads, and sizes of fused parts."""
    sizes = {part for product in layers if not product.columns for part in product.parts or (product.size,)}
    heads = {counts[name] for name in ("heads", "kv_heads") if name in counts}
    paths: dict[str, None] = {}
    for product in layers:
        parts = product.owner.split(".")
        for end in range(block.count(".") + 2, len(parts)):
            paths[".".join(parts[:end])] = None
    found = []
    for path in paths:
        for name, value in vars(model.get_submodule(path)).items():
            if type(value) is not int:
                continue
            counts_heads = "head" in name and not name.endswith(("dim", "size", "groups")) and value in heads
            if counts_heads or (name in FEATURE_COUNTS and value in sizes):
                found.append((_inside(path, block), name))
    return tuple(found)
