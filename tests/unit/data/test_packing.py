"""Batches of any type go into a slot and come out unchanged."""

from __future__ import annotations

import pickle
from collections import OrderedDict, namedtuple
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest
import torch

from tests.data.batches import Sample, in_slot, ramp, same
from tests.data.loopback import Loopback, lent, loopback
from tests.unit.data.seam import NO_SLOT, Copier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DTYPES: Final = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    - {getattr(torch, name) for name in vars(torch) if name.startswith(("q", "bits"))},
    key=str,
)

Pair = namedtuple("Pair", "first second")  # noqa: PYI024 - what users write


@pytest.fixture
def loop() -> Iterator[Loopback]:
    """Give a pool with one worker."""
    with loopback() as made:
        yield made


BATCHES: Final[dict[str, Any]] = {
    "tensor": ramp(7, 11),
    "tuple": (ramp(3), ramp(4)),
    "list": [ramp(3), "text", None, 7, 1.5, b"bytes", {"set"}],
    "dict": {"x": ramp(3), 5: [ramp(2), {"deep": (ramp(1),)}]},
    "ordered": OrderedDict(b=ramp(1), a=ramp(2)),
    "namedtuple": Pair(ramp(300), Pair(ramp(2), "text")),
    "own type": Sample(ramp(3, 5), 7, Sample(ramp(2), 1)),
    "200 tensors": {f"key {number}": ramp(16, 4) for number in range(200)},
    "arrays beside tensors": (ramp(300), np.arange(300.0), ramp(3), np.arange(300)),
}
LAYOUTS: Final[dict[str, Callable[[], torch.Tensor]]] = {
    "0-dim": lambda: torch.tensor(7.5),
    "one element": lambda: ramp(1, 1, 1),
    "transposed": lambda: ramp(5, 9).t(),
    "permuted": lambda: ramp(3, 4, 5).permute(2, 0, 1),
    "channels last": lambda: ramp(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "every third": lambda: ramp(100)[1::3],
    "column": lambda: ramp(20, 20)[:, 7],
    "inner block": lambda: ramp(20, 20)[3:9, 4:11],
    "expanded": lambda: ramp(6, 1).expand(6, 50),
    "expanded scalar": lambda: torch.tensor(3.0).expand(100, 100),
    "overlapping": lambda: ramp(100).as_strided((20, 30), (1, 2)),
    "offset": lambda: ramp(100)[37:],
    "flipped": lambda: ramp(10, 10).flip(0),
}
ARRAYS: Final[dict[str, Callable[[], Any]]] = {
    "writable": lambda: np.arange(1000.0),
    "Fortran order": lambda: np.asfortranarray(np.arange(1000.0).reshape(20, 50)),
    "0-dim": lambda: np.array(3.5),
    "not contiguous": lambda: np.arange(4000.0)[::2],
    "structured": lambda: np.zeros(500, dtype=[("a", "i4"), ("b", "f8")]),
    "dates": lambda: np.arange("2020-01", "2030-01", dtype="datetime64[D]").astype("datetime64[ns]").astype("i8"),
    "objects": lambda: np.array([1, "two", None], dtype=object),
    "text": lambda: np.array(["a", "bc"] * 300),
    "empty": lambda: np.zeros((0, 5)),
}


class TestBatches:
    """A batch of any type comes out unchanged."""

    @pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
    def test_containers(self, loop: Loopback, batch: Any) -> None:
        """Containers of any type may be nested; objects that are not tensors stay in the pickle."""
        in_slot(loop, batch)

    @pytest.mark.filterwarnings("ignore:ComplexHalf", "ignore:BComplex32")
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_dtypes(self, loop: Loopback, dtype: torch.dtype) -> None:
        """Every byte is kept, alone and after a tensor of an odd length."""
        tensor = torch.arange(2, 98, dtype=torch.uint8).repeat(dtype.itemsize).view(dtype)
        if dtype is torch.bool:
            tensor = torch.arange(96) % 3 == 0
        in_slot(loop, tensor)
        in_slot(loop, (torch.zeros(3, dtype=torch.uint8), tensor[5:], tensor))

    @pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)
    def test_layouts(self, loop: Loopback, make: Callable[[], torch.Tensor]) -> None:
        """Sizes and strides are kept, and no more memory is sent than there is."""
        tensor = make()
        head = in_slot(loop, [tensor])
        assert head.storages == ((0, tensor.untyped_storage().nbytes()),)

    @pytest.mark.parametrize("make", ARRAYS.values(), ids=ARRAYS)
    def test_arrays(self, loop: Loopback, make: Callable[[], Any]) -> None:
        """Arrays stay as writable as they were."""
        for batch in (make(), [make(), ramp(3)]):
            assert same(Copier(pins=False).open(loop.send(batch)), batch)

    def test_small_arrays_stay_in_the_pickle(self, loop: Loopback) -> None:
        """Arrays below 1 KiB stay in the pickle, which is cheaper. Tensors of any size go into the slot."""
        assert loop.post(np.zeros(127))[0].slot == NO_SLOT
        assert in_slot(loop, np.zeros(128)).storages == ((0, 1024),)
        assert in_slot(loop, torch.zeros(1)).storages == ((0, 4),)

    @pytest.mark.parametrize("batch", [None, 7, "text", [], {"x": torch.zeros(0, 5)}, torch.zeros(0)], ids=repr)
    def test_nothing_to_send_needs_no_slot(self, loop: Loopback, batch: Any) -> None:
        """For a batch without memory no slot is made, and it is not a miss."""
        head, body = loop.post(batch)
        assert (head.miss, head.slot, head.wanted_bytes) == (None, NO_SLOT, 0)
        assert not loop.pool.slots
        assert same(pickle.loads(body), batch)


