"""`numapin run` takes what torchrun takes, and its ranks see what torchrun's see."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from numapin.errors import UsageError
from tests.integration.launching import numapin, script, torchrun
from tests.integration.seam import OPTIONS, TORCHRUN_OPTIONS, TorchrunCommand, parse
from tests.needs import TORCH_VERSION

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

    from tests.integration.seam import Job, TorchrunOption

DUMP_ENVIRONMENT = """
import json, os, sys
line = json.dumps(dict(os.environ) | {"argv": " ".join(sys.argv[1:])}) + "\\n"
os.write(1, line.encode())  # in one piece: ranks share the pipe
"""


needs_torch_2_10 = pytest.mark.skipif(TORCH_VERSION < (2, 10), reason="torch 2.9 does not have this option")


def torch_parser() -> argparse.ArgumentParser:
    """Return torchrun's own parser."""
    from torch.distributed.run import get_args_parser

    return get_args_parser()


def ours(arguments: list[str]) -> Job | str:
    """Return what `numapin run` makes of arguments, or its error."""
    own = {name: not option.is_flag for option in OPTIONS for name in (*option.opts, *option.secondary_opts)}
    try:
        return parse(arguments, own, {}, python="python3", prog="numapin run")
    except UsageError as error:
        return error.message


def theirs(arguments: list[str]) -> dict[str, object] | str:
    """Return what torchrun makes of arguments, or its error."""
    err = io.StringIO()
    with contextlib.redirect_stderr(err):
        try:
            return vars(torch_parser().parse_args(arguments))
        except SystemExit:
            return err.getvalue().rpartition("error: ")[2].rstrip("\n")


OWN_BEFORE_2_12 = {"shutdown_timeout"} if TORCH_VERSION < (2, 12) else set()
"""What numapin adds to an older torch's options."""


def options_of_the_installed_torch() -> list[TorchrunOption]:
    """Return the table without what only newer torches have."""
    return [option for option in TORCHRUN_OPTIONS if option.since <= TORCH_VERSION]


def test_the_table_of_options_is_torchruns() -> None:
    """Help and completion know the installed torch's options: spellings, whether they take a value, and choices."""
    actions = [action for action in torch_parser()._actions if action.option_strings and action.dest != "help"]
    theirs = {action.dest: (action.option_strings, action.nargs != 0) for action in actions}
    ours = options_of_the_installed_torch()
    assert {each.key: ([*each.spellings], bool(each.value)) for each in ours} == theirs
    words = {each.key: each.words for each in ours}
    assert [action.dest for action in actions if action.choices and words[action.dest] != tuple(action.choices)] == []


@pytest.mark.parametrize(
    ("words", "is_help"),
    [
        (["--help"], True),
        (["-h"], True),
        (["--standalone", "--nproc_per", "2", "--hel"], True),
        (["--bind=node", "--help-all", "train.py"], True),
        (["train.py", "--help"], False),
        (["--role", "--help", "train.py"], False),
        (["--", "--help"], False),
    ],
)
def test_help_of_the_script_is_the_scripts(words: list[str], *, is_help: bool) -> None:
    """--help is numapin's only where torchrun would take it for its own."""
    given: list[tuple[str, ...]] = []

    def take(arguments: tuple[str, ...]) -> None:
        given.append(arguments)

    command = TorchrunCommand("run", take, about="", examples="", short_help="", sections={})
    done = CliRunner().invoke(command, words)
    assert (done.exit_code, "Exit status" in done.output, given) == (0, is_help, [] if is_help else [tuple(words)])


def test_every_abbreviation_means_what_it_means_to_torchrun() -> None:
    """Each prefix of each long option of torch's that torchrun accepts has the same meaning and value."""
    names = [name for action in torch_parser()._actions for name in action.option_strings if name.startswith("--")]
    tried = {name[:length] for name in names for length in range(3, len(name) + 1)} - {"--h", "--he", "--hel", "--help"}
    num_same = 0
    for beginning, value in itertools.product(sorted(tried), ["1", "spawn", "node"]):
        for arguments in ([f"{beginning}={value}", "s.py"], [beginning, value, "s.py", "--bind", "x"]):
            their, our = theirs(arguments), ours(arguments)
            if isinstance(their, str) or (isinstance(our, str) and "; it must be" in our):  # we say so earlier
                assert isinstance(our, str) or "ambiguous" in their or "invalid choice" not in their, (arguments, our)
                continue
            assert not isinstance(our, str), (arguments, our)
            (key,) = our.typed
            text = "" if their[key] is True else _text(our, key)
            same = our.options[key] is True if their[key] is True else str(their[key]) in (text, f"['{text}']", "1.0")
            assert same, (arguments, our.options[key], their[key])
            rest = (their["training_script"], *their["training_script_args"])  # type: ignore[misc]
            assert our.command[-len(rest) :] == rest
            num_same += 1
    assert num_same > 200


