#!/usr/bin/env bash
# Fig 22: peak memory of each scheme; runs of 17ac. Flags: --help.
exec "$(dirname "${BASH_SOURCE[0]}")/figure.sh" 22 "$@"
