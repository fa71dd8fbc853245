#!/usr/bin/env bash
# Usage: wheels.sh OUT [NAME==VERSION ...]
# Downloads wheels.txt, and what else is named, as wheels for Python 3.12 on x86-64 Linux; prints sizes. Run it where a
# package index is; OUT is what check.sh takes as --wheels on the machine without a network.
set -euo pipefail
out=${1:?usage: wheels.sh OUT [NAME==VERSION ...]}; shift
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
platforms=()
for tag in manylinux_2_28 manylinux_2_27 manylinux_2_24 manylinux_2_17 manylinux2014 manylinux1; do
    platforms+=(--platform "${tag}_x86_64")
done
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 \
    --implementation cp "${platforms[@]}" -d "$out" -r "$here/wheels.txt" "$@"
du -ch "$out"/*.whl
