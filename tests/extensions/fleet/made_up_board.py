"""A board of a fleet without TensorFlow: a real connection, and answers that are wrong in the way that a test asks for.

Changes are a hundredth of the weights. In round 1 it does `--does nan|shape|foreign|huge|alien|half|late|hangs`.
"""

import argparse
import time
from pathlib import Path

import numpy as np
from flwr.app import Array, Message

from elastic_trainer.extensions.fleet import supernode
from elastic_trainer.extensions.fleet.messages import Parcel
from elastic_trainer.extensions.fleet.settings import BoardSettings
from elastic_trainer.extensions.fleet.supernode import take_part

LATE_SECONDS = 10.0


def send_no_message():
    """What is sent next as a message is an array of Flower."""
    alien, real = Array(np.zeros(3)), Message.object_id

    def of_alien(function):
        def called(reply):
            setattr(supernode, function.__name__, function)
            Message.object_id = real
            return function(alien)

        setattr(supernode, function.__name__, called)

    of_alien(supernode.get_object_tree)
    of_alien(supernode.get_all_nested_objects)
    Message.object_id = property(lambda message: alien.object_id)


def answer_of(parcel, name, does):
    if parcel.kind == "hello":
        about = {"images": 30, "test_images": 6, "full_seconds": 0.2, "head_seconds": 0.1}
        return Parcel("ready", {"name": name, **about})
    if parcel.kind in ("sums", "end"):
        return Parcel(parcel.kind, {"none": "a made-up board has no features"})
    tested = {"test": {"loss": 1.0, "accuracy": 0.5}, "test_images": 6}
    if parcel.kind == "test":
        return Parcel("tested", tested)
    print(f"round {parcel.values['round']}", flush=True)  # the test waits for it
    does = does if parcel.values["round"] == 1 else "good"
    changes = {name: 0.01 * array for name, array in parcel.arrays.items()}
    first = next(iter(changes))
    if does == "nan":
        changes[first] = np.full_like(changes[first], np.nan)
    elif does == "shape":
        changes[first] = changes[first][:1]
    elif does == "foreign":
        changes["model/9999"] = np.zeros(3, np.float32)
    elif does == "huge":
        changes[first] = 1e6 * changes[first]
    elif does == "alien":
        send_no_message()
    elif does == "half":
        push = supernode.push_objects
        supernode.push_objects = lambda *_, **__: setattr(supernode, "push_objects", push)
    elif does in ("late", "hangs"):
        time.sleep(LATE_SECONDS if does == "late" else 1000)
    return Parcel("trained", {"steps": 5, **tested}, changes)


def main():
    parser = argparse.ArgumentParser()
    for flag in ("--superlink", "--name", "--does"):
        parser.add_argument(flag, required=True)
    for flag in ("--root_certificates", "--private_key"):
        parser.add_argument(flag, type=Path)
    args = parser.parse_args()
    settings = BoardSettings(args.superlink, args.root_certificates, args.private_key)
    take_part(settings, lambda parcel: answer_of(parcel, args.name, args.does), print)


if __name__ == "__main__":
    main()
