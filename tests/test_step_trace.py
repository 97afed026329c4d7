"""One training step of `main.py` is a short way through few files and objects, counted by a trace of it.

The step neither selects nor validates, lies between two ticks of the clock, and starts from cached features. Counted
are, of our own code:

    frames    on the stack from `main.main` to the call of TensorFlow's function that trains
    files     of these frames, and of all functions that run from the end of the step before to the end of this one
    kinds     of our objects that such a function has as `self`, argument or local variable
"""

import sys
from pathlib import Path

import zoo
from command_line import ROOT
from small_images import write_noise

import main
from elastic_trainer.runs import trainer

BEFORE = 4  # steps: an epoch has 3, so all features are made, and no validation follows
MAX_FRAMES, MAX_FILES, MAX_KINDS = 6, 12, 15
OURS = {path for path in ROOT.iterdir() if path.suffix == ".py"}, ROOT / "elastic_trainer"


class StepTrace:
    """Is called by Python at each call and return (`sys.setprofile`)."""

    def __init__(self):
        self.steps, self.frames, self.files, self.objects = 0, [], set(), {}

    def __call__(self, frame, event, argument):
        if self.steps == BEFORE and event in ("call", "return"):
            if is_ours(frame):
                self.files.add(frame.f_code.co_filename)
                for value in frame.f_locals.values():
                    if type(value).__module__.startswith("elastic_trainer."):
                        self.objects[id(value)] = value  # kept alive, so that no other object gets its address
            elif not self.frames and frame.f_code.co_filename.endswith("polymorphic_function/concrete_function.py"):
                self.frames = our_frames(frame)
        self.steps += event == "return" and name_of(frame) == "engine.step"


def is_ours(frame):
    files, package = OURS
    path = Path(frame.f_code.co_filename)
    return path in files or path.is_relative_to(package)


def name_of(frame):
    return f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}"


def our_frames(frame):
    """Those on the stack, the innermost first."""
    found = []
    while frame is not None:
        found += [frame] if is_ours(frame) else []
        frame = frame.f_back
    return found


def traced_run(folder, monkeypatch):
    """Elastic training by `main.main`."""
    words = ["--dataset_name", "image_folder", "--data_dir", write_noise(folder / "photos"), "--preset", "paper"]
    words += ["--feature_cache", "float32", "--deterministic"]
    words += ["--model_name", f"{Path(zoo.__file__)}:branches", "--input_size", 12, "--batch_size", 4]
    words += ["--train_type", "elastic_training", "--rho", 0.6, "--num_epochs", 4, "--interval", 4]
    monkeypatch.setattr(sys, "argv", ["main.py", *map(str, [*words, "--logdir", folder, "--run_name", "traced"])])
    monkeypatch.setattr(trainer, "TICK_SECONDS", 1e9)
    trace = StepTrace()
    sys.setprofile(trace)
    try:
        main.main()
    finally:
        sys.setprofile(None)
    return trace


def test_one_step_takes_few_frames_files_and_kinds_of_object(tmp_path, monkeypatch):
    trace = traced_run(tmp_path, monkeypatch)
    names = [name_of(frame) for frame in trace.frames]
    assert names[-1] == "main.main" and "engine.step" in names and trace.steps == 12
    files = sorted({Path(name).name for name in trace.files} | {Path(f.f_code.co_filename).name for f in trace.frames})
    kinds = sorted({type(each).__name__ for each in trace.objects.values()})
    assert len(names) <= MAX_FRAMES, names
    assert len(files) <= MAX_FILES, files
    assert len(kinds) <= MAX_KINDS, kinds
