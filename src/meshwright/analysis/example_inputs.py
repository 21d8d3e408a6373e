"""Makes example inputs of a model, from an example of the user or from the model's signature, configuration and layers.
All analyses and preflight checks call the model with them.

An example of the user has priority: an argument, or the attribute `dummy_inputs` of a model without `main_input_name`.
Otherwise the parameter names of forward determine the type of input: token ids, decoder token ids, images, videos,
audio features, waveforms or time series. The configuration and its sub-configurations determine the sizes. If no name
is known, the model gets a positional input that fits its first layers: token ids, pixels, a signal, or vectors. If
several shapes are possible, the first shape with which the model runs on the meta device is used. Generated examples
are meta tensors until values are needed.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import islice, product
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from meshwright.analysis.dry_run import call_with_tensors, dry_run
from meshwright.analysis.expert_modules import pass_through_experts

EXAMPLE_BATCH, EXAMPLE_LENGTH, EXAMPLE_IMAGE_SIZE = 2, 7, 32
EXAMPLE_AUDIO_FRAMES = 4 * EXAMPLE_LENGTH
"""Number of audio frames of an example. It exceeds EXAMPLE_LENGTH, because the first layers of audio models shorten the
sequence.
"""
BOOLEAN_OPS = frozenset({"__bool__", "__contains__", "equal", "allclose", "is_nonzero"})
"""Functions with a Boolean result."""
DATA_DEPENDENT_OPS = BOOLEAN_OPS | {"item", "__int__", "__index__", "__float__"}
IMAGE_INPUT_NAMES = ("pixel_values", "images", "image")
TOKEN_INPUT_NAMES = ("input_ids", "decoder_input_ids")
KNOWN_INPUT_NAMES = (*TOKEN_INPUT_NAMES, *IMAGE_INPUT_NAMES, "input_features", "input_values", "past_values")
MAX_EXAMPLE_ATTEMPTS = 24

ExampleInputs = Mapping[str, Any]
"""Arguments of forward by name. Dimension 0 of a tensor is the batch. The argument named '' is passed by position. Of
meta tensors only shapes and dtypes are used.
"""
InputForm = tuple[tuple[int, ...], torch.dtype]
"""The shape and the dtype of one sample of an input."""


def answer_data_dependent_op(name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Returns the result of `function`, whose name is in DATA_DEPENDENT_OPS. If it fails because a meta tensor has no
    values, returns False or 0. For `__bool__` always returns False.

    So a forward that checks 'is this batch packed?' or 'how many are masked?' takes its default branch.
    """
    if name == "__bool__":
        return False
    try:
        return function(*args, **kwargs)
    except RuntimeError:
        return (
            False if name in BOOLEAN_OPS or args[0].dtype == torch.bool else 0.0 if args[0].is_floating_point() else 0
        )


