"""Links of the documentation have targets, its command lines are valid, and its figures are in the results."""

from __future__ import annotations

import ast
import json
import re
import shlex
from itertools import pairwise
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from numapin.errors import UsageError
from scripts import docs_site
from tests.docs.pages import DOCS, PAGES, ROOT, anchors_of, command_lines_of, links_of, name_of, prose_of
from tests.docs.seam import GpuVendor, NodeSource, numapin, options, run, trace

README = ROOT / "README.md"
MAX_README_LINES = 110


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    """Each link to this repository names an existing file or folder and, if it has an anchor, an existing heading."""
    for link in links_of(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        is_generated = target.parent == DOCS / "commands" and target.stem in docs_site.command_names()
        assert is_generated or target.exists(), f"{name_of(page)}: {link}"
        if anchor and not is_generated:
            assert anchor in anchors_of(target), f"{name_of(page)}: {link}"


def test_readme_fits_on_one_screen() -> None:
    """README has at most 110 lines."""
    assert len(README.read_text().splitlines()) <= MAX_README_LINES


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_rows_belong_to_a_table(page: Path) -> None:
    """A line that begins with `|` belongs to a table with a header row; after a blank line it would be plain text."""
    for table in re.findall(r"(?:^\|.*\n?)+", prose_of(page), re.MULTILINE):
        assert re.match(r".*\n\|(?: *:?-+:? *\|)+(?:\n|$)", table), f"{name_of(page)}: {table.splitlines()[0]}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_command_lines_are_real(page: Path) -> None:
    """Each `$ numapin …` line has an existing command, and options and values that it accepts."""
    for words in command_lines_of(page):
        try:
            check_command_line(words)
        except (click.ClickException, LookupError) as error:
            pytest.fail(f"{name_of(page)}: numapin {' '.join(words)}: {error}")


def check_command_line(words: list[str]) -> None:
    """Parse a command line without running it; raise click's errors, or LookupError for an unknown command."""
    if words[:1] in (["run"], ["trace"]) and "--read" not in words:
        _check_torch_line(words[0], words[1:])
        return
    command: click.Command = numapin
    rest = words
    while isinstance(command, click.Group):
        if not rest:
            raise LookupError("no command")
        child = command.get_command(click.Context(command), rest[0])
        if child is None:
            raise LookupError(f"no command {rest[0]!r}")
        command, rest = child, rest[1:]
    command.make_context(" ".join(words), [word for word in rest if word not in ("…", "...")])


def _check_torch_line(name: str, words: list[str]) -> None:
    """Parse a line, which ends with a script, with the parser of `run`, and then numapin's own options with click."""
    own = [*run.OPTIONS, *(trace._OPTIONS if name == "trace" else ())]
    spellings = {spelling: not option.is_flag for option in own for spelling in option.opts + option.secondary_opts}
    try:
        job = options.parse(words, spellings, {}, python="python", prog=f"numapin {name}")
    except UsageError as error:
        raise LookupError(error.message) from None
    click.Command(name, params=own).make_context(name, list(job.own))


@pytest.mark.parametrize(
    "line", ["run --bnd node train.py", "plan --bind nodes", "topology", "job slurm --node 4 train.py", "run"]
)
def test_wrong_command_lines_are_found(line: str) -> None:
    """The check rejects an unknown command, option or value."""
    with pytest.raises((click.ClickException, LookupError)):
        check_command_line(line.split())


def transcripts_of(page: Path) -> list[tuple[str, list[str]]]:
    """Return the `numapin topo` and `plan` commands on a page that show a built-in machine, and their printed lines."""
    blocks = re.findall(r"```console\n(.*?)```", page.read_text(), re.DOTALL)
    parts = [part.splitlines() for block in blocks for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]]
    shown = re.compile(r"numapin (topo|plan)\b[^>]*--machine example:[\w-]+[^>]*")
    return [(line, printed) for line, *printed in parts if printed and shown.fullmatch(line)]


