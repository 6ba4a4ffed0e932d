"""Hooks of the documentation site (mkdocs.yml): README as its home page, the commands' pages, links to other files.

A command's page is generated from its options and help when the site is built, so it cannot go stale. A link from a
page to a file of the repository, such as ../examples/train_ddp.py, leads to a copy of that file in repository/.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from numapin.cli.torchrun_command import EXIT_STATUSES, TorchrunCommand, records

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).resolve().parent.parent
README: Final = ROOT / "README.md"
COPIES: Final = "repository"
COMMANDS: Final = "commands"
HOME: Final = "index.md"
COPIED_FILES: Final = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE")
COPIED_RECORDS: Final = ("tests/integration/faults.md", "tests/integration/failure-blocks.md")
COPIED_FOLDERS: Final = ("examples", "tests/machines")
_LEFT_OUT: Final = {"__pycache__", "golden"}
_LINK: Final = re.compile(r"(?:(?<=\]\()|(?<=\]: ))(?P<target>[^)\s#:]+)(?P<anchor>#[^)\s]*)?(?=\)|$)", re.MULTILINE)
_FENCE: Final = re.compile(r"^( *)(`{3,}|~{3,}).*?^\1\2 *$", re.MULTILINE | re.DOTALL)


# --- hooks of mkdocs -------------------------------------------------------------------------------------------------


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add README, the commands' pages and the copies of files outside docs/."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, HOME, content=README.read_text()))
    for name in command_names():
        files.append(File.generated(config, f"{COMMANDS}/{name}.md", content=command_page(name)))
    for path in copied_files():
        uri = f"{COPIES}/{path.relative_to(ROOT).as_posix()}"
        files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Point links to files outside docs/ at their copies."""
    return relinked(markdown, page.file.src_uri)


def copied_files() -> list[Path]:
    """Return the files outside docs/ that are copied into the site."""
    files = [ROOT / name for name in (*COPIED_FILES, *COPIED_RECORDS)]
    below = chain.from_iterable(sorted((ROOT / name).rglob("*")) for name in COPIED_FOLDERS)
    return [path for path in chain(files, below) if path.is_file() and not _LEFT_OUT & set(path.parts)]


def relinked(markdown: str, page_uri: str) -> str:
    """Return the page with links to files outside docs/ replaced by links to their copies, except in code blocks."""
    source = source_of(page_uri)
    pieces, end = [], 0
    for fence in _FENCE.finditer(markdown):
        pieces += [_relinked_text(markdown[end : fence.start()], page_uri, source), fence.group()]
        end = fence.end()
    return "".join([*pieces, _relinked_text(markdown[end:], page_uri, source)])


def source_of(page_uri: str) -> Path:
    """Return the file of the repository that a page of the site is generated from."""
    if page_uri == HOME:
        return README
    inside = page_uri.removeprefix(f"{COPIES}/")
    return ROOT / inside if inside != page_uri else ROOT / "docs" / page_uri


def _relinked_text(text: str, page_uri: str, source: Path) -> str:
    def replace(match: re.Match[str]) -> str:
        uri = _site_uri(Path(os.path.normpath(source.parent / match.group("target"))))
        if uri is None:
            return match.group()
        return os.path.relpath(uri, Path(page_uri).parent) + (match.group("anchor") or "")

    return _LINK.sub(replace, text)


def _site_uri(target: Path) -> str | None:
    """Return a file's address within the site, for a folder its README's; None for files outside the repository."""
    if target.is_dir():
        target /= "README.md"
    if target.is_relative_to(ROOT / "docs"):
        return target.relative_to(ROOT / "docs").as_posix()
    if target.is_relative_to(ROOT) and target.exists():
        return f"{COPIES}/{target.relative_to(ROOT).as_posix()}"
    return None


# --- the commands' pages ---------------------------------------------------------------------------------------------


def command_names() -> list[str]:
    """Return the commands of `numapin`, in the order of its help."""
    from numapin.cli.main import numapin

    return numapin.list_commands(click.Context(numapin))


def find_command(name: str) -> click.Command:
    """Return the click command of that name."""
    from numapin.cli.main import numapin

    command = numapin.get_command(click.Context(numapin), name)
    if command is None:
        raise LookupError(f"numapin has no command {name!r}")
    return command


def command_page(name: str) -> str:
    """Return the Markdown page of one command."""
    return f"# numapin {name}\n\n{_click_body(find_command(name), f'numapin {name}', level=2)}\n"


def _click_body(command: click.Command, path: str, *, level: int) -> str:
    context = click.Context(command, info_name=path, **command.context_settings)
    usage = _fenced(command.get_usage(context).removeprefix("Usage: "))
    if isinstance(command, click.Group):
        details = _subcommands(command, context, path, level)
    elif isinstance(command, TorchrunCommand):
        sections = command.sections(context, shows_all=True)
        tables = (f"## {title}\n\n{_table(records(options, context))}" for title, options in sections.items())
        details = chain(tables, ["## Exit status\n\n" + _table(EXIT_STATUSES, heads=("status", "meaning"))])
    else:
        details = iter([_table(records(command.get_params(context), context))])
    return "\n\n".join([*_help_parts(command), usage, *details])


def _subcommands(group: click.Group, context: click.Context, path: str, level: int) -> Iterator[str]:
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        body = _click_body(command, f"{path} {name}", level=level + 1)
        yield f"{'#' * level} {path} {name}\n\n{body}"


def _help_parts(command: click.Command) -> Iterator[str]:
    """Yield the paragraphs of a help text; one that click does not wrap becomes a code block."""
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        kept = paragraph.startswith("\b\n")
        yield _fenced(paragraph.removeprefix("\b\n")) if kept else _text(paragraph)


def _table(rows: Iterable[tuple[str, str]], *, heads: tuple[str, str] = ("option", "meaning")) -> str:
    lines = [f"| `{_cell(names)}` | {_text(_cell(text))} |" for names, text in rows]
    return "\n".join([f"| {heads[0]} | {heads[1]} |", "|---|---|", *lines])


def _cell(text: str) -> str:
    return " ".join(text.split())


def _text(text: str) -> str:
    """Return plain text as Markdown that shows it unchanged, apart from `code`."""
    pieces = text.split("`")
    for i in range(0, len(pieces), 2):  # the others are code, in which a backslash would be shown
        pieces[i] = re.sub(r"([*\[\]_|])", r"\\\1", pieces[i]).replace("<", "&lt;")
    return "`".join(pieces)


def _fenced(text: str) -> str:
    return f"```text\n{text.strip(chr(10))}\n```"


if __name__ == "__main__":  # show one page: python -m scripts.docs_site topo
    sys.stdout.write(command_page(sys.argv[1]))
