#!/usr/bin/env bash
# Fig 7: similarity of importance, and what measuring it costs, over interval and batch size. Flags: --help.
exec "$(dirname "${BASH_SOURCE[0]}")/figure.sh" 7 "$@"
