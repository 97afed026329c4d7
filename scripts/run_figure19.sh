#!/usr/bin/env bash
# Fig 19: accuracy and training time of four networks on CUB (Jetson TX2 20 h, Raspberry Pi 310 h). Flags: --help.
exec "$(dirname "${BASH_SOURCE[0]}")/figure.sh" 19 "$@"
