"""Fail if a page of the built site loads anything from another host: python scripts/docs_check.py site."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Final

# Element -> the attribute with the address that a browser loads. An <a href> is not loaded.
LOADED: Final = {
    "script": "src",
    "link": "href",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "audio": "src",
    "embed": "src",
    "object": "data",
}
_NOT_LOADED: Final = {"canonical", "prev", "next", "alternate", "author"}
_OTHER_HOST: Final = re.compile(r"\s*(?:https?:)?//", re.IGNORECASE)
_CSS: Final = re.compile(r"""(?:url\(\s*|@import\s+)["']?((?:https?:)?//[^"')\s]+)""", re.IGNORECASE)


class _Loads(HTMLParser):
    """A collector of the addresses that a page loads from other hosts."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._in_style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect an element's addresses on other hosts."""
        self._in_style = tag == "style"
        values = {name: value or "" for name, value in attrs}
        if "mermaid" in values.get("class", "").split():
            self.found.append("mermaid, which the theme loads from a CDN")
        address = values.get(LOADED.get(tag, ""), "")
        is_loaded = _NOT_LOADED.isdisjoint(values.get("rel", "").split())
        if is_loaded and _OTHER_HOST.match(address):
            self.found.append(f"<{tag}> {address}")
        self.found += _CSS.findall(values.get("style", ""))

    def handle_data(self, data: str) -> None:
        """Collect the addresses in a style sheet inside the page."""
        if self._in_style:
            self.found += _CSS.findall(data)


def loads(path: Path) -> list[str]:
    """Return the addresses on other hosts that one file of the site loads."""
    text = path.read_text(errors="replace")
    if path.suffix == ".css":
        return _CSS.findall(text)
    parser = _Loads()
    parser.feed(text)
    return parser.found


def main(site: Path) -> int:
    """Print what is loaded from other hosts; return 1 if anything is, or if there are no pages."""
    pages = sorted([*site.rglob("*.html"), *site.rglob("*.css")])
    found = [(path, address) for path in pages for address in loads(path)]
    for path, address in found:
        print(f"{path}: loads {address}", file=sys.stderr)
    print(f"{len(pages)} files of {site}: {len(found)} loads from other hosts")
    return 1 if found or not pages else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
