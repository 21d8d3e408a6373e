"""Sets up the conditions of numeric checks: seeds, random values for meta parameters, training modes, and repeatable
float64 computation. The checks of the analysis and the proofs of the runtime use it.

A check compares a full run with runs on shards. Three effects could hide a difference or create a false one. All runs
exclude randomness and constants. Only `exact` runs exclude rounding:
- Rounding: an exact run computes in float64, even where the model casts to float32. If a model is too large for float64
  or fails in it, the run is not exact, and the tolerance is larger.
- Randomness: dropout becomes a factor of 1 + p, where p is the dropout rate. So the check detects a missing dropout.
  All runs begin with equal random states.
- Constants: parameters with equal elements (zero-initialised outputs, unit gains) get noise, and matrices with small
  elements are scaled up. A factor that is zero at the start of training would otherwise hide errors.

Guarantees:
- All ranks use equal random values.
- On exit the parameters, modes and attributes of the model are restored.
"""

from __future__ import annotations

import copy
import math
import mmap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from meshwright.analysis.dry_run import dry_run
from meshwright.analysis.nf4 import pack_nf4, weight_shape


def set_seed(number: int) -> None:
    """Seeds the generators of the CPU and of initialised CUDA devices.

    torch.manual_seed takes 3 ms longer, because it stores the caller's stack for each device type that is not
    initialised.
    """
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(number)


MAX_RANDOM_PARAMS = 1 << 27
"""Maximum number of parameter elements of a model that gets random values. In float32 they take 0.5 GiB."""

CHECK_VOCAB_ROWS = 512
"""Number of token ids that a check may use. Only this many rows of the embedding table need values."""


@contextmanager
def random_weights(model: nn.Module, needed: Callable[[str], bool], read: int = CHECK_VOCAB_ROWS) -> Iterator[None]:
    """Replaces meta parameters by parameters with random values, which are equal on every rank. Restores the meta
    parameters on exit.

    `needed(name)` returns whether a parameter needs values. Of embedding tables only the first `read` rows get random
    values. All later rows are zero.
    """
    random = torch.Generator().manual_seed(0)
    before: list[tuple[nn.Module, str, nn.Parameter]] = []
    numbers: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta and needed(f"{path}.{name}"):
                before.append((module, name, parameter))
    try:
        for module, name, parameter in before:
            if id(parameter) not in numbers:
                width = parameter.shape[-1] if parameter.ndim else 1
                kind = parameter.dtype if parameter.dtype == torch.float64 else torch.float32
                # The pages of zeros take memory only when they are written, so a large vocabulary costs nothing.
                shape = weight_shape(parameter.shape) if parameter.dtype == torch.uint8 else parameter.shape
                tensor = torch.zeros(shape, dtype=kind)
                rows = read * width if isinstance(module, nn.Embedding) else None
                tensor.view(-1)[:rows].normal_(0, width**-0.5, generator=random)
                if parameter.dtype == torch.uint8:
                    tensor = pack_nf4(tensor)
                numbers[id(parameter)] = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
            module._parameters[name] = numbers[id(parameter)]
        yield
    finally:
        for module, name, parameter in before:
            module._parameters[name] = parameter


MAX_PARAMS_CHECK_ALL_BLOCKS = 1 << 25
"""Maximum number of parameter elements of a model whose blocks are all checked. Up to this size, the parameters of a
model on the meta device get random values for the checks.
"""
MAX_PARAMS_FLOAT64 = 1 << 27
"""Maximum number of parameter elements of a model that a check computes in float64. They take 1 GiB."""
RELATIVE_TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 5e-2}
"""Maximum relative difference of two results that count as equal, by dtype. Rounding errors are far smaller."""
ROUNDING_TOLERANCES = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-2}
"""Absolute tolerance in addition to RELATIVE_TOLERANCES, as a fraction of the largest compared norm, by dtype. A
gradient whose norm is below this tolerance consists of rounding errors.
"""
NOISE_SCALE = 0.1
"""Standard deviation of the noise on constant tensors."""
RANDOM_PERIOD_NUMEL = (1 << 20) - 3
"""Number of elements of the table of random numbers from which large tensors are filled. It is a prime, so no row
length divides it.
"""
MIN_TABLE_NUMEL = 1 << 14
"""Tensors with at most this many elements get new random numbers. Larger tensors are filled from the table."""
FLOAT64_BY_DTYPE = {torch.float32: torch.float64, torch.float16: torch.float64, torch.bfloat16: torch.float64}
CAST_METHODS = frozenset({"float", "half", "bfloat16"})


