"""One run on a board: where it is, what is best so far, and what it writes. Part of board_train.py."""

import json
import math
import time
from contextlib import suppress
from typing import Any, Dict  # Python 3.6

import board_device as device
import numpy as np
from board_head import average_head, fit, set_head
from board_memory import peak_memory_mb


class Run:
    """One run: where it is, its history, its best weights. The checkpoint holds all of it.

    `finishing` are the seconds that writing the results takes, by what the last checkpoint took. The model that is best
    so far is on the disk from before the first step on.
    """

    def __init__(self, record, output, args, network, examples):
        given = {name: getattr(args, name) for name in ("num_epochs", "learning_rate") if getattr(args, name)}
        self.recipe, self.deadline, self.saved = {**record["recipe"], **given}, args.deadline, time.monotonic()
        self.record, self.output, self.path, self.network = record, output, output / "checkpoint.npz", network
        self.key = json.loads(json.dumps([record["id"], examples.fingerprint, self.recipe]))
        self.examples, self.batch = examples, self.recipe["batch_size"]
        self.best, self.finishing = {}, None
        self.epoch_steps = len(examples.train) // self.batch
        if not self.epoch_steps:
            device.fail(
                f"--data_dir: has {len(examples.train)} photos to train on, and a step takes {self.batch}; add some"
            )
        self.planned = self.epoch_steps * self.recipe["num_epochs"]
        self.state: Dict[str, Any] = {"step": 0, "steps": self.planned, "seconds": 0.0, "validation": [], "epochs": []}
        # Seconds of the last fit; whether only results are left; of the best weights; before training.
        self.state.update(sums=[0.0, 0.0], fitting=0.0, ended=False, best=None, start=None)

    def save(self):
        start = time.monotonic()
        arrays = {f"now/{name}": value for name, value in self.network.call("state").items()}
        arrays.update({f"best/{name}": value for name, value in self.best.items()})
        text = np.frombuffer(json.dumps({"key": self.key, "state": self.state}).encode(), np.uint8)
        device.replace_file(self.path, lambda file: np.savez(file, about=text, **arrays))
        self.saved = time.monotonic()
        # Another such file, half of it as weights, and the network.
        model_bytes = 0 if self.record["offsets"] is None else (device.HERE / "inference.tflite").stat().st_size
        self.finishing = (self.saved - start) * (2 + model_bytes / self.path.stat().st_size)

    def resume(self):
        """Continue from the checkpoint; from its end if only the results are left to write.

        Else all steps are planned again: a deadline counts from the start of this program, and an epoch that the last
        one cut short goes on.
        """
        about, arrays = read_checkpoint(self.path)
        if about["key"] != self.key:
            device.fail(f"--resume: {self.path} is of other photos, another export or other flags; give the same")
        state = self.state = about["state"]
        self.network.call("load", **{name[4:]: value for name, value in arrays.items() if name.startswith("now/")})
        self.best = {name[5:]: value for name, value in arrays.items() if name.startswith("best/")}
        results = self.output / "result.json"
        if state["ended"] and not results.exists():
            return
        state["steps"], state["ended"] = self.planned, False
        steps = state["step"] - self.epoch_steps * (len(state["epochs"]) - 1)
        if 0 < steps < self.epoch_steps:
            row = state["epochs"].pop()
            state["sums"] = [steps * row["train_loss"], steps * row["train_accuracy"]]
        self.save()
        device.remove(results)

    def rate(self):
        """A linear rise over a share of the planned steps, then half a cosine to 0."""
        step, peak, rise = self.state["step"], self.recipe["learning_rate"], round(self.recipe["warmup"] * self.planned)
        rise = max(min(rise, self.planned - 1), 0)
        done = min((step - rise) / max(self.state["steps"] - rise, 1), 1)
        return peak * (step + 1) / rise if step < rise else peak * 0.5 * (1 + math.cos(math.pi * done))

    def fit_head(self, has_time):
        """See `board_head.fit`; None if sums of the features are not finite, too."""
        if self.record["head"] is None:
            return None
        start, found = time.monotonic(), None
        with suppress(np.linalg.LinAlgError):
            found = fit(self.network, self.examples, self.record["head"], has_time)
        self.state["fitting"] = time.monotonic() - start
        return found

    def start(self):
        """Write a model before the first step: with the head in closed form if that is better. Training itself starts
        from the head of the export, as `main.py` does it. Takes at most half of the time that is left."""
        exported, until = self.network.call("state"), time.monotonic() + self.time_left() / 2

        def has_time():
            return time.monotonic() < until

        found = self.fit_head(has_time) if self.recipe["starts_with_head"] else None
        is_better = found is not None and bool(found[1])
        if found and is_better:
            set_head(self.network, self.record["head"], exported, found[0])
        loss, accuracy, tested = self.network.validate(self.examples, self.examples.test, has_time)
        self.state["start"] = {"test_loss": loss, "test_accuracy": accuracy, "is_closed_form": is_better}
        self.keep_best(accuracy, tested)
        self.network.call("load", **exported)
        head = "head in closed form" if is_better else "as exported"
        device.say(f"before training ({head}): test accuracy {accuracy:.3f}; {self.output} has this model")

    def keep_best(self, accuracy, tested):
        """Keep and write the weights that the network has if they are the best so far."""
        if self.state["best"] is None or accuracy > self.state["best"]["accuracy"]:
            self.state["best"] = {"accuracy": accuracy, "tested": tested}
            self.best = {name: value for name, value in self.network.call("state").items() if "weights" in name}
            self.write_model()

    def write_model(self):
        """Write the weights that the network has, which are the best, and the file for inference with them."""
        record, best = self.record, self.best
        device.replace_file(self.output / "weights.npz", lambda file: np.savez(file, id=np.array(record["id"]), **best))
        if record["offsets"] is not None:
            content, arrays = bytearray((device.HERE / "inference.tflite").read_bytes()), self.network.call("fill")
            for index, offset in enumerate(record["offsets"]):
                encoded = arrays[f"array_{index}"].tobytes()
                content[offset : offset + len(encoded)] = encoded
            device.replace_file(self.output / "model.tflite", lambda file: file.write(content))

    def train(self):
        state, seed = self.state, self.recipe["seed"]
        if state["start"] is None and not device.caught:
            self.start()
        while not device.caught:
            done = len(state["epochs"]) * self.epoch_steps
            if done < state["step"] and (state["step"] % self.epoch_steps == 0 or state["step"] >= state["steps"]):
                self.end_epoch()  # also of a run that was interrupted when only this was left
            if state["step"] >= state["steps"]:
                return
            epoch, first = divmod(state["step"], self.epoch_steps)
            order = np.random.default_rng([seed, epoch]).permutation(len(self.examples.train))
            views = np.random.default_rng([seed, epoch, 1]).integers(self.examples.views, size=len(order))
            for start in range(first * self.batch, self.epoch_steps * self.batch, self.batch):
                rows = order[start : start + self.batch]
                self.step(self.examples.train[rows], views[rows], [seed, state["step"]])
                if device.caught or state["step"] >= state["steps"]:
                    break
        self.save()
        device.stop(f"after step {state['step']}")

    def step(self, rows, views, seed):
        state, start, size = self.state, time.monotonic(), self.network.part
        places = (slice(first, first + size) for first in range(0, len(rows), size))
        read, labels = self.examples.read, self.examples.labels
        parts = ((read(rows[one], views[one]), labels[rows[one]], 1 / len(rows)) for one in places)
        found = self.network.step(parts, self.rate(), seed)
        if not math.isfinite(found[0]):
            device.fail(f"the loss is {found[0]} at step {state['step']}; start again with a smaller --learning_rate")
        state["step"], state["sums"] = state["step"] + 1, (found + state["sums"]).tolist()
        state["seconds"] += time.monotonic() - start
        done, step_s = (state["step"] - 1) % self.epoch_steps + 1, state["seconds"] / state["step"]
        if self.deadline:
            if self.finishing is None:
                self.save()  # which shows how fast the disk is
            testing = max(state["validation"], default=len(self.examples.test) / self.batch * step_s)
            testing *= 1 + len(self.examples.held_out) / len(self.examples.test)
            spare = self.time_left() - testing - state["fitting"] * self.recipe["average_head"]
            possible = max(int(spare / step_s) - 1, 0)  # one for what takes longer than usual
            state["steps"] = min(self.planned, state["step"] + possible)
        loss, accuracy = (total / done for total in state["sums"])
        device.show(
            f"epoch {len(state['epochs']) + 1} of {self.recipe['num_epochs']}, step {done} of {self.epoch_steps}: "
            f"loss {loss:.3f}, accuracy {accuracy:.1%}, {1e3 * step_s:.1f} ms a step, "
            f"{(state['steps'] - state['step']) * step_s:.0f} s left"
        )
        if time.monotonic() - self.saved > device.CHECKPOINT_SECONDS:
            self.save()

    def time_left(self):
        """Seconds until the results must be written."""
        return device.left(self.deadline) - (self.finishing or 0)

    def has_time(self):
        return self.time_left() > 0

    def end_epoch(self):
        """Validate, unless that would take more than its share of the time, and keep the best weights. At the end of
        the run, average the head first."""
        state, spent, test = self.state, self.state["validation"], self.examples.test
        is_last, share = state["step"] >= state["steps"], self.recipe["validation_share"]
        if is_last and self.recipe["average_head"]:
            needed = state["fitting"] + max(spent, default=0.0)
            found = self.fit_head(self.has_time) if needed < self.time_left() else None
            average_head(self.network, self.record["head"], found)
        start = time.monotonic()
        steps = state["step"] - self.epoch_steps * len(state["epochs"])
        row = {"train_loss": state["sums"][0] / steps, "train_accuracy": state["sums"][1] / steps}
        if is_last or share >= 1 or not spent or sum(spent) + 2 * spent[-1] <= share * state["seconds"]:
            row["test_loss"], row["test_accuracy"], tested = self.network.validate(self.examples, test, self.has_time)
            if tested < len(test):  # the deadline came first
                row["tested"] = tested
            spent.append(time.monotonic() - start)
            self.keep_best(row["test_accuracy"], tested)
        state["epochs"], state["sums"] = [*state["epochs"], row], [0.0, 0.0]
        device.show("", end="")
        found = ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in row.items())
        device.say(f"epoch {len(state['epochs'])}: {found}, {state['seconds']:.1f} s")

    def finish(self):
        """Write the best weights, the file for inference that has them, and the results. The best weights are tested on
        the photos that were not used to choose them, if there are any.

        The checkpoint is enough for `--resume` to do this again, or to go on where the deadline ended training.
        """
        state, held_out, output, now = self.state, self.examples.held_out, self.output, self.network.call("state")
        state["ended"] = True
        self.save()
        self.network.call("load", **{**now, **self.best})
        self.write_model()
        tested, accuracy = state["best"]["tested"], state["best"]["accuracy"]
        result = {
            "best_accuracy": accuracy,
            "final_accuracy": [one["test_accuracy"] for one in state["epochs"] if "test_accuracy" in one][-1],
            "tested": tested,
            "steps": state["step"],
            "planned_steps": self.planned,
            "train_seconds": state["seconds"],
            "before_training": state["start"],
            "peak_memory_mb": peak_memory_mb() or math.nan,
            "recipe": self.recipe,
            "epochs": state["epochs"],
        }
        if len(held_out):
            found = self.network.validate(self.examples, held_out, self.has_time)
            result["test_loss"], result["test_accuracy"], result["test_photos"] = found
            device.say(f"test accuracy {found[1]:.1%} on {found[2]} photos not used to choose it")
        result["seconds"] = time.monotonic() - device.START
        content = json.dumps(result, indent=1).encode()
        device.replace_file(output / "result.json", lambda file: file.write(content))
        device.remove(output / "features.bin")
        device.say(f"{output}: accuracy {accuracy:.1%} on {tested} photos, {result['seconds']:.0f} s, "
            f"{result['peak_memory_mb']:.0f} MB; scripts/board/load.py takes weights.npz")  # fmt: skip
        if state["step"] < self.planned:
            device.say(f"the deadline ended it after {state['step']} of {self.planned} steps; continue with --resume")
        else:
            device.remove(self.path)


def read_checkpoint(path):
    try:
        with np.load(path) as file:
            arrays = {name: file[name] for name in file.files}
        return json.loads(arrays.pop("about").tobytes()), arrays
    except Exception as error:  # zipfile and NumPy raise many types
        device.fail(f"--resume: {path} cannot be read ({error}); remove it, and the run starts again")
