"""The NIC of each rank, and the variables of --nic-env."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from numapin import Bind, Link, Nic, Request, Topology, make_plan
from numapin.errors import BindingRefused, UsageError
from tests.machines.grids import grid
from tests.unit.plan.seam import (
    NicKind,
    NicLibrary,
    Task,
    exported,
    nic_variables,
    parse_nic_env,
    plan_task,
    with_users_nics,
    without_users,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numapin import RankPlan

BOTH = ("ucx", "nvshmem")


def rdma(number: int) -> Nic:
    """Return a NIC with a verbs name."""
    return Nic(name=f"mlx5_{number}", pci=f"0000:{0x80 + number:02x}:00.0", kind=NicKind.INFINIBAND)


def linked(
    gpus: Sequence[int | None], nics: Sequence[Nic], words: Mapping[tuple[int, int], str], default: str = ""
) -> Topology:
    """Return a machine of two packages with these nodes of GPUs, and links by the numbers of GPU and NIC."""
    pairs = {(gpu, nic): words.get((gpu, nic), default) for gpu in range(len(gpus)) for nic in range(len(nics))}
    links = tuple(Link(a=f"gpu{gpu}", b=nics[nic].name, kind=word) for (gpu, nic), word in pairs.items() if word)
    return replace(grid(packages=2, nodes=1, gpus=gpus), nics=tuple(nics), links=links)


def _machine(num_gpus: int = 2, num_nics: int = 2) -> Topology:
    return linked([0] * num_gpus, [rdma(number) for number in range(num_nics)], {}, default="PIX")


def _ranks(machine: Topology, **options: object) -> tuple[RankPlan, ...]:
    return make_plan(machine, Request(**options)).ranks  # type: ignore[arg-type]


class TestPlan:
    """NICs in a plan."""

    def test_each_rank_has_its_gpus_nics(self) -> None:
        """Ranks have the NICs of their GPUs with the reason, and nothing is exported unless it is asked for."""
        first, second = _ranks(_machine())
        assert (first.nics, second.nics) == (("mlx5_0", "mlx5_1"), ("mlx5_1", "mlx5_0"))
        assert second.nics_reason == "nearest (PIX), one of 2 equally near"
        assert (nic_variables(first), first.nic_env, first.exact) == ({}, (), True)

    def test_the_map_is_the_hosts(self) -> None:
        """A job on some GPUs gets the NICs that these GPUs have in a job on all of them."""
        machine = _machine(4, 4)
        assert [rank.nics for rank in _ranks(machine, gpus=["3", "1"])] == [
            machine.nearest_nics[gpu].names for gpu in (3, 1)
        ]

    @pytest.mark.parametrize("bind", Bind)
    def test_a_rank_without_a_nic_is_not_exact(self, bind: Bind) -> None:
        """If variables are asked for and no NIC is known, the rank says so once, and --strict refuses."""
        plan = make_plan(grid(gpus=[0, 1]), Request(bind=bind, nic_env=BOTH))
        assert [(rank.exact, rank.nics, rank.nic_env, nic_variables(rank)) for rank in plan.ranks] == [
            (False, None, (), {})
        ] * 2
        missing = "--nic-env ucx,nvshmem sets nothing: no RDMA NIC is known near its GPU"
        assert sum(missing in warning for warning in plan.warnings) == 1
        with pytest.raises(BindingRefused, match="sets nothing"):
            plan.require_exact()

    def test_slingshot_has_no_verbs(self) -> None:
        """A Slingshot NIC is the rank's own, but UCX and NVSHMEM cannot be given its name."""
        nic = Nic(name="cxi0", pci="0000:80:00.0", kind=NicKind.SLINGSHOT)
        machine = linked([0], [nic], {}, default="PIX")
        (plain,), (asked,) = _ranks(machine), _ranks(machine, nic_env=BOTH)
        assert (plain.nics, plain.exact) == (("cxi0",), True)
        assert (asked.nics, asked.exact, nic_variables(asked)) == (("cxi0",), False, {})
        assert asked.reason.endswith("sets nothing: its NIC is one of Slingshot, which has no verbs device")

    def test_a_rank_without_a_gpu(self) -> None:
        """Without GPUs there is no nearest NIC."""
        (rank,) = _ranks(grid(), num_ranks=1, nic_env=["ucx"])
        assert (rank.exact, rank.nics) == (False, None)
        assert rank.reason.endswith("--nic-env ucx sets nothing: no GPU is known")