class RepeatableMode(TorchFunctionMode):
    """Replaces dropout by a factor of 1 + p, where p is the dropout rate, also inside attention and recurrent layers.
    `exact`: whether float64 replaces every narrower floating dtype.
    """

    def __init__(self, exact: bool) -> None:
        super().__init__()
        self.exact = exact

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name == "__get__":  # reading a property, such as the shape, computes nothing
            return function(*args, **kwargs)
        if "dropout" in name and args and isinstance(args[0], torch.Tensor):
            return _dropout_as_factor(name, args, kwargs)
        args, kwargs, rate = without_inner_dropout(name, args, kwargs)
        if rate:
            return scale_first(function(*args, **kwargs), 1 + rate)
        if self.exact:
            if name in CAST_METHODS and len(args) == 1:
                return args[0].double()
            if torch.dtype in map(type, args):
                args = tuple(_float64_of(value) for value in args)
            if kwargs:
                kwargs = {key: _float64_of(value) for key, value in kwargs.items()}
        return function(*args, **kwargs)


DROPOUT_POSITIONS = {"scaled_dot_product_attention": 4, "multi_head_attention_forward": 10}
"""Positions of the dropout rate among the arguments of functions that apply dropout inside, where no mode sees it."""
RECURRENT_FUNCTIONS = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
"""Functions that apply dropout inside, and whose only float argument is its rate. Whether they train comes next."""


def without_inner_dropout(name: str, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any], float]:
    """Returns the arguments of the torch function `name` with a rate of 0 for dropout inside the function, and the
    rate that the function would use: 0 if it has no such dropout or does not train."""
    place = DROPOUT_POSITIONS.get(name, -1)
    if name in RECURRENT_FUNCTIONS:
        place = next((place for place, value in enumerate(args) if isinstance(value, float)), -1)
        trains = place >= 0 and args[place + 1]
    else:
        trains = kwargs.get("training", args[13] if len(args) > 13 else True)
    if place < 0:
        return args, kwargs, 0.0
    if len(args) > place:
        return (*args[:place], 0.0, *args[place + 1 :]), kwargs, args[place] if trains else 0.0
    rate = kwargs.get("dropout_p", 0.0)
    return args, {**kwargs, "dropout_p": 0.0} if "dropout_p" in kwargs else kwargs, rate if trains else 0.0


def scale_first(result: Any, factor: float) -> Any:
    """Returns `result`, a tensor or a tuple that begins with one, with this tensor multiplied by `factor`."""
    return (result[0] * factor, *result[1:]) if isinstance(result, tuple) else result * factor


def _float64_of(value: Any) -> Any:
    return FLOAT64_BY_DTYPE.get(value, value) if isinstance(value, torch.dtype) else value


def _dropout_as_factor(name: str, args: Any, kwargs: Any) -> torch.Tensor:
    """Returns the input of a dropout function times 1 + p, where p is the dropout rate. Returns the input itself
    outside of training. Rate and mode have equal argument positions in torch.nn.functional and torch.
    """
    rate = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
    training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
    if not training or not rate:
        return args[0]  # type: ignore[no-any-return]
    in_place = kwargs.get("inplace", args[3] if len(args) > 3 else False) or name.endswith("_")
    return args[0].mul_(1 + rate) if in_place else args[0] * (1 + rate)  # type: ignore[no-any-return]


def training_modes(model: nn.Module) -> dict[nn.Module, bool]:
    """Returns, for each module, whether it is in training mode when the model trains. If `model` is now in eval mode,
    the result is True for all modules. Otherwise it is the present mode of each module.
    """
    return {module: module.training or not model.training for module in model.modules()}


def run_modes(model: nn.Module, evaluates: bool) -> dict[nn.Module, bool]:
    """Returns eval mode (False) for each module if `evaluates`, otherwise the result of `training_modes`."""
    return dict.fromkeys(model.modules(), False) if evaluates else training_modes(model)


def set_training_modes(model: nn.Module, modes: Mapping[nn.Module, bool]) -> None:
    """Sets the mode of each module of `model`. A module that is not in `modes` gets training mode."""
    for module in model.modules():
        module.training = modes.get(module, True)


@contextmanager
def training_conditions(model: nn.Module, exact: bool, modes: Mapping[nn.Module, bool]) -> Iterator[None]:
    """Sets `modes` (see `training_modes`) and repeatable computation inside the context, in float64 if `exact`.
    Restores the earlier state on exit.
    """
    before = torch.get_default_dtype()
    with ExitStack() as stack:
        # Checks run on copies of the parameters (check_parameters), so the dry run need not record writes to them.
        stack.enter_context(dry_run(model, {}))
        stack.enter_context(torch.random.fork_rng(devices=()))
        stack.enter_context(torch.enable_grad())
        set_training_modes(model, modes)
        stack.enter_context(RepeatableMode(exact))
        if exact:
            torch.set_default_dtype(torch.float64)
            stack.callback(torch.set_default_dtype, before)
        yield


