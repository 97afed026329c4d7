#!/usr/bin/env bash
# Fig 15 a and d: the CUB part of it (Jetson TX2, 10 h). Flags: --help.
exec "$(dirname "${BASH_SOURCE[0]}")/figure.sh" 15ad "$@"
