#!/usr/bin/env bash
# Measures on one GPU what the goals ask for: JSON, a table and a log in --out. A call takes 420 s at most; two do all.
#
#   check.sh                                         on a machine with learner and rollout images installed
#   check.sh --te DIR --sglang DIR --wheels DIR      on one without a network (see README.md beside this file)
#
#   --te DIR       Transformer Engine and Megatron-Core: unpacked, or packed in
#                  DIR/NAME.tar.zst.* with DIR/NAME.sha256 (then say --te DIR/NAME)
#   --sglang DIR   SGLang and what it alone needs, likewise; never on the learner's path
#   --wheels DIR   what wheels.sh downloaded
#   --python EXE   Python 3.12 with torch (default python3)
#   --home DIR     where packs are unpacked and wheels installed (default /tmp/evenkeel-gpu)
#   --out DIR      default ops/measurements
# All else goes to `python -m tests.gpu`: --only NAME ..., --deadline-s N, --rehearse.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
te= sglang= wheels= python=python3 home=/tmp/evenkeel-gpu out=$root/ops/measurements rest=()
fail() { echo "error: $*" >&2; exit 1; }
while [ $# -gt 0 ]; do
    case $1 in
        --te | --sglang | --wheels | --python | --home | --out)
            [ $# -gt 1 ] || fail "$1 needs a value"
            printf -v "${1#--}" %s "$2"; shift 2 ;;
        -h | --help) sed -n '2,/^set /p' "$0" | sed '$d; s/^# \{0,1\}//'; exit 0 ;;
        *) rest+=("$1"); shift ;;
    esac
done
mkdir -p "$home" "$out"

# A folder as it can stand on a path: unpacked here where it is packed.
ready() {  # NAME DIR MODULE
    if [ -d "$2/$3" ]; then (cd "$2" && pwd); return; fi
    PYTHON=$python "$root/ops/gpu/unpack.sh" "$2" "$home/$1" || exit 1
    [ -d "$home/$1/$3" ] || fail "--$1 $2 holds no $3"
    echo "$home/$1"
}

command -v "$python" >/dev/null || fail "$python not found; name a Python with torch by --python"
python=$(command -v "$python")
learner=$root
if [ -n "$te" ]; then te=$(ready te "$te" megatron) && learner+=:$te; fi
if [ -n "$wheels" ]; then
    [ -d "$wheels" ] || fail "--wheels $wheels is not a folder"
    [ -e "$home/site/.installed" ] || "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps \
        --no-compile --upgrade --target "$home/site" "$wheels"/*.whl || fail "cannot install the wheels of $wheels"
    touch "$home/site/.installed"
    learner+=:$home/site
fi
export PYTHONPATH=$learner${PYTHONPATH:+:$PYTHONPATH}
if [ -n "$sglang" ]; then
    sglang=$(ready sglang "$sglang" sglang)
    # The engines' interpreter: the same Python with another path, for SGLang wants other versions than the learner.
    printf '#!/bin/sh\nPYTHONPATH=%s exec %s "$@"\n' "'$sglang:$root'" "'$python'" > "$home/rollout-python"
    chmod +x "$home/rollout-python"
    export EVENKEEL_ROLLOUT_PYTHON=$home/rollout-python
fi
"$python" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' ||
    fail "$python is not Python 3.11 or 3.12; name one by --python"
cd "$root"
exec "$python" -m tests.gpu --out "$out" "${rest[@]}"
