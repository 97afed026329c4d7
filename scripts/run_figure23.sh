#!/usr/bin/env bash
# Fig 23: energy of each scheme; runs of 17ac. Flags: --help.
exec "$(dirname "${BASH_SOURCE[0]}")/figure.sh" 23 "$@"
