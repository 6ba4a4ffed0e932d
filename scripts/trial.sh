#!/bin/sh
# Install the wheel in dist/ into a new environment, and run those tests of the sdist that depend most on torch there:
# trial.sh none|newest|VERSION, such as 2.9. $PYTHON chooses the Python. A torch that pip cannot install is no failure.
set -eu
cd "$(dirname "$0")/.."
torch=$1
wheel=$(ls "$PWD"/dist/*_"$(uname -m)".whl)
folder=$PWD/.cache/trial-$torch
rm -rf "$folder"
mkdir -p "$folder/source"
trap 'rm -rf "$folder"' EXIT

# Without the package beside them, the tests can only import the installed one.
tar -xf dist/numapin-*.tar.gz --strip-components=1 -C "$folder/source"
rm -r "$folder/source/numapin"
grep -v '^torch==' constraints.txt >"$folder/constraints.txt"

"${PYTHON:-python3}" -m venv "$folder/env"
PATH=$folder/env/bin:$PATH
install() {
    python -m pip install --quiet --disable-pip-version-check --constraint "$folder/constraints.txt" "$@"
}
if [ "$torch" = none ]; then
    install "$wheel" hypothesis pytest pytest-timeout pytest-xdist
    tests=tests/integration/test_without_torch.py
else
    wanted=torch
    [ "$torch" = newest ] || wanted="torch==$torch.*"
    install --no-compile --only-binary torch "$wanted" || {
        echo "not tried: pip cannot install $wanted"
        exit 0
    }
    install "${wheel}[test]"
    tests="tests/contract/test_surface.py tests/contract/test_errors.py
        tests/contract/test_cast.py tests/unit/data tests/unit/test_public_api.py tests/unit/launcher/test_direct.py
        tests/unit/launcher/test_hosts.py tests/unit/launcher/test_installed_torch.py
        tests/unit/launcher/test_options.py tests/unit/launcher/test_store.py"
    python -c 'import torch; print("torch", torch.__version__)'
fi
cd "$folder/source"
# shellcheck disable=SC2086 # several files on purpose
timeout 1200 sh scripts/test.sh python -q --tb=short --numprocesses=2 --dist=loadgroup -m "not alone" $tests
