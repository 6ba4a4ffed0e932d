"""The networks of `bench.training`, without torchvision. Pure.

Comes in: a name. Goes out: a `Workload`: a network, its input and its training options.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A network and its float32 samples of shape `shape`; `batch_size` is per rank.

    Each rank holds `num_samples` distinct samples in memory. `bf16` trains under bfloat16 autocast, `channels_last`
    with that memory format. Without autocast, cuDNN runs convolutions in TF32.
    """

    name: str
    build: Callable[[int], nn.Module]
    shape: tuple[int, ...]
    batch_size: int
    num_classes: int
    num_samples: int
    bf16: bool
    channels_last: bool

    @property
    def about(self) -> str:
        """The workload in one line."""
        size = "x".join(map(str, self.shape))
        precision = "bf16 autocast" if self.bf16 else "float32 (TF32 convolutions)"
        layout = ", channels_last" if self.channels_last else ""
        batch = f"{self.batch_size} x {size} float32 per rank and step"
        return f"{batch}, of {self.num_samples} samples; {precision}{layout}"

    def quick(self) -> Workload:
        """Return a version for smoke tests: a few small samples, the same network."""
        side = 32 if len(self.shape) == 3 else 16
        shape = (self.shape[0], *[side] * (len(self.shape) - 1))
        return replace(self, shape=shape, batch_size=4, num_samples=16)


class Residual(nn.Module):
    """A residual block: `relu(branch(x) + shortcut(x))`."""

    def __init__(self, branch: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.branch, self.shortcut, self.relu = branch, shortcut, nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add both paths."""
        added: torch.Tensor = self.relu(self.branch(x) + self.shortcut(x))
        return added


def resnet18(num_classes: int) -> nn.Module:
    """Build ResNet-18 (He et al., 2015)."""
    return _resnet(_basic, (2, 2, 2, 2), 1, num_classes)


def resnet50(num_classes: int) -> nn.Module:
    """Build ResNet-50 v1.5: the stride is in the 3x3 convolution, as in torchvision."""
    return _resnet(_bottleneck, (3, 4, 6, 3), 4, num_classes)


def cnn3d(num_classes: int) -> nn.Module:
    """Build a small 3D CNN for volumes with one channel: four convolutions of stride 2, 16 to 128 channels."""
    layers: list[nn.Module] = []
    for before, after in ((1, 16), (16, 32), (32, 64), (64, 128)):
        layers += [nn.Conv3d(before, after, 3, 2, 1, bias=False), nn.BatchNorm3d(after), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(128, num_classes))


def _resnet(
    branch: Callable[[int, int, int], nn.Module], depths: tuple[int, ...], expansion: int, num_classes: int
) -> nn.Module:
    layers: list[nn.Module] = [_conv(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    before = 64
    for stage, depth in enumerate(depths):
        width = 64 << stage
        for block in range(depth):
            stride = 2 if stage and not block else 1
            layers.append(Residual(branch(before, width, stride), _shortcut(before, width * expansion, stride)))
            before = width * expansion
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, num_classes))


def _basic(before: int, width: int, stride: int) -> nn.Module:
    return nn.Sequential(_conv(before, width, 3, stride), nn.ReLU(inplace=True), _conv(width, width, 3, 1))


def _bottleneck(before: int, width: int, stride: int) -> nn.Module:
    narrow = (_conv(before, width, 1, 1), nn.ReLU(inplace=True), _conv(width, width, 3, stride), nn.ReLU(inplace=True))
    return nn.Sequential(*narrow, _conv(width, width * 4, 1, 1))


def _shortcut(before: int, after: int, stride: int) -> nn.Module:
    return nn.Identity() if (before, stride) == (after, 1) else _conv(before, after, 1, stride)


def _conv(before: int, after: int, kernel: int, stride: int) -> nn.Module:
    """Build a convolution without bias, and its batch norm."""
    convolution = nn.Conv2d(before, after, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(after))


_RESNET18: Final = Workload(
    name="resnet18",
    build=resnet18,
    shape=(3, 224, 224),
    batch_size=256,
    num_classes=1000,
    num_samples=512,
    bf16=True,
    channels_last=True,
)
_CNN3D: Final = Workload(
    name="cnn3d",
    build=cnn3d,
    shape=(1, 96, 96, 96),
    batch_size=32,
    num_classes=10,
    num_samples=128,
    bf16=False,
    channels_last=False,
)

WORKLOADS: Final = {
    "resnet18": _RESNET18,
    "cnn3d": _CNN3D,
    "resnet50": replace(_RESNET18, name="resnet50", build=resnet50),
}
"""The networks by name, in the order in which they are measured."""
