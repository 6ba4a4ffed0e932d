"""The pages of the documentation and their contents: links, headings, command lines."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
DOCS: Final = ROOT / "docs"
PAGES: Final = (
    *(
        ROOT / name
        for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
        if (ROOT / name).exists()
    ),
    *sorted(DOCS.rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
)

_FENCE: Final = re.compile(r"^```(?P<language>\w*)\n(?P<body>.*?)^```", re.MULTILINE | re.DOTALL)
_LINK: Final = re.compile(r"\]\((?P<inline>[^)\s]+)\)|^\[[^\]]+\]: (?P<reference>\S+)$", re.MULTILINE)
_CODE: Final = re.compile(r"`[^`\n]+`")
_HEADING: Final = re.compile(r"^#+ (?P<text>.+)$", re.MULTILINE)
_PROMPT: Final = re.compile(r"^(?:\w+)?\$ (?P<line>.*)$", re.MULTILINE)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def prose_of(path: Path) -> str:
    return _FENCE.sub("", path.read_text())


def links_of(path: Path) -> list[str]:
    """Return the targets of a page's links, without links to other hosts."""
    prose = _CODE.sub("", prose_of(path))
    found = (match["inline"] or match["reference"] for match in _LINK.finditer(prose))
    return [target for target in found if "://" not in target]


def anchors_of(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as mkdocs and GitHub generate them for plain headings."""
    texts = (match["text"] for match in _HEADING.finditer(prose_of(path)))
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", text.replace("`", "")).strip().lower()) for text in texts}


def command_lines_of(path: Path) -> list[list[str]]:
    """Return the words of each `numapin` command after a prompt, alone or under a launcher."""
    blocks = (match["body"] for match in _FENCE.finditer(path.read_text()) if match["language"] == "console")
    lines = [match["line"] for block in blocks for match in _PROMPT.finditer(block)]
    return [words for line in lines for words in _numapin_words(line)]


def _numapin_words(line: str) -> list[list[str]]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|><()")
    lexer.whitespace_split = True
    found: list[list[str]] = []
    commands: list[list[str]] = [[]]
    for word in lexer:
        if set(word) <= set(";&|><()"):
            commands.append([])
        else:
            commands[-1].append(word)
    for words in commands:
        if "numapin" in words and (not found or words[0] != words[-1]):
            found.append(words[words.index("numapin") + 1 :])
    return found
