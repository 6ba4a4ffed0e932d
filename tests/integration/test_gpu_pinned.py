"""On a GPU: page-locked memory for user code, and registrations that the driver refuses."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

import numapin
from numapin import pinned
from numapin.errors import BindingRefused, MachineError
from tests.integration.gpu_loading import (
    BATCH,
    CYCLES,
    DEVICE,
    HOST,
    MIB,
    Filled,
    assert_no_error_is_pending,
    copies_to_device,
    cuda,
    is_right,
    settled_pinned_bytes,
    uses_gpu,
)
from tests.integration.seam import CudaRefused, Driver
from tests.waiting import wait_until

pytestmark = uses_gpu

OPTIONS = {"host": HOST, "device": DEVICE}


class TestMemory:
    """numapin.pinned with the real driver."""

    @pytest.mark.filterwarnings("ignore")  # a warning of the profiler
    def test_a_copy_is_one_from_pinned_memory(self) -> None:
        """CUDA's own trace calls copies of it, and of a view, pinned, and copies of ordinary memory pageable."""
        tensor, plain = pinned.empty((64, MIB), torch.uint8), torch.zeros((64, MIB), dtype=torch.uint8)
        tensor.fill_(3)
        assert tensor.is_pinned()
        with copies_to_device() as copies:
            whole, part = tensor.to("cuda", non_blocking=True), tensor[3:5].to("cuda", non_blocking=True)
            plain.to("cuda")
        assert sorted(set(copies)) == ["Memcpy HtoD (Pageable -> Device)", "Memcpy HtoD (Pinned -> Device)"]
        assert copies.count("Memcpy HtoD (Pinned -> Device)") == 2
        assert (int(whole.sum()), int(part.sum())) == (3 * 64 * MIB, 3 * 2 * MIB)

    def test_where_it_lies(self) -> None:
        """Every page is on one node, as the kernel reports for memory that the driver has locked."""
        try:
            pages = pinned.where(pinned.empty(64 * MIB, torch.uint8))
        except MachineError as error:
            pytest.skip(str(error))
        assert list(pages.values()) == [64 * MIB // 4096]
        assert None not in pages

    def test_idle_when_the_copy_has_ended(self) -> None:
        """Dropped memory stays in use only while a copy waits to read it, even on a stream unknown to numapin."""
        before, destination = settled_pinned_bytes(), torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")
        tensor = pinned.empty(64 * MIB, torch.uint8).fill_(5)
        address = tensor.data_ptr()
        assert pinned.budget().pinned_bytes == before + 64 * MIB
        side, passed = cuda.Stream(), cuda.Event()
        torch.cuda.synchronize()
        with cuda.stream(side):
            cuda._sleep(8 * CYCLES)
            destination.copy_(tensor, non_blocking=True)
            passed.record()
        del tensor
        assert pinned.budget().idle_bytes == 0 or passed.query()
        assert wait_until(lambda: pinned.budget().idle_bytes == 64 * MIB, limit_s=4)
        assert passed.query()
        assert int((destination == 5).sum()) == 64 * MIB
        again = pinned.empty(60 * MIB, torch.uint8)
        assert (again.data_ptr(), again.is_pinned()) == (address, True)
        assert int(again.fill_(3).to("cuda", non_blocking=True).sum()) == 3 * 60 * MIB
        del again
        assert wait_until(lambda: pinned.budget().idle_bytes == 64 * MIB, limit_s=4)
        assert (pinned.trim(), pinned.budget().pinned_bytes) == (64 * MIB, before)
        assert_no_error_is_pending()


def test_pinning_starts_cuda() -> None:
    """`.pin_memory()` creates a CUDA context in a process that has none."""
    code = (
        "import torch; from numapin.system.cuda import driver; torch.empty(1, pin_memory=True); "
        "print(torch.cuda.is_initialized(), driver().active_devices())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[1] == "(0,)"


def test_serve_torch_is_torchs_pin_memory() -> None:
    """Values, dtype and strides are as torch's, the result is pinned by us, and torch's again afterwards."""
    before, source = settled_pinned_bytes(), torch.arange(3 * MIB).view(3, MIB).t()
    with pinned.serve_torch():
        copy = source.pin_memory()
    torchs = source.pin_memory()
    assert copy.is_pinned()
    assert (copy.stride(), copy.dtype, copy.shape) == (torchs.stride(), torchs.dtype, torchs.shape)
    assert torch.equal(copy.to("cuda", non_blocking=True).cpu(), source)
    assert pinned.budget().pinned_bytes == before + source.nbytes


def out_of_memory(_driver: Driver, _device: int, _address: int, num_bytes: int) -> None:
    raise CudaRefused(f"{num_bytes} bytes refused", "pin less", name="CUDA_ERROR_OUT_OF_MEMORY")


def overlapping(driver: Driver, device: int, address: int, num_bytes: int) -> None:
    """Make the real driver refuse: the range is registered already."""
    register(driver, device, address, num_bytes)
    try:
        register(driver, device, address, num_bytes)
    finally:
        driver.unregister(device, address)


register = Driver.register


@pytest.mark.parametrize("refuse", [out_of_memory, overlapping])
@pytest.mark.parametrize("kind", OPTIONS)
def test_pageable_slots(
    kind: str, refuse: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The refusal is reported once, batches travel in slots that are not pinned, and no CUDA error is left."""
    before = settled_pinned_bytes()
    monkeypatch.setattr(Driver, "register", refuse)
    with numapin.DataLoader(Filled(400, 1 << 16), BATCH, num_workers=2, **OPTIONS[kind]) as loader:
        for number, batch in enumerate(loader):
            assert batch.is_pinned() or kind == "device"
            assert is_right(batch.to("cuda", non_blocking=True), number)
        assert wait_until(lambda: loader.stats().notes, limit_s=5)
        stats = loader.stats()
    assert_no_error_is_pending()
    assert (stats.batches, stats.hits, stats.pinned_bytes) == (100, 100, 0)
    assert len([note for note in stats.notes if "not pinned from now on" in note]) == 1
    assert capfd.readouterr().err.count("not pinned from now on") == 1
    assert settled_pinned_bytes() == before


def test_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """With strict=True the refusal is an error at one of the next batches."""
    monkeypatch.setattr(Driver, "register", overlapping)
    loader = numapin.DataLoader(Filled(4000, 1 << 16), BATCH, num_workers=2, pin_memory=True, strict=True)
    with pytest.raises(BindingRefused, match="ALREADY_REGISTERED"):
        list(loader)
    assert_no_error_is_pending()
