#!/usr/bin/env bash
# Usage: install_bench.sh BIN VENV. A second environment with TRL on top of the first one's packages.
set -euo pipefail
bin=$1 venv=$2
[ -e "$venv/.installed" ] && exit 0
"$bin/python" -m venv "$venv"
site=$("$bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "$site" > "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/evenkeel.pth"
"$venv/bin/python" -m pip install --quiet --no-deps --disable-pip-version-check -r ops/locks/bench.txt
touch "$venv/.installed"
