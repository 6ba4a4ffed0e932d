"""Replace invisible characters in untrusted text.

Each rank imports this before its program starts: the standard library only.
"""

from __future__ import annotations


def printable(text: str) -> str:
    """Replace control characters, line breaks, direction marks, lone surrogates and other invisible characters."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else "\ufffd" for char in text)


def printable_lines(text: str) -> str:
    """Do the same to a text of several lines; newlines stay, and a tab becomes four spaces."""
    return "\n".join(printable(line.replace("\t", "    ")) for line in text.split("\n"))


def ascii_escapes(json_text: str) -> str:
    r"""Write the invisible characters of a JSON text as \uXXXX, which leaves every value as it is.

    Outside of its strings the text may have spaces and newlines only.
    """
    lines = json_text.split("\n")
    return "\n".join(line if line.isprintable() else "".join(map(_escaped, line)) for line in lines)


def _escaped(char: str) -> str:
    if char.isprintable():
        return char
    units = char.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))
