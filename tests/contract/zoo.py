"""Batches of every kind that a collate function may return.

Input: a number, so that no two batches of a kind are equal. Output: one batch. Most have about 16 KiB or more.
"""

from __future__ import annotations

import enum
import warnings
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import pack_sequence

from tests.contract.datasets import row

if TYPE_CHECKING:
    from collections.abc import Callable

Pair = namedtuple("Pair", "left right")  # noqa: PYI024 - the untyped kind is one more kind


class Typed(NamedTuple):
    """A named tuple with types."""

    image: torch.Tensor
    label: int


@dataclass(frozen=True, slots=True)
class Frozen:
    """A frozen dataclass with slots."""

    image: torch.Tensor
    name: str


@dataclass
class Graph:
    """A dataclass with a dict and a class attribute."""

    nodes: torch.Tensor
    extra: dict[str, Any] = field(default_factory=dict)


class Pinnable:
    """A user's class that can pin itself."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data, self.pinned = data, False

    def pin_memory(self) -> Pinnable:
        """Return a pinned copy, marked."""
        pinned = Pinnable(self.data.pin_memory())
        pinned.pinned = True
        return pinned


class Remade:
    """A class that pickles through __reduce__, with tensors among the arguments."""

    def __init__(self, *parts: torch.Tensor) -> None:
        self.parts = parts

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a call with the parts."""
        return Remade, self.parts


class Tagged(torch.Tensor):
    """A tensor subclass."""


class Color(enum.Enum):
    """An enumeration."""

    RED = 1


class Pages(UserDict[str, Any]):
    """A mapping that is not a dict."""


def views(k: int) -> dict[str, torch.Tensor]:
    """Return views that share one storage, some of them with bytes in common."""
    base = row(k, (64, 128))
    return {"base": base, "first": base[:32], "second": base[32:], "columns": base[:, 3:9], "turned": base.t()}


def sparse(k: int) -> torch.Tensor:
    """Return a sparse matrix of 2,000 uncoalesced values."""
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


def structured(k: int) -> np.ndarray[Any, Any]:
    """Return a NumPy array of records."""
    return np.array([(k, 0.5, "a")] * 900, dtype=[("number", "<i8"), ("share", "<f4"), ("name", "<U3")])


def typed(dtype: torch.dtype) -> Callable[[int], torch.Tensor]:
    """Return a function that makes 20,000 elements of a dtype."""
    return lambda k: (torch.arange(20000) % 90 + k % 7).to(dtype)


def twice(k: int) -> list[torch.Tensor]:
    """Return one tensor twice, and an equal one."""
    return [tensor := row(k), tensor, row(k)]


_DTYPES = (
    *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "float16", "bfloat16"),
    *("float64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2"),
)

ZOO: dict[str, Callable[[int], Any]] = {
    **{name: typed(getattr(torch, name)) for name in _DTYPES if hasattr(torch, name)},
    # Layouts
    "transposed": lambda k: row(k, (64, 96)).t(),
    "channels-last": lambda k: row(k, (4, 3, 40, 40)).contiguous(memory_format=torch.channels_last),
    "every-other": lambda k: row(k, (200, 100))[::2, ::3],
    "slice": lambda k: row(k, (100, 100))[40:90],
    "expanded": lambda k: row(k, (1, 4096)).expand(8, 4096),
    "expanded-scalar": lambda k: torch.tensor(float(k)).expand(100, 100),
    "overlapping-windows": lambda k: row(k, (5000,)).unfold(0, 100, 50),
    "zero-size": lambda k: [torch.empty(0), torch.empty(3, 0, 5), torch.empty(0, 4).t(), row(k)],
    "scalars": lambda k: {"zero-dim": torch.tensor(k), "one": torch.tensor([k]), "float": torch.tensor(0.5)},
    "negative-zero-nan-inf": lambda k: torch.tensor([-0.0, float("nan"), float("inf"), k] * 2000),
    "conjugate": lambda k: typed(torch.complex64)(k).conj().resolve_conj(),
    "imaginary": lambda k: typed(torch.complex64)(k).imag,
    "views": views,
    "views-only": lambda k: (views(k)["second"], views(k)["columns"]),
    "bitcast-views": lambda k: [tensor := row(k), tensor.view(torch.int32), tensor.view(torch.uint8)],
    "twice": twice,
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
    "list": lambda k: [row(k), [row(k + 1)], ()],
    "named-tuple": lambda k: Pair(row(k), row(k + 1)),
    "typed-tuple": lambda k: Typed(row(k), k),
    "frozen-dataclass": lambda k: Frozen(row(k), f"row {k}"),
    "dataclass": lambda k: Graph(row(k), {"edges": row(k, (2, 5000)), "deep": [{"er": (row(k),)}]}),
    "pinnable": lambda k: Pinnable(row(k)),
    "remade": lambda k: Remade(row(k), row(k, (3,)), row(k)),
    "ordered-dict": lambda k: OrderedDict(b=row(k), a=row(k)),
    "default-dict": lambda k: defaultdict(list, {"rows": [row(k)]}),
    "user-dict": lambda k: Pages(x=row(k)),
    "odd-keys": lambda k: {k: row(k), (1, "two"): row(k), None: 3, Color.RED: row(k)},
    "sixty-tensors": lambda k: {f"field {i}": row(k + i, (1024,)) for i in range(60)},
    "sixty-small-tensors": lambda k: [row(k + i, (9,)) for i in range(60)],
    "large-beside-small": lambda k: {"large": row(k, (512, 512)), "small": row(k, (3,)), "k": k},
    # Leaves that are not tensors
    "none": lambda _: None,
    "number": lambda k: k,
    "text": lambda k: f"row {k} \u00e9\U0001f600" * 300,
    "bytes": lambda k: bytes([k % 256]) * 100_000,
    "bytearray": lambda k: bytearray([k % 256]) * 100_000,
    "long-list": lambda k: list(range(k, k + 5000)),
    "set": lambda k: {k, "a", frozenset({1})},
    "exception": lambda k: ValueError("a batch, not an error", k),
    "torch-words": lambda k: (torch.float32, torch.device("cpu"), torch.Size([k, 2]), torch.strided),
    "numpy": lambda k: np.arange(5000.0) + k,
    "numpy-fortran": lambda k: np.asfortranarray(np.arange(6000.0).reshape(60, 100) + k),
    "numpy-read-only": lambda k: np.broadcast_to(np.arange(100.0) + k, (50, 100)),
    "numpy-structured": structured,
    "numpy-objects": lambda k: np.array([k, "text", None], dtype=object),
    "numpy-scalar": lambda k: (np.float32(k), np.int64(k), np.bool_(True)),
    "numpy-of-tensor": lambda k: {"array": row(k).numpy(), "tensor": row(k)},
}


KINDS = tuple(ZOO)
ROUNDS = 7  # of all kinds; slots are reused after the first few

# Batches that do not travel in slots: without a tensor or array of some size, or with one that only torch can send.
TORCHS_WAY = frozenset(
    (
        *("leaf-with-gradient", "parameter", "parameter-frozen", "meta", "storage", "nested"),
        *("sparse", "sparse-coalesced", "sparse-csr", "already-shared", "views-of-shared"),
        *("none", "number", "text", "bytes", "bytearray", "long-list", "set", "exception", "torch-words"),
        *("numpy-objects", "numpy-scalar"),
    )
)


def from_zoo(indices: list[int]) -> Any:
    """Collate to the kind of batch that the first index selects; indices cycle through all kinds."""
    return ZOO[KINDS[indices[0] % len(KINDS)]](indices[0])
