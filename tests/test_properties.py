"""The properties of `properties.py`, each on a few inputs; `scripts/benchmarks/fuzz.py` tries many."""

import properties_of_command_lines  # noqa: F401  # enters its properties
import properties_of_files  # noqa: F401  # enters its properties
import properties_of_training  # noqa: F401  # enters its properties
import pytest
from properties import PROPERTIES, SLOW, attempt


@pytest.mark.parametrize("name", PROPERTIES)
def test_it_holds(name):
    attempt(name, examples=2 if name in SLOW else 25)
