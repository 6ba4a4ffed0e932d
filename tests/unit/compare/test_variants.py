"""Names and texts of variants as command lines. Errors are in tests/recorded/errors.txt."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from numapin import Request, discover, make_plan
from numapin.errors import UsageError
from tests.recorded.screens import compare, compare_answers
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


def names(text: str) -> None:
    """Read the names of variants, and require that they differ."""
    require_different_names([known_variant(name, SCRIPT) for name in parse_names(text)])


READERS: Final[dict[str, Callable[[str], object]]] = {
    "own": lambda text: own_variant(text, SCRIPT),
    "command": lambda text: own_command(text, option="--a"),
    "names": names,
    "percent": _percent,
}


def test_mistakes() -> None:
    """Each is an error in words; for variants, a hint says what to write.

    No shell would see the operator of a command; a program's own semicolon is none.
    """

    def answer(line: str) -> str:
        kind, _, text = line.partition(" ")
        with pytest.raises((UsageError, ValueError)) as caught:
            READERS[kind](text)
        return str(caught.value)

    compare_answers(Path(__file__).with_name("mistakes.txt"), answer)
