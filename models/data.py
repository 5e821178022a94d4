"""Endless, seeded streams of numpy batches that need no download: real text, real images, and a synthetic task.

Text is the source code of Python's own standard library, read as bytes. Images are scikit-learn's bundled handwritten
digits (the extra `data`). Equal seeds give equal batches on one machine; another version of Python has another
library and hence other text. What can go wrong is a Python without its sources (a zipped or stripped one): the error
says so.
"""

import functools
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

NumpyBatch: TypeAlias = dict[str, NDArray[np.int32] | NDArray[np.float32]]

CORPUS_BYTES = 4 * 2**20
BYTE_VALUES = 256
DIGITS_SIZE = 8
DIGITS_CLASSES = 10
_LEFT_OUT_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})


def library_sources() -> list[Path]:
    """The .py files of the standard library, sorted by their path inside it, without its own tests."""
    root = Path(sysconfig.get_path("stdlib"))
    inside = (path.relative_to(root) for path in root.rglob("*.py"))
    kept = (path for path in inside if _LEFT_OUT_FOLDERS.isdisjoint(path.parts[:-1]))
    return [root / path for path in sorted(kept, key=Path.as_posix)]


@functools.cache
def corpus(limit_bytes: int = CORPUS_BYTES) -> NDArray[np.uint8]:
    """The first `limit_bytes` bytes of the library's sources, one after the other; read once and read-only.

    Raises:
        RuntimeError: this Python carries no sources of its library.
    """
    text = bytearray()
    for path in library_sources():
        if len(text) >= limit_bytes:
            break
        text += path.read_bytes()
    if not text:
        raise RuntimeError(
            f"no .py file under {sysconfig.get_path('stdlib')}: the text corpus is the source code of Python's "
            "standard library, which this Python lacks (zipped or stripped). Use a Python that has its sources."
        )
    return np.frombuffer(bytes(text[:limit_bytes]), np.uint8)


def text_batches(seed: int, *, batch: int, seq: int) -> Iterator[NumpyBatch]:
    """Yield {"tokens", "targets"}, int32 (batch, seq) each: random windows of text, targets one byte ahead of tokens.

    Raises:
        ValueError: a window is longer than the corpus.
    """
    text = corpus()
    if seq + 1 > text.size:
        raise ValueError(f"seq is {seq}, but the text has only {text.size} bytes: use a shorter sequence")
    generator = np.random.default_rng(seed)
    while True:
        starts = generator.integers(0, text.size - seq, size=(batch, 1))
        windows = text[starts + np.arange(seq + 1)].astype(np.int32)
        yield {"tokens": windows[:, :-1].copy(), "targets": windows[:, 1:].copy()}


@functools.cache
def digits() -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """The 1,797 handwritten digits: images (n, 8, 8) with mean 0 and deviation 1 over all pixels; labels (n,).

    Raises:
        ImportError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as missing:
        raise ImportError(
            "the images are scikit-learn's bundled digits, and scikit-learn is not installed: "
            "install the extra `data` (pip install 'autopar[data]')"
        ) from missing
    pixels, labels = load_digits(return_X_y=True)
    images = pixels.reshape(-1, DIGITS_SIZE, DIGITS_SIZE).astype(np.float32)
    scaled, classes = (images - images.mean()) / images.std(), labels.astype(np.int32)
    scaled.setflags(write=False)
    classes.setflags(write=False)
    return scaled, classes


def image_batches(seed: int, *, batch: int, image_size: int, channels: int) -> Iterator[NumpyBatch]:
    """Yield {"images", "labels"}: float32 (batch, image_size, image_size, channels) and int32 (batch,).

    Each pixel of a digit is repeated to fill `image_size`, a multiple of 8, and its value is repeated over the
    channels.
    """
    if image_size % DIGITS_SIZE:
        raise ValueError(f"image_size is {image_size}, but digits are repeated to a multiple of {DIGITS_SIZE}")
    images, labels = digits()
    repeats = image_size // DIGITS_SIZE
    generator = np.random.default_rng(seed)
    while True:
        chosen = generator.integers(0, len(images), size=batch)
        pixels = images[chosen].repeat(repeats, axis=1).repeat(repeats, axis=2)
        yield {"images": pixels[..., None].repeat(channels, axis=-1), "labels": labels[chosen]}


def teacher_batches(seed: int, *, batch: int, inputs: int, outputs: int, regression: bool) -> Iterator[NumpyBatch]:
    """Yield {"inputs", "targets"}: Gaussian inputs (batch, inputs) and what a fixed random network makes of them.

    Targets are its outputs, float32 (batch, outputs), for regression, and else the largest one, int32 (batch,). The
    network is the same for every seed: the seed chooses the examples, not the task.
    """
    task = np.random.default_rng(0)
    first = task.normal(size=(inputs, 32)) / np.sqrt(inputs)
    second = task.normal(size=(32, outputs)) / np.sqrt(32)
    generator = np.random.default_rng(seed)
    while True:
        examples = generator.normal(size=(batch, inputs))
        answers = np.tanh(examples @ first) @ second
        targets = answers.astype(np.float32) if regression else answers.argmax(axis=-1).astype(np.int32)
        yield {"inputs": examples.astype(np.float32), "targets": targets}
