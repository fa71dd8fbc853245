#!/usr/bin/env bash
# Usage: install_learner.sh PYTHON VENV. The learner's environment for GPUs, by its exact list, as far as a CPU can use it:
# without Transformer Engine, whose extension for torch is compiled, and without what torch loads on GPUs alone.
set -euo pipefail
python=$1 venv=$2
[ -e "$venv/.installed" ] && exit 0
"$python" -m venv "$venv"
only_gpu='^(transformer-engine|triton|onnx|ml-dtypes|protobuf|cuda-|nvidia-(cusolver|cuda-nvrtc|nvtx))'
grep -hvE "$only_gpu" ops/locks/learner.txt ops/locks/learner-gpu.txt > "$venv/lock.txt"
"$venv/bin/python" -m pip install --quiet --no-deps --disable-pip-version-check -r "$venv/lock.txt"
"$venv/bin/python" -m pip install --quiet --no-deps --disable-pip-version-check --no-build-isolation --editable .
touch "$venv/.installed"
