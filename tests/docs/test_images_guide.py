"""The code of docs/guides/images.md, run on JPEG files of known colors."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.docs.pages import DOCS

image: Any = pytest.importorskip("PIL.Image", reason="no pillow; type: pip install .[dev]")
pytestmark = pytest.mark.filterwarnings("ignore:The image decoding:DeprecationWarning")  # of torchvision, from 0.29 on

GUIDE = DOCS / "guides" / "images.md"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COLORS = [(0, 0, 0), (255, 255, 255), (200, 40, 90), (30, 180, 60), (10, 20, 240)]
MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])


def stand_in() -> dict[str, Any]:
    """Return modules with what the guide uses of torchvision: no release of it may fit this torch."""

    def decoded(data: torch.Tensor) -> torch.Tensor:
        with image.open(BytesIO(bytes(data.numpy()))) as opened:
            return torch.from_numpy(np.array(opened.convert("RGB"))).permute(2, 0, 1).contiguous()

    def decode_jpeg(data: Any, _mode: object, device: object = "cpu") -> Any:
        assert str(device) == "cpu"
        return [decoded(one) for one in data] if isinstance(data, list) else decoded(data)

    def read_file(path: str) -> torch.Tensor:
        return torch.from_numpy(np.fromfile(path, np.uint8))

    io = SimpleNamespace(ImageReadMode=SimpleNamespace(RGB=3), decode_jpeg=decode_jpeg, read_file=read_file)
    return {"torchvision": SimpleNamespace(io=io), "torchvision.io": io}


def run(**given: object) -> dict[str, Any]:
    blocks = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    exec(compile("\n".join(blocks), GUIDE, "exec"), given)  # noqa: S102
    return given


@pytest.fixture
def guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run the guide's code on a file of each color, of several sizes."""
    try:
        import_module("torchvision")
    except (ImportError, RuntimeError):  # it was built for another torch
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            monkeypatch.delitem(sys.modules, name)
        for name, module in stand_in().items():
            monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    paths = []
    for number, color in enumerate(COLORS):
        paths.append(str(tmp_path / f"{number}.jpg"))
        image.new("RGB", (300 + 17 * number, 240 + 9 * number), color).save(paths[-1], quality=95)
    return run(paths=paths, labels=list(range(len(COLORS))), device=DEVICE)


@pytest.mark.parametrize("name", ["loader", "photos"])
def test_pipelines(guide: dict[str, Any], name: str) -> None:
    """Every image arrives cropped to 224 pixels, with its label, and in the normalized values of its color."""
    ((images, labels),) = guide[name]
    assert sorted(labels.tolist()) == list(range(len(COLORS)))
    assert (images.shape, images.dtype, images.device.type) == ((len(COLORS), 3, 224, 224), torch.float32, DEVICE)
    for picture, label in zip(images.cpu(), labels.tolist(), strict=True):
        expected = (torch.tensor(COLORS[label]) / 255 - MEAN) / STD
        assert (picture - expected.view(3, 1, 1)).abs().max() < 4 / 255 / 0.224  # JPEG rounds
    guide[name].close()


# All of the area, as high as it can be, which is cut off; 8 % of it, wide and flipped.
@pytest.mark.parametrize("draws", [[1.0, 0.0, 0.3, 0.8, 0.0], [0.0, 1.0, 0.5, 0.1, 0.9]])
def test_crops(guide: dict[str, Any], draws: list[float]) -> None:
    """The numbers choose a box as RandomResizedCrop does, and its pixels are of the places that they stand for."""
    rows = torch.arange(200, dtype=torch.uint8).view(1, 200, 1).expand(1, 200, 300)
    columns = (torch.arange(300) // 2).byte().view(1, 1, 300).expand(1, 200, 300)
    black = torch.zeros(3, 50, 70, dtype=torch.uint8)
    pictures = [one.to(DEVICE) for one in (black, torch.cat([rows, columns, rows]), black)]
    sizes = torch.tensor([picture.shape[1:] for picture in pictures], device=DEVICE)
    pixels = torch.cat([picture.permute(1, 2, 0).flatten(0, 1) for picture in pictures])
    seen = guide["crop"](pixels, sizes, torch.tensor([draws] * 3, device=DEVICE), 224).cpu()
    share, ratio, y, x, flip = draws
    area, ratio = 200 * 300 * (0.08 + 0.92 * share), (4 / 3) ** (2 * ratio - 1)
    height, width = min((area / ratio) ** 0.5, 200), min((area * ratio) ** 0.5, 300)
    steps = (torch.arange(224) + 0.5) / 224
    down, across = y * (200 - height) + steps * height, x * (300 - width) + steps * width
    assert (seen[1][0] - down[:, None]).abs().max() < 1.5
    assert (seen[1][1] - (across if flip < 0.5 else across.flip(0)) / 2).abs().max() < 1.5
    assert not seen[0].any()
    assert not seen[2].any()
