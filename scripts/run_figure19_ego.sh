#!/usr/bin/env bash
# Fig 19, the elastic runs alone. Flags: --help.
exec "$(dirname "${BASH_SOURCE[0]}")/figure.sh" 19_ego "$@"
