#!/usr/bin/env bash
# Fig 13: the solver's subproblems, and training time and overhead over T_q. Flags: --help.
exec "$(dirname "${BASH_SOURCE[0]}")/figure.sh" 13 "$@"
