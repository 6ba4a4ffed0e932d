"""The variables of `numapin run --dataloader`, and the commands that it cannot reach."""

from __future__ import annotations

from pathlib import Path

import pytest

import numapin
from numapin.launcher import preload

FOLDER = str(Path(numapin.__file__).parent / "launcher" / "sitehook")


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ({}, FOLDER),
        ({"PYTHONPATH": ""}, FOLDER),
        ({"PYTHONPATH": "lib:/opt/x"}, f"{FOLDER}:lib:/opt/x"),
        ({"PYTHONPATH": "a::b:"}, f"{FOLDER}:a::b:"),
        ({"PYTHONPATH": f"{FOLDER}:a", "NUMAPIN_DATALOADER": "numapin"}, f"{FOLDER}:a"),
    ],
    ids=["unset", "empty", "relative", "empty entries", "nested"],
)
def test_numapin_puts_its_folder_before_the_path(given: dict[str, str], path: str) -> None:
    """PYTHONPATH keeps every entry, even empty ones, which mean the current folder; ours comes first, once."""
    assert preload.environment("numapin", given) == {"NUMAPIN_DATALOADER": "numapin", "PYTHONPATH": path}


def test_torch_leaves_the_environment_alone() -> None:
    """The default sets nothing, but switches off what an outer numapin switched on."""
    assert preload.environment("torch", {"PYTHONPATH": "a"}) == {}
    assert preload.environment("torch", {"NUMAPIN_DATALOADER": "numapin"}) == {"NUMAPIN_DATALOADER": "torch"}


def test_tracing() -> None:
    """Tracing installs the hook without a data path; a run inside a traced run is not traced."""
    assert preload.environment("torch", {}, trace="{}") == {"NUMAPIN_TRACE": "{}", "PYTHONPATH": FOLDER}
    assert preload.environment("torch", {"NUMAPIN_TRACE": "{}"}) == {"NUMAPIN_TRACE": ""}
    both = {"NUMAPIN_DATALOADER": "numapin", "NUMAPIN_TRACE": "{}", "PYTHONPATH": FOLDER}
    assert preload.environment("numapin", {}, trace="{}") == both


def test_the_folder_holds_nothing_else() -> None:
    """The folder on every rank's path can hide one module only."""
    assert [path.name for path in Path(FOLDER).glob("*.py")] == ["sitecustomize.py"]


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        ("-I train.py", "-I"),
        ("-u -E train.py", "-E"),
        ("-uS train.py", "-S"),
        ("-W error -X dev -Ic pass", "-I"),
        ("-Werror -I train.py", "-I"),
        ("-u train.py -I", None),
        ("-m package -E", None),
        ("-cprint('ISE') -I", None),
        ("-W I -X E train.py", None),
        ("--check-hash-based-pycs=always -s train.py", None),
        ("- -I", None),
        ("", None),
    ],
)
def test_refusal_reads_the_interpreters_own_options(arguments: str, flag: str | None) -> None:
    """-I, -E and -S keep the hook out as Python's options; after the script, -c or -m they belong to the program."""
    reason = preload.refusal(["/usr/bin/python3.11", *arguments.split()])
    assert (reason is None) == (flag is None)
    assert flag is None or f"/usr/bin/python3.11 {flag} " in str(reason)


def test_other_programs_are_not_refused() -> None:
    """A profiler or a shell may start Python, so its options are not read."""
    assert preload.refusal(["nsys", "-I", "python", "train.py"]) is None
    assert not preload.is_python(["nsys"])
    assert preload.is_python(["/opt/conda/bin/python3.12"])
