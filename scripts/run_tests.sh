#!/usr/bin/env bash
# Lint, type check and all tests. Makes the environment if it is missing.
#
#   ./scripts/run_tests.sh                          newest supported versions (constraints.txt), in .venv
#   ./scripts/run_tests.sh --tensorflow 2.16.2      only the tests, with that TensorFlow, in .venv-tensorflow-2.16.2
#   ./scripts/run_tests.sh -k solver                further words are passed to pytest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

if [[ ${1:-} == --tensorflow ]]; then
  version=${2:?--tensorflow needs a version, such as 2.16.2}
  shift 2
  extra_requirement="tensorflow==$version"
  constraints=""  # only the two ends of the range are pinned
  [[ $version == 2.16.* ]] && constraints=constraints-oldest.txt
  if [[ $version == 2.1[6-9].* ]]; then
    newest_minor=12
    extra_requirement+=" tensorflow-metadata<1.18 setuptools<82"  # which it needs without saying so (docs/devices.md)
  fi
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
