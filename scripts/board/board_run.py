"""One run on a board: where it is, what is best so far, and what it writes. Part of board_train.py."""

import json
import math
import time
from typing import Any, Dict  # Python 3.6

import numpy as np
from board_device import HERE, START, fail, left, remove, replace_file, show, write_json
from board_head import average_head, fit, set_head
from board_memory import peak_memory_mb
from board_network import Network


class Run:
    """One run: where it is, its history, its best weights. The checkpoint holds all of it.

    `finishing` are the seconds that writing the results takes, by what the last checkpoint took. The model that is best
    so far is on the disk from before the first step on.
    """

    def __init__(self, record, selection, output, args):
        self.created = self.saved = time.monotonic()
        given = {name: getattr(args, name) for name in ("num_epochs", "learning_rate") if getattr(args, name)}
        self.recipe, self.args, self.path = {**record["recipe"], **given}, args, output / "checkpoint.npz"
        self.record, self.output = record, output
        self.network, self.batch = Network(args.engine(record, args.threads), selection), self.recipe["batch_size"]
        self.key = json.loads(json.dumps([record["id"], None, selection["name"], self.recipe]))
        self.best, self.signal, self.first_step_seconds, self.finishing = {}, 0, None, None
        self.state: Dict[str, Any] = {"step": 0, "seconds": 0.0, "validation": [], "epochs": [], "sums": [0.0, 0.0]}
        self.state.update(ended=False, best=None)  # True: only the results are left to write; of the best weights
        self.state.update(start=None, first_model_seconds=None, fitting=None)  # before training; of the last fit
        self.model_bytes = 0 if record["offsets"] is None else (HERE / "inference.tflite").stat().st_size

    def give(self, examples):
        """What it trains on."""
        self.examples, self.key[1] = examples, examples.fingerprint
        self.epoch_steps = len(examples.train) // self.batch
        if not self.epoch_steps:
            fail(f"--data_dir: has {len(examples.train)} photos to train on, and a step takes {self.batch}; add some")
        self.planned = self.epoch_steps * self.recipe["num_epochs"]
        self.state.update(steps=self.planned, planned=self.planned, test_photos=len(examples.test))

    def save(self):
        start = time.monotonic()
        arrays = {f"now/{name}": value for name, value in self.network.call("state").items()}
        arrays.update({f"best/{name}": value for name, value in self.best.items()})
        about = {"key": self.key, "state": self.state, "arrays": len(arrays)}
        text = np.frombuffer(json.dumps(about).encode(), np.uint8)
        replace_file(self.path, lambda file: np.savez(file, about=text, **arrays))
        self.saved = time.monotonic()
        # Another such file, half of it as weights, and the network.
        self.finishing = (self.saved - start) * (2 + self.model_bytes / self.path.stat().st_size)

    def load(self, about, arrays):
        """Continue from a checkpoint; from its end if only the results are left to write."""
        if self.key[1] is None:
            self.key[1] = about["key"][1]
        if about["key"] != self.key:
            fail(f"--resume: {self.path} is of other photos, another export or other flags; give the same")
        self.state.update(about["state"])
        self.network.call("load", **{name[4:]: value for name, value in arrays.items() if name.startswith("now/")})
        self.best = {name[5:]: value for name, value in arrays.items() if name.startswith("best/")}

    def go_on(self):
        """Plan all steps again: a deadline counts from the start of this program. An epoch that the last one cut short
        goes on."""
        state = self.state
        state["steps"], state["ended"] = self.planned, False
        steps = state["step"] - self.epoch_steps * (len(state["epochs"]) - 1)
        if 0 < steps < self.epoch_steps:
            row = state["epochs"].pop()
            state["sums"] = [steps * row["train_loss"], steps * row["train_accuracy"]]

    def rate(self):
        """A linear rise over a share of the planned steps, then half a cosine to 0."""
        step, peak, rise = self.state["step"], self.recipe["learning_rate"], round(self.recipe["warmup"] * self.planned)
        rise = max(min(rise, self.planned - 1), 0)
        done = min((step - rise) / max(self.state["steps"] - rise, 1), 1)
        return peak * (step + 1) / rise if step < rise else peak * 0.5 * (1 + math.cos(math.pi * done))

    def fit_head(self, has_time):
        """See `board_head.fit`."""
        if self.record["head"] is None:
            return None
        start = time.monotonic()
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
        if found and found[1]:
            set_head(self.network, self.record["head"], exported, found[0])
        loss, accuracy, tested = self.network.validate(self.examples, self.examples.test, has_time)
        self.state["start"] = {"test_loss": loss, "test_accuracy": accuracy, "is_closed_form": bool(found and found[1])}
        self.keep_best(accuracy, tested)
        self.network.call("load", **exported)
        self.state["first_model_seconds"] = time.monotonic() - START
        head = "head in closed form" if found and found[1] else "as exported"
        print(f"before training ({head}): test accuracy {accuracy:.3f}; {self.output} has this model", flush=True)

    def validate(self, photos):
        return self.network.validate(self.examples, photos, self.has_time)

    def keep_best(self, accuracy, tested):
        """Keep and write the weights that the network has if they are the best so far."""
        if self.state["best"] is None or accuracy > self.state["best"]["accuracy"]:
            self.state["best"] = {"accuracy": accuracy, "tested": tested}
            self.best = {name: value for name, value in self.network.call("state").items() if "weights" in name}
            self.write_model()

    def write_model(self):
        """Write the weights that the network has, which are the best, and the file for inference with them."""
        record, best = self.record, self.best
        replace_file(self.output / "weights.npz", lambda file: np.savez(file, id=np.array(record["id"]), **best))
        if record["offsets"] is not None:
            content, arrays = bytearray((HERE / "inference.tflite").read_bytes()), self.network.call("fill")
            for index, offset in enumerate(record["offsets"]):
                encoded = arrays[f"array_{index}"].tobytes()
                content[offset : offset + len(encoded)] = encoded
            replace_file(self.output / "model.tflite", lambda file: file.write(content))

    def train(self):
        if self.state["start"] is None:
            self.start()
        state, seed = self.state, self.recipe["seed"]
        while not self.signal:
            done = len(state["epochs"]) * self.epoch_steps
            if done < state["step"] and (state["step"] % self.epoch_steps == 0 or state["step"] >= state["steps"]):
                self.end_epoch()  # also of a run that was interrupted when only this was left
            if state["step"] >= state["steps"]:
                break
            epoch, first = divmod(state["step"], self.epoch_steps)
            order = np.random.default_rng([seed, epoch]).permutation(len(self.examples.train))
            views = np.random.default_rng([seed, epoch, 1]).integers(self.examples.views, size=len(order))
            for start in range(first * self.batch, self.epoch_steps * self.batch, self.batch):
                rows = order[start : start + self.batch]
                self.step(self.examples.train[rows], views[rows], [seed, state["step"]])
                if self.signal or state["step"] >= state["steps"]:
                    break
        if self.signal:
            self.save()

    def step(self, rows, views, seed):
        state, start, size = self.state, time.monotonic(), self.network.part
        places = (slice(first, first + size) for first in range(0, len(rows), size))
        read, labels = self.examples.read, self.examples.labels
        parts = ((read(rows[one], views[one]), labels[rows[one]], 1 / len(rows)) for one in places)
        found = self.network.step(parts, self.rate(), seed)
        if not math.isfinite(found[0]):
            fail(f"the loss is {found[0]} at step {state['step']}; start again with a smaller --learning_rate")
        state["step"], state["sums"] = state["step"] + 1, (found + state["sums"]).tolist()
        state["seconds"] += time.monotonic() - start
        self.first_step_seconds = self.first_step_seconds or time.monotonic() - self.created
        done, step_s = (state["step"] - 1) % self.epoch_steps + 1, state["seconds"] / state["step"]
        if self.args.deadline:
            if self.finishing is None:
                self.save()  # which shows how fast the disk is
            testing = max(state["validation"], default=len(self.examples.test) / self.batch * step_s)
            testing *= 1 + len(self.examples.held_out) / len(self.examples.test)
            spare = self.time_left() - testing - (self.state["fitting"] or 0.0) * self.recipe["average_head"]
            state["steps"] = min(self.planned, state["step"] + int(max(spare, 0) / step_s))
        loss, accuracy = (total / done for total in state["sums"])
        left = (state["steps"] - state["step"]) * step_s
        show(
            f"epoch {len(state['epochs']) + 1} of {self.recipe['num_epochs']}, step {done} of {self.epoch_steps}: "
            f"loss {loss:.3f}, accuracy {accuracy:.1%}, {1e3 * step_s:.1f} ms a step, {left:.0f} s left"
        )
        if time.monotonic() - self.saved > 60 * self.args.checkpoint_minutes:
            self.save()

    def time_left(self):
        """Seconds until the results must be written."""
        return left(self.args.deadline) - (self.finishing or 0)

    def has_time(self):
        return self.time_left() > 0

    def end_epoch(self):
        """Validate, unless that would take more than its share of the time, and keep the best weights. At the end of
        the run, average the head first."""
        state = self.state
        if state["step"] >= state["steps"] and self.recipe["average_head"]:
            needed = (state["fitting"] or 0.0) + max(state["validation"], default=0.0)
            found = self.fit_head(self.has_time) if needed < self.time_left() else None
            average_head(self.network, self.record["head"], found)
        start = time.monotonic()
        steps = state["step"] - self.epoch_steps * len(state["epochs"])
        row = {"train_loss": state["sums"][0] / steps, "train_accuracy": state["sums"][1] / steps}
        spent = state["validation"]
        share, seconds = self.recipe["validation_share"], state["seconds"]
        is_last = state["step"] >= state["steps"]
        if is_last or share >= 1 or not spent or sum(spent) + 2 * spent[-1] <= share * seconds:
            row["test_loss"], row["test_accuracy"], tested = self.validate(self.examples.test)
            if tested < state["test_photos"]:  # the deadline came first
                row["tested"] = tested
            spent.append(time.monotonic() - start)
            self.keep_best(row["test_accuracy"], tested)
        state["epochs"], state["sums"] = [*state["epochs"], row], [0.0, 0.0]
        show("", end="")
        found = ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in row.items())
        print(f"epoch {len(state['epochs'])}: {found}, {state['seconds']:.1f} s", flush=True)

    def test(self):
        """Test the best weights on the photos that were not used to choose them, if there are any."""
        if len(self.examples.held_out):
            now = self.network.call("state")
            self.network.call("load", **{**now, **self.best})
            self.state["held_out"] = self.validate(self.examples.held_out)
            self.network.call("load", **now)  # `--resume` may go on from them

    def finish(self):
        """Write the best weights, the file for inference that has them, and the results.

        The features go first, so that a full disk has room. The checkpoint is enough for `--resume` to do this again.
        """
        state = self.state
        if not state["ended"]:
            self.test()
            state["ended"] = True
        self.save()
        remove(self.output / "features.json", self.output / "features.bin")
        self.network.call("load", **{**self.network.call("state"), **self.best})
        self.write_model()
        accuracies = [one["test_accuracy"] for one in state["epochs"] if "test_accuracy" in one]
        count = state["best"]["tested"]
        result = {
            "best_accuracy": state["best"]["accuracy"],
            "final_accuracy": accuracies[-1],
            "tested": count,
            "steps": state["step"],
            "planned_steps": state["planned"],
            "train_seconds": state["seconds"],
            "before_training": state["start"],
            "first_model_seconds": state["first_model_seconds"],
            "first_step_seconds": self.first_step_seconds,
            "seconds": time.monotonic() - START,
            "peak_memory_mb": peak_memory_mb() or math.nan,
            "recipe": self.recipe,
            "epochs": state["epochs"],
        }
        if state.get("held_out"):
            result["test_loss"], result["test_accuracy"], result["test_photos"] = state["held_out"]
            print(
                f"test accuracy {result['test_accuracy']:.1%} on {result['test_photos']} photos not used to choose it"
            )
        write_json(self.output / "result.json", result)
        is_early = state["step"] < state["planned"]
        if not is_early:
            self.path.unlink()
        print(f"{self.output}: accuracy {result['best_accuracy']:.1%} on {count} photos, ", end="")
        print(f"{result['seconds']:.0f} s, {result['peak_memory_mb']:.0f} MB; scripts/board/load.py takes weights.npz")
        if is_early:
            print(f"the deadline ended it after {state['step']} of {state['planned']} steps; continue with --resume")
