"""The GPUs that --gpus names: looked up once, for the plan and for CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from numapin import Bind, Gpu, Request, Topology, make_plan
from numapin.errors import UsageError
from tests.machines.grids import gpu, grid
from tests.unit.plan.seam import Mig, in_turn, settle_gpus

if TYPE_CHECKING:
    from numapin import Plan

_FOUR = grid(nodes=4, gpus=[0, 1, 2, 3])


def _indices(plan: Plan) -> list[int | None]:
    return [rank.gpu.index if rank.gpu else None for rank in plan.ranks]


@pytest.mark.parametrize("num_ranks", [None, 1, 2, 5])
@pytest.mark.parametrize("bind", Bind)
def test_a_settled_request_gives_the_same_plan(bind: Bind, num_ranks: int | None) -> None:
    """GPUs by index and by name give the same plan, with more ranks than GPUs and with fewer."""
    request = Request(gpus=("3", "0000:10:00.0"), bind=bind, num_ranks=num_ranks)
    settled, _ = settle_gpus(_FOUR, request, {})
    assert make_plan(_FOUR, settled) == make_plan(_FOUR, request)
    assert _indices(make_plan(_FOUR, settled)) == ([3, 0, 3, 0, 3] if num_ranks == 5 else [3, 0][:num_ranks])


def test_names_are_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A settled request does not look up GPUs again, neither for the environment nor for the plan."""
    asked: list[str] = []
    find = Topology.find_gpu

    def counted(self: Topology, key: str, *, option: str) -> Gpu:
        asked.append(key)
        return find(self, key, option=option)

    monkeypatch.setattr(Topology, "find_gpu", counted)
    settled, environment = settle_gpus(_FOUR, Request(gpus=("2", "GPU-01")), {})
    make_plan(_FOUR, settled)
    assert asked == ["2", "GPU-01"]
    assert environment == {
        "CUDA_VISIBLE_DEVICES": "GPU-02000000-0000-4000-8000-000000000000,GPU-01000000-0000-4000-8000-000000000000"
    }


def test_the_environment_names_every_gpu_once() -> None:
    """All GPUs stay visible for any number of ranks: more ranks share GPUs, fewer leave some out."""
    shown = {str(settle_gpus(_FOUR, Request(gpus=("1", "0"), num_ranks=n), {})[1]) for n in (None, 1, 2, 7)}
    assert len(shown) == 1


def test_without_gpus_nothing_is_settled() -> None:
    """CUDA's own choice does not change."""
    request = Request(num_ranks=3)
    assert settle_gpus(_FOUR, request, {}) == (request, {})


def test_in_turn() -> None:
    """Rank n uses GPU n mod G; GPUs without a rank are kept."""
    assert in_turn([4, 2], 5) == (4, 2, 4, 2, 4)
    assert in_turn([4, 2], 1) == (4, 2)


@pytest.mark.parametrize(
    ("change", "message", "hint"),
    [
        ({"uuid": None}, "--gpus: the UUID of gpu0 is unknown; only NVML reports it", "numapin doctor"),
        (
            {"mig": (Mig(uuid="MIG-a"), Mig(uuid="MIG-b"))},
            "--gpus: gpu0 is cut into 2 MIG instances, which it cannot choose from",
            "CUDA_VISIBLE_DEVICES=MIG-a",
        ),
        ({"visible": False, "cuda_index": None}, "--gpus names gpu0; CUDA_VISIBLE_DEVICES shows gpu1", "unset"),
    ],
)
def test_gpus_that_cannot_be_shown_are_refused(change: dict[str, object], message: str, hint: str) -> None:
    """A GPU without a UUID, a split GPU, and a hidden GPU cannot be given to the ranks."""
    topology = replace(grid(), gpus=(replace(gpu(0, 0), **change), gpu(1, 1)))  # type: ignore[arg-type] # by name
    with pytest.raises(UsageError) as raised:
        settle_gpus(topology, Request(gpus=("0",)), {})
    assert raised.value.message == message
    assert hint in (raised.value.hint or "")
