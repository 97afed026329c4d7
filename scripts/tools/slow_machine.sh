#!/usr/bin/env bash
# Run a command, and all that it starts, with a share of the processors; LOAD keeps all of them busy from time to time.
#
#     scripts/tools/slow_machine.sh 0.25 ./scripts/run_demo.sh
#     LOAD="20 40" scripts/tools/slow_machine.sh 0.25 ./scripts/run_demo.sh    # others are busy for 20 s of every 40
#
# The kernel limits it by a control group (v1 or v2), which mostly needs root.
set -euo pipefail

fail() {
    echo "slow_machine.sh: error: $1" >&2
    exit 2
}

share=${1-}
[[ $share =~ ^(0?\.[0-9]*[1-9]|1)$ ]] || fail "SHARE: '$share' must be a share of the processors, such as 0.25"
shift
command -v "${1-}" > /dev/null || fail "COMMAND: there is no program '${1-}'"
quota=$(awk "BEGIN { printf \"%d\", $share * $(nproc) * 100000 }")
groups=/sys/fs/cgroup limit="cpu.max" text="$quota 100000"
[[ -d $groups/cpu ]] && groups=$groups/cpu limit="cpu.cfs_quota_us" text=$quota
group=$groups/slow_machine_$$
rmdir "$groups"/slow_machine_* 2> /dev/null || true # of commands that have ended
{ mkdir "$group" && echo "$text" > "$group/$limit"; } 2> /dev/null || fail "SHARE: no control group here; run it as root"
if [[ -n ${LOAD-} ]]; then
    read -r busy every <<< "$LOAD"
    while kill -0 $$ 2> /dev/null; do
        for _ in $(seq "$(nproc)"); do timeout "$busy" sh -c 'while :; do :; done' & done
        sleep "$every"
    done > /dev/null 2>&1 &
fi
echo $$ > "$group/cgroup.procs" # all that this process starts from now on is in it, too
exec "$@"
