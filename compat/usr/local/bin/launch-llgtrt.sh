#!/bin/bash
# launch-llgtrt.sh of llgtrt: MODEL [flags of `loraplex compat llgtrt`].
set -euo pipefail

if [ $# -lt 1 ]; then
    echo "usage: $0 MODEL [flags of loraplex compat llgtrt]" >&2
    exit 1
fi
model=$1
shift
exec python3 -P -m loraplex compat llgtrt --engine "$model" "$@"
