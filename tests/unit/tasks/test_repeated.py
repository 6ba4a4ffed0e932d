"""A launcher that is one of several tasks on its host."""

from __future__ import annotations

import pytest

from tests.unit.tasks.seam import _COMMANDS, LAUNCHERS, explain_repeated, repeated_task

SLURM = {"SLURM_STEP_ID": "0", "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x3)"}


@pytest.mark.parametrize(
    ("environ", "command"),
    [
        (SLURM, "srun --ntasks-per-node=1 numapin run"),
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
        SLURM | {"SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "1(x8)"},
        {"SLURM_LOCALID": "0", "SLURM_NTASKS_PER_NODE": "8", "SLURM_NTASKS": "16"},
        {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
        {"OMPI_COMM_WORLD_LOCAL_RANK": "x", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
        SLURM | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
    ],
    ids=["no launcher", "one per host", "a batch script", "one task", "not a number", "inside a rank"],
)
def test_the_only_one(environ: dict[str, str]) -> None:
    """Nothing is said about a launcher that is alone on its host, or inside a rank."""
    assert repeated_task(environ) is None


def test_every_launcher_has_its_command() -> None:
    """No launcher that is recognized lacks a remedy."""
    assert {*_COMMANDS} == {name for name, _ in LAUNCHERS} - {"LOCAL_RANK"} | {"SLURM_LOCALID"}
