"""A command line without its secrets, for files and screens that others may see.

Names that only count or describe, such as --max-tokens, keep their values.

This is a heuristic: it misses a secret under an unusual name. A secret on a command line is visible to every user in
/proc anyway; it belongs into the environment or a file.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

HIDDEN: Final = "***"


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


_ALWAYS: Final = _set(  # last words of a name that make it secret
    "apikey authorization bearer cookie credential credentials passcode passphrase passwd password pw "
    "secret secrets signature"
)
_ENDINGS: Final = (  # the same for names without separators, such as PGPASSWORD
    *("accesskey", "apikey", "privatekey", "secretkey", "passphrase", "passwd", "password", "secret"),
    *("accesstoken", "apitoken", "authtoken", "bearertoken", "hftoken", "refreshtoken", "sessiontoken"),
)
_WITH_OTHERS: Final = {  # last words that make a name secret together with one of these; `keys` counts as `key`
    "key": _set(
        "access account admin anthropic api auth aws azure client comet deploy encryption gcp hf huggingface license "
        "master mlflow neptune openai private secret service shared signing ssh storage subscription token "
        "wandb"
    ),
    "tokens": _set("access api auth bearer refresh secret session"),
    "pass": _set("auth db ftp http mysql pg postgres proxy redis smtp user"),
    "pwd": _set("admin db ftp http mysql pg postgres proxy redis root smtp user"),
    "auth": _set("basic http proxy registry"),
}
_TOKENS_OF_TEXT: Final = _set(  # words that make `token` one of a tokenizer
    "begin bos cls drop end eos extra first image last mask max min n new next num pad per placeholder sep "
    "special start stop think tool total trigger unk video"
)
_ALONE: Final = frozenset({"auth", "pass", "token"})
_SECRET_GROUPS: Final = frozenset({"secret", "secrets", "credentials"})
"""Words before a dot that make every name after it secret."""
_NOT_SECRET: Final = frozenset({"", "true", "false", "none", "null", "yes", "no", "on", "off"})

_WORDS: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_NAME: Final = r"[A-Za-z_+-][\w.+-]{0,99}"
_ASSIGNED: Final = re.compile(rf"(?<![\w.+-])(?P<name>{_NAME})(?P<sign>=)(?P<value>\"[^\"]*\"|'[^']*'|[^\s&;\"']+)")
_IN_JSON: Final = re.compile(
    rf"(?P<name>[\"']{_NAME}[\"'])(?P<sign>\s*:\s*)(?P<value>\"[^\"]*\"|'[^']*'|[^\s,{{}}\[\]\"']+)"
)
_OPTION: Final = re.compile(rf"(?<!\S)(?P<name>-{_NAME})(?P<sign>\s+)(?P<value>\"[^\"]*\"|'[^']*'|(?!-)\S+)")
_HEADER: Final = re.compile(rf"(?<![\w-])(?P<name>{_NAME})(?P<sign>:\s*)(?P<value>(?:(?:Bearer|Basic)\s+)?[^\s/\"']+)")
_NAMED: Final = (_ASSIGNED, _IN_JSON, _OPTION, _HEADER)

_IN_URL: Final = re.compile(r"(?P<before>[A-Za-z][\w+.-]{0,30}://[^\s/:@?#]*:)[^\s/]+(?=@)")
_USER_OF_URL: Final = re.compile(r"(?P<before>\bhttps?://)[^\s/:@?#]+(?=@)", re.IGNORECASE)
_SCHEME: Final = re.compile(r"(?P<before>\bBearer\s+)[\w.~+/=-]+", re.IGNORECASE)
_FORMS: Final = re.compile(
    r"(?P<before>)(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{20,}|gh[opsur]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"
    r"|sk-[\w-]{20,}|xox[abeoprs]-[\w-]{10,}|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{30,}"
    r"|eyJ[\w-]{8,4096}\.eyJ[\w-]{8,4096}\.[\w-]*)"
)
_SHAPED: Final = (_IN_URL, _USER_OF_URL, _SCHEME, _FORMS)


def without_secrets(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with values that look secret replaced by "***"."""
    shown, is_value = [], False  # of a secret option, the word before
    for given in words:
        word = given
        is_option = word.startswith("-") and word != "-"
        is_hidden = is_value and not is_option and word.lower() not in _NOT_SECRET
        is_value = is_option and "=" not in word and is_secret(word)
        for pattern in _SHAPED:
            word = pattern.sub(rf"\g<before>{HIDDEN}", word)
        for pattern in _NAMED:
            word = pattern.sub(_replacement, word)
        shown.append(HIDDEN if is_hidden else word)
    return shown


def _replacement(found: re.Match[str]) -> str:
    name, sign, value = found["name"], found["sign"], found["value"]
    quote = value[0] if value[0] in "\"'" else ""
    is_hidden = is_secret(name) and value.strip("\"'").lower() not in _NOT_SECRET
    return f"{name}{sign}{quote}{HIDDEN}{quote}" if is_hidden else found[0]


def is_secret(name: str) -> bool:
    """Return whether an option or variable of this name holds a secret: `--api-key`, `wandb.apiKey`, HF_TOKEN."""
    *groups, own = name.strip("\"'").rstrip(".").split(".")
    if not _SECRET_GROUPS.isdisjoint(group.strip("-+").lower() for group in groups):
        return True
    words = [word.lower() for word in _WORDS.findall(own)]
    if "".join(words).endswith(_ENDINGS) or (words and words[-1] in _ALWAYS):
        return True
    *others, last = words or [""]
    if not others:
        return last in _ALONE
    if last == "token":
        return _TOKENS_OF_TEXT.isdisjoint(others)
    return not _WITH_OTHERS.get("key" if last == "keys" else last, frozenset()).isdisjoint(others)
