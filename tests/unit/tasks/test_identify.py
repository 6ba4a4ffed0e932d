"""The task of a process on its host: every launcher's variables, contradictions, malformed values."""

from __future__ import annotations

from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from numapin.errors import UsageError
from tests.unit.tasks.seam import _COMMANDS, LAUNCHERS, explain_repeated, find_task, repeated_task

SLURM = {"SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": "2"}
TORCHRUN = {"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4"}


def _mpi(rank: int, size: int) -> dict[str, str]:
    return {"OMPI_COMM_WORLD_LOCAL_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_SIZE": str(size)}


@pytest.mark.parametrize(("variable", "sizes"), [(name, sizes[:1]) for name, sizes in LAUNCHERS])
def test_each_launcher(variable: str, sizes: tuple[str, ...]) -> None:
    """Each launcher's own variables give rank and size; the task lists them with their values."""
    task = find_task({variable: "3", **dict.fromkeys(sizes, "8")})
    assert (task.rank, task.size, task.variable) == (3, 8 if sizes else None, variable)
    assert task.settings == (f"{variable}=3", *(f"{size}=8" for size in sizes))


@pytest.mark.parametrize(
    ("environ", "size"),
    [
        ({"LOCAL_RANK": "1", "LOCAL_SIZE": "4"}, 4),  # DeepSpeed
        ({"FLUX_TASK_LOCAL_ID": "1", "FLUX_JOB_SIZE": "8", "FLUX_JOB_NNODES": "2"}, 4),
        ({"FLUX_TASK_LOCAL_ID": "1", "FLUX_JOB_SIZE": "7", "FLUX_JOB_NNODES": "2"}, None),
        ({"FLUX_TASK_LOCAL_ID": "1", "FLUX_JOB_SIZE": "7", "FLUX_JOB_NNODES": "0"}, None),
        (SLURM, 3),
        (SLURM | {"SLURM_NODEID": "1"}, 4),
        (SLURM | {"SLURM_NTASKS_PER_NODE": "9"}, 3),
        ({"SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, 4),
        ({"SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "4(x2),3"}, None),
        ({"LOCAL_RANK": "1"} | SLURM, 3),  # a wrapper that sets LOCAL_RANK=$SLURM_LOCALID
        ({"LOCAL_RANK": "1"} | SLURM | {"SLURM_STEP_ID": "2"}, 3),
    ],
)
def test_sizes_from_other_variables(environ: dict[str, str], size: int | None) -> None:
    """The size may come from another variable, from two, or from a list; else it is unknown."""
    task = find_task(environ)
    assert (task.rank, task.size) == (1, size)


class TestSeveral:
    """Variables of several launchers at once."""

    def test_slurms_number_counts_last(self) -> None:
        """Ranks of mpirun inherit a batch script's SLURM_LOCALID=0; a note says that it is ignored."""
        task = find_task(_mpi(3, 4) | {"SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "1"})
        assert (task.rank, task.size) == (3, 4)
        assert task.notes == ("SLURM_LOCALID=0 is ignored because OMPI_COMM_WORLD_LOCAL_RANK is set",)

    def test_torchrun_below_one_task_of_mpirun(self) -> None:
        """A launcher with one task here started the other launcher: the inner one numbers the ranks."""
        task = find_task(TORCHRUN | _mpi(0, 1))
        assert (task.rank, task.size) == (2, 4)
        assert "OMPI_COMM_WORLD_LOCAL_RANK=0" in task.notes[0]

    @pytest.mark.parametrize("outer", [_mpi(0, 1), {"SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "1"}])
    def test_a_launcher_without_a_size_below_one_task(self, outer: dict[str, str]) -> None:
        """Rank 0, whose number equals the outer task's, has an unknown size like the other ranks."""
        tasks = [find_task({"LOCAL_RANK": str(rank)} | outer) for rank in range(2)]
        assert [(task.rank, task.size) for task in tasks] == [(0, None), (1, None)]

    def test_those_that_agree(self) -> None:
        """Two launchers with the same values do not contradict each other."""
        task = find_task({"MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_LOCAL_RANK": "1"})
        assert (task.rank, task.size, task.notes) == (1, 2, ())

    @pytest.mark.parametrize(
        "environ",
        [
            TORCHRUN | _mpi(3, 4),
            TORCHRUN | _mpi(0, 2),
            TORCHRUN | _mpi(2, 8),
            {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"} | _mpi(3, 4),
            {"LOCAL_RANK": "3", "FLUX_TASK_LOCAL_ID": "0"},
        ],
    )
    def test_contradictions(self, environ: dict[str, str]) -> None:
        """The inner launcher is unknown: the error has every variable with its value."""
        with pytest.raises(UsageError, match="contradict") as caught:
            find_task(environ)
        assert all(f"{name}={value}" in caught.value.message for name, value in environ.items())
        assert "--local-rank $" in caught.value.hint
        assert find_task(environ, rank=1, size=2).settings == ("--local-rank=1", "--local-size=2")


class TestOutsideOfAStep:
    """Slurm's variables in processes that srun did not start, as set by Slurm 22.05."""

    BATCH: Final = {"SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS_PER_NODE": "1"}
    SHELL: Final = BATCH | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_TASKS_PER_NODE": "1"}

    @pytest.mark.parametrize("environ", [BATCH, SHELL])
    def test_no_rank(self, environ: dict[str, str]) -> None:
        """Below a batch script or salloc's shell, an unknown launcher is an error, not rank 0 in every task."""
        with pytest.raises(UsageError, match=r"none of .* is set, and SLURM_LOCALID=0 is ignored"):
            find_task(environ)
        assert find_task(environ, rank=0).size is None

    @pytest.mark.parametrize("environ", [BATCH, SHELL])
    def test_no_size(self, environ: dict[str, str]) -> None:
        """If a script starts the ranks itself, rank 0 has an unknown size like the others."""
        sizes = [find_task({"LOCAL_RANK": str(rank)} | environ).size for rank in range(4)]
        assert sizes == [None] * 4


class TestGiven:
    """The user's options win."""

    def test_rank_and_size(self) -> None:
        """Both win over any variable, even a malformed one."""
        task = find_task({"LOCAL_RANK": "x"}, rank=1, size=4)
        assert (task.rank, task.size, task.variable) == (1, 4, None)

    def test_each_alone(self) -> None:
        """The other comes from the environment, if it is valid there."""
        assert find_task(TORCHRUN, rank=1).size == 4
        assert find_task({"LOCAL_WORLD_SIZE": "4"}, rank=1).size is None
        task = find_task(TORCHRUN, size=8)
        assert (task.rank, task.size) == (2, 8)
        assert str(task) == "rank 2 of 8 on this host (LOCAL_RANK=2, --local-size=8)"

    def test_a_rank_beyond_the_size(self) -> None:
        """It is refused, with both values."""
        with pytest.raises(UsageError, match=r"--local-rank=4 and --local-size=4"):
            find_task({}, rank=4, size=4)


def test_nothing_is_set() -> None:
    """The error lists all variables that were checked, and the option."""
    with pytest.raises(UsageError) as caught:
        find_task({"LOCAL_WORLD_SIZE": "4"})
    assert all(variable in caught.value.message for variable, _ in LAUNCHERS)
    assert "SLURM_LOCALID" in caught.value.message
    assert "--local-rank" in caught.value.hint


@pytest.mark.parametrize("value", ["", "-1", "one", "1.0", " 1", "٣", "9" * 5000, "1\n", "0x1"])
@pytest.mark.parametrize("variable", ["LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_LOCALID"])
def test_no_numbers(variable: str, value: str) -> None:
    """A malformed value is an error that shows it, cut short; nothing is guessed."""
    environ = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"} if variable.startswith("LOCAL") else SLURM
    with pytest.raises(UsageError, match=f"^{variable}=") as caught:
        find_task(environ | {variable: value})
    assert len(caught.value.message) < 200


@pytest.mark.parametrize("value", ["", "4(x2", "4(2)", "x", "4,,3", "4(x2)3", "-4", "4(x2),3;"])
def test_no_lists_of_tasks(value: str) -> None:
    """A malformed list is refused."""
    with pytest.raises(UsageError, match="SLURM_STEP_TASKS_PER_NODE"):
        find_task(SLURM | {"SLURM_STEP_TASKS_PER_NODE": value})


def test_a_host_that_the_list_lacks() -> None:
    """SLURM_NODEID beyond the list is a contradiction."""
    with pytest.raises(UsageError, match="has no host 3"):
        find_task(SLURM | {"SLURM_NODEID": "3"})


@given(
    st.dictionaries(
        st.sampled_from([name for rank, sizes in LAUNCHERS for name in (rank, *sizes)] + list(SLURM)),
        st.one_of(st.integers(-2, 9).map(str), st.text("0149(x),-٣a ", max_size=8)),
    )
)
def test_any_environment(environ: dict[str, str]) -> None:
    """Any environment gives a rank below its size, or a UsageError."""
    try:
        task = find_task(environ)
    except UsageError:
        return
    assert task.rank >= 0
    assert task.size is None or task.rank < task.size


# --- a launcher that is one of several tasks on its host ---

STEP = {"SLURM_STEP_ID": "0", "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x3)"}


@pytest.mark.parametrize(
    ("environ", "command"),
    [
        (STEP, "srun --ntasks-per-node=1 numapin run"),
        (
            {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            "mpirun --map-by ppr:1:node numapin run",
        ),
        ({"MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}, "mpirun -ppn 1 numapin run"),
    ],
)
def test_one_of_several(environ: dict[str, str], command: str) -> None:
    """The message has the variables, and the remedy the launcher's own command."""
    task = repeated_task(environ)
    assert task is not None
    message, remedy = explain_repeated(task)
    assert all(f"{name}={value}" in message for name, value in environ.items() if name != "SLURM_STEP_ID")
    assert command in remedy
    assert "numapin exec" in remedy


@pytest.mark.parametrize(
    "environ",
    [
        {},
        STEP | {"SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "1(x8)"},
        {"SLURM_LOCALID": "0", "SLURM_NTASKS_PER_NODE": "8", "SLURM_NTASKS": "16"},
        {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
        {"OMPI_COMM_WORLD_LOCAL_RANK": "x", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
        STEP | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
    ],
    ids=["no launcher", "one per host", "a batch script", "one task", "not a number", "inside a rank"],
)
def test_the_only_one(environ: dict[str, str]) -> None:
    """Nothing is said about a launcher that is alone on its host, or inside a rank."""
    assert repeated_task(environ) is None


def test_every_launcher_has_its_command() -> None:
    """No launcher that is recognized lacks a remedy."""
    assert {*_COMMANDS} == {name for name, _ in LAUNCHERS} - {"LOCAL_RANK"} | {"SLURM_LOCALID"}
