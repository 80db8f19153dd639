"""What training scripts do with outputs, run by test_outputs_frameworks.py in an environment that has the frameworks.

``python frameworks_writer.py STEP DIRECTORY``: knows nothing of FanStore; each step asserts what a user would expect.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIMIT_S = 60.0


def torch_model() -> Any:
    import torch

    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 10))


def torch_save(directory: Path) -> None:
    """Three epochs, each saved as a temporary file that is renamed over the last checkpoint, and read back."""
    import torch

    model = torch_model()
    optimizer = torch.optim.Adam(model.parameters())
    directory.mkdir(exist_ok=True)
    for epoch in range(3):
        loss = model(torch.randn(8, 512)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        temporary = directory / "last.pt.tmp"
        torch.save({"epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, temporary)
        os.replace(temporary, directory / "last.pt")
        loaded = torch.load(directory / "last.pt")
        assert loaded["epoch"] == epoch
        assert all(torch.equal(value, loaded["model"][name]) for name, value in model.state_dict().items())
    torch.save(model.state_dict(), directory / "final.pt")


def torch_load(directory: Path) -> None:
    """A later job goes on where the earlier one ended."""
    import torch

    last, final = torch.load(directory / "last.pt"), torch.load(directory / "final.pt")
    assert last["epoch"] == 2
    assert all(torch.equal(value, last["model"][name]) for name, value in final.items())
    mapped = torch.load(directory / "final.pt", mmap=True)
    assert all(torch.equal(value, mapped[name]) for name, value in final.items())
    torch_model().load_state_dict(final)


def numpy_memmap(directory: Path) -> None:
    import numpy

    directory.mkdir(exist_ok=True)
    written = numpy.memmap(directory / "features", dtype="float32", mode="w+", shape=(1000, 256))
    for row in range(1000):
        written[row] = row
    written.flush()
    del written
    read = numpy.memmap(directory / "features", dtype="float32", mode="r", shape=(1000, 256))
    assert (read[:, 17] == numpy.arange(1000)).all()
    grown = numpy.memmap(directory / "features", dtype="float32", mode="r+", shape=(1000, 256))
    grown[500] = -1
    grown.flush()
    assert (numpy.fromfile(directory / "features", dtype="float32").reshape(1000, 256)[500] == -1).all()


def keras_checkpoints(directory: Path) -> None:
    """Keras saves its weights after each epoch, and the best of them are loaded again."""
    import numpy
    import tensorflow

    directory.mkdir(exist_ok=True)
    keras = tensorflow.keras
    model = keras.Sequential(
        [keras.layers.Input((16,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1)]
    )
    model.compile("adam", "mse")
    data = numpy.random.default_rng(3).normal(size=(64, 16)).astype("float32")
    saves = keras.callbacks.ModelCheckpoint(str(directory / "epoch{epoch}.weights.h5"), save_weights_only=True)
    model.fit(data, data[:, :1], epochs=2, verbose=0, callbacks=[saves])
    expected = model.predict(data, verbose=0)
    model.load_weights(str(directory / "epoch2.weights.h5"))
    assert numpy.allclose(model.predict(data, verbose=0), expected)
    checkpoint = tensorflow.train.Checkpoint(model=model)
    path = checkpoint.save(str(directory / "tf" / "ckpt"))
    assert tensorflow.train.latest_checkpoint(str(directory / "tf")) == path
    checkpoint.restore(path).assert_existing_objects_matched()
    model.save(directory / "whole.keras")
    assert numpy.allclose(keras.models.load_model(directory / "whole.keras").predict(data, verbose=0), expected)


def tensorboard_write(directory: Path) -> None:
    """Scalars in an event file that stays open; the reader on the other node says when it has seen each."""
    from torch.utils.tensorboard import SummaryWriter

    directory.mkdir(exist_ok=True)
    with SummaryWriter(str(directory)) as writer:
        for step in range(3):
            writer.add_scalar("loss", 1.0 / (step + 1), step)
            writer.flush()
            (event,) = directory.glob("events*")
            descriptor = os.open(event, os.O_RDWR)
            os.fsync(descriptor)
            os.close(descriptor)
            wait_for((directory / f"seen{step}").exists, f"the reader has seen step {step}")


def tensorboard_read(directory: Path) -> None:
    """On another node: the growing event file is read again and again until the next step is in it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    wait_for(lambda: directory.exists() and any(directory.glob("events*")), "the event file is there")
    (event,) = directory.glob("events*")
    for step in range(3):

        def has_step(step: int = step) -> bool:
            accumulator = EventAccumulator(str(event)).Reload()
            return "loss" in accumulator.Tags()["scalars"] and len(accumulator.Scalars("loss")) > step

        wait_for(has_step, f"step {step} is in the event file")
        (directory / f"seen{step}").touch()


def wait_for(condition: Callable[[], bool], what: str) -> None:
    limit_s = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > limit_s:
            raise SystemExit(f"not within {LIMIT_S:g} s: {what}")
        time.sleep(0.05)


def main() -> None:
    step, directory = sys.argv[1], Path(os.environ["FANSTORE_MOUNT"], sys.argv[2])
    if step == "tensorboard":
        step = "tensorboard_read" if os.environ["FANSTORE_RANK"] == "1" else "tensorboard_write"
    globals()[step](directory)
    print(f"{step} done")


if __name__ == "__main__":
    main()
