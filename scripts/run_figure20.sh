#!/usr/bin/env bash
# Fig 20: accuracy by the importance that tensors are selected by. Flags: --help.
exec "$(dirname "${BASH_SOURCE[0]}")/figure.sh" 20 "$@"
