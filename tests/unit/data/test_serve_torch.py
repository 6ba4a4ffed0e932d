"""`numapin.pinned.serve_torch`: torch's own pinning in our memory, FSDP2's and checkpoints', on the stand-in driver."""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.utils.data._utils.pin_memory import pin_memory as pinned_by_loader

from numapin import pinned
from tests.data.loopback import ANYWHERE, in_forked_child
from tests.unit.data.seam import CpuSet, placement

if TYPE_CHECKING:
    from tests.cuda.fake import FakeCuda

PAGE = os.sysconf("SC_PAGE_SIZE")

torchs_registration: Any = pytest.importorskip("torch.cuda._pin_memory_utils")


@pytest.fixture
def gpu(fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: fake_cuda.is_registered(tensor.data_ptr()))
    return fake_cuda


@pytest.fixture
def torchs(gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Collect the tensors that go to torch's own `pin_memory`, which returns them as they are."""
    seen: list[torch.Tensor] = []

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor)
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    assert gpu.registered_bytes() == 0
    return seen


class TestPinMemory:
    @pytest.mark.parametrize("source", [torch.arange(12.0).view(3, 4).t(), torch.arange(9)[::2], torch.tensor(5)])
    def test_plain_tensors(self, gpu: FakeCuda, source: torch.Tensor) -> None:
        """Values, dtype and strides are kept, also if torch's loader pins; a pinned tensor is returned as it is."""
        with pinned.serve_torch():
            copy = source.pin_memory()
            assert copy.pin_memory() is copy
            again = pinned_by_loader({"a": [source]})["a"][0]
        assert torch.equal(copy, source)
        assert torch.equal(again, source)
        assert (copy.dtype, copy.stride()) == (source.dtype, torch.empty_like(source).stride())
        assert gpu.is_registered(copy.data_ptr())
        assert gpu.registered_bytes() == 2 * PAGE

    @pytest.mark.parametrize(
        "source",
        [
            torch.nn.Parameter(torch.zeros(2), requires_grad=False),
            torch.zeros(2, requires_grad=True),
            torch.eye(2).to_sparse(),
            torch.empty(2, device="meta"),
            torch.empty(0),
        ],
        ids=["parameter", "gradient", "sparse", "meta", "empty"],
    )
    def test_others_are_torchs(self, torchs: list[torch.Tensor], source: torch.Tensor) -> None:
        """Tensors that are not plain dense CPU memory go to torch's own."""
        with pinned.serve_torch():
            assert source.pin_memory() is source
        assert len(torchs) == 1

    def test_without_the_driver(self, torchs: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
        """Where CUDA's driver cannot be used, e.g. on an AMD GPU, torch pins, and a warning says so."""
        monkeypatch.setattr(pinned, "driver", lambda: None)
        source = torch.zeros(2)
        with pinned.serve_torch(), pytest.warns(RuntimeWarning, match=r"libcuda\.so\.1 cannot be used: torch pins"):
            assert source.pin_memory() is source
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pinned.serve_torch():
            source.pin_memory()
        assert len(torchs) == 2

    def test_it_ends(self) -> None:
        """The end restores torch's functions; a second call changes nothing, and neither does its end."""
        before, register = torch.Tensor.pin_memory, torchs_registration.pin_memory
        first = pinned.serve_torch()
        ours = torch.Tensor.pin_memory
        assert ours is not before
        assert torchs_registration.pin_memory is not register
        with pinned.serve_torch():
            pass
        assert torch.Tensor.pin_memory is ours
        first.close()
        assert "pin_memory" not in vars(torch.Tensor)
        assert (torch.Tensor.pin_memory, torchs_registration.pin_memory) == (before, register)


@pytest.mark.skipif(dist.is_nccl_available(), reason="a torch with NCCL makes groups for the stand-in's GPU")
@pytest.mark.filterwarnings("ignore:.*requires_grad.*:UserWarning")
def test_fsdp2_offload(gpu: FakeCuda) -> None:
    """Every parameter is in our memory, before and after steps, and the losses are those without offload."""

    def losses(mesh: Any, **options: Any) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.Linear(100, 7))
        for module in (*model, model):
            fully_shard(module, mesh=mesh, **options)
        optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(torch.ones(4, 100)).pow(2).mean()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        if options:
            local: list[Any] = [parameter.to_local() for parameter in model.parameters()]  # type: ignore[attr-defined]
            assert all(gpu.is_registered(tensor.data_ptr()) for tensor in local)
        return found

    def are_the_same() -> bool:
        untyped: Any = dist
        untyped.init_process_group("gloo", store=untyped.HashStore(), rank=0, world_size=1)
        mesh = init_device_mesh("cpu", (1,))
        expected = losses(mesh)
        assert gpu.registered_bytes() == 0
        with pinned.serve_torch():
            assert losses(mesh, offload_policy=CPUOffloadPolicy()) == expected
        assert gpu.registered_bytes() == (10 + 3) * PAGE  # 100 x 100 and 100 x 7 floats, and two biases
        return True

    assert in_forked_child(are_the_same)  # afterwards, workers that a thread forks would hang in torch's fork handlers


