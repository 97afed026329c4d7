#!/usr/bin/env bash
# Fig 17 a and c: accuracy and training time over budgets (Jetson TX2 15 h, Raspberry Pi 190 h). Flags: --help.
exec "$(dirname "${BASH_SOURCE[0]}")/figure.sh" 17ac "$@"