class DataFreeMode(TorchFunctionMode):
    """Runs a model on meta tensors: functions that need values return defaults (`answer_data_dependent_op`)."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        return (
            answer_data_dependent_op(name, function, args, kwargs or {})
            if name in DATA_DEPENDENT_OPS
            else function(*args, **(kwargs or {}))
        )


class MetaRunMode(DataFreeMode):
    """Runs a model on meta tensors. A draw of a single random number returns 1 (`without_drops`)."""

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(function, types, args, kwargs)
        return without_drops(getattr(function, "__name__", ""), result)


def without_drops(name: str, result: Any) -> Any:
    """Returns `result`, the result of the function `name`. If the function draws a single random number, returns 1
    instead. Layer dropout compares this number with a rate, so 1 drops nothing.
    """
    is_draw = name == "rand" and result.numel() == 1
    return torch.ones(result.shape, device="cpu") if is_draw else result


def requires_input(model: nn.Module, name: str) -> bool:
    """Returns whether the model cannot be called without the input `name`."""
    signature = inspect.signature(model.forward).parameters.get(name)
    return (
        signature is not None
        and signature.default is signature.empty
        and signature.kind not in (signature.VAR_KEYWORD, signature.VAR_POSITIONAL)
    )


def make_example(
    model: nn.Module, given: ExampleInputs | None = None, length: int = EXAMPLE_LENGTH, side: int = EXAMPLE_IMAGE_SIZE
) -> ExampleInputs:
    """Returns the example inputs with which `model` is analysed. They have the model's floating-point dtype and a batch
    size of EXAMPLE_BATCH. If the tensors of a user's example do not all have the same batch size, they keep them.

    `given` is the user's example. Its `labels` are left out unless forward requires them. Without an example, `length`
    is the number of token ids per sample. `side` is the width and height of images in pixels, if the model does not
    specify a size.
    """
    kind = next((parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()), None)
    own = getattr(model, "dummy_inputs", None) if getattr(model, "main_input_name", None) is None else None
    given = own if given is None and isinstance(own, Mapping) else given
    if given is not None:
        wanted = {name: value for name, value in given.items() if name != "labels" or requires_input(model, name)}
        rows = {len(value) for value in wanted.values() if isinstance(value, torch.Tensor) and value.ndim}
        return {
            name: tree_map(lambda leaf: _with_batch_size(leaf, kind, len(rows) == 1), value)
            for name, value in wanted.items()
        }
    made = [
        {name: _with_batch_size(_meta_input(form), kind) for name, form in one.items()}
        for one in islice(_with_labels(model, length, _input_candidates(model, length, side)), MAX_EXAMPLE_ATTEMPTS)
    ]
    return made[0] if len(made) == 1 else next((one for one in made if _runs_with(model, one)), made[0])


def describe_inputs(example: ExampleInputs) -> str:
    """Returns a description of inputs by name and shape.

    >>> describe_inputs({"input_ids": torch.zeros(2, 7), "": torch.zeros(2, 3)})
    'input_ids (2, 7), an input (2, 3)'
    """
    return ", ".join(
        f"{name or 'an input'} {tuple(value.shape)}"
        for name, value in example.items()
        if isinstance(value, torch.Tensor)
    )


def name_positional_inputs(model: nn.Module, example: ExampleInputs) -> ExampleInputs:
    """Returns `example`, with the positional input (named '') renamed to the first parameter of forward."""
    first = next(iter(inspect.signature(model.forward).parameters), "")
    return {name or first: value for name, value in example.items()}


@lru_cache(maxsize=64)
def _parameter_names(forward: Callable[..., Any], is_method: bool) -> tuple[str, ...] | None:
    """Returns the names of the parameters of `forward`, without `self` of a method. Returns None if it takes any
    name. A step calls it for each pass."""
    parameters = list(inspect.signature(forward).parameters.values())[int(is_method) :]
    is_open = any(each.kind is each.VAR_KEYWORD for each in parameters)
    return None if is_open else tuple(each.name for each in parameters)


def bind_inputs(model: nn.Module, batch: Mapping[str, Any], own_loss: bool = False) -> dict[str, Any]:
    """Returns the entries of `batch` by the parameter names of forward. Token ids of the name `input_ids` go to the
    first parameter, if forward has no parameter of that name. `own_loss`: whether entries that forward does not take
    are left out, because a user-defined loss reads them."""
    forward = model.forward
    parameters = _parameter_names(getattr(forward, "__func__", forward), hasattr(forward, "__func__"))
    found, first = dict(batch), next(iter(parameters or ()), "")
    if parameters is None:
        return found
    if "input_ids" in found and "input_ids" not in parameters and first not in found:
        found = {first if name == "input_ids" else name: value for name, value in found.items()}
    return {name: value for name, value in found.items() if name in parameters} if own_loss else found


def extra_inputs(example: ExampleInputs) -> list[str]:
    """Returns the names of inputs that are neither token ids nor images. A floating-point positional input has the name
    'vectors', and an integer one counts as token ids."""
    tensors = {name: value for name, value in example.items() if isinstance(value, torch.Tensor)}
    return [
        name or "vectors"
        for name, value in tensors.items()
        if name not in (*TOKEN_INPUT_NAMES, *IMAGE_INPUT_NAMES) and (name or value.is_floating_point())
    ]


def max_integer_value(example: ExampleInputs) -> int:
    """Returns the largest integer in `example`, 0 if it has none."""
    numbers = [
        value
        for value in example.values()
        if isinstance(value, torch.Tensor) and not value.is_floating_point() and not value.is_meta
    ]
    return max((int(value.max()) for value in numbers if value.numel()), default=0)


def call_arguments(
    example: ExampleInputs, dtype: torch.dtype | None = None, device: str = "meta", vocabulary: int = 1, text: int = 0
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns positional and keyword arguments to call a model with, on `device`. `dtype` replaces floating-point
    dtypes, None preserves them.

    On a device other than meta, integer meta tensors in `example` become ids below `vocabulary`, and floating-point
    meta tensors become noise. `text` is the seed of both.
    """
    found = {
        name: tree_map(
            lambda leaf: (
                _materialize_input(leaf, dtype, device, vocabulary, text) if isinstance(leaf, torch.Tensor) else leaf
            ),
            value,
        )
        for name, value in example.items()
    }
    return ((found.pop(""),), found) if "" in found else ((), found)


