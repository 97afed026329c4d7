#!/usr/bin/env bash
# Fig 18: FLOPs of each epoch over budgets; runs of 17ac. Flags: --help.
exec "$(dirname "${BASH_SOURCE[0]}")/figure.sh" 18 "$@"