def _text(job: Job, key: str) -> str:
    option = next(option for option in TORCHRUN_OPTIONS if option.key == key)
    return next(text for text in ("1", "spawn", "node") if option.read(text) == job.options[key])


DIFFERENT = {
    "MASTER_PORT": "a free port",
    "MASTER_ADDR": "127.0.0.1 instead of the host's name",
    "TORCHELASTIC_RUN_ID": "random",
    "TORCHELASTIC_ERROR_FILE": "a temporary folder",
    "OMP_NUM_THREADS": "the rank's thread count instead of 1",
    "NUMAPIN_BINDING": "ours",
    "NUMAPIN_RUN_DIR": "ours",
    **(
        {"TORCHELASTIC_SIGNALS_TO_HANDLE": "new in 2.10; numapin handles them with 2.9, too"}
        if TORCH_VERSION < (2, 10)
        else {}
    ),
}


@pytest.mark.parametrize(
    "options",
    [
        ["--nproc-per-node", "2"],
        ["--nproc_per_node=2", "--role", "trainer", "--max_restarts", "2", "--standalone"],
        ["--nproc-p", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--rdzv-id", "job7"],
        pytest.param(["--nproc-per-node", "2", "--virtual-local-rank"], marks=needs_torch_2_10),
        ["--nnodes", "1", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", "0"],
        pytest.param(
            [
                "--nproc-per-node",
                "1",
                "--signals-to-handle",
                "SIGTERM,SIGUSR1",
                "--rdzv-id",
                "job8",
                "--role",
                "trainer",
            ],
            marks=needs_torch_2_10,
        ),
    ],
    ids=["plain", "spellings", "c10d", "virtual", "static", "signals"],
)
def test_ranks_see_the_environment_of_torchrun(tmp_path: Path, options: list[str]) -> None:
    """Each variable of a rank has torchrun's value, apart from the documented differences."""
    dump = script(tmp_path, DUMP_ENVIRONMENT)
    theirs = torchrun(*options, dump, "--lr", "a b")
    ours = numapin("run", *options, dump, "--lr", "a b")
    assert (ours.status, theirs.status) == (0, 0), ours.err
    assert len(ours.json_lines()) == len(theirs.json_lines()) > 0
    for mine, other in zip(ours.json_lines(), theirs.json_lines(), strict=True):
        keys = (mine.keys() | other.keys()) - DIFFERENT.keys()
        assert {key: mine.get(key) for key in keys} == {key: other.get(key) for key in keys}
        assert mine.keys() ^ other.keys() <= DIFFERENT.keys()
        assert mine["MASTER_ADDR"] in ("127.0.0.1", "localhost")


def test_module_and_program_and_run_path(tmp_path: Path) -> None:
    """-m runs a module, --no-python a program, --run-path a script in runpy; all bound, with their arguments."""
    path = script(tmp_path, DUMP_ENVIRONMENT, "module_of_ours.py")
    for options in (
        ["-m", "module_of_ours"],
        ["--no-python", "python3", path],
        ["--run-path", path],
    ):
        done = numapin("run", "--nproc-per-node", "1", *options, "x", "y z", cwd=tmp_path)
        assert done.status == 0, done.err
        (rank,) = done.json_lines()
        assert rank["argv"] == "x y z"
        assert json.loads(rank["NUMAPIN_BINDING"])["local_rank"] == 0


def test_pet_variables(tmp_path: Path) -> None:
    """PET_* variables, which Kubernetes operators set, mean what they mean to torchrun."""
    done = numapin(
        "run", script(tmp_path, DUMP_ENVIRONMENT), PET_NPROC_PER_NODE="2", PET_ROLE="operator", PET_NNODES="1"
    )
    assert done.status == 0, done.err
    assert [rank["ROLE_NAME"] for rank in done.json_lines()] == ["operator", "operator"]


def test_redirects_and_tee(tmp_path: Path) -> None:
    """--redirects and --tee write the same files below --log-dir as torchrun does."""
    said = script(tmp_path, "import sys; print('to out', flush=True); print('to err', file=sys.stderr, flush=True)")
    options = ["--nproc-per-node", "2", "--rdzv-id", "x", "--redirects", "3", "--tee", "1"]
    texts = {}
    for name, launcher in (("ours", numapin), ("theirs", torchrun)):
        folder = tmp_path / name
        arguments = [*options, "--log-dir", str(folder), said]
        done = launcher("run", *arguments) if launcher is numapin else launcher(*arguments)
        assert done.status == 0, done.err
        assert done.out.count("to out") == 2
        files = set(folder.rglob("*.log"))
        texts[name] = sorted((path.relative_to(folder).parts[1:], path.read_text()) for path in files)
    assert texts["ours"] == texts["theirs"]
    assert len(texts["ours"]) == 4
