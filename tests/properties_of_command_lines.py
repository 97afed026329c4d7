"""A property of command lines, see `properties.py`."""

from __future__ import annotations

import itertools
import json

from hypothesis import strategies as st
from properties import one_line, property_of

import data
from elastic_trainer.cli.commands import NAMES, parse_main, parse_profiler
from elastic_trainer.settings import MAIN_FLAGS, PROFILER_FLAGS, Settings

_NAMES = sorted({*MAIN_FLAGS, *PROFILER_FLAGS})
_CHOICES = sorted({one for names in NAMES.values() for one in names})
_WORDS = [
    *("", "-", "--", "=", "0", "-1", "1", "4", "10", "0.5", "1e400", "nan", "inf", "1e-320", "True", "False", "none"),
    *("5m", "1h 30m", "0s", "1e9d", "2G", "80%", "-5%", "1e30M", "imagenet", "digits", "image_folder", "sgd", "adam"),
    *(
        "/",
        ".",
        "..",
        "~",
        "/dev/null",
        "/proc/self/mem",
        "a\0b",
        "a\nb",
        "x" * 300,
        "\udcff",
        "é",
        "🐀",
        "--rho",
        "@x",
    ),
    *("no/such.keras", "no/such.py:f", f"{__file__}:f", f"{__file__}:", __file__, "1" * 400, "0x10", "1_0", "٣"),
    *("prepare", "mobilenetv2", "resnet50", "vit", "logs", "None", "./-photos", "my photos", "photos"),
]
VALUES = st.one_of(
    *(st.sampled_from(_WORDS), st.sampled_from(_CHOICES), st.text()), st.integers().map(str), st.floats().map(str)
)
_FLAGS = st.sampled_from(_NAMES).map(lambda name: f"--{name}")
_PIECES = st.one_of(
    st.tuples(_FLAGS, VALUES).map(list),
    st.tuples(_FLAGS, VALUES).map(lambda pair: ["=".join(pair)]),
    _FLAGS.map(lambda flag: [flag]),
    VALUES.map(lambda value: [value]),
)
_PARSERS = {
    "main.py": parse_main,
    "profiler.py": parse_profiler,
    "data.py": data.parse,
}


@property_of(
    st.sampled_from(sorted(_PARSERS)),
    st.sampled_from([[], ["prepare"]]),
    st.lists(_PIECES, max_size=6),
)
def any_command_line_is_parsed_or_refused_in_a_line(script: str, start: list[str], pieces: list[list[str]]) -> None:
    with one_line():
        try:
            command = _PARSERS[script]([*start, *itertools.chain(*pieces)])
        except SystemExit as stopped:  # --help
            assert stopped.code == 0 and any("--help".startswith(one) or one == "-h" for [one, *_] in pieces)
            return
        if isinstance(command, Settings):
            json.dumps(command.to_record())
