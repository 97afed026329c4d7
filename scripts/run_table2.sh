#!/usr/bin/env bash
# Table 2: time to accuracy over the best baseline; runs of Fig 15. Flags: --help.
exec "$(dirname "${BASH_SOURCE[0]}")/figure.sh" table2 "$@"