def test_a_checkpoint_that_keeps_its_copy(gpu: FakeCuda) -> None:
    """The copies of a BlockingAsyncStager are in our memory, with the state's values; the second save uses them."""
    state, stager = {"weight": torch.arange(2000.0), "step": 3}, BlockingAsyncStager(cache_staged_state_dict=True)
    with pinned.serve_torch():
        for _ in range(2):
            state["weight"] = state["weight"] + 1  # type: ignore[operator] # a tensor
            staged = stager.stage(state)
            assert torch.equal(staged["weight"], state["weight"])  # type: ignore[arg-type] # a tensor
            assert gpu.is_registered(staged["weight"].data_ptr())
    assert gpu.registered_bytes() == 2 * PAGE


@pytest.mark.usefixtures("gpu")
class TestStaging:
    @pytest.fixture
    def registered(self, monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
        """Return what CUDA's runtime has registered, address and size. A stand-in notes it."""
        found: dict[int, int] = {}

        def register(address: int, num_bytes: int, flags: int) -> int:
            assert flags == 1
            found[address] = num_bytes
            return 0

        runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=lambda address: found.pop(address) * 0)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
        return found

    @pytest.mark.parametrize("share_memory", [True, False])
    def test_it_is_placed_first(
        self, registered: dict[int, int], monkeypatch: pytest.MonkeyPatch, *, share_memory: bool
    ) -> None:
        """Whole pages of large storages are placed on the node before they are registered, of small ones none."""
        placed, place = [], placement.place

        def noted(address: int, num_bytes: int, **options: Any) -> Any:
            assert not registered
            placed.append((address, num_bytes, options["nodes"]))
            return place(address, num_bytes, **options)

        monkeypatch.setattr(pinned, "_home", lambda *_: replace(ANYWHERE, nodes=CpuSet({0}), num_machine_nodes=2))
        monkeypatch.setattr(pinned, "place", noted)
        state = {"large": torch.randn(100_000), "small": torch.randn(1000)}
        stager = StateDictStager(pin_memory=True, share_memory=share_memory)
        with pinned.serve_torch():
            staged = stager.stage(state)
        assert all(torch.equal(staged[name], state[name]) for name in state)
        ((address, num_bytes, nodes),) = placed
        large = staged["large"]
        assert registered == {tensor.data_ptr(): tensor.nbytes for tensor in staged.values()}
        assert 0 <= address - large.data_ptr() < PAGE
        assert 0 <= large.data_ptr() + large.nbytes - (address + num_bytes) < PAGE
        assert (address % PAGE, num_bytes % PAGE, nodes) == (0, 0, {0})
        del staged, large
        stager.close()
        assert registered == {}

    def test_pages_that_do_not_come_are_reported(
        self, registered: dict[int, int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Memory that was used before is moved; what stays elsewhere is a warning, and is registered all the same."""
        moved: list[Any] = []
        monkeypatch.setattr(pinned, "_home", lambda *_: replace(ANYWHERE, nodes=CpuSet({1}), num_machine_nodes=2))
        monkeypatch.setattr(pinned, "move_pages", lambda *given, within: moved.append((given, within)))
        with pinned.serve_torch(), pytest.warns(RuntimeWarning, match="not all pages are on node 1: 100.0% on node 0"):
            staged = StateDictStager(pin_memory=True).stage({"large": torch.ones(100_000)})
        assert list(registered) == [staged["large"].data_ptr()]
        (((pid, addresses, node), within),) = moved
        assert (pid, node, within) == (os.getpid(), 1, {1})
        assert len(addresses) in {400_000 // PAGE - 1, 400_000 // PAGE}  # whole pages

    @pytest.mark.parametrize("change", ["other parameters", "gone"])
    def test_a_torch_that_we_do_not_know(self, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
        """It is a warning at the user's call; Tensor.pin_memory is ours all the same."""
        if change == "gone":
            monkeypatch.delattr(torchs_registration, "pin_memory")
        else:
            monkeypatch.setattr(torchs_registration, "pin_memory", lambda data_ptr, size, flags: None)  # noqa: ARG005
        with pytest.warns(RuntimeWarning, match=r"has no torch\.cuda\._pin_memory_utils\.pin_memory") as caught:
            serving = pinned.serve_torch()
        assert caught[0].filename == __file__
        assert torch.zeros(3).pin_memory().is_pinned()
        serving.close()
