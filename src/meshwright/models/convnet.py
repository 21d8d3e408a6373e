"""A small residual convolutional network for image classification, which can be trained with data parallelism and ZeRO.

Source: He et al., Deep Residual Learning (2016), section 3. Norms are GroupNorm (Wu and He, 2018), which has no batch
statistics, so the loss does not depend on how a batch is divided. Inputs are `images` (B, channels, height, width) and
`labels` (B,).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from meshwright.models.model_io import ModelOutput, output_with_loss


@dataclass(frozen=True)
class ConvNetConfig:
    """The sizes of the model: `layers` residual blocks of equal width after a stem that halves the image. `groups` is
    the number of groups of a GroupNorm. `batch_norm`: whether BatchNorm, which has batch statistics, replaces
    GroupNorm."""

    layers: int
    hidden: int
    classes: int
    channels: int = 3
    groups: int = 4
    batch_norm: bool = False

    def norm(self) -> nn.Module:
        """Returns a new normalization layer of the configured kind."""
        return nn.BatchNorm2d(self.hidden) if self.batch_norm else nn.GroupNorm(self.groups, self.hidden)


class ConvNetBlock(nn.Module):
    """A residual block: two convolutions, each followed by a norm."""

    def __init__(self, config: ConvNetConfig) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(config.hidden, config.hidden, 3, padding=1, bias=False)
        self.norm1 = config.norm()
        self.conv2 = nn.Conv2d(config.hidden, config.hidden, 3, padding=1, bias=False)
        self.norm2 = config.norm()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class ConvNet(nn.Module):
    """The classifier: stem, residual blocks, mean over positions, and linear layer."""

    shift_labels = False

    def __init__(self, config: ConvNetConfig) -> None:
        super().__init__()
        self.config = config
        self.stem = nn.Conv2d(config.channels, config.hidden, 3, stride=2, padding=1, bias=False)
        self.norm = config.norm()
        self.blocks = nn.ModuleList(ConvNetBlock(config) for _ in range(config.layers))
        self.classifier = nn.Linear(config.hidden, config.classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: torch.Tensor, labels: torch.Tensor | None = None) -> ModelOutput:
        x = F.relu(self.norm(self.stem(images)))
        for block in self.blocks:
            x = block(x)
        return output_with_loss(self.classifier(x.mean(dim=(2, 3))), labels, self.shift_labels)
