"""Command lines of `numapin run`, compared with torch's parser: each option alone and in pairs, variables, mistakes."""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner
from torch.distributed.run import get_args_parser

from numapin.errors import UsageError
from tests.needs import TORCH_VERSION
from tests.recorded.screens import compare_answers
from tests.unit.launcher.seam import OPTIONS, TORCHRUN_OPTIONS, Job, TorchrunCommand, parse, why_known

OWN = {name: not option.is_flag for option in OPTIONS for name in (*option.opts, *option.secondary_opts)}
SCRIPT = str(Path(__file__).resolve())
TABLE = [option for option in TORCHRUN_OPTIONS if option.since <= TORCH_VERSION]


def read(arguments: Sequence[str], environ: Mapping[str, str] | None = None) -> Job:
    return parse(arguments, OWN, environ or {}, python="python3", prog="numapin run")


def _answer(line: str) -> str:
    variables, _, words = line.rpartition("| ")
    try:
        job = read(words.split(), dict(word.split("=") for word in variables.split()))
    except UsageError as error:
        return f"error: {error.message}\n  hint: {error.hint}"
    typed = {name: job.options[name] for name in sorted(job.typed)}
    hosts = "one host" if job.is_single_host else f"hosts {job.nnodes}"
    grace = f"grace {job.shutdown_timeout_s:g} s"
    known = (
        f"\n  others know the id: {why_known(job.rdzv_id, is_typed=job.is_id_typed)}" if "id" in line.lower() else ""
    )
    return f"{job.program} on {hosts}, {grace}, ours {[*job.own]}, typed {typed}\n  {' '.join(job.command)}{known}"


def test_lines_are_read_as_recorded() -> None:
    """Own options, variables, jobs without a rendezvous, and mistakes; NUMAPIN_UPDATE_GOLDEN=1 records them anew."""
    compare_answers(Path(__file__).with_name("options.txt"), _answer)


@pytest.fixture(scope="module")
def torchs() -> argparse.ArgumentParser:
    return get_args_parser()


ALONE = [line.split() for line in Path(__file__).with_name("alone.txt").read_text().splitlines()]
"""Options of torchrun, each alone and in all pairs; the first line is empty."""
OTHER_DEFAULTS = {"nproc_per_node", "shutdown_timeout", "master_port"}
"""Options whose default numapin decides later."""
REST = [[], ["--lr", "0.1"], ["-m", "x", "--bind", "mine", "${local_rank}", "$$", "--nnodes=2"], ["-"]]


def test_as_torch_reads_it(torchs: argparse.ArgumentParser) -> None:
    """Each line means what it means to torch's parser: every option, the program, and what belongs to it."""
    lines = [*ALONE, *([*one, *other] for one, other in itertools.permutations(ALONE, 2))]
    for number, options in enumerate(lines):
        line = [*options, SCRIPT, *REST[number % len(REST)]]
        theirs = torchs.parse_args(line)
        if theirs.no_python and theirs.module and not theirs.run_path:
            with pytest.raises(UsageError, match=r"^--no-python cannot be combined with --module"):
                read(line)
            continue
        job = read(line)
        for option in TABLE:
            value = getattr(theirs, option.key)
            if isinstance(value, list):
                wanted: object = tuple(value)
            else:
                wanted = value if not option.value or value is None else option.read(str(value))
            if option.key in job.typed or option.key not in OTHER_DEFAULTS:
                assert job.options[option.key] == wanted, (option.key, line)
        assert (job.own, job.program) == ((), theirs.training_script)
        assert list(job.command[-1 - len(REST[number % len(REST)]) :]) == [SCRIPT, *theirs.training_script_args], line
    assert len(lines) > 500


def test_the_table_is_torchruns(torchs: argparse.ArgumentParser) -> None:
    """Help and completion know the installed torch's options: spellings, whether they take a value, and choices.

    No spelling is ours and torch's.
    """
    assert not {name for option in TORCHRUN_OPTIONS for name in option.spellings} & set(OWN)
    actions = [action for action in torchs._actions if action.option_strings and action.dest != "help"]
    theirs = {action.dest: (action.option_strings, action.nargs != 0) for action in actions}
    assert {each.key: ([*each.spellings], bool(each.value)) for each in TABLE} == theirs
    words = {each.key: each.words for each in TABLE}
    assert [action.dest for action in actions if action.choices and words[action.dest] != tuple(action.choices)] == []


def theirs(parser: argparse.ArgumentParser, arguments: list[str]) -> dict[str, object] | str:
    """Return what torchrun makes of arguments, or its error."""
    with contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            return vars(parser.parse_args(arguments))
        except SystemExit:
            return err.getvalue().rpartition("error: ")[2].rstrip("\n")


def test_every_abbreviation_means_what_it_means_to_torchrun(torchs: argparse.ArgumentParser) -> None:
    """Each prefix of each long option of torch's that torchrun accepts has the same meaning and value."""
    names = [name for action in torchs._actions for name in action.option_strings if name.startswith("--")]
    tried = {name[:length] for name in names for length in range(3, len(name) + 1)} - {"--h", "--he", "--hel", "--help"}
    num_same = 0
    for beginning, value in itertools.product(sorted(tried), ["1", "spawn", "node"]):
        for arguments in ([f"{beginning}={value}", "s.py"], [beginning, value, "s.py", "--bind", "x"]):
            their = theirs(torchs, arguments)
            try:
                our: Job | str = read(arguments)
            except UsageError as error:
                our = error.message
            if isinstance(their, str) or (isinstance(our, str) and "; it must be" in our):  # we say so earlier
                assert isinstance(our, str) or "ambiguous" in their or "invalid choice" not in their, (arguments, our)
                continue
            assert not isinstance(our, str), (arguments, our)
            (key,) = our.typed
            option = next(option for option in TORCHRUN_OPTIONS if option.key == key)
            values = ("1", "spawn", "node")
            text = next(
                (each for each in values if their[key] is not True and option.read(each) == our.options[key]), ""
            )
            same = our.options[key] is True if their[key] is True else str(their[key]) in (text, f"['{text}']", "1.0")
            assert same, (arguments, our.options[key], their[key])
            rest = (their["training_script"], *their["training_script_args"])  # type: ignore[misc]
            assert our.command[-len(rest) :] == rest
            num_same += 1
    assert num_same > 200


@pytest.mark.parametrize(
    ("line", "is_help"),
    [
        *(("--help", True), ("-h", True), ("--standalone --nproc_per 2 --hel", True)),
        *(("--bind=node --help-all train.py", True), ("train.py --help", False)),
        *(("--role --help train.py", False), ("-- --help", False)),
    ],
)
def test_help_of_the_script_is_the_scripts(line: str, *, is_help: bool) -> None:
    """--help is numapin's only where torchrun would take it for its own."""
    given: list[tuple[str, ...]] = []

    def take(arguments: tuple[str, ...]) -> None:
        given.append(arguments)

    command = TorchrunCommand("run", take, about="", examples="", sections={})
    done = CliRunner().invoke(command, line.split())
    assert (done.exit_code, "Exit status" in done.output) == (0, is_help)
    assert given == ([] if is_help else [tuple(line.split())])
