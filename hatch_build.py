"""Compile numapin/system/stores.c while a wheel is built, if there is a C compiler; without one numapin is slower.

Comes in: the source tree. Goes out: numapin/system/libstores.so in the wheel or, for an editable install, in the tree.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class StoresHook(BuildHookInterface[Any]):
    """Hatchling's hook; `initialize` runs before files are collected, `finalize` when the wheel is there."""

    _folder: tempfile.TemporaryDirectory[str] | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and mark the wheel as made for this machine's kind. Nothing that goes wrong stops the build."""
        if self.target_name != "wheel" or platform.machine() != "x86_64":
            return
        self._folder = tempfile.TemporaryDirectory()
        library = Path(self._folder.name, "libstores.so")
        try:
            compiler = shlex.split(os.environ.get("CC", "")) or ["cc" if shutil.which("cc") else "gcc"]
            source = str(Path(self.root, "numapin", "system", "stores.c"))
            options = ["-O2", "-Wall", "-Werror", "-shared", "-fPIC"]
            subprocess.run([*compiler, *options, "-o", str(library), source], check=True)
            if version == "editable":
                self._put_into_tree(library)
            else:
                build_data["force_include"][str(library.resolve(strict=True))] = f"numapin/system/{library.name}"
        except (OSError, ValueError, subprocess.CalledProcessError) as error:
            self.app.display_warning(f"numapin is built without {library.name}: {error}")
            return
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-linux_x86_64"

    def finalize(self, _version: str, _build_data: dict[str, Any], _artifact_path: str) -> None:
        """Remove what was compiled."""
        if self._folder is not None:
            self._folder.cleanup()

    def _put_into_tree(self, library: Path) -> None:
        """Replace the library in the tree at once: processes that have it mapped keep the old one."""
        new = Path(self.root, "numapin", "system", f".{library.name}.{os.getpid()}")
        shutil.copyfile(library, new)
        new.replace(new.with_name(library.name))
