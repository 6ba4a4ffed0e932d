"""Names and texts of variants as command lines."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from numapin import Request, discover, make_plan
from numapin.errors import UsageError
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
)
from tests.unit.compare.seam import require_different_names as require


@pytest.mark.parametrize("name", KNOWN)
def test_known_variants_run_the_script_on_equal_ranks(name: str) -> None:
    """Each known variant starts the same number of ranks of the same script."""
    variant = known_variant(name, SCRIPT)
    assert variant.command[-3:] == SCRIPT.words
    assert variant.command[variant.command.index("--nproc-per-node") + 1] == "2"
    assert shlex.join(variant.shown).endswith("train.py --lr 0.1")


@pytest.mark.parametrize("name", example_names())
def test_idle_cpus_that_a_wider_binding_uses(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """By default --bind socket is compared where the plan warns that it would use idle CPUs, and only there."""
    topology = discover(machine=Path(name), environ={})
    plan = make_plan(topology, Request())
    warns = any("--bind socket uses them" in warning for warning in plan.warnings)
    assert default_names(topology, plan) == (*DEFAULT, *["numapin-socket"] * warns)
    assert ("numapin-socket is compared, too" in capsys.readouterr().err) == warns
    assert warns == (name == "example:dgx-a100")


def test_threads_are_numapins() -> None:
    """One variant is torchrun with the number of threads that numapin gives a rank."""
    assert known_variant("torchrun-threads", SCRIPT).variables == {"OMP_NUM_THREADS": "8"}
    assert "torchrun-threads" in DEFAULT


def test_own_variants() -> None:
    """A text names variables, a launcher and its options; `numapin run` is `numapin`."""
    variant = own_variant("OMP_NUM_THREADS=4 A='b c' numapin run --bind socket", SCRIPT)
    assert variant.variables == {"OMP_NUM_THREADS": "4", "A": "b c"}
    assert variant.shown[2:] == ("numapin", "run", "--nproc-per-node", "2", "--bind", "socket", *SCRIPT.words)
    module = replace(SCRIPT, is_module=True)
    assert own_variant("torchrun", module).shown[-4:] == ("-m", *SCRIPT.words)
    command = own_command("X=1 python 'a b.py'", option="--a")
    assert (command.name, command.command, command.variables) == ("a", ("python", "a b.py"), {"X": "1"})


@pytest.mark.parametrize("text", ["accelerate launch", "A=1", "", "torchrun 'x"])
def test_wrong_texts_are_usage_errors(text: str) -> None:
    """Another launcher, no launcher, or an open quote is an error that says what to write."""
    with pytest.raises(UsageError) as caught:
        own_variant(text, SCRIPT)
    assert caught.value.hint
    assert ("is not closed" in caught.value.message) == ("'" in text)


@pytest.mark.parametrize("text", ["x", "", "0", "101", "nan"])
def test_a_margin_is_a_percentage(text: str) -> None:
    """Anything else is an error in words."""
    with pytest.raises(ValueError, match=r"is not (a percentage such as 5 or 5%|between 0 and 100 %)"):
        _percent(text)


def test_a_comparison_takes_two_different_variants() -> None:
    """One variant, or the same one twice, is an error; unknown names are, too."""
    one = known_variant("torchrun", SCRIPT)
    for variants in ([one], [one, one]):
        with pytest.raises(UsageError):
            require(variants)
    for text in ("cd x && python y.py", "cd x; python y.py", "python x.py > log", "python x.py | tee log"):
        with pytest.raises(UsageError, match="no shell runs"):
            own_command(text, option="--a")
    assert own_command("python -c 'import a; a.b()'", option="--a").command[-1] == "import a; a.b()"
    with pytest.raises(ValueError, match="is not one of torchrun"):
        parse_names("torchrun,torchrn")
