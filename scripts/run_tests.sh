#!/usr/bin/env bash
# Lint, type check and all tests. Makes the environment if it is missing.
#
#   ./scripts/run_tests.sh                          newest supported versions (constraints.txt), in .venv
#   ./scripts/run_tests.sh --tensorflow 2.20.0      only the tests, with that TensorFlow, in .venv-tensorflow-2.20.0
#   ./scripts/run_tests.sh -k solver                further words are passed to pytest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

if [[ ${1:-} == --tensorflow ]]; then
  version=${2:?--tensorflow needs a version, such as 2.20.0}
  shift 2
  extra_requirement="tensorflow==$version"
  constraints=""  # only the two ends of the range are pinned
  [[ $version == 2.20.* ]] && constraints=constraints-oldest.txt
  prepare_environment ".venv-tensorflow-$version" "$constraints" requirements.txt requirements-dev.txt
  "$python" -c 'import importlib.metadata as m; print("TensorFlow", m.version("tensorflow"), "Keras", m.version("keras"))'
else
  extra_requirement=""
  prepare_environment .venv constraints.txt requirements.txt requirements-dev.txt
  "$python" -m ruff check .
  "$python" -m ruff format --check .
  "$python" -m mypy
fi
# Two tests at a time: most of the time is spent tracing graphs, which uses one core.
exec "$python" -m pytest -n 2 --dist worksteal "$@"
