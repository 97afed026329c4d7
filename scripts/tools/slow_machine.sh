#!/usr/bin/env bash
# Run a command as on a slower machine: slow_machine.sh SHARE COMMAND, such as 0.25 ./scripts/run_demo.sh.
exec python3 "$(dirname "${BASH_SOURCE[0]}")/slow_machine.py" "$@"
