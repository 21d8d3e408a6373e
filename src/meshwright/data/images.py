"""Generates the data set `shapes` of images, so that image classifiers can train without files. The classes are ten
kinds of shape.

Each image has one bright shape with a random rotation, position and scale on a dark background, plus noise.

Guarantees:
- Image n is a pure function of n, the image size and the number of classes.
- Training and validation images have different numbers n.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.data.sampler import derive_key, random_uniform

SHAPE_KINDS = ("disc", "ring", "square", "frame", "diamond", "triangle", "plus", "cross", "bars", "checker")
TRAINING_ROWS, VALIDATION_ROWS = 8192, 512
_RNG_KEY = derive_key(0x5348415045)  # a constant key: the seed of a job orders the images and does not change them
_NOISE_STD = 0.2

Int64Array = NDArray[np.int64]


class ShapeImages:
    """`rows` training images and `validation_rows` validation images, each 3 x side x side with values of about -1 to
    1. The images show the first `classes` kinds of SHAPE_KINDS, at most all ten.

    Raises:
        InputError: `classes` is less than 2.
    """

    tokenizer = None
    rows, validation_rows = TRAINING_ROWS, VALIDATION_ROWS
    labels_per_row = 1

    def __init__(self, classes: int = len(SHAPE_KINDS), side: int = 32) -> None:
        if classes < 2:
            raise InputError(
                Message("a model that classifies images needs 2 or more classes, it has {classes}", classes=classes)
            )
        self.vocabulary = min(classes, len(SHAPE_KINDS))
        self.side = side
        self.digest = f"shapes-1-{self.vocabulary}-{side}"

    def describe(self) -> str:
        """Returns one line about the source and the number of images."""
        return Message(
            "shapes: {rows:,} drawn images of 3 x {side} x {side} to train on, {validation_rows:,} held out, "
            "{vocabulary} kinds",
            rows=self.rows,
            side=self.side,
            validation_rows=self.validation_rows,
            vocabulary=self.vocabulary,
        )

    def training(self, rows: Int64Array, numbers: Int64Array, seed: int) -> dict[str, torch.Tensor]:
        """Returns the training images `rows`. They do not depend on `numbers` or `seed`."""
        return self._draw(rows)

    def validation(self, rows: Int64Array) -> dict[str, torch.Tensor]:
        """Returns the validation images `rows`."""
        return self._draw(rows + self.rows)

    def _draw(self, numbers: Int64Array) -> dict[str, torch.Tensor]:
        """Returns images (n, 3, side, side) float32 and labels (n,) int64."""
        traits = torch.from_numpy(random_uniform(_RNG_KEY, numbers, 11))
        labels = (traits[:, 0] * self.vocabulary).long()
        u, v = self._places(traits)
        inside = _points_inside(labels, u, v)[:, None]
        ground, ink = -0.5 - 0.5 * traits[:, 5:8, None, None], 0.5 + 0.5 * traits[:, 8:11, None, None]
        noise = torch.from_numpy(random_uniform(derive_key(_RNG_KEY, 1), numbers, 3 * self.side**2)).view(
            -1, 3, self.side, self.side
        )
        images = torch.where(inside, ink, ground) + _NOISE_STD * (2 * noise - 1)
        return {"images": images.float(), "labels": labels}

    def _places(self, traits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the coordinates u and v of every pixel, both (n, side, side), relative to the shape of its image. The
        shape extends from -1 to 1 in both coordinates."""
        radius = 0.55 + 0.35 * traits[:, 1]
        angle = (traits[:, 2] - 0.5) * math.pi / 6
        line = (torch.arange(self.side, dtype=torch.float64) + 0.5) * 2 / self.side - 1
        free = (1 - radius)[:, None, None]
        x = line[None, None, :] - (2 * traits[:, 3, None, None] - 1) * free
        y = line[None, :, None] - (2 * traits[:, 4, None, None] - 1) * free
        cos, sin, scale = (value[:, None, None] for value in (angle.cos(), angle.sin(), radius))
        return (cos * x + sin * y) / scale, (cos * y - sin * x) / scale


def _points_inside(labels: torch.Tensor, u: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Returns a bool tensor (n, side, side): whether each pixel is inside the shape of its image."""
    radius, edge, sum_ = (u * u + v * v).sqrt(), torch.maximum(u.abs(), v.abs()), u.abs() + v.abs()
    arms = torch.minimum(u.abs(), v.abs())
    slant = (u.abs() - v.abs()).abs()
    shapes = torch.stack(
        [
            radius < 1,
            (radius < 1) & (radius > 0.6),
            edge < 0.85,
            (edge < 0.85) & (edge > 0.5),
            sum_ < 1.1,
            (v < 0.8) & (2 * u.abs() - v < 0.9),
            (edge < 1) & (arms < 0.3),
            (edge < 0.9) & (slant < 0.35),
            (edge < 0.9) & ((v.abs() - 0.5).abs() < 0.2),
            (edge < 0.9) & (u * v > 0),
        ]
    )
    return shapes[labels, torch.arange(len(labels))]