class TestSharing:
    """Tensors share memory in the rank where they did in the worker, and nowhere else."""

    def test_views_go_on_sharing(self, loop: Loopback) -> None:
        """Views in any order share memory, which is sent once and can be edited through any of them."""
        base = ramp(10, 10)
        for batch in ((base, base[3], base.t()), (base[3:8], base, base.t()), (base, base, base.view(-1))):
            head = in_slot(loop, batch)
            assert head.storages == ((0, 400),)
            assert head.wanted_bytes == 512
            opened = lent(loop, batch)
            opened[0].fill_(-1)
            assert all((tensor == -1).any() for tensor in opened[1:])

    def test_conjugated_and_negated_views(self, loop: Loopback) -> None:
        """They are in the slot, share its memory, and keep their values, which torch's own pickling changes."""
        base = torch.view_as_complex(ramp(300, 2) + 1)
        batch = [base, base.conj(), base.conj().imag, torch._neg_view(base.conj()), base.conj()[5:]]
        arrived = lent(loop, batch)
        assert [(each.is_conj(), each.is_neg()) for each in arrived] == [(t.is_conj(), t.is_neg()) for t in batch]
        assert all(torch.equal(each, expected) for each, expected in zip(arrived, batch, strict=True))
        arrived[0].zero_()
        assert not any(each.any() for each in arrived)

    def test_others_do_not(self, loop: Loopback) -> None:
        """Each tensor has a separate storage of its former size, so that saving one saves no other."""
        one, other = lent(loop, (ramp(10), ramp(20)))
        assert one.untyped_storage().nbytes() == 40
        assert other.untyped_storage().nbytes() == 80
        one.fill_(-1)
        assert torch.equal(other, ramp(20))

    def test_the_same_tensor_twice_is_the_same_object(self, loop: Loopback) -> None:
        """An object that occurs twice is one object, as in pickle."""
        tensor = ramp(5)
        one, other = lent(loop, [tensor, tensor])
        assert one is other

    def test_of_a_huge_storage_only_what_is_seen_is_sent(self, loop: Loopback) -> None:
        """A row of a large table is sent without the table, unless the table is at most four times its size."""
        table = ramp(1000, 1000)
        assert in_slot(loop, (table[7], table[9, :50])).storages == ((0, 4000), (4096, 200))
        assert in_slot(loop, table[7]).storages == ((0, 4000),)
        assert in_slot(loop, ramp(4, 100)[2]).storages == ((0, 1600),)
        assert in_slot(loop, ramp(5, 100)[2]).storages == ((0, 400),)

    def test_views_within_what_was_sent_share_it(self, loop: Loopback) -> None:
        """Overlapping views share memory even in a huge storage."""
        row = ramp(1000, 1000)[7]
        whole, part = lent(loop, (row, row[10:20]))
        whole[10:20] = -1
        assert part.unique().tolist() == [-1]

    def test_views_of_another_dtype(self, loop: Loopback) -> None:
        """Views of different dtypes keep their offsets in the same memory, even if the first one is unaligned."""
        memory = torch.arange(1 << 20).to(torch.uint8)
        in_slot(loop, (memory[1:101], memory[4:100].view(torch.int32)))
