#!/usr/bin/env bash
# Fig 15: accuracy and test loss over time, ResNet50 on three data sets (the paper's: Jetson TX2, 33 h). Flags: --help.
exec "$(dirname "${BASH_SOURCE[0]}")/figure.sh" 15 "$@"
