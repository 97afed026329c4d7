#!/usr/bin/env bash
# Fig 15 a and d, the elastic run alone. Flags: --help.
exec "$(dirname "${BASH_SOURCE[0]}")/figure.sh" 15ad_ego "$@"
