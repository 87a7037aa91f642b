#!/bin/sh
# ensure_libaio.sh: install the headers of libaio if root can install packages: DeepSpeed needs them
# to compile its NVMe offload. Otherwise say what is missing; only that offload needs it.
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
has_headers || echo "no libaio headers (libaio-dev, libaio-devel): no DeepSpeed offload to NVMe" >&2
