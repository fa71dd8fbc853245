#!/usr/bin/env bash
# Usage: install.sh PYTHON VENV LOCK. One virtual environment from a complete lock file.
# --no-deps: the lock names every package; SGLang's own list would pull gigabytes of CUDA-only ones.
# Three pip processes share the work, since unpacking and not the network is the slow part.
# Triton, for tests of kernels, lies in VENV/triton and not on the path: SGLang would find it, and take it for a GPU's.
set -euo pipefail
python=$1 venv=$2 lock=$3
command -v "$python" >/dev/null || { echo "error: $python not found; install Python 3.11 or run make PYTHON=..." >&2; exit 1; }
"$python" - <<'PY' || { echo "error: need Python 3.11 or 3.12, got $("$python" --version)" >&2; exit 1; }
import sys
sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))
PY
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
echo "installing $(grep -c == "$lock") pinned packages into $venv"
heavy='^(torch|sglang|sglang-router|triton|transformers|scipy|xgrammar|sympy)=='
pip=("$venv/bin/python" -m pip install --quiet --no-deps --disable-pip-version-check)
grep -E "$heavy" "$lock" | "${pip[@]}" -r /dev/stdin &
first=$!
"${pip[@]}" --upgrade --target "$venv/triton" -r ops/locks/triton.txt &
second=$!
grep -Ev "$heavy" "$lock" | "${pip[@]}" -r /dev/stdin
wait "$first"
wait "$second"
"${pip[@]}" --no-build-isolation --editable .
echo "ready: $venv; for the command evenkeel: source $venv/bin/activate"
