#!/bin/bash
# docker/run.sh of llgtrt, without a container: MODEL [LORA_DIR] [flags of `loraplex compat llgtrt`].
# PORT in the environment is the port, 3000 if it is not there.
set -euo pipefail

if [ $# -lt 1 ]; then
    echo "usage: PORT=3000 $0 MODEL [LORA_DIR] [flags of loraplex compat llgtrt]" >&2
    exit 1
fi
model=$1
shift
lora=()
if [ $# -gt 0 ] && [[ $1 != -* ]]; then
    lora=(--lora-root "$1")
    shift
fi
here=$(dirname "$(readlink -f "$0")")
exec "$here/../../usr/local/bin/launch-llgtrt.sh" "$model" --port "${PORT:-3000}" "${lora[@]}" "$@"
