#!/usr/bin/env python3
"""Unpack QEMU, a Linux kernel and numactl from Debian packages into a cache folder, for the VM tests.

    python3 scripts/make_vm.py          # or: make vm

Needs Debian on x86-64 with apt and network access, but not root; nothing is installed. Fills the folder
NUMAPIN_VM_CACHE, by default .cache/vm in the repository, with

    host/        qemu-system-x86_64, its firmware, and the shared libraries this machine lacks
    guest/       numactl and libnuma.so.1
    vmlinuz      the kernel
    initrd.gz    busybox, the modules that reach a 9p root, and the init below
    ready.json   a record of what was unpacked; written last, when everything else is complete

A second call returns at once. The exit status is 0, or 1 if something is missing, which stderr names.
"""

from __future__ import annotations

import gzip
import io
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

RECIPE = 3
"""Increased when this file unpacks something else, so that old caches are rebuilt."""
HOST_PACKAGES = ("qemu-system-x86", "seabios", "busybox-static")
GUEST_PACKAGES = ("numactl", "libnuma1")
KERNEL_PACKAGE = "linux-image-amd64"
MODULES = ("virtio_pci", "9pnet_virtio", "9p", "overlay")
NEVER_FROM_HOST = re.compile(r"Package: (qemu|seabios|ipxe)")
"""Packages that are fetched even if they are installed: QEMU finds its modules and firmware beside itself only."""
STATUS = Path("/var/lib/dpkg/status")
TOOLS = ("apt-get", "apt-cache", "dpkg-deb")

INIT = r"""#!/bin/busybox sh
# The host's root through 9p, read-only, below a tmpfs for writes. The host's processes and devices are not visible.
b=/bin/busybox
$b mount -t proc proc /proc; $b mount -t sysfs sys /sys; $b mount -t devtmpfs dev /dev
for m in $($b cat /modules); do $b insmod "/lib/modules/$m" || echo "VM: insmod $m failed"; done
$b mount -t tmpfs upper /upper; $b mkdir /upper/changes /upper/work
$b mount -t 9p -o trans=virtio,version=9p2000.L,ro,cache=loose,msize=512000 root /lower || echo "VM: no 9p root"
$b mount -t overlay -o lowerdir=/lower,upperdir=/upper/changes,workdir=/upper/work root /root || echo "VM: no overlay"
for d in proc sys dev run; do $b mkdir -p /root/$d; done
$b mount -t proc proc /root/proc; $b mount -t sysfs sys /root/sys; $b mount -t devtmpfs dev /root/dev
$b mount -t tmpfs run /root/run
$b mkdir -p /root/dev/shm /root/run/share /root/run/tmp
$b mount -t tmpfs -o size=64m shm /root/dev/shm
$b mount -t cgroup2 cgroup2 /root/sys/fs/cgroup
$b mount -t 9p -o trans=virtio,version=9p2000.L,cache=none,msize=512000 share /root/run/share || echo "VM: no share"
$b hostname localhost   # torch's rendezvous resolves the name of the host
$b ifconfig lo 127.0.0.1 up
echo "VM: ready"
$b chroot /root /bin/sh /run/share/batch.sh
echo "VM: done $?"
$b sync; $b poweroff -f
"""


class MissingError(Exception):
    """Something is missing on this machine; the text names it and the remedy."""


def main() -> int:
    """Fill the cache folder unless it is ready; return the exit status."""
    cache = cache_folder()
    if is_ready(cache):
        _say(f"{cache} is ready")
        return 0
    try:
        make(cache)
    except MissingError as error:
        _say(f"make vm: {error}")
        return 1
    return 0


def cache_folder() -> Path:
    """Return the folder NUMAPIN_VM_CACHE, by default .cache/vm in the repository."""
    default = Path(__file__).resolve().parent.parent / ".cache" / "vm"
    return Path(os.environ.get("NUMAPIN_VM_CACHE") or default).absolute()


