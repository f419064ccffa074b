#!/bin/sh
# Builds the kernels for aarch64 and tests them in an emulator, on a machine that is none.
#
#   native/tests/run_neon.sh [build folder]
#
# Needs cmake, aarch64-linux-gnu-g++ and qemu-aarch64 (Debian: g++-aarch64-linux-gnu, qemu-user).
set -eu
native=$(cd "$(dirname "$0")/.." && pwd)
build=${1:-$(mktemp -d)}
cmake -S "$native" -B "$build" -DCMAKE_BUILD_TYPE=Release \
    -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
    -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
    -DLORAPLEX_SELFTEST=ON -DLORAPLEX_WARNINGS_AS_ERRORS=ON
cmake --build "$build" --parallel 2 --target selftest_neon
qemu-aarch64 "$build/selftest_neon"
