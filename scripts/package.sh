#!/bin/sh
# Build an sdist and three wheels into dist/, and check them: package.sh BIN, the programs of packaging/release-tools.txt.
set -eu
cd "$(dirname "$0")/.."
bin=$PWD/$1
rm -rf dist
source=$(mktemp -d)
trap 'rm -rf "$source"' EXIT

"$bin/python" -m build --no-isolation --sdist --outdir dist .
tar -xf dist/numapin-*.tar.gz --strip-components=1 -C "$source"
for kind in x86_64 aarch64 pure; do # made from the sdist, which is so known to have what a build needs
    NUMAPIN_WHEEL=$kind "$bin/python" -m build --no-isolation --wheel --outdir dist "$source"
done

"$bin/python" -m twine check --strict dist/*
for machine in x86_64 aarch64; do
    "$bin/auditwheel" show dist/*_"$machine".whl | tr '\n' ' ' | grep -q "platform tag: \"manylinux_2_17_$machine\"" || {
        echo "the wheel for $machine is not a manylinux_2_17 one:" >&2
        "$bin/auditwheel" show dist/*_"$machine".whl >&2
        exit 1
    }
done
"$bin/zizmor" --offline --quiet --min-severity low .github/workflows
ls -l dist
