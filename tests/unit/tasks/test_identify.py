"""The task of a process on its host: every launcher's variables, contradictions, malformed values."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from numapin.errors import UsageError
from tests.recorded.screens import compare_answers
from tests.unit.tasks.seam import _COMMANDS, LAUNCHERS, explain_repeated, find_task, repeated_task

SLURM = {"SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": "2"}


def _answer(line: str) -> str:
    words = dict(word.split("=", 1) for word in shlex.split(line))
    given = {name.removeprefix("--local-"): int(value) for name, value in words.items() if name.startswith("--")}
    environ = {name: value for name, value in words.items() if not name.startswith("--")}
    try:
        task = find_task(environ, rank=given.get("rank"), size=given.get("size"))
        lines = [str(task), *(f"  note: {note}" for note in task.notes)]
    except UsageError as error:
        lines = [f"error: {error.message}", f"  hint: {error.hint}"]
    repeated = repeated_task(environ)
    lines += [f"  repeated: {text}" for text in explain_repeated(repeated)] if repeated else []
    return "\n".join(lines)


def test_tasks_are_the_recorded_ones() -> None:
    """Rank, size, their sources and what is ignored are recorded, with each error and each launcher that is repeated.

    NUMAPIN_UPDATE_GOLDEN=1 records them anew.
    """
    compare_answers(Path(__file__).with_name("tasks.txt"), _answer)


def test_each_launcher() -> None:
    """Each launcher's own variables give rank and size; the task lists them with their values.

    No launcher that is recognized lacks a remedy.
    """
    assert {*_COMMANDS} == {name for name, _ in LAUNCHERS} - {"LOCAL_RANK"} | {"SLURM_LOCALID"}
    for variable, all_sizes in LAUNCHERS:
        sizes = all_sizes[:1]
        task = find_task({variable: "3", **dict.fromkeys(sizes, "8")})
        assert (task.rank, task.size, task.variable) == (3, 8 if sizes else None, variable)
        assert task.settings == (f"{variable}=3", *(f"{size}=8" for size in sizes))


@pytest.mark.parametrize("value", ["", "-1", "1.0", " 1", "٣", "9" * 5000, "1\n"])
@pytest.mark.parametrize("variable", ["LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_LOCALID"])
def test_no_numbers(variable: str, value: str) -> None:
    """A malformed value is an error that shows it, cut short; nothing is guessed."""
    environ = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"} if variable.startswith("LOCAL") else SLURM
    with pytest.raises(UsageError, match=f"^{variable}=") as caught:
        find_task(environ | {variable: value})
    assert len(caught.value.message) < 200


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
