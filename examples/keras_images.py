"""Trains a small CNN on a folder of images, DATA/train/CLASS/* and DATA/val/CLASS/*, with Keras on TensorFlow.

    python keras_images.py DATA --output-dir RUN
    tensorboard --logdir RUN/logs

Weights are saved after every epoch, event files for TensorBoard are written meanwhile. Same seed, same result.
"""

import argparse
import hashlib
import os
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import tensorflow as tf
from sample_log import SampleLog

SIDE = 32


class EpochLog(keras.callbacks.Callback):
    """Prints a line per epoch, and closes the epoch in the log of samples."""

    def __init__(self, log, count):
        super().__init__()
        self.log, self.count = log, count

    def on_epoch_begin(self, epoch, logs=None):
        self.log.begin_epoch()
        self.start = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        seconds = time.perf_counter() - self.start
        self.log.end_epoch(epoch + 1, float(logs["loss"]), seconds)
        print(
            f"epoch {epoch + 1}: loss {logs['loss']:.9f}, validation accuracy {logs['val_accuracy']:.3f}, "
            f"{self.count / seconds:.0f} images/s",
            flush=True,
        )


def noted(log):
    """A step of the input pipeline that notes every image, by a digest of its pixels: names do not get this far."""

    def note(images):
        for image in images:
            log.add(hashlib.sha256(image.tobytes()).hexdigest()[:16], b"")
        return images

    def step(images, labels):
        same = tf.numpy_function(note, [images], images.dtype)
        same.set_shape(images.shape)
        return same, labels

    return step


def make_model(classes):
    model = keras.Sequential(
        [
            keras.layers.Input((SIDE, SIDE, 3)),
            keras.layers.Rescaling(1 / 127.5, offset=-1),
            keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(4),
            keras.layers.Flatten(),
            keras.layers.Dense(classes),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.003), loss, metrics=["accuracy"])
    return model


def main():
    parser = argparse.ArgumentParser(description="Train a small CNN on a folder of images.")
    parser.add_argument("data", type=Path, help="directory with train/CLASS/* and val/CLASS/*")
    parser.add_argument("--output-dir", type=Path, required=True, help="where weights and logs go")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sample-log", type=Path, help="write a digest of the samples read to DIR/0.json")
    arguments = parser.parse_args()

    keras.utils.set_random_seed(arguments.seed)
    tf.config.experimental.enable_op_determinism()
    options = {"image_size": (SIDE, SIDE), "batch_size": arguments.batch_size, "verbose": False}
    train = keras.utils.image_dataset_from_directory(arguments.data / "train", seed=arguments.seed, **options)
    validation = keras.utils.image_dataset_from_directory(arguments.data / "val", shuffle=False, **options)
    model = make_model(len(train.class_names))

    log = SampleLog()
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    callbacks = [
        keras.callbacks.TensorBoard(arguments.output_dir / "logs"),
        keras.callbacks.ModelCheckpoint(
            str(arguments.output_dir / "epoch{epoch:02d}.weights.h5"), save_weights_only=True
        ),
        EpochLog(log, len(train.file_paths)),
    ]
    # The file names are known before the step that notes what is really read.
    samples = train.map(noted(log)).prefetch(2)
    model.fit(
        samples, validation_data=validation, epochs=arguments.epochs, callbacks=callbacks, shuffle=False, verbose=0
    )
    if arguments.sample_log:
        log.save(arguments.sample_log / "0.json")


if __name__ == "__main__":
    main()
