"""A small residual convolutional network as the planner sees it. A token is an image: its sequence is 1.

Parameters and forms follow the reference network: a stem that halves the image, equal residual blocks with group norms, a mean over places
and a classifier. No rule shards it among tensor ranks; data parallelism, ZeRO and pipeline cuts apply.
"""

from __future__ import annotations

from meshwright.intake.sizes import Sizes
from meshwright.spec.model import Layer, ModelSpec, Parameter

KERNEL = 9


def convolution_spec(name: str, sizes: Sizes) -> ModelSpec:
    width, places = sizes.hidden, (sizes.image // 2) ** 2
    side = 3

    def convolution(path: str, inputs: int) -> Parameter:
        return Parameter(name=f"{path}.weight", shape=(width, inputs, side, side))

    def norm(path: str) -> tuple[Parameter, Parameter]:
        return Parameter(name=f"{path}.weight", shape=(width,)), Parameter(name=f"{path}.bias", shape=(width,))

    map_size = float(width * places)
    stem = Layer(
        name="front",
        parameters=(convolution("stem", sizes.channels), *norm("norm")),
        flops=2.0 * KERNEL * sizes.channels * map_size,
        moved=4 * map_size,
        saved_whole=sizes.channels * sizes.image**2 + 2 * map_size,
        transient=2 * map_size,
        output=map_size,
    )
    block = Layer(
        name="block",
        repeat=sizes.layers,
        parameters=(convolution("conv1", width), *norm("norm1"), convolution("conv2", width), *norm("norm2")),
        flops=4.0 * KERNEL * width * map_size,
        moved=11 * map_size,
        saved_whole=4 * map_size,
        transient=2 * map_size,
        output=map_size,
    )
    classifier = (
        Parameter(name="classifier.weight", shape=(sizes.classes, width)),
        Parameter(name="classifier.bias", shape=(sizes.classes,)),
    )
    head = Layer(
        name="head",
        parameters=classifier,
        flops=2.0 * width * sizes.classes,
        moved=map_size,
        saved_whole=map_size + width + sizes.classes,
        output=float(sizes.classes),
    )
    return ModelSpec(name=name, layers=(stem, block, head), hidden=width, context=1, tensor_parallel=False)
