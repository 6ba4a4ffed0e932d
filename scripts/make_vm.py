#!/usr/bin/env python3
"""Unpack QEMU, a Linux kernel and numactl from Debian packages into a cache folder, for the VM tests.

    python3 scripts/make_vm.py          # or: make vm

Comes in: a Debian machine with apt and the network (root is not needed, nothing is installed). Goes out: the folder
that NUMAPIN_VM_CACHE names, else .cache/vm in the repository, with

    host/        qemu-system-x86_64, its firmware, and the shared libraries this machine lacks
    guest/       numactl and libnuma.so.1
    vmlinuz      the kernel
    initrd.gz    busybox, the modules that reach a 9p root, and the init below
    ready.json   what was unpacked; written last, so its presence means that the rest is there

A second call returns at once. Exit status: 0 ready; 1 something is missing, named on stderr.
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
from pathlib import Path

RECIPE = 2
"""Counts up when this file unpacks something else, so that an old cache is made again."""
HOST_PACKAGES = ("qemu-system-x86", "seabios", "busybox-static")
GUEST_PACKAGES = ("numactl", "libnuma1")
KERNEL_PACKAGE = "linux-image-amd64"
MODULES = ("virtio_pci", "9pnet_virtio", "9p", "overlay")
TOOLS = ("apt-get", "apt-cache", "dpkg-deb")

INIT = r"""#!/bin/busybox sh
# The host's root, read-only through 9p, below a tmpfs that takes the writes; what the host runs is not shown.
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
    """Something this machine lacks; the text says what, and the remedy."""


def main() -> int:
    """Make the cache folder unless it is there; return the exit status."""
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
    """Return the folder that NUMAPIN_VM_CACHE names, else .cache/vm in the repository."""
    default = Path(__file__).resolve().parent.parent / ".cache" / "vm"
    return Path(os.environ.get("NUMAPIN_VM_CACHE") or default).absolute()


def is_ready(cache: Path) -> bool:
    """Say whether `cache` was made by this recipe."""
    try:
        made = json.loads((cache / "ready.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(made, dict) and made.get("recipe") == RECIPE


def make(cache: Path) -> None:
    """Fill `cache`: download, unpack, build the initramfs, try QEMU, and only then say that it is ready."""
    started = time.monotonic()
    _require_tools()
    shutil.rmtree(cache, ignore_errors=True)
    cache.mkdir(parents=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="work-") as work:
        apt = Apt(Path(work) / "apt")
        apt.update()
        kernel = apt.kernel()
        names = apt.closure((*HOST_PACKAGES, *GUEST_PACKAGES))
        files = apt.download((*names, kernel))
        _say(f"unpacking {len(files)} packages")
        for name, file in files.items():
            if name != kernel:
                _unpack(file, cache / ("guest" if name in GUEST_PACKAGES else "host"))
        _unpack(files[kernel], Path(work) / "kernel")
        num_modules = _boot_files(Path(work) / "kernel", cache)
        downloaded = sum(file.stat().st_size for file in files.values())
    version = _try_qemu(cache)
    size = sum(file.lstat().st_size for file in cache.rglob("*") if not file.is_dir())
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


class Apt:
    """apt with lists and archives of its own in `folder`, so that neither root nor an earlier `apt-get update` counts.

    The system's package status is read, because what is installed need not be fetched.
    """

    def __init__(self, folder: Path) -> None:
        self.archives = folder / "archives"
        for path in (folder / "lists" / "partial", self.archives / "partial"):
            path.mkdir(parents=True)
        self.options = (
            "-qq",
            "-o",
            f"Dir::State::lists={folder / 'lists'}",
            "-o",
            f"Dir::Cache={folder}",
            "-o",
            "APT::Sandbox::User=root",
            "-o",
            "Acquire::Languages=none",
            "-o",
            "Acquire::Retries=3",
            "-o",
            "Debug::NoLocking=1",
        )

    def update(self) -> None:
        """Fetch the package lists; a third-party source that fails is no reason to stop."""
        _say("fetching the package lists")
        self.problem = _output("apt-get", *self.options, "update", check=False).strip()

    def kernel(self) -> str:
        """Return the name of the package with the kernel itself, which the metapackage depends on."""
        listing = _output("apt-cache", *self.options, "depends", "--important", KERNEL_PACKAGE, check=False)
        match = re.search(r"Depends: (linux-image-\S+)", listing)
        if match is None:
            raise MissingError(
                f"apt knows no {KERNEL_PACKAGE}; is this Debian on x86-64, and is the network there?\n{self.problem}"
            )
        return match[1]

    def closure(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Return `names` and what they need that is not installed here."""
        plan = _output(
            "apt-get", *self.options, "install", "-s", "--reinstall", "--no-install-recommends", *names, quiet=False
        )
        found = re.findall(r"^Inst (\S+)", plan, re.MULTILINE)
        # The C library must stay the one that this machine's loader belongs to.
        return tuple(name for name in dict.fromkeys(found) if not re.match(r"(libc6|libc-bin)\b", name))

    def download(self, names: tuple[str, ...]) -> dict[str, Path]:
        """Download packages, checked against the signed lists; return name -> .deb."""
        _say(f"downloading {len(names)} packages: {' '.join(names)}")
        _output("apt-get", *self.options, "download", *names, cwd=self.archives)
        files = {file.name.partition("_")[0]: file for file in self.archives.glob("*.deb")}
        if lost := [name for name in names if name not in files]:
            raise MissingError(f"apt-get download left out {' '.join(lost)}")
        return files


def _boot_files(unpacked: Path, cache: Path) -> int:
    """Copy the kernel and build the initramfs; return how many modules went into it."""
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

    The order comes from the modules' own `depends=` lines: modules.dep is written when a kernel is installed, which
    this one is not. A module that is not a file is built into the kernel.
    """
    found = {_module_name(file): file for file in unpacked.rglob("*.ko*")}
    ordered: dict[str, bytes] = {}

    def add(name: str) -> None:
        file = found.get(name)
        if file is None or f"{name}.ko" in ordered:
            return
        data = _decompressed(file)
        match = re.search(rb"\0depends=([^\0]*)\0", data)
        for needed in match[1].decode().split(",") if match else ():
            add(needed.replace("-", "_"))
        ordered[f"{name}.ko"] = data

    for name in MODULES:
        add(name)
    if "9p.ko" not in ordered:
        raise MissingError(f"the kernel of {KERNEL_PACKAGE} has no 9p module")
    return ordered


def _module_name(file: Path) -> str:
    return file.name.partition(".ko")[0].replace("-", "_")


def _decompressed(file: Path) -> bytes:
    if file.suffix == ".ko":
        return file.read_bytes()
    if file.suffix == ".xz":
        return lzma.decompress(file.read_bytes())
    raise MissingError(f"kernel module {file.name} is compressed in a way that this script cannot read")


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
        raise MissingError("missing: " + ", ".join(missing) + "; the VM tests need Debian or a relative on x86-64")


def _unpack(package: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    _output("dpkg-deb", "-x", str(package), str(target))


def _output(tool: str, *arguments: str, cwd: Path | None = None, check: bool = True, quiet: bool = True) -> str:
    """Run a tool and return what it printed; a failure carries that text."""
    if not quiet:
        arguments = tuple(argument for argument in arguments if argument != "-qq")
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