def _materialize_input(
    value: torch.Tensor, dtype: torch.dtype | None, device: str, vocabulary: int, text: int
) -> torch.Tensor:
    kind = dtype if dtype and value.is_floating_point() else value.dtype
    if value.is_meta and device != "meta":
        if value.is_floating_point():
            value = torch.randn(value.shape, generator=torch.Generator().manual_seed(1 + text))
        else:
            value = (torch.arange(value.numel()) * (31 + 2 * text) % max(vocabulary, 1)).view(value.shape)
    return value.to(device, kind)


def _with_batch_size(value: Any, kind: torch.dtype | None, cut: bool = False) -> Any:
    """Returns `value`, converted to the dtype `kind` if it is floating-point. `cut`: whether samples are repeated or
    dropped to get a batch size of EXAMPLE_BATCH.
    """
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach().to((kind or value.dtype) if value.is_floating_point() else value.dtype)
    return (
        value[torch.arange(EXAMPLE_BATCH, device=value.device) % len(value)]
        if cut and value.ndim and len(value) not in (0, EXAMPLE_BATCH)
        else value
    )


def _meta_input(form: InputForm) -> torch.Tensor:
    return torch.empty(EXAMPLE_BATCH, *form[0], dtype=form[1], device="meta")


# --- generated inputs


def _input_candidates(model: nn.Module, length: int, side: int) -> Iterator[dict[str, InputForm]]:
    """Yields candidates for the inputs by name, most likely first. Each candidate has the required inputs. For a model
    with several components, further candidates have all inputs with known names.
    """
    signature = inspect.signature(model.forward).parameters
    names = [name for name, parameter in signature.items() if parameter.kind < parameter.VAR_POSITIONAL]
    known = [name for name in names if name in KNOWN_INPUT_NAMES]
    main = getattr(model, "main_input_name", None)
    main = main if main in known else next((name for name in (*IMAGE_INPUT_NAMES, *known) if name in known), None)
    if main is None:
        yield from ({"": form} for form in _inputs_from_layers(model, length, side))
        return
    decoder_input = "decoder_input_ids" if getattr(getattr(model, "config", None), "is_encoder_decoder", True) else ""
    least = [name for name in known if name in (main, decoder_input) or requires_input(model, name)]
    more = [*least, *(name for name in known if name not in least and name != "decoder_input_ids")]
    for wanted in [least, more] if more != least and _sub_configs(model) else [least]:
        for forms in product(*(_input_forms(model, name, length, side) for name in wanted)):
            yield dict(zip(wanted, forms, strict=True))


def _with_labels(
    model: nn.Module, length: int, candidates: Iterable[dict[str, InputForm]]
) -> Iterator[dict[str, InputForm]]:
    """Yields `candidates`. If forward requires labels, yields each candidate twice: with one label per position, and
    with one label per sample.
    """
    forms: list[InputForm] = [((length,), torch.long), ((), torch.long)]
    for one in candidates:
        yield from [{**one, "labels": form} for form in forms] if requires_input(model, "labels") else [one]


