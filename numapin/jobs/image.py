"""Container images: one notation for users, and the notation of each program that runs them."""

from __future__ import annotations

import re
from typing import Final

from numapin.errors import UsageError

SAMPLE: Final = "an image such as nvcr.io/nvidia/pytorch:25.01-py3, or a file"

_DOCKER: Final = "docker://"
_APPTAINERS: Final = ("library://", "oras://", "shub://", "https://", "http://")
_SQUASHED: Final = (".sqsh", ".squashfs")
_ENROOTS_USER: Final = re.compile(r"^[^@/#]*@(?=[^#]*#)")


def for_apptainer(image: str) -> str:
    """Return the image as Apptainer takes it. Raises UsageError for an image that only enroot can unpack."""
    if image.endswith(_SQUASHED):
        raise UsageError(
            f"--container {image} is an enroot file, which only Slurm with pyxis runs",
            "give an Apptainer image (.sif), or the image in its registry",
        )
    named = in_registry(image)
    return image if named is None else _DOCKER + named


def for_pyxis(image: str) -> str | None:
    """Return the image as pyxis takes it, in which paths start with a dot or a slash. None: it is Apptainer's."""
    if image.endswith(_SQUASHED):
        return image if _is_path(image) else f"./{image}"
    if in_registry(image) is None:
        return None
    named = image.removeprefix(_DOCKER)
    host, _, rest = named.partition("/")
    is_host = host == "localhost" or "." in host or ":" in host  # Docker's rule
    # Without a # after the registry's host, enroot asks Docker Hub.
    return f"{host}#{rest}" if rest and is_host and "#" not in named else named


def in_registry(image: str) -> str | None:
    """Return the image as `docker pull` names it. None: it is not in a registry."""
    is_file = _is_path(image) or image.endswith((".sif", *_SQUASHED))
    if is_file or image.startswith(_APPTAINERS):
        return None
    return _ENROOTS_USER.sub("", image.removeprefix(_DOCKER)).replace("#", "/")


def require_known(image: str) -> None:
    """Raise UsageError for an unknown URI scheme, and for an image with an empty part, as from an empty $TAG."""
    if "://" in image.removeprefix(_DOCKER) and not image.startswith(_APPTAINERS):
        raise UsageError(f"--container {image!r}: no engine runs such a URI", f"use {SAMPLE}")
    named = in_registry(image)
    parts = [image.rpartition("://")[2]] if named is None else named.split("/")
    has_empty_tag = parts[-1].endswith((":", "@")) and not _is_path(image)
    if "" in parts or has_empty_tag:
        raise UsageError(f"--container {image!r} names no image: a part of the name is empty", f"use {SAMPLE}")


def _is_path(image: str) -> bool:
    return image.startswith((".", "/"))
