#!/usr/bin/env bash
# Fig 16: accuracy and test loss over time, CUB and Pet (the paper's: Raspberry Pi 4B, 221 h). Flags: --help.
exec "$(dirname "${BASH_SOURCE[0]}")/figure.sh" 16 "$@"