def _inputs_from_layers(model: nn.Module, length: int, side: int) -> list[InputForm]:
    """Returns inputs that fit some layer of the model, most likely first. Inputs of embeddings and `Conv2d` layers come
    before those of all other layers. Otherwise the order is that of registration.
    """
    found: dict[InputForm, None] = {}
    kinds = (nn.Embedding, nn.Conv2d)
    modules = list(model.modules())
    for module in [
        *filter(lambda one: isinstance(one, kinds), modules),
        *filter(lambda one: not isinstance(one, kinds), modules),
    ]:
        match module:
            case nn.Embedding():
                found.setdefault(((length,), torch.long))
            case nn.Conv2d() | nn.Conv1d() | nn.Conv3d():
                places = len(module.kernel_size)
                found.setdefault(
                    ((module.in_channels, *[side if places > 1 else EXAMPLE_AUDIO_FRAMES] * places), torch.float32)
                )
            case nn.Linear():
                found.setdefault(((module.in_features,), torch.float32))
                found.setdefault(((length, module.in_features), torch.float32))
            case nn.RNNBase():
                found.setdefault(((length, module.input_size), torch.float32))
    return list(found) or [((length,), torch.long)]


def _input_forms(model: nn.Module, name: str, length: int, side: int) -> list[InputForm]:
    """Returns the shapes and dtypes that the input `name` may have, most likely first."""
    configs = [config for config in (getattr(model, "config", None), *_sub_configs(model)) if config is not None]

    def config_value(*names: str) -> Any:
        found = (getattr(config, one, None) for config in configs for one in names)
        return next((value for value in found if value and isinstance(value, int | list | tuple)), None)

    if name in TOKEN_INPUT_NAMES:
        return [((length,), torch.long)]
    if name in IMAGE_INPUT_NAMES:
        shown = config_value("image_size") or side
        sides = tuple(shown) if isinstance(shown, list | tuple) else (shown, shown)
        channels = next(
            (one.in_channels for one in model.modules() if isinstance(one, nn.Conv2d | nn.Conv3d)),
            config_value("num_channels") or 3,
        )
        frames = config_value("num_frames")
        shapes: list[tuple[int, ...]] = [(frames, channels, *sides)] * bool(frames) + [(channels, *sides)]
        return [(shape, torch.float32) for shape in shapes]
    if name == "past_values":
        return [
            (
                (
                    config_value("context_length") or EXAMPLE_AUDIO_FRAMES,
                    config_value("num_input_channels", "input_size") or 1,
                ),
                torch.float32,
            )
        ]
    bins = config_value("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", "feature_size")
    frames = config_value("max_length") or EXAMPLE_AUDIO_FRAMES
    shapes = [(frames, bins), (bins, frames)] if bins else []
    if bins and (places := config_value("max_source_positions")):
        shapes.insert(0, (bins, 2 * places))
    if name == "input_values":
        shapes.insert(0, (2 * EXAMPLE_LENGTH * math.prod(config_value("conv_stride") or (320,)),))
    return [(shape, torch.float32) for shape in shapes or [(EXAMPLE_AUDIO_FRAMES, 80)]]


def _sub_configs(model: nn.Module) -> list[Any]:
    """Returns the configurations of the model's components, such as text and vision."""
    config = getattr(model, "config", None)
    return [part for part in getattr(config, "__dict__", {}).values() if hasattr(part, "to_dict")]


def _runs_with(model: nn.Module, example: ExampleInputs) -> bool:
    """Returns whether the model runs on `example`, in its own dtype or in bfloat16, which some kernels require."""
    for dtype in (None, torch.bfloat16):
        state = {
            name: torch.empty_like(tensor, device="meta", dtype=dtype if tensor.is_floating_point() else None)
            for name, tensor in (*model.named_parameters(), *model.named_buffers())
        }
        args, kwargs = call_arguments(example, dtype)
        try:
            with dry_run(model), torch.no_grad(), torch.device("meta"), pass_through_experts(model), DataFreeMode():
                call_with_tensors(model, state, args, kwargs)
        except Exception:
            continue
        return True
    return False
