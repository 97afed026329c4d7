#!/usr/bin/env bash
# Fig 17 b and d: training FLOPs over budgets; the runs of 17ac. Flags: --help.
exec "$(dirname "${BASH_SOURCE[0]}")/figure.sh" 17bd "$@"