@contextmanager
def check_parameters(
    model: nn.Module, needed: Callable[[str], bool], read: int, exact: bool, real: bool = True, head: str | None = None
) -> Iterator[None]:
    """Replaces parameters and buffers of `model` by copies, in float64 if `exact`. Parameters with equal elements get
    noise, and matrices with small elements are scaled up. Restores the originals on exit, so that no write of a run
    remains.

    `needed(name)` returns whether a tensor is replaced. Meta parameters get random values, which are equal on every
    rank. Of embedding tables and of the layer at path `head`, only the first `read` rows have values. `real`: whether
    the copies have values. If False, all copies are meta tensors.
    """
    random = _NormalNumbers(torch.Generator().manual_seed(0))
    before: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    twins: dict[int, torch.Tensor] = {}
    try:
        for path, module in model.named_modules():
            for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is None or not needed(f"{path}.{name}".lstrip(".")):
                    continue
                container: Any = module._parameters if name in module._parameters else module._buffers
                if id(tensor) not in twins:
                    rows = read if isinstance(module, nn.Embedding) or path == head else None
                    twins[id(tensor)] = (
                        _check_tensor(tensor, rows, random, exact) if real else _meta_tensor_like(tensor)
                    )
                before.append((container, name, tensor))
                container[name] = twins[id(tensor)]
        yield
    finally:
        for container, name, tensor in before:
            container[name] = tensor


def _check_tensor(tensor: torch.Tensor, read: int | None, random: _NormalNumbers, exact: bool) -> torch.Tensor:
    is_parameter = isinstance(tensor, nn.Parameter)
    if not tensor.is_floating_point() or (tensor.is_meta and not is_parameter):
        found = tensor.detach().clone()
        return nn.Parameter(found, tensor.requires_grad) if is_parameter else found
    kind = torch.float64 if exact else tensor.dtype
    device = torch.device("cpu") if tensor.is_meta else tensor.device
    found = _lazy_zeros(tensor.shape, kind, device) if read else torch.empty(tensor.shape, dtype=kind, device=device)
    part = found[:read] if found.ndim else found
    if tensor.is_meta:
        width = tensor.shape[-1] if tensor.ndim else 1
        random.fill(part, max(width, 1) ** -0.5)
    else:
        part.copy_(tensor.detach()[:read] if tensor.ndim else tensor.detach())
    if is_parameter and part.numel():
        if is_constant(part):
            part.add_(NOISE_SCALE * torch.randn(part.shape, generator=random.random, dtype=torch.float32).to(part))
        if part.ndim > 1 and not tensor.is_meta and (factor := _upscale_factor(part)) > 1:
            part.mul_(factor)
    return nn.Parameter(found, tensor.requires_grad) if is_parameter else found


