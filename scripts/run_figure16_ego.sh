#!/usr/bin/env bash
# Fig 16, the elastic runs alone. Flags: --help.
exec "$(dirname "${BASH_SOURCE[0]}")/figure.sh" 16_ego "$@"
