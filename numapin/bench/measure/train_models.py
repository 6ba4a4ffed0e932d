"""The networks of `bench train`, written here so that torchvision is not needed. Edge, but only torch's layers.

Comes in: a `TrainCase`. Goes out: a module with random weights that returns the loss of a batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import nn

from numapin.bench.cases.train import Material

if TYPE_CHECKING:
    from collections.abc import Callable

    from numapin.bench.cases.train import TrainCase

_HEAD_WIDTH: Final = 64
_PATCH: Final = 16  # pixels of a side


class Residual(nn.Module):
    """A residual block: `relu(branch(x) + shortcut(x))`."""

    def __init__(self, branch: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.branch, self.shortcut, self.relu = branch, shortcut, nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add both paths."""
        added: torch.Tensor = self.relu(self.branch(x) + self.shortcut(x))
        return added


def resnet18(case: TrainCase) -> nn.Module:
    """Build ResNet-18 (He et al., 2015)."""
    return _resnet(_basic, (2, 2, 2, 2), 1, case.num_classes)


def resnet50(case: TrainCase) -> nn.Module:
    """Build ResNet-50 v1.5: the stride is in the 3x3 convolution, as in torchvision."""
    return _resnet(_bottleneck, (3, 4, 6, 3), 4, case.num_classes)


def cnn3d(case: TrainCase) -> nn.Module:
    """Build a small 3D CNN for volumes with one channel: four convolutions of stride 2, 16 to 128 channels."""
    layers: list[nn.Module] = []
    for before, after in ((1, 16), (16, 32), (32, 64), (64, 128)):
        layers += [nn.Conv3d(before, after, 3, 2, 1, bias=False), nn.BatchNorm3d(after), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(128, case.num_classes))


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


class Block(nn.Module):
    """A transformer block with norms before attention and feed-forward layers, and heads of 64 channels."""

    def __init__(self, width: int, *, is_causal: bool) -> None:
        super().__init__()
        self._num_heads, self._is_causal = width // _HEAD_WIDTH, is_causal
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.to_all, self.from_heads = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend, then feed forward."""
        heads = self.to_all(self.before(x)).unflatten(-1, (3, self._num_heads, _HEAD_WIDTH))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=self._is_causal)
        x = x + self.from_heads(seen.transpose(1, 2).flatten(2))
        fed: torch.Tensor = x + self.feed(self.between(x))
        return fed


class ImageTransformer(nn.Module):
    """A vision transformer that averages its patches; with width 384 and depth 12 as large as ViT-S/16."""

    def __init__(self, case: TrainCase) -> None:
        super().__init__()
        channels, height, width = case.shape
        self.patches = nn.Conv2d(channels, case.width, _PATCH, _PATCH)
        num_patches = (height // _PATCH) * (width // _PATCH)
        self.places = nn.Parameter(torch.randn(1, num_patches, case.width) * 0.02)
        self.blocks = nn.Sequential(*(Block(case.width, is_causal=False) for _ in range(case.depth)))
        self.head = nn.Sequential(nn.LayerNorm(case.width), nn.Linear(case.width, case.num_classes))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return an output per class; uint8 images are scaled here, on the device."""
        x = self.patches(images.float() / 255 - 0.5)
        x = self.blocks(x.flatten(2).transpose(1, 2) + self.places)
        scores: torch.Tensor = self.head(x.mean(1))
        return scores


class LanguageModel(nn.Module):
    """A causal language model. Sequences are padded on the right, where the causal mask already hides the padding."""

    def __init__(self, case: TrainCase) -> None:
        super().__init__()
        self.words = nn.Embedding(case.num_classes, case.width)
        (longest,) = case.shape
        self.places = nn.Embedding(longest, case.width)
        self.blocks = nn.Sequential(*(Block(case.width, is_causal=True) for _ in range(case.depth)))
        self.head = nn.Sequential(nn.LayerNorm(case.width), nn.Linear(case.width, case.num_classes))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return an output per word of the vocabulary, at each place."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        scores: torch.Tensor = self.head(self.blocks(self.words(tokens) + self.places(places)))
        return scores


NETWORKS: Final[dict[str, Callable[[TrainCase], nn.Module]]] = {
    "resnet18": resnet18,
    "resnet50": resnet50,
    "cnn3d": cnn3d,
    "vit": ImageTransformer,
    "lm": LanguageModel,
}


class Lossy(nn.Module):
    """A network with its loss, so that wrappers such as FSDP see one call per step."""

    def __init__(self, case: TrainCase) -> None:
        super().__init__()
        self.network = NETWORKS[case.model](case)
        self._num_classes, self._reads_tokens = case.num_classes, case.material is Material.TOKENS

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy; targets of -100 do not count."""
        scores = self.network(inputs)
        if self._reads_tokens:
            return nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())
        return nn.functional.cross_entropy(scores, targets % self._num_classes)
