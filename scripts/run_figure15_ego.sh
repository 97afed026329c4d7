#!/usr/bin/env bash
# Fig 15, the elastic runs alone. Flags: --help.
exec "$(dirname "${BASH_SOURCE[0]}")/figure.sh" 15_ego "$@"
