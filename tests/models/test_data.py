"""The data: real text and images, deterministic, bounded, and helpful where a machine lacks them."""

import itertools
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from autopar.models import data


def test_the_corpus_is_the_library_s_sources_in_a_fixed_order():
    sources = data.library_sources()
    root = Path(sysconfig.get_path("stdlib"))
    names = [path.relative_to(root).as_posix() for path in sources]
    assert names == sorted(names)
    assert {"argparse.py", "json/decoder.py"} <= set(names)
    assert not any("site-packages" in name for name in names)
    text = data.corpus().tobytes()
    first = sources[0].read_bytes()
    assert text[: len(first)] == first
    assert text.count(b"\n    def ") > 1000
    assert text.count(b"return") > 1000


def test_the_corpus_is_bounded_cached_and_read_only():
    assert data.corpus().size == data.CORPUS_BYTES
    assert data.corpus() is data.corpus()
    with pytest.raises(ValueError, match="read-only"):
        data.corpus()[0] = 0
    np.testing.assert_array_equal(data.corpus(1000), data.corpus()[:1000])


def test_windows_are_pieces_of_the_corpus_and_targets_are_one_byte_ahead():
    text = data.corpus().tobytes()
    for batch in itertools.islice(data.text_batches(0, batch=4, seq=32), 3):
        np.testing.assert_array_equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])
        for tokens, targets in zip(batch["tokens"], batch["targets"], strict=True):
            window = tokens.astype(np.uint8).tobytes() + targets[-1:].astype(np.uint8).tobytes()
            assert window in text


def test_a_sequence_longer_than_the_text_is_refused_with_both_numbers():
    with pytest.raises(
        ValueError, match=rf"seq is {data.CORPUS_BYTES}, but the text has only {data.CORPUS_BYTES} bytes"
    ):
        next(data.text_batches(0, batch=1, seq=data.CORPUS_BYTES))


def test_a_python_without_sources_is_told_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(
        RuntimeError, match=r"no \.py file under .*: the text corpus is the source code of Python's standard"
    ):
        data.corpus.__wrapped__()


def test_images_are_digits_with_every_pixel_repeated():
    small, large = (next(data.image_batches(0, batch=6, image_size=size, channels=2)) for size in (8, 24))
    np.testing.assert_array_equal(large["images"][:, ::3, ::3], small["images"])
    np.testing.assert_array_equal(large["images"][:, 2::3, 1::3], small["images"])
    np.testing.assert_array_equal(small["images"][..., 0], small["images"][..., 1])
    np.testing.assert_array_equal(small["labels"], large["labels"])
    originals, classes = data.digits()
    assert originals.shape == (1797, 8, 8)
    assert abs(float(originals.mean())) < 1e-5
    assert abs(float(originals.std()) - 1) < 1e-5
    for image, label in zip(small["images"][..., 0], small["labels"], strict=True):
        places = (originals == image).all(axis=(1, 2))
        assert label in classes[places]


def test_a_size_that_digits_cannot_fill_is_refused():
    with pytest.raises(ValueError, match="image_size is 20, but digits are repeated to a multiple of 8"):
        next(data.image_batches(0, batch=1, image_size=20, channels=1))


def test_without_scikit_learn_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r"install the extra `data` \(pip install 'autopar\[data\]'\)"):
        data.digits.__wrapped__()


def test_the_synthetic_task_is_the_same_for_every_seed():
    def examples(seed, regression):
        return next(data.teacher_batches(seed, batch=64, inputs=5, outputs=3, regression=regression))

    values, classes = examples(4, True), examples(4, False)
    np.testing.assert_array_equal(values["inputs"], classes["inputs"])
    np.testing.assert_array_equal(values["targets"].argmax(axis=-1), classes["targets"])
    assert len(np.unique(classes["targets"])) == 3
    assert (values["inputs"] != examples(5, True)["inputs"]).all()
