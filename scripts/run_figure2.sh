#!/usr/bin/env bash
# Fig 2: accuracy after 3 epochs and step time against how many of the last layers train. Flags: --help.
exec "$(dirname "${BASH_SOURCE[0]}")/figure.sh" 2 "$@"
