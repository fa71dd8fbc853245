#!/usr/bin/env bash
# Usage: install_learner.sh VENV. The learner's environment for GPUs by its exact lists, as far as a CPU can use it: without
# Transformer Engine, whose extension for torch is compiled, and without what torch loads on GPUs alone.
set -euo pipefail
venv=$1
[ -e "$venv/.installed" ] && exit 0
python=$(PYENV_VERSION=3.12 python3.12 -c 'import sys; print(sys.executable)' 2>/dev/null) ||
    { echo "this machine has no Python 3.12: nothing trains with the learner's packages for GPUs"; exit 0; }
pip() { "$venv/bin/python" -m pip install --quiet --no-deps --disable-pip-version-check "$@"; }

"$python" -m venv "$venv"
only_gpu='^(transformer-engine|triton|onnx|ml-dtypes|protobuf|cuda-|nvidia-(cusolver|cuda-nvrtc|nvtx))'
grep -E '^nvidia-' ops/locks/learner-gpu.txt | grep -vE "$only_gpu" >"$venv/libraries.txt"
grep -hvE "$only_gpu|^nvidia-" ops/locks/learner.txt ops/locks/learner-gpu.txt >"$venv/packages.txt"
pip -r "$venv/libraries.txt" & libraries=$!  # two at a time: unpacking is half of the work
pip -r "$venv/packages.txt"
wait "$libraries"
pip --no-build-isolation --editable .
touch "$venv/.installed"
