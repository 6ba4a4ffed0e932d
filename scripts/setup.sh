#!/bin/sh
# Create the virtual environment that the Makefile uses: setup.sh FOLDER
# As root on Debian, install libnuma1, Python's venv module and a C compiler if missing; else print how to get them.
set -eu
venv=$1
python=${PYTHON:-python3}

packages=""
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || {
    echo "numapin needs Python 3.11 or newer; found: $("$python" --version 2>&1 || echo none)" >&2
    echo "  set PYTHON=/path/to/python3.11 and try again" >&2
    exit 1
}
"$python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null || packages="$packages libnuma1"
"$python" -c 'import ensurepip, venv' 2>/dev/null || packages="$packages python3-venv"
command -v cc >/dev/null || command -v gcc >/dev/null || {
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        packages="$packages gcc libc6-dev"
    else
        echo "no C compiler found: numapin will work, but move large batches more slowly" >&2
    fi
}

if [ -n "$packages" ]; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "installing$packages"
        # shellcheck disable=SC2086 # several words on purpose
        apt-get install -y -q -o DPkg::Lock::Timeout=600 $packages >/dev/null 2>&1 || {
            apt-get update -q
            apt-get install -y -q -o DPkg::Lock::Timeout=600 $packages
        }
    else
        echo "missing:$packages" >&2
        echo "  as root: apt-get install$packages   (Fedora: dnf install numactl-libs python3)" >&2
        exit 1
    fi
fi

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
echo "installing torch and what the tests need into $venv: a few minutes"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
