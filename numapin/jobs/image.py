"""Container images: one way to name them, and what each program that runs them wants to read. Pure.

Comes in: the word that the user typed: an image of a registry (`docker pull`'s name, or with enroot's #), a file, or a
URI of Apptainer's. Goes out: the same image as Apptainer, pyxis and Kubernetes name it.
"""

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
    """Return the image as Apptainer takes it. Raises UsageError for what only enroot unpacks."""
    if image.endswith(_SQUASHED):
        raise UsageError(
            f"--container {image} is a file of enroot's, which only Slurm runs, with pyxis",
            "give Apptainer's own (.sif), or the image in its registry",
        )
    named = in_registry(image)
    return image if named is None else _DOCKER + named


def for_pyxis(image: str) -> str | None:
    """Return the image as pyxis takes it, None where it is Apptainer's.

    Without # enroot asks Docker Hub, whatever the name begins with; a path is one that begins with a dot or a slash.
    """
    if image.endswith(_SQUASHED):
        return image if image.startswith((".", "/")) else f"./{image}"
    if in_registry(image) is None:
        return None
    named = image.removeprefix(_DOCKER)
    host, slash, rest = named.partition("/")
    is_host = slash and ("." in host or ":" in host or host == "localhost")
    return f"{host}#{rest}" if is_host and "#" not in named else named


def in_registry(image: str) -> str | None:
    """Return the image as `docker pull` names it, None where it is in no registry."""
    is_path = image.startswith((".", "/")) or image.endswith((".sif", *_SQUASHED))
    if is_path or image.startswith(_APPTAINERS):
        return None
    return _ENROOTS_USER.sub("", image.removeprefix(_DOCKER)).replace("#", "/")


def require_known(image: str) -> None:
    """Raise UsageError for a scheme that no program here has, and for what names no image, as with an empty $TAG."""
    if "://" in image.removeprefix(_DOCKER) and not image.startswith(_APPTAINERS):
        raise UsageError(f"--container {image!r}: nothing here runs such a URI", f"use {SAMPLE}")
    named = in_registry(image)
    parts = image.rpartition("://")[2:] if named is None else named.split("/")
    if "" in parts or (parts[-1].endswith((":", "@")) and not image.startswith((".", "/"))):
        raise UsageError(f"--container {image!r} names no image: a part of the name is empty", f"use {SAMPLE}")
