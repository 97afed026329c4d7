#!/usr/bin/env bash
# A fleet of ten boards, simulated on this machine by `flwr run examples/fleet`: at most four minutes on two quiet cores
# after the installation. docs/fleet.md says more.
#
#   ./scripts/run_fleet.sh              further words go to `flwr run`
#   ./scripts/run_fleet.sh --install    only make the environment
#   ./scripts/run_fleet.sh --tests      the tests of the app, instead
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
extra_requirement=""
oldest_minor=11  # Flower's
prepare_environment .venv-fleet constraints-fleet.txt requirements-fleet.txt
[[ ${1:-} == --install ]] && exit
export PATH=$PWD/.venv-fleet/bin:$PATH PYTHONPATH=$PWD FLWR_HOME=$PWD/logs/fleet/flower
export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 TF_CPP_MIN_LOG_LEVEL=2
if [[ ${1:-} == --tests ]]; then
  exec "$python" -m pytest examples/fleet/tests "${@:2}"
fi
export FLWR_LOCAL_CONTROL_API_PORT=39193 FLWR_LOCAL_RUNTIME_API_PORT=39191  # a server of our own
mkdir -p "$FLWR_HOME"
touch "$FLWR_HOME/started"
trap 'pkill -f "flower-superlink.*$FLWR_HOME" || true' EXIT  # Flower leaves its server running
flwr run examples/fleet --stream --run-config "output='$PWD/logs/fleet'" \
  --federation-config "num-supernodes=10 client-resources-num-cpus=1 init-args-num-cpus=2" "$@"
# Flower's exit status does not say whether the run has failed.
[[ -n $(find logs/fleet -name model.keras -newer "$FLWR_HOME/started") ]] || { echo "the run has no model" >&2; exit 1; }