def _lazy_zeros(shape: torch.Size, kind: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns zeros that take host memory only for the pages that are written, because a check uses few rows of a large
    table.
    """
    if device.type != "cpu" or not shape.numel():
        return torch.zeros(shape, dtype=kind, device=device)
    # The mapping is private, because the first read of a page of a shared mapping takes memory and twice the time.
    memory = mmap.mmap(-1, shape.numel() * kind.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=kind).view(shape)


class _NormalNumbers:
    """Generates normal random numbers for many tensors. Large tensors repeat one table of RANDOM_PERIOD_NUMEL numbers,
    beginning at a random position. New random numbers would take longer than all other steps of a check.
    """

    def __init__(self, random: torch.Generator) -> None:
        self.random = random
        self.tables: dict[torch.dtype, torch.Tensor] = {}

    def fill(self, tensor: torch.Tensor, size: float) -> None:
        """Fills `tensor` with random numbers of standard deviation `size`."""
        places = tensor.view(-1)
        if places.numel() <= MIN_TABLE_NUMEL:
            places.normal_(0, size, generator=self.random)
            return
        if tensor.dtype not in self.tables:
            table = torch.empty(RANDOM_PERIOD_NUMEL, dtype=tensor.dtype)
            self.tables[tensor.dtype] = table.normal_(generator=self.random)
        table = self.tables[tensor.dtype]
        start, first = int(torch.randint(len(table), (), generator=self.random)), 0
        while first < places.numel():
            piece = table[start : start + places.numel() - first]
            torch.mul(piece, size, out=places[first : first + len(piece)])
            start, first = 0, first + len(piece)


def is_constant(tensor: torch.Tensor) -> bool:
    """Returns whether all elements are equal."""
    places = tensor.view(-1)
    return all(bool((piece == places[0]).all()) for piece in (places[:MIN_TABLE_NUMEL], places))


def _meta_tensor_like(tensor: torch.Tensor) -> torch.Tensor:
    found = torch.empty_like(tensor.detach(), device="meta")
    return nn.Parameter(found, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else found


def _upscale_factor(tensor: torch.Tensor) -> float:
    """Returns the power of two, at least 1, by which the matrix `tensor` must be multiplied to preserve the scale of
    activations.

    Without this factor, a convolution over the sequence may change the hidden state by less than the comparison
    detects.
    """
    size = float(tensor.norm()) * tensor.numel() ** -0.5
    wanted = (tensor.numel() / len(tensor)) ** -0.5
    return 2.0 ** math.ceil(math.log2(wanted / size)) if 0 < size < wanted else 1.0


def fresh_leaves(value: Any) -> Any:
    """Returns a copy of the nested `value` with a new autograd leaf for each distinct tensor. Callables and modules are
    not copied.
    """
    made: dict[int, torch.Tensor] = {}

    def leaf(one: Any) -> Any:
        if not isinstance(one, torch.Tensor):
            return one if callable(one) or isinstance(one, nn.Module) else copy.deepcopy(one)
        if id(one) not in made:
            made[id(one)] = leaf_copy(one)
        return made[id(one)]

    return tree_map(leaf, value)


def leaf_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy of `tensor` as an autograd leaf."""
    return tensor.detach().clone().requires_grad_(tensor.is_floating_point())


def cotangent(shape: torch.Size, like: torch.Tensor, number: int) -> torch.Tensor:
    """Returns a random gradient for a result of `shape`, with `number` as seed and the dtype and device of `like`.
    Random values reveal an error in any element.
    """
    return torch.randn(shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64).to(like)


def relative_difference(here: torch.Tensor, there: torch.Tensor, scale: float = 0.0) -> float | None:
    """Returns the norm of `here` - `there` relative to the norm of `there`, None if the difference may be rounding.
    Returns infinity if the shapes differ, or if tensors of integers differ. NaN at the same positions counts as equal.
    `scale` is the largest norm among the compared tensors.
    """
    if here.shape != there.shape:
        return math.inf
    if not there.is_floating_point() and not there.is_complex():
        return None if torch.equal(here, there) else math.inf
    off, size = float((here - there).norm()), float(there.norm())
    allowed = RELATIVE_TOLERANCES.get(there.dtype, 1e-10) * size + ROUNDING_TOLERANCES.get(there.dtype, 1e-13) * scale
    if off <= max(allowed, 1e-300):
        return None
    both = bool((here.isnan() == there.isnan()).all()) and bool(there.isnan().any())
    if both:
        return relative_difference(here.nan_to_num(), there.nan_to_num(), scale)
    return off / max(size, 1e-300)


def group_identical_blocks(blocks: Sequence[nn.Module], indices: Sequence[int] | None = None) -> list[int]:
    """Returns, for each block, the position of the first block that is identical to it. Identical blocks have equal
    modules, shapes and plain attributes, except for attributes that store the index of the block.

    `indices` are the indices of the blocks in their lists, by default their positions in `blocks`.
    """
    stored = _index_attributes(blocks, range(len(blocks)) if indices is None else indices)
    kinds: dict[Any, int] = {}
    return [
        kinds.setdefault(module_signature(block, lambda path, name, _: (path, name) in stored), position)
        for position, block in enumerate(blocks)
    ]


def _index_attributes(blocks: Sequence[nn.Module], indices: Sequence[int]) -> set[tuple[str, str]]:
    """Returns the attributes that store the index of their block, as (module path, name).

    In every block that has a module at the path, the attribute must equal the index. An attribute that equals the index
    of only some blocks has a different meaning, for example 8 heads in block 8.
    """
    modules: Counter[str] = Counter()
    equal: Counter[tuple[str, str]] = Counter()
    for index, block in zip(indices, blocks, strict=True):
        for path, module in block.named_modules():
            modules[path] += 1
            equal.update((path, name) for name, value in vars(module).items() if type(value) is int and value == index)
    return {(path, name) for (path, name), count in equal.items() if count == modules[path]}


def module_signature(root: nn.Module, is_index: Callable[[str, str, int], bool]) -> Any:
    """Returns a key that is equal for identical modules. `is_index(path, name, value)` returns whether an integer
    attribute stores an index. Such attributes may differ between identical modules.
    """
    modules = []
    for path, module in root.named_modules():
        plain = tuple(
            (name, repr(value))
            for name, value in sorted(vars(module).items())
            if isinstance(value, bool | float | str | tuple | torch.dtype)
            or value is None
            or (type(value) is int and not is_index(path, name, value))
        )
        modules.append((path, type(module), plain))
    tensors = [*root.named_parameters(), *root.named_buffers()]
    return tuple(modules), tuple((name, tensor.shape, tensor.requires_grad) for name, tensor in tensors)
