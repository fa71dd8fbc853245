#!/usr/bin/env bash
# Usage: unpack.sh FROM TO
# FROM is a package set in pieces, DIR/NAME.tar.zst.000 …, with their checksums in DIR/NAME.sha256: DIR/NAME, or DIR where
# it holds one set only. Unpacks it into TO once; a second call returns at once.
set -euo pipefail
from=${1:?usage: unpack.sh FROM TO} to=${2:?usage: unpack.sh FROM TO}
say() { echo "unpack: $*" >&2; }
[ -e "$to/.unpacked" ] && { say "$to is there"; exit 0; }
if [ -e "$from.sha256" ]; then
    name=$(basename "$from") from=$(dirname "$from")
else
    sums=("$from"/*.sha256)
    [ -e "${sums[0]}" ] || { say "error: neither $from.sha256 nor $from/*.sha256; name the set of pieces"; exit 1; }
    [ "${#sums[@]}" = 1 ] || { say "error: ${#sums[@]} sets in $from; name one, as $from/NAME"; exit 1; }
    name=$(basename "${sums[0]}" .sha256)
fi
(cd "$from" && sha256sum --check --quiet "$name.sha256") || {
    say "error: pieces of $from/$name are damaged or missing; copy them again"; exit 1; }
mkdir -p "$to"
if command -v zstd >/dev/null; then
    cat "$from/$name".tar.zst.* | zstd -dcq --long=27 | tar -xf - -C "$to"
else
    "${PYTHON:-python3}" - "$to" "$from/$name".tar.zst.* <<'PY'
import shutil, sys, tarfile, tempfile
try:
    import pyarrow
except ImportError:
    sys.exit("unpack: error: needs zstd, or pyarrow in this Python; install one of them")
with tempfile.TemporaryFile() as whole:
    for piece in sys.argv[2:]:
        with open(piece, "rb") as file:
            shutil.copyfileobj(file, whole)
    whole.seek(0)
    with pyarrow.CompressedInputStream(pyarrow.PythonFile(whole), "zstd") as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
        archive.extractall(sys.argv[1], filter="tar")
PY
fi
touch "$to/.unpacked"
say "$to is ready"
