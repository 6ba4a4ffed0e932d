"""Batches of every kind that a collate function may return, each from a number; most have 16 KiB or more."""

from __future__ import annotations

import enum
import warnings
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch.nn.utils.rnn import pack_sequence, pad_sequence
from torch.utils.data import DataLoader, default_collate
from torch.utils.data._utils import collate

from tests.contract.datasets import Made, row
from tests.contract.describe import Described, describe

if TYPE_CHECKING:
    from tests.contract.watching import LoaderClass

TORCHS_MAP = dict(collate.default_collate_fn_map)  # copied before the workers start
ROW: torch.Tensor = row(3)
RECORD = [("number", "<i8"), ("share", "<f4"), ("name", "<U3")]
Pair = namedtuple("Pair", "left right")  # noqa: PYI024 - the untyped kind is one more kind


@dataclass(frozen=True, slots=True)
class Frozen:
    image: torch.Tensor
    name: str


@dataclass
class Graph:
    nodes: torch.Tensor
    extra: dict[str, Any] = field(default_factory=dict)


class Pinnable:
    def __init__(self, data: torch.Tensor) -> None:
        self.data, self.pinned = data, False

    def pin_memory(self) -> Pinnable:
        pinned = Pinnable(self.data.pin_memory())
        pinned.pinned = True
        return pinned


class Remade:
    def __init__(self, *parts: torch.Tensor) -> None:
        self.parts = parts

    def __reduce__(self) -> tuple[Any, ...]:
        return Remade, self.parts


class Tagged(torch.Tensor):
    """A tensor subclass."""


Color = enum.Enum("Color", "RED")


class Pages(UserDict[str, Any]):
    """A mapping that is not a dict."""


class Wrapped(torch.Tensor):
    """A tensor such as torchvision's: only these functions return its class, others a plain tensor."""

    KEPT: ClassVar = {torch.Tensor.clone, torch.Tensor.to, torch.Tensor.detach, torch.Tensor.requires_grad_}

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
            is_tensor = isinstance(out, torch.Tensor)
            return out.as_subclass(cls if func in cls.KEPT else torch.Tensor) if is_tensor else out


class Named(torch.Tensor):
    name: str


def wrapped(index: int) -> torch.Tensor:
    return row(index).as_subclass(Wrapped)


def named(index: int) -> torch.Tensor:
    tensor = row(index).as_subclass(Named)
    tensor.__dict__["boxes"] = row(index, (50, 4))
    return tensor


def stack_into_shared(batch: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stack into new shared memory, as PyTorch Geometric does."""
    numel = sum(tensor.numel() for tensor in batch)
    storage = batch[0].untyped_storage()._new_shared(numel * batch[0].element_size())
    out = torch.empty(0, dtype=batch[0].dtype).set_(storage).resize_(len(batch), *batch[0].shape)
    return torch.stack(list(batch), out=out)


def read_only(index: int, dtype: str = "<f8", size: int = 5000) -> np.ndarray[Any, Any]:
    """Return an array that may not be written, such as Arrow's."""
    array = (np.arange(size) + index).astype(dtype)
    array.flags.writeable = False
    return array


def ragged(index: int) -> torch.Tensor:
    return row(index, (3000 + index,))


def pad(batch: Sequence[torch.Tensor], *, collate_fn_map: object = None) -> torch.Tensor:
    del collate_fn_map
    return pad_sequence(list(batch), batch_first=True)


def views(k: int) -> dict[str, torch.Tensor]:
    base = row(k, (64, 128))
    return {"base": base, "first": base[:32], "second": base[32:], "columns": base[:, 3:9], "turned": base.t()}


def sparse(k: int) -> torch.Tensor:
    indices = torch.stack([torch.arange(2000) % 50, torch.arange(2000) % 70])
    return torch.sparse_coo_tensor(indices, torch.arange(2000.0) + k, (50, 70))


def sparse_csr(k: int) -> torch.Tensor:
    """Return a tensor in the CSR layout, of which torch says once in each process that it is in beta state."""
    with warnings.catch_warnings(action="ignore"):
        return row(k).relu().to_sparse_csr()


def leaf(k: int) -> torch.Tensor:
    """Return a leaf that requires a gradient and has one, which torch does not send."""
    tensor = row(k).requires_grad_()
    tensor.grad = torch.ones_like(tensor)
    return tensor


def tagged(k: int) -> torch.Tensor:
    """Return a tensor with an attribute, which torch does not send."""
    tensor = row(k)
    tensor.__dict__["tag"] = "lost"
    return tensor


def typed(dtype: torch.dtype) -> Callable[[int], torch.Tensor]:
    return lambda k: (torch.arange(20000) % 90 + k % 7).to(dtype)


_DTYPES = (
    *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "float16", "bfloat16"),
    *("float64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2"),
)

