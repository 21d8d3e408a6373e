"""Builds tensor-parallel regions from the trace of a block for analyze.py. Finds which column layers belong to which
row layers, where a region begins, and which sizes tp must divide.

A region consists of row layers and the column layers whose sharded outputs the row layers read. It begins at the
outermost module inside the block whose input only these column layers read ([Note: consumers] in op_trace.py).
`AnalysisState` has the intermediate results of analyze.py and verified_regions.py.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn

from meshwright.analysis.dry_run import ExternalFailure
from meshwright.analysis.example_inputs import ExampleInputs
from meshwright.analysis.graph import HeadCount, PerHeadArg, TpRegion, TpSplit
from meshwright.analysis.layer_rules.rule import rule_of
from meshwright.analysis.propagation import ShardedTensorInfo
from meshwright.analysis.trace_log import TraceLog, WeightProduct


class RegionCandidate(NamedTuple):
    """A candidate for a region of one block.

    Names in `splits` and `partial` are full parameter names. The keys of `sizes` are 'heads', 'kv_heads', 'ffn' or
    'groups of ...'. tp must divide every size, but of 'kv_heads' it may also be a multiple. `partial` are replicated
    parameters with a partial gradient on each rank.
    """

    region: TpRegion
    splits: dict[str, TpSplit]
    sizes: dict[str, int]
    partial: tuple[str, ...]
    has_sequence_dim: bool
    """Whether the column layers read (batch, sequence, features)."""
    weights: frozenset[str]
    """The weights of the column layers, including column layers in other blocks whose sharded outputs the region
    reads.
    """

    def summary(self, block: str) -> str:
        """Returns a description of the region for `ModelGraph.findings`. `block` is the path of its block."""
        columns, rows = (
            [path.removeprefix(block + ".") for path in paths] for paths in (self.region.columns, self.region.rows)
        )
        return f"{', '.join(columns)} by columns, {', '.join(rows)} by rows"


def find_block_regions(model: nn.Module, block: str, seen: TraceLog) -> tuple[list[RegionCandidate], dict[str, str]]:
    """Returns the regions of the block at path `block` in forward order. Also returns the weights of the earliest
    column layers that must stay unsharded, each with the reason.

    Later column layers that must stay unsharded are not returned, because the earliest ones may be the cause.
    """
    products = seen.products.get(block, [])
    used = Counter(product.weight for product in products)
    found: list[RegionCandidate] = []
    left: list[tuple[int, dict[str, str]]] = []
    for columns, rows in _group_products(products):
        weights = frozenset(product.weight for product in columns).union(*(row.columns for row in rows))
        why = next(
            (
                seen.problems[weight]
                for weight in sorted(weights & seen.problem_times.keys(), key=seen.problem_times.__getitem__)
            ),
            None,
        )
        if any(used[product.weight] > 1 for product in [*columns, *rows]):
            why = "a weight is used twice"
        inflows = {layer: inflow for layer, inflow in seen.mla_inputs.items() if inflow.consumers & weights}
        astray = next((layer for layer, inflow in inflows.items() if not inflow.consumers <= weights), None)
        why = f"the output of {astray} is also used elsewhere" if astray and not why else why
        odd = next(
            (row.owner for row in rows if row.bias and not rule_of(model.get_submodule(row.owner)).adds_bias_last), None
        )
        why = f"{odd} has a custom forward" if odd and not why else why
        if why or not rows or all(column.is_table for column in columns):
            why = (why or "no row layer follows").replace(block + ".", "").replace(block, "the block")
            time = min(
                (seen.problem_times[weight] for weight in weights if weight in seen.problem_times),
                default=len(seen.problem_times) + 1,
            )
            first = [product.weight for product in columns if seen.problem_times.get(product.weight) == time]
            left.append((time, dict.fromkeys(first or [product.weight for product in columns], why)))
        else:
            found.append(_make_candidate(model, block, columns, rows, weights, seen))
    return found, min(left, key=lambda one: one[0])[1] if left else {}


def _make_candidate(
    model: nn.Module,
    block: str,
    columns: list[WeightProduct],
    rows: list[WeightProduct],
    weights: frozenset[str],
    seen: TraceLog,
) -> RegionCandidate:
    splits: dict[str, TpSplit] = {}
    by_heads = next((attention.heads for attention in seen.attentions.get(block, []) if attention.columns & weights), 0)
    for product in columns:
        parts, ways = product.parts, product.shard_limits() if by_heads else ()
        ways = ways if any(way < size for way, size in zip(ways, parts or (product.size,), strict=False)) else ()
        splits[product.weight] = TpSplit(product.dim, parts, ways)
        if product.bias:
            splits[product.bias] = TpSplit(0, parts, ways)
    for product in rows:
        splits[product.weight] = TpSplit(1 - product.dim)
    for name, (dim, share) in seen.following.items():
        if share.columns & weights:
            splits[name] = _split_following_parameter(model, name, dim, share, columns, splits)
    kv_heads = min((way for product in columns for way in splits[product.weight].ways), default=by_heads)
    sizes = {"heads": by_heads, "kv_heads": min(kv_heads, by_heads)} if by_heads else {"ffn": _min_features(columns)}
    groups = {key: count for key, (count, origin) in seen.grouped.items() if origin & weights}
    sizes |= {f"groups of {path.removeprefix(block + '.')}": count for (path, _), count in groups.items()}
    inflows = {layer: inflow for layer, inflow in seen.mla_inputs.items() if inflow.consumers & weights}
    inner = tuple(product.owner for product in columns if product.mla_sources & inflows.keys())
    region = TpRegion(
        _common_entry_module(block, [product for product in columns if product.owner not in inner], seen) or "",
        tuple(product.owner for product in columns),
        tuple(product.owner for product in rows),
        by_heads,
        sizes.get("kv_heads", 0),
        tuple(HeadCount(path, name, "share") for path, name in groups),
        tuple(
            PerHeadArg(given.path, given.argument, given.dim, given.size)
            for given, origin in seen.per_head_args.items()
            if origin & weights
        ),
        mla_inputs=tuple(inflows),
        inner_columns=inner,
    )
    partial = dict.fromkeys(name for name, origin in seen.partial_params.items() if origin & weights)
    for inflow in inflows.values():
        partial |= inflow.parameters
    partial = {name: None for name in partial if name not in splits}
    return RegionCandidate(
        region,
        splits,
        sizes,
        tuple(partial),
        all(p.has_sequence_dim for p in [*columns, *rows] if not p.is_table),
        weights,
    )


def _split_following_parameter(
    model: nn.Module,
    name: str,
    dim: int,
    share: ShardedTensorInfo,
    columns: list[WeightProduct],
    splits: dict[str, TpSplit],
) -> TpSplit:
    """Returns the split along `dim` of the parameter or buffer `name`, which has one entry for each feature or head.
    The split equals that of `share`, the sharded tensor that the parameter is applied to.
    """
    origin = next((product for product in columns if share.columns == {product.weight}), None)
    if origin is None:
        return TpSplit(dim)
    whole = splits[origin.weight]
    size = (model.get_parameter(name) if name in dict(model.named_parameters()) else model.get_buffer(name)).shape[dim]
    if size == origin.size:
        return TpSplit(dim, whole.parts, whole.ways)
    least = min(whole.ways, default=0)
    if share.product_slice is not None and whole.parts:
        begin = 0
        for part, way in zip(whole.parts, whole.ways or (0,) * len(whole.parts), strict=True):
            least = way if (begin, begin + part) == share.product_slice else least
            begin += part
    return TpSplit(dim, (), (least,) if least else ())


def _min_features(columns: list[WeightProduct]) -> int:
    """Returns the number of output features of the smallest part of any column layer."""
    return min(min(product.parts or (product.size,)) for product in columns)


def _group_products(products: list[WeightProduct]) -> list[tuple[list[WeightProduct], list[WeightProduct]]]:
    """Groups column layers by the row layers that read their outputs. Returns (columns, rows) of each group."""
    groups: list[tuple[list[WeightProduct], list[WeightProduct]]] = []
    for product in products:
        mine = [group for group in groups if any(column.weight in product.columns for column in group[0])]
        if not mine:
            if not product.columns:
                groups.append(([product], []))
            continue
        first = mine[0]
        for other in mine[1:]:
            first[0].extend(other[0])
            first[1].extend(other[1])
            groups.remove(other)
        first[1].append(product)
    return groups


def _common_entry_module(block: str, columns: list[WeightProduct], seen: TraceLog) -> str | None:
    """Returns the path of the outermost module whose input only `columns` read, None if these layers have no such
    module in common.

    Two regions that read the same input must begin at separate modules. At a common module the gradient of the input
    would be summed over ranks twice.
    """
    chosen = {_entry_module(block, column, columns, seen) for column in columns if not column.is_table}
    return chosen.pop() if len(chosen) == 1 else None


def _entry_module(block: str, column: WeightProduct, columns: list[WeightProduct], seen: TraceLog) -> str:
    weights, owners = {product.weight for product in columns}, {product.owner for product in columns}
    parts = column.owner.split(".")
    for end in range(block.count(".") + 2, len(parts)):
        module = ".".join(parts[:end])
        uses = [(stack, weight) for stack, weight in seen.uses[id(column.source)] if module in stack]
        if seen.inputs.get(module) is column.source and all(
            weight in weights or stack[-1] in owners for stack, weight in uses
        ):
            return module
    return column.owner


# --- head counts and sizes that forwards read


def head_count_candidates(model: nn.Module, block: str, found: RegionCandidate) -> list[tuple[HeadCount, ...]]:
    """Returns sets of integer attributes that each rank may have to divide by tp, most likely first. Verification uses
    the first set that gives correct results.
    """
    heads = _head_counts(model, block, found, False)
    configured = heads + _head_counts(model, block, found, True)
    sizes = _size_attributes(model, block, found)
    result: list[tuple[HeadCount, ...]] = []
    for counts in (heads, (), configured, heads + sizes, configured + sizes, sizes):
        if counts not in result:
            result.append(counts)
    return result


def _enclosing_modules(block: str, found: RegionCandidate) -> list[str]:
    """Returns the paths of the modules that contain layers of the region, from the block down to these layers."""
    paths: dict[str, None] = {}
    for owner in (*found.region.columns, *found.region.rows):
        parts = owner.split(".")
        for end in range(block.count(".") + 1, len(parts)):
            paths[".".join(parts[:end])] = None
    return list(paths)


def _integer_attributes(model: nn.Module, path: str, configured: bool) -> dict[str, int]:
    module = model.get_submodule(path)
    source = getattr(module, "config", None) if configured else module
    prefix = "config." if configured else ""
    values = vars(source) if source is not None else {}
    return {prefix + name: value for name, value in values.items() if type(value) is int}


def _head_counts(model: nn.Module, block: str, found: RegionCandidate, configured: bool) -> tuple[HeadCount, ...]:
    """Returns the integer attributes whose name and value match the number of heads, of key-value heads, or of heads
    per key-value head. `configured`: whether to search the configurations of the modules instead of the modules.
    """
    region = found.region
    if not region.heads:
        return ()
    few = region.kv_heads != region.heads
    kinds = {region.kv_heads: "kv_heads", region.heads: "share"}
    result = []
    for path in _enclosing_modules(block, found):
        for name, value in _integer_attributes(model, path, configured).items():
            if name.endswith("groups"):
                kind = "groups" if few and value == region.heads // region.kv_heads else ""
            else:
                kind = kinds.get(value, "") if "head" in name and not name.endswith(("dim", "size")) else ""
            if kind:
                result.append(HeadCount(path, name, kind))
    return tuple(result)


def _size_attributes(model: nn.Module, block: str, found: RegionCandidate) -> tuple[HeadCount, ...]:
    """Returns the integer attributes that equal the output size of a column layer, or of one part of a fused layer."""
    shares: set[int] = set()
    for path in found.region.columns:
        split = found.splits[f"{path}.weight"]
        shares |= {*split.parts, model.get_parameter(f"{path}.weight").shape[split.dim]}
    few = {
        part
        for path in found.region.columns
        for part, way in _column_parts(model, found, path)
        if 0 < way < found.region.heads
    }
    return tuple(
        HeadCount(path, name, "kv_heads" if value in few else "share")
        for path in _enclosing_modules(block, found)
        if path != block
        for name, value in _integer_attributes(model, path, False).items()
        if value in shares
        and value > 1
        and "head_dim" not in name
        and not ("head" in name and not name.endswith(("dim", "size")))
    )


def _column_parts(model: nn.Module, found: RegionCandidate, path: str) -> list[tuple[int, int]]:
    split = found.splits[f"{path}.weight"]
    parts = split.parts or (model.get_parameter(f"{path}.weight").shape[split.dim],)
    return list(zip(parts, split.ways or (0,) * len(parts), strict=True))


@dataclass
class AnalysisState:
    """Stores the intermediate results of an analysis."""

    model: nn.Module
    lists: list[str]
    findings: list[str]
    example: ExampleInputs
    modes: dict[nn.Module, bool]
    """Whether each module is in training mode when the model trains (`training_modes` in run_conditions.py)."""
    whole: list[str] = field(default_factory=list)
    """The findings about layers that stay unsharded, each with the reason."""
    failed_run: str = ""
    """The finding that the model does not run with the example, '' if it runs."""
    trace: TraceLog | None = None
    candidates: dict[str, list[RegionCandidate]] = field(default_factory=dict)
    """The candidate regions of each block, in forward order."""
    unsharded: dict[str, str] = field(default_factory=dict)
    """Weights of column layers that stay unsharded, each with the reason."""
    stacks: list[str] = field(default_factory=list)
    """Paths of the lists of blocks that pipeline stages cut (block_lists.py)."""
    sequence_error: str = ""
    """The reason why the hidden state cannot be split along the sequence, '' if the numeric check accepts it."""
    gathering_error: str = ""
    """The reason why ZeRO 3 cannot gather the weights, '' if no write to a parameter rules it out."""
    sequence_sliced: tuple[str, ...] = ()
    """Names of parameters between blocks that each rank applies to its slice of the sequence. Their gradient is partial
    on each rank.
    """
    unverified_reason: str = ""
    """The reason why splits are not verified numerically, '' if they are."""
    external_failure: ExternalFailure | None = None
    """The failure to read a file or the network that made the trace fail, None if there was no such failure."""


@dataclass(frozen=True)
class OuterLayers:
    """The layers around the blocks: paths of embedding and head (None if the model has none), and names of the
    parameters after the blocks.

    `splits` has the split of each sharded vocabulary parameter. `unsharded` maps the path of an unsharded vocabulary
    layer to the reason.
    """

    embedding: str | None
    head: str | None
    after_blocks: tuple[str, ...]
    splits: dict[str, TpSplit] = field(default_factory=dict)
    unsharded: dict[str, str] = field(default_factory=dict)