def is_ready(cache: Path) -> bool:
    """Return whether `cache` was filled by this recipe."""
    try:
        made = json.loads((cache / "ready.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(made, dict) and made.get("recipe") == RECIPE


def make(cache: Path) -> None:
    """Fill `cache`: download, unpack, build the initramfs, try QEMU, and then mark it as ready."""
    started = time.monotonic()
    _require_tools()
    shutil.rmtree(cache, ignore_errors=True)
    cache.mkdir(parents=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="work-") as work:
        apt = Apt(Path(work) / "apt")
        apt.update()
        kernel = apt.kernel()
        files = apt.download((*apt.closure((*HOST_PACKAGES, *GUEST_PACKAGES)), kernel))
        _say(f"unpacking {len(files)} packages")
        for name, file in files.items():
            _unpack(file, _target(name, kernel, cache, Path(work)))
        num_modules = _boot_files(Path(work) / "kernel", cache)
        downloaded = _total_bytes(files.values())
    version = _try_qemu(cache)
    size = _total_bytes(file for file in cache.rglob("*") if not file.is_dir())
    seconds = round(time.monotonic() - started, 1)
    record = {
        "recipe": RECIPE,
        "qemu": version,
        "kernel": kernel,
        "packages": sorted(files),
        "num_modules": num_modules,
        "downloaded_bytes": downloaded,
        "unpacked_bytes": size,
        "seconds": seconds,
    }
    (cache / "ready.json").write_text(json.dumps(record, indent=1) + "\n")
    _say(f"{cache}: {version}, {kernel}; {downloaded >> 20} MiB fetched, {size >> 20} MiB kept, {seconds} s")


def _target(package: str, kernel: str, cache: Path, work: Path) -> Path:
    if package == kernel:
        return work / "kernel"
    return cache / ("guest" if package in GUEST_PACKAGES else "host")


def _total_bytes(files: Iterable[Path]) -> int:
    return sum(file.lstat().st_size for file in files)


class Apt:
    """apt with its own lists and archives in `folder`, independent of root and of earlier calls of `apt-get update`.

    It knows which packages are installed here, because libraries that this machine has need not be fetched.
    """

    def __init__(self, folder: Path) -> None:
        self.archives = folder / "archives"
        for path in (folder / "lists" / "partial", self.archives / "partial"):
            path.mkdir(parents=True)
        status = folder / "status"
        installed = STATUS.read_text(errors="surrogateescape").split("\n\n")
        kept = [package for package in installed if not NEVER_FROM_HOST.match(package)]
        status.write_text("\n\n".join(kept), errors="surrogateescape")
        settings = (
            f"Dir::State::status={status}",
            f"Dir::State::lists={folder / 'lists'}",
            f"Dir::Cache={folder}",
            "APT::Sandbox::User=root",
            "Acquire::Languages=none",
            "Acquire::Retries=3",
            "Debug::NoLocking=1",
        )
        self.options = tuple(chain.from_iterable(("-o", setting) for setting in settings))
        self.quiet = ("-qq", *self.options)

    def update(self) -> None:
        """Fetch the package lists; continue if a third-party source fails."""
        _say("fetching the package lists")
        self.problem = _output("apt-get", *self.quiet, "update", check=False).strip()

    def kernel(self) -> str:
        """Return the package of the kernel itself, on which the metapackage depends."""
        listing = _output("apt-cache", *self.quiet, "depends", "--important", KERNEL_PACKAGE, check=False)
        match = re.search(r"Depends: (linux-image-\S+)", listing)
        if match is None:
            raise MissingError(
                f"apt does not know {KERNEL_PACKAGE}; is this Debian on x86-64 with network access?\n{self.problem}"
            )
        return match[1]

    def closure(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Return `names` and their dependencies, without the libraries that are installed here."""
        plan = _output("apt-get", *self.options, "install", "-s", "--reinstall", "--no-install-recommends", *names)
        found = re.findall(r"^Inst (\S+)", plan, re.MULTILINE)
        # The C library must match this machine's dynamic loader.
        return tuple(name for name in dict.fromkeys(found) if not re.match(r"(libc6|libc-bin)\b", name))

    def download(self, names: tuple[str, ...]) -> dict[str, Path]:
        """Download packages, checked against the signed lists; return name -> .deb."""
        _say(f"downloading {len(names)} packages: {' '.join(names)}")
        _output("apt-get", *self.quiet, "download", *names, cwd=self.archives)
        files = {file.name.partition("_")[0]: file for file in self.archives.glob("*.deb")}
        missing = [name for name in names if name not in files]
        if missing:
            raise MissingError(f"apt-get download left out {' '.join(missing)}")
        return files


def _boot_files(unpacked: Path, cache: Path) -> int:
    """Copy the kernel and build the initramfs; return its number of modules."""
    shutil.copyfile(next(unpacked.glob("boot/vmlinuz-*")), cache / "vmlinuz")
    modules = _modules_in_order(unpacked)
    busybox = next(
        file for file in (cache / "host" / "bin/busybox", cache / "host" / "usr/bin/busybox") if file.exists()
    )
    folders = ("bin", "lib", "lib/modules", "proc", "sys", "dev", "lower", "upper", "root")
    entries = [(name, 0o040755, b"") for name in folders]
    entries += [(f"lib/modules/{name}", 0o100644, data) for name, data in modules.items()]
    entries += [
        ("modules", 0o100644, "\n".join(modules).encode()),
        ("bin/busybox", 0o100755, busybox.read_bytes()),
        ("init", 0o100755, INIT.encode()),
    ]
    (cache / "initrd.gz").write_bytes(gzip.compress(_newc(entries), compresslevel=6, mtime=0))
    return len(modules)


def _modules_in_order(unpacked: Path) -> dict[str, bytes]:
    """Return file name -> content of MODULES and their dependencies, dependencies first.

    The order comes from the `depends=` lines in the modules, because modules.dep is written when a kernel is installed.
    A module without a file is built into the kernel.
    """
    files = {_module_name(file): file for file in unpacked.rglob("*.ko*")}
    ordered: dict[str, bytes] = {}
    for name in MODULES:
        _add_module(name, files, ordered)
    if "9p.ko" not in ordered:
        raise MissingError(f"the kernel of {KERNEL_PACKAGE} has no 9p module")
    return ordered


def _add_module(name: str, files: dict[str, Path], ordered: dict[str, bytes]) -> None:
    """Add a module after its dependencies."""
    if name not in files or f"{name}.ko" in ordered:
        return
    content = _decompressed(files[name])
    match = re.search(rb"\0depends=([^\0]+)\0", content)
    for needed in match[1].decode().split(",") if match else ():
        _add_module(needed.replace("-", "_"), files, ordered)
    ordered[f"{name}.ko"] = content


def _module_name(file: Path) -> str:
    return file.name.partition(".ko")[0].replace("-", "_")


def _decompressed(file: Path) -> bytes:
    if file.suffix == ".ko":
        return file.read_bytes()
    if file.suffix == ".xz":
        return lzma.decompress(file.read_bytes())
    raise MissingError(f"kernel module {file.name} has a compression that this script cannot read")


def _newc(entries: list[tuple[str, int, bytes]]) -> bytes:
    """Write a cpio archive in the "newc" format of (name, mode, content) entries.

    Source: Documentation/driver-api/early-userspace/buffer-format.rst.
    """
    out = io.BytesIO()
    for inode, (name, mode, data) in enumerate([*entries, ("TRAILER!!!", 0, b"")], start=1):
        fields = (inode, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0)
        out.write(b"070701" + b"".join(b"%08x" % value for value in fields) + name.encode() + b"\0")
        out.write(b"\0" * (-out.tell() % 4))
        out.write(data)
        out.write(b"\0" * (-out.tell() % 4))
    return out.getvalue()


def _try_qemu(cache: Path) -> str:
    """Run the unpacked QEMU once; return its version line."""
    qemu = cache / "host/usr/bin/qemu-system-x86_64"
    libraries = ":".join(str(cache / side / base) for side in ("host", "guest") for base in LIBRARY_FOLDERS)
    done = subprocess.run(
        [qemu, "--version"], env={"LD_LIBRARY_PATH": libraries}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise MissingError(f"the unpacked QEMU does not start: {done.stderr.strip()}")
    return done.stdout.splitlines()[0]


LIBRARY_FOLDERS = ("usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu")


def _require_tools() -> None:
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if os.uname().machine != "x86_64":
        missing.append(f"an x86-64 processor (this is {os.uname().machine})")
    if missing:
        raise MissingError("missing: " + ", ".join(missing) + "; the VM tests need Debian or a derivative on x86-64")


def _unpack(package: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    _output("dpkg-deb", "-x", str(package), str(target))


def _output(tool: str, *arguments: str, cwd: Path | None = None, check: bool = True) -> str:
    """Run a tool and return its output. Raises MissingError, with that output, if it fails and `check` is set."""
    done = subprocess.run(
        [shutil.which(tool) or tool, *arguments],
        cwd=cwd,
        env={**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if check and done.returncode:
        raise MissingError(f"{tool} {arguments[-1]} failed with status {done.returncode}:\n{done.stdout.strip()}")
    return done.stdout


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