ZOO: dict[str, Callable[[int], Any]] = {
    **{name: typed(getattr(torch, name)) for name in _DTYPES if hasattr(torch, name)},
    # Layouts
    "transposed": lambda k: row(k, (64, 96)).t(),
    "channels-last": lambda k: row(k, (4, 3, 40, 40)).contiguous(memory_format=torch.channels_last),
    "channels-last-of-one": lambda k: row(k, (4, 1, 40, 40)).to(memory_format=torch.channels_last),
    "every-other": lambda k: row(k, (200, 100))[::2, ::3],
    "slice": lambda k: row(k, (100, 100))[40:90],
    "expanded": lambda k: row(k, (1, 4096)).expand(8, 4096),
    "expanded-scalar": lambda k: torch.tensor(float(k)).expand(100, 100),
    "overlapping-windows": lambda k: row(k, (5000,)).unfold(0, 100, 50),
    "zero-size": lambda k: [torch.empty(0), torch.empty(3, 0, 5), torch.empty(0, 4).t(), row(k)],
    "scalars": lambda k: {"zero-dim": torch.tensor(k), "one": torch.tensor([k]), "float": torch.tensor(0.5)},
    "conjugate": lambda k: typed(torch.complex64)(k).conj().resolve_conj(),
    "imaginary": lambda k: typed(torch.complex64)(k).imag,
    "views": views,
    "views-only": lambda k: (views(k)["second"], views(k)["columns"]),
    "bitcast-views": lambda k: [tensor := row(k), tensor.view(torch.int32), tensor.view(torch.uint8)],
    "twice": lambda k: [tensor := row(k), tensor, row(k)],
    "diagonal": lambda k: row(k, (200, 200)).diagonal(),
    # Kinds of tensors
    "leaf-with-gradient": leaf,
    "parameter": lambda k: torch.nn.Parameter(row(k)),
    "parameter-frozen": lambda k: torch.nn.Parameter(row(k), requires_grad=False),
    "subclass": lambda k: row(k).as_subclass(Tagged),
    "sparse": sparse,
    "sparse-coalesced": lambda k: sparse(k).coalesce(),
    "sparse-csr": sparse_csr,
    "meta": lambda k: torch.empty(k % 5, 4000, device="meta"),
    "already-shared": lambda k: row(k).share_memory_(),
    "views-of-shared": lambda k: [shared := row(k).share_memory_(), shared[3:5], row(k)],
    "nested": lambda k: torch.nested.nested_tensor([row(k, (50, 40)), row(k, (60, 40))], layout=torch.strided),
    "storage": lambda k: row(k).untyped_storage(),
    "packed-sequence": lambda k: pack_sequence([row(k, (40, 90)), row(k, (30, 90))]),
    "attributes": tagged,
    # Containers
    "tuple": lambda k: (row(k), k),
    "named-tuple": lambda k: Pair(row(k), row(k + 1)),
    "frozen-dataclass": lambda k: Frozen(row(k), f"row {k}"),
    "dataclass": lambda k: Graph(row(k), {"edges": row(k, (2, 5000)), "deep": [{"er": (row(k),)}]}),
    "pinnable": lambda k: Pinnable(row(k)),
    "remade": lambda k: Remade(row(k), row(k, (3,)), row(k)),
    "ordered-dict": lambda k: OrderedDict(b=row(k), a=row(k)),
    "default-dict": lambda k: defaultdict(list, {"rows": [row(k)]}),
    "user-dict": lambda k: Pages(x=row(k)),
    "odd-keys": lambda k: {k: row(k), (1, "two"): row(k), None: 3, Color.RED: row(k)},
    "memory-in-keys": lambda k: {("a", row(k)): row(k + 1), ("b", row(k + 2)): row(k + 3)},
    "sixty-tensors": lambda k: {f"field {i}": row(k + i, (1024,)) for i in range(60)},
    "sixty-small-tensors": lambda k: [row(k + i, (9,)) for i in range(60)],
    "large-beside-small": lambda k: {"large": row(k, (512, 512)), "small": row(k, (3,)), "k": k},
    # Leaves that are not tensors
    "none": lambda _: None,
    "text": lambda k: f"row {k} \u00e9\U0001f600" * 300,
    "bytes": lambda k: bytes([k % 256]) * 100_000,
    "bytearray": lambda k: bytearray([k % 256]) * 100_000,
    "exception": lambda k: ValueError("a batch, not an error", k),
    "torch-words": lambda k: (torch.float32, torch.device("cpu"), torch.Size([k, 2]), torch.strided),
    "numpy": lambda k: np.arange(5000.0) + k,
    "numpy-fortran": lambda k: np.asfortranarray(np.arange(6000.0).reshape(60, 100) + k),
    "numpy-read-only": lambda k: np.broadcast_to(np.arange(100.0) + k, (50, 100)),
    "numpy-structured": lambda k: np.array([(k, 0.5, "a")] * 900, dtype=RECORD),
    "numpy-objects": lambda k: np.array([k, "text", None], dtype=object),
    "numpy-of-tensor": lambda k: {"array": row(k).numpy(), "tensor": row(k)},
}
COLLATED: dict[str, Callable[[int], Any]] = {
    "wrapped-stacked": lambda k: default_collate([wrapped(k), wrapped(k + 1)]),
    "wrapped": wrapped,
    "named-stacked": lambda k: default_collate([named(k), named(k + 1)]),
    "named": named,
    "own-map": lambda k: collate.collate([ragged(k), ragged(k + 1)], collate_fn_map={torch.Tensor: pad}),
    "copied-map": lambda k: collate.collate([row(k), row(k + 1)], collate_fn_map=TORCHS_MAP),
    "into-shared-memory": lambda k: stack_into_shared([row(k), row(k + 1)]),
    "the-same-each-time": lambda _: [ROW, ROW],
    "many-tiny": lambda k: [torch.tensor(k + n) for n in range(50)],
    "small-stacked": lambda k: default_collate([k, k + 1]),
    "inside-objects": lambda k: Graph(row(k), {"mask": read_only(k)}),
    "long-texts-and-labels": lambda k: {"text": f"{k} " * 30_000, "label": torch.tensor(k)},
    "numpy-read-only-stacked": lambda k: default_collate([read_only(k), read_only(k + 1)]),
    "numpy-read-only-fortran": lambda k: read_only(k).reshape(50, 100).T,
    "numpy-read-only-small": lambda k: [(read_only(k, size=9), row(k))],
    "numpy-read-only-records": lambda k: read_only(k).view([("x", "<f4"), ("y", "<i4")]),
    "numpy-other-byte-order": lambda k: [read_only(k, ">f8").copy(), read_only(k, ">i4"), row(k)],
    "numpy-axes-in-another-order": lambda k: np.arange(6000.0).reshape(10, 20, 30).transpose(2, 0, 1) + 0 * k,
    "numpy-axes-reversed": lambda k: (np.arange(6000.0) + k).reshape(60, 100)[::-1, ::2],
    "numpy-odd": lambda k: [np.array(k + 0.5), np.array(["a", "bc"] * 300), np.zeros((0, 5)), row(k)],
}


ALL = ZOO | COLLATED
KINDS = tuple(ALL)
ROUNDS = 3  # of all kinds; slots are reused within the first

TORCHS_WAY = frozenset(
    (
        *("leaf-with-gradient", "parameter", "parameter-frozen", "nested", "sparse", "sparse-coalesced", "sparse-csr"),
        *("already-shared", "views-of-shared"),
    )
)
"""Batches of which a large tensor does not travel in a slot: only torch can send it, or it is in shared memory."""


def from_zoo(indices: list[int]) -> Any:
    return ALL[KINDS[indices[0] % len(KINDS)]](indices[0])


def of_each_kind(loader_class: LoaderClass) -> tuple[dict[str, list[Described]], DataLoader[Any]]:
    loader = loader_class(Made(size=ROUNDS * len(KINDS), pause_s=0.001), collate_fn=from_zoo, num_workers=1)
    batches = [describe(batch) for batch in loader]
    return {kind: batches[number :: len(KINDS)] for number, kind in enumerate(KINDS)}, loader
