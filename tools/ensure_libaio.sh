#!/bin/sh
# ensure_libaio.sh: where root may install packages, install the headers of libaio, which DeepSpeed
# needs to compile its NVMe offload. Elsewhere say what is missing; nothing but that offload needs it.
set -eu
has_headers() {
    printf '#include <libaio.h>\n' | "${CXX:-c++}" -E -x c++ - >/dev/null 2>&1
}
if has_headers; then
    exit 0
fi
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    (apt-get update -q && apt-get install -y -q libaio-dev) >/dev/null 2>&1 || true
elif [ "$(id -u)" = 0 ] && command -v dnf >/dev/null 2>&1; then
    dnf install -y -q libaio-devel >/dev/null 2>&1 || true
fi
has_headers || echo "no libaio headers (libaio-dev, libaio-devel): no offload to NVMe by DeepSpeed" >&2
