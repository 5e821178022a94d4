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
PAD, MASK, START = 256, 257, 258  # marks, which no byte is
MARKED_VALUES = 259
MASKED_SHARE = 0.15
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
    text = _text_longer_than(seq, "seq")
    generator = np.random.default_rng(seed)
    while True:
        starts = generator.integers(0, text.size - seq, size=(batch, 1))
        windows = text[starts + np.arange(seq + 1)].astype(np.int32)
        yield {"tokens": windows[:, :-1].copy(), "targets": windows[:, 1:].copy()}


def _text_longer_than(length: int, size_name: str) -> NDArray[np.uint8]:
    """The corpus, if it has more than `length` bytes."""
    text = corpus()
    if length >= text.size:
        raise ValueError(f"{size_name} is {length}, but the text has only {text.size} bytes: use a shorter sequence")
    return text


def masked_batches(seed: int, *, batch: int, seq: int) -> Iterator[NumpyBatch]:
    """Yield {"tokens", "segments", "targets", "weights"}, (batch, seq) each, to fill in masked bytes.

    An example is two pieces of text, segments 0 and 1, together at least half of `seq` long, then PAD. Of its bytes
    15 %, and at least one, have weight 1: for 8 in 10 of them "tokens" has MASK, for 1 a random byte, for 1 the byte.
    """
    text, places = _text_longer_than(seq, "seq"), np.arange(seq)
    generator = np.random.default_rng(seed)
    while True:
        total = generator.integers(max(2, seq // 2), seq + 1, size=(batch, 1))
        first = generator.integers(1, total)
        starts = generator.integers(0, text.size - seq, size=(2, batch, 1))
        second_piece, real = places >= first, places < total
        bytes_read = text[np.where(second_piece, starts[1] - first, starts[0]) + places].astype(np.int32)
        masked = real & (generator.random((batch, seq)) < MASKED_SHARE)
        masked |= places == generator.integers(0, total)
        kind, noise = generator.random((batch, seq)), generator.integers(0, BYTE_VALUES, (batch, seq))
        shown = np.select([masked & (kind < 0.8), masked & (kind < 0.9)], [MASK, noise], bytes_read)
        yield {
            "tokens": np.where(real, shown, PAD).astype(np.int32),
            "segments": (second_piece & real).astype(np.int32),
            "targets": np.where(real, bytes_read, PAD),
            "weights": masked.astype(np.float32),
        }


def continued_batches(seed: int, *, batch: int, seq: int, target_seq: int) -> Iterator[NumpyBatch]:
    """Yield {"sources" (batch, seq), "tokens", "targets", "weights" (batch, target_seq)}, to continue a text.

    Sources are pieces of text, at least half of `seq` long, then PAD; targets are what follows, at least half of
    `target_seq` long, then PAD, of weight 0. Tokens are START and then the targets, one place later.
    """
    text = _text_longer_than(seq + target_seq, "seq + target_seq")
    read, written = np.arange(seq), np.arange(target_seq)
    generator = np.random.default_rng(seed)
    while True:
        starts = generator.integers(0, text.size - seq - target_seq, size=(batch, 1))
        lengths = generator.integers(max(1, seq // 2), seq + 1, size=(batch, 1))
        real = written < generator.integers(max(1, target_seq // 2), target_seq + 1, size=(batch, 1))
        targets = np.where(real, text[starts + lengths + written].astype(np.int32), PAD)
        yield {
            "sources": np.where(read < lengths, text[starts + read].astype(np.int32), PAD),
            "tokens": np.pad(targets[:, :-1], ((0, 0), (1, 0)), constant_values=START),
            "targets": targets,
            "weights": real.astype(np.float32),
        }


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


def noisy_image_batches(seed: int, *, batch: int, image_size: int, channels: int, noise: float) -> Iterator[NumpyBatch]:
    """Yield {"noisy", "images"}, float32 (batch, image_size, image_size, channels): images with Gaussian noise added."""
    generator = np.random.default_rng((seed, 1))
    for chosen in image_batches(seed, batch=batch, image_size=image_size, channels=channels):
        images = chosen["images"].astype(np.float32)
        yield {"noisy": (images + noise * generator.normal(size=images.shape)).astype(np.float32), "images": images}


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
