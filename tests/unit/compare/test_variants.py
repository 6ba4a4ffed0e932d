"""Names and texts of variants as command lines. Errors are in tests/recorded/errors.txt."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path

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


@pytest.mark.parametrize("text", ["A=1", "", "torchrun 'x", "torchrun \\"])
def test_wrong_texts_are_usage_errors(text: str) -> None:
    """No launcher, or an open quote, is an error that says what to write."""
    with pytest.raises(UsageError) as caught:
        own_variant(text, SCRIPT)
    assert caught.value.hint
    assert ("is not closed" in caught.value.message) == text.startswith("torchrun")


def test_a_comparison_takes_two_different_variants() -> None:
    """One variant, the same one twice, and unknown names are errors."""
    one = known_variant("torchrun", SCRIPT)
    for variants in ([one], [one, one]):
        with pytest.raises(UsageError):
            require_different_names(variants)
    with pytest.raises(ValueError, match="is not one of torchrun"):
        parse_names("torchrun,torchrn")
    for text in ("accelerate launch", "mpirun -n 2"):
        with pytest.raises(UsageError, match="begins with neither"):
            own_variant(text, SCRIPT)


@pytest.mark.parametrize(
    "text", ["cd x; python y.py", "python x.py > log", "python x.py 2>&1", "python x.py | tee log"]
)
def test_a_command_for_a_shell_is_a_usage_error(text: str) -> None:
    """No shell would see the operator; a program's own semicolon is none."""
    with pytest.raises(UsageError, match="no shell runs"):
        own_command(text, option="--a")


@pytest.mark.parametrize("text", ["x", "", "101", "nan"])
def test_a_margin_is_a_percentage(text: str) -> None:
    """Anything else is an error in words."""
    with pytest.raises(ValueError, match=r"is not (a percentage such as 5 or 5%|between 0 and 100 %)"):
        _percent(text)
