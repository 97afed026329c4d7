#!/usr/bin/env bash
# Fig 21: which tensors train in which epoch. Flags: --help.
exec "$(dirname "${BASH_SOURCE[0]}")/figure.sh" 21 "$@"
