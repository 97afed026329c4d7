#!/usr/bin/env bash
# Table 1: seconds of profiling over those of an epoch, four networks. Flags: --help.
exec "$(dirname "${BASH_SOURCE[0]}")/figure.sh" table1 "$@"
