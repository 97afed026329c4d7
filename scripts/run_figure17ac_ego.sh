#!/usr/bin/env bash
# Fig 17 a and c, the elastic runs alone. Flags: --help.
exec "$(dirname "${BASH_SOURCE[0]}")/figure.sh" 17ac_ego "$@"