class TestVariables:
    """The variables of a rank's process."""

    def test_their_spelling(self) -> None:
        """UCX and NVSHMEM get the rank's own NIC with its port, each as it spells it; NCCL gets nothing."""
        _, rank = _ranks(_machine(), nic_env=BOTH)
        assert nic_variables(rank) == {
            "UCX_NET_DEVICES": "mlx5_1:1",
            "NVSHMEM_ENABLE_NIC_PE_MAPPING": "1",
            "NVSHMEM_HCA_LIST": "mlx5_1:1",
        }
        assert exported(rank)["NUMAPIN_NIC_ENV"] == "UCX_NET_DEVICES:NVSHMEM_ENABLE_NIC_PE_MAPPING:NVSHMEM_HCA_LIST"

    @pytest.mark.parametrize("library", NicLibrary)
    def test_one_library_alone(self, library: NicLibrary) -> None:
        """Only the variables of the libraries that were asked for are set, and never NCCL's."""
        (rank, _) = _ranks(_machine(), nic_env=[library])
        assert all(name.startswith(library.value.upper()) for name in nic_variables(rank))
        assert not any("NCCL" in name for name in exported(rank))

    @pytest.mark.parametrize("name", ["a,b", "a b", "a:1", "a=b", "", "x" * 64, "mlx5_0\n"])
    def test_a_plan_with_an_impossible_name(self, name: str) -> None:
        """A plan file cannot put anything but a device's name into the environment."""
        (rank, _) = _ranks(_machine(), nic_env=BOTH)
        with pytest.raises(UsageError, match="as the NIC of rank 0"):
            nic_variables(replace(rank, nics=(name,)))


class TestUsers:
    """Variables that the user has set."""

    @pytest.mark.parametrize(
        ("environ", "left"),
        [
            ({}, BOTH),
            ({"UCX_NET_DEVICES": "mlx5_7:1"}, ("nvshmem",)),
            ({"UCX_NET_DEVICES": ""}, ("nvshmem",)),
            ({"NVSHMEM_HCA_PE_MAPPING": "mlx5_7:1:8"}, ("ucx",)),
            ({"NVSHMEM_ENABLE_NIC_PE_MAPPING": "0"}, ("ucx",)),
            ({"NVSHMEM_ENABLE_NIC_PE_MAPPING": "1"}, BOTH),  # the same as numapin's
            ({"UCX_NET_DEVICES": "mlx5_7:1", "NVSHMEM_HCA_LIST": "mlx5_7:1"}, ()),
            ({"UCX_NET_DEVICES": "mlx5_7:1", "NUMAPIN_NIC_ENV": "UCX_NET_DEVICES"}, BOTH),  # a rank's own child
        ],
    )
    def test_they_win_and_are_reported(self, environ: dict[str, str], left: tuple[str, ...]) -> None:
        """A library whose NICs the user has chosen is left alone, and a message names the variable once."""
        plan = with_users_nics(make_plan(_machine(), Request(nic_env=BOTH)), environ)
        assert {rank.nic_env for rank in plan.ranks} == {left}
        told = " is set and stays: --nic-env does not change it for ranks 0-1"
        kept = [warning.removesuffix(told) for warning in plan.warnings if warning.endswith(told)]
        assert kept == ([] if left == BOTH else [f"{name}={value}" for name, value in environ.items()])
        assert all(rank.exact for rank in plan.ranks)

    def test_nothing_is_said_without_the_option(self) -> None:
        """Without --nic-env the variables are the user's business."""
        ranks = _ranks(_machine())
        assert without_users(ranks, {"UCX_NET_DEVICES": "mlx5_7:1"}) == (ranks, ())


class TestTasks:
    """NICs where another launcher started the ranks."""

    def test_each_task_gets_its_part_of_one_map(self) -> None:
        """Tasks that see all GPUs choose as one plan does, each alone."""
        machine = _machine(4, 4)
        tasks = [Task(rank=n, size=4, settings=("LOCAL_RANK",)) for n in range(4)]
        parts = [plan_task(machine, Request(nic_env=BOTH), task, own_cpus=False) for task in tasks]
        assert [part.rank.nics and part.rank.nics[0] for part in parts] == [f"mlx5_{n}" for n in range(4)]
        assert all(part.rank.exact for part in parts)

    @pytest.mark.parametrize(("nics", "exact"), [(2, False), (1, True)])
    def test_a_task_that_sees_too_few_gpus_is_not_exact(self, *, nics: int, exact: bool) -> None:
        """If the driver shows a task its own GPU only, another task may choose the same of several near NICs."""
        task = Task(rank=1, size=4, settings=("LOCAL_RANK",))
        part = plan_task(_machine(1, nics), Request(nic_env=BOTH), task, own_cpus=True)
        assert part.rank.exact == exact
        assert ("this task sees 1 GPU of 4 tasks" in part.rank.reason) != exact


@pytest.mark.parametrize(
    ("text", "libraries"),
    [("ucx", ("ucx",)), ("ucx,nvshmem", BOTH), ("nvshmem, ucx,ucx", ("nvshmem", "ucx"))],
)
def test_parse(text: str, libraries: tuple[str, ...]) -> None:
    """A list of libraries, each once."""
    assert parse_nic_env(text) == libraries


@pytest.mark.parametrize("text", ["", "nccl", "ucx,", "UCX"])
def test_parse_refuses(text: str) -> None:
    """Other words are an error that lists the choices."""
    with pytest.raises(ValueError, match="not one of ucx, nvshmem"):
        parse_nic_env(text)


def test_a_request_refuses_other_libraries() -> None:
    """So does a request."""
    with pytest.raises(UsageError, match="--nic-env is 'nccl'; it must be one of ucx, nvshmem"):
        Request(nic_env=("nccl",))