def test_transcripts_of_built_in_machines_are_current(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line that a page shows below such a command is one that it prints, apart from blanks and the line's end.

    Warnings are not left out.
    """
    monkeypatch.setenv("COLUMNS", "200")
    transcripts = [(name_of(page), *transcript) for page in PAGES for transcript in transcripts_of(page)]
    assert transcripts
    for name, line, printed in transcripts:
        done = CliRunner().invoke(numapin, shlex.split(line)[1:])
        shown = " ".join(done.output.split())
        for text in printed:
            assert " ".join(text.rstrip("…").split()) in shown, f"{name}: $ {line}"
        warnings = {text for text in done.output.splitlines() if text.startswith("numapin: warning:")}
        assert warnings <= {*printed}, f"{name}: $ {line}"


def test_every_command_has_a_page() -> None:
    """The navigation has a page for each command, with each of its options."""
    nav = (ROOT / "mkdocs.yml").read_text()
    for name in docs_site.command_names():
        page, command = docs_site.command_page(name), docs_site.find_command(name)
        commands = command.commands.values() if isinstance(command, click.Group) else [command]
        options = [option for one in commands for option in one.params if isinstance(option, click.Option)]
        assert f"commands/{name}.md" in nav
        assert [option.name for option in options if not option.hidden and option.opts[0] not in page] == []


def test_engines_are_documented() -> None:
    """Each engine of `numapin job` is in the line of `numapin --help`, and in the table of engines."""
    job, page = docs_site.find_command("job"), (DOCS / "engines" / "README.md").read_text()
    assert isinstance(job, click.Group)
    line = re.search(r"^  job .*", CliRunner().invoke(numapin, []).output, re.MULTILINE)
    assert line is not None
    assert [name for name in job.commands if name not in line[0].lower()] == []
    assert [name for name in job.commands if f"`numapin job {name}`" not in page] == []


def test_sources_of_nodes_and_vendors_are_documented() -> None:
    """Each source of a GPU's node has a row, and each vendor's word is in the schema of the topology."""
    binding, schemas = ((DOCS / name).read_text() for name in ("binding.md", "schemas.md"))
    assert [source for source in NodeSource if f"| `{source}` |" not in binding] == []
    assert [vendor for vendor in GpuVendor if f"`{vendor}`" not in schemas] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_pages_name_exist(page: Path) -> None:
    """A path such as `numapin/plan/make.py` names an existing file or folder, on pages about the current code."""
    if page.name in ("decisions.md", "CHANGELOG.md"):  # these also describe the past
        return
    paths = re.findall(r"`((?:numapin|tests|docs|scripts|examples|bench)/[\w./-]+)`", prose_of(page))
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_walks_go_forward() -> None:
    """Each walk of the architecture page has at most six files, none twice, with the names that it tells to read.

    Each file imports the next one, or is imported by it, if that one's function is passed in.
    """
    walks = re.findall(r"^### Walk \d.*?(?=^##)", (DOCS / "architecture.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(walks) == 5
    for walk in walks:
        assert len(set(re.findall(r"[\w/]+\.py", walk))) <= 6
        steps = re.findall(r"^\d\. `(numapin/[\w./]+)`: `(\w+)`", walk, re.MULTILINE)
        assert 1 < len(steps) == len(re.findall(r"^\d\. ", walk, re.MULTILINE))
        files = [file for file, _ in steps]
        assert len(set(files)) == len(files)
        for file, name in steps:
            assert re.search(rf"^ *(?:def|class) {name}\b", (ROOT / file).read_text(), re.MULTILINE), f"{file}: {name}"
        for one, other in pairwise(files):
            assert other in _imported(one) or one in _imported(other), f"{one} -> {other}"


def _imported(file: str) -> set[str]:
    nodes = [node for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.ImportFrom)]
    names = [name for node in nodes for name in (node.module, *(f"{node.module}.{each.name}" for each in node.names))]
    return {f"{(name or '').replace('.', '/')}.py" for name in names}


def test_figures_of_readme_are_in_the_results() -> None:
    """Each figure of README's first table is in the results file that its row links to."""
    readme = README.read_text()
    files = dict(re.findall(r"^\[(\w+)\]: (docs/results/\S+)$", readme, re.MULTILINE))
    for row in re.findall(r"^\|.*\]\[.*", readme, re.MULTILINE):
        figures = re.findall(r"\d[\d,]*\.?\d+(?= (?:batches|samples|s |s:|times))", row)
        for label in re.findall(r"\]\[(\w+)\]", row):
            content = (ROOT / files[label]).read_text()
            assert [figure for figure in figures if figure not in content] == [], files[label]


def test_local_pages_of_readme_are_those_of_the_virtual_machines() -> None:
    """The shares of local pages are the means over the ranks, per launcher, in the three results files."""
    row = next(line for line in README.read_text().splitlines() if "Memory pages on the GPU" in line)
    torchrun, ours = ([int(share) for share in re.findall(r"(\d+) %", cell)] for cell in row.split("|")[2:4])
    for i, name in enumerate(("two-nodes", "four-nodes", "memory-only")):
        rows = json.loads((DOCS / "results" / f"vm-pages-{name}.json").read_text())["rows"]
        for shares, command in ((torchrun, "torchrun"), (ours, "default")):
            local = [rank["local"] for rank in rows if rank["command"] == command]
            assert shares[i] == round(100 * sum(local) / len(local))


def test_training_figures_are_the_measured_ones() -> None:
    """The training table of docs/measured.md has the medians and ratios of the raw output, README has some of them."""
    readme, measured = README.read_text(), (DOCS / "measured.md").read_text()
    link = re.search(r"^\[training\]: (.*)", readme, re.MULTILINE)
    assert link is not None
    tables = (ROOT / link[1]).read_text().split("\n\n")
    for label, case in (("ResNet-18, 256", "resnet18"), ("3D CNN, 32", "cnn3d"), ("ResNet-50, 256", "resnet50")):
        row = next(line for line in measured.splitlines() if line.startswith(f"| {label}"))
        _, _, torch, ours, ceiling, ratio, _share, _ = (cell.strip() for cell in row.split("|"))
        table = next(text for text in tables if text.startswith(f"{case}  "))
        lines = {line.split()[0]: line for line in table.splitlines()[2:]}
        assert torch in lines["torch"]
        assert ceiling in lines["ceiling"]
        assert ours in lines["numapin"]
        middle, low, high = re.findall(r"\d\.\d\d", ratio)
        assert f"{middle} [{low}, {high}]" in lines["numapin"]
        if case == "resnet18":
            assert f"ResNet-18 trains {middle} times as fast ({low} to {high})" in " ".join(readme.split())


def test_site_has_every_page() -> None:
    """Each page below docs/ is in the navigation."""
    nav = (ROOT / "mkdocs.yml").read_text()
    missing = [page for page in sorted(DOCS.rglob("*.md")) if page.relative_to(DOCS).as_posix() not in nav]
    assert missing == [], "add it to nav in mkdocs.yml"


@pytest.mark.parametrize(
    ("page", "link", "expected"),
    [
        ("dataloader.md", "../examples/train_ddp.py", "repository/examples/train_ddp.py"),
        ("engines/README.md", "../../examples/mpi", "../repository/examples/mpi/README.md"),
        ("repository/examples/README.md", "../docs/exec.md#what", "../../exec.md#what"),
        ("exec.md", "results/exec-cpu.txt", "results/exec-cpu.txt"),
        ("index.md", "docs/exec.md#what", "exec.md#what"),
    ],
)
def test_links_out_of_docs_lead_to_copies(page: str, link: str, expected: str) -> None:
    """A link to a file outside docs/ leads to its copy in the site; links inside docs/ are not changed."""
    assert docs_site.relinked(f"[a]({link})", page) == f"[a]({expected})"
