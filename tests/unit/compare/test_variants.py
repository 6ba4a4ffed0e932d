"""Names and texts of variants as command lines. Errors are in tests/recorded/errors.txt."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from numapin import Request, discover, make_plan
from numapin.errors import UsageError
from tests.recorded.screens import compare
from tests.unit.compare.made import SCRIPT
from tests.unit.compare.seam import (
    DEFAULT,
    KNOWN,
    _percent,
    default_names,
    example_names,
    known_variant,
    own_command,
    own_variant,
    parse_names,
    require_different_names,
)

if TYPE_CHECKING:
    from collections.abc import Callable


def test_variants_are_the_recorded_ones() -> None:
    """Each variant runs the same script with as many ranks; what a user writes may set variables."""
    module = replace(SCRIPT, is_module=True)
    variants = [
        *(known_variant(name, SCRIPT) for name in KNOWN),
        own_variant("OMP_NUM_THREADS=4 A='b c' numapin run --bind socket", SCRIPT),
        own_variant("torchrun", module),
        own_command("X=1 python 'a b.py'", option="--a"),
        own_command("python -c 'import a; a.b()'", option="--b"),
    ]
    text = ""
    for variant in variants:
        started = variant.command
        if started[0] == sys.executable:
            started = started[started.index("-c") + 2 :] if "-c" in started else started[1:]
        text += f"{variant.name}\n  {shlex.join(variant.shown)}\n  {variant.variables} {shlex.join(started)}\n"
    compare(text, str(Path(__file__).with_name("variants.txt")))


@pytest.mark.parametrize("name", example_names())
def test_idle_cpus_that_a_wider_binding_uses(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """By default --bind socket is compared where the plan warns that it would use idle CPUs, and only there."""
    topology = discover(machine=Path(name), environ={})
    plan = make_plan(topology, Request())
    warns = any("--bind socket uses them" in warning for warning in plan.warnings)
    assert default_names(topology, plan) == (*DEFAULT, *["numapin-socket"] * warns)
    assert ("numapin-socket is compared, too" in capsys.readouterr().err) == warns
    assert warns == (name == "example:dgx-a100")


def own(text: str) -> object:
    """Read the text of a variant."""
    return own_variant(text, SCRIPT)


def command(text: str) -> object:
    """Read a command of --a."""
    return own_command(text, option="--a")


def names(text: str) -> object:
    """Read the names of variants, and require that they differ."""
    require_different_names([known_variant(name, SCRIPT) for name in parse_names(text)])
    return text


@pytest.mark.parametrize(
    ("read", "text", "says"),
    [
        *((own, text, "names no command") for text in ("A=1", "")),
        *((own, text, "is not closed") for text in ("torchrun 'x", "torchrun \\")),
        *((own, text, "begins with neither") for text in ("accelerate launch", "mpirun -n 2")),
        (names, "torchrun", "a comparison needs two variants"),
        (names, "torchrun,torchrun", "twice"),
        (names, "torchrun,torchrn", "is not one of torchrun"),
        *(  # no shell would see the operator; a program's own semicolon is none
            (command, text, "no shell runs")
            for text in ("cd x; python y.py", "python x.py > log", "python x.py 2>&1", "python x.py | tee log")
        ),
        *(
            (_percent, text, "is not a percentage such as 5 or 5%|between 0 and 100 %")
            for text in ("x", "", "101", "nan")
        ),
    ],
)
def test_mistakes(read: Callable[[str], object], text: str, says: str) -> None:
    """Each is an error in words; for variants, a hint says what to write."""
    with pytest.raises((UsageError, ValueError), match=says) as caught:
        read(text)
    if read is own:
        assert isinstance(caught.value, UsageError)
        assert caught.value.hint
