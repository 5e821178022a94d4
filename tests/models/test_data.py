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


def is_piece(numbers):
    return numbers.astype(np.uint8).tobytes() in data.corpus().tobytes()


def test_masked_examples_are_two_pieces_of_text_and_padding():
    batch = next(data.masked_batches(0, batch=16, seq=24))
    for tokens, segments, targets in zip(batch["tokens"], batch["segments"], batch["targets"], strict=True):
        real = targets != data.PAD
        total, first = real.sum(), 24 - (segments[real] == 1).sum() - (~real).sum()
        assert 12 <= total <= 24
        assert 1 <= first < total
        np.testing.assert_array_equal(real, np.arange(24) < total)
        np.testing.assert_array_equal(segments, (np.arange(24) >= first) & real)
        np.testing.assert_array_equal(tokens == data.PAD, ~real)
        assert is_piece(targets[:first])
        assert is_piece(targets[first:total])
    assert len(np.unique((batch["targets"] == data.PAD).sum(axis=1))) > 4


def test_about_15_percent_are_masked_of_which_8_in_10_are_hidden_and_1_in_10_is_another_byte():
    batches = list(itertools.islice(data.masked_batches(1, batch=64, seq=64), 20))
    tokens, targets, weights = (np.stack([batch[key] for batch in batches]) for key in ("tokens", "targets", "weights"))
    assert set(np.unique(weights)) == {0, 1}
    assert (weights.sum(axis=-1) >= 1).all()
    assert (weights[targets == data.PAD] == 0).all()
    np.testing.assert_array_equal(tokens[weights == 0], targets[weights == 0])
    assert weights.sum() / (targets != data.PAD).sum() == pytest.approx(0.15 + 0.85 / 48, abs=0.01)
    shown = tokens[weights == 1]
    assert np.mean(shown == data.MASK) == pytest.approx(0.8, abs=0.02)
    assert np.mean(shown == targets[weights == 1]) == pytest.approx(0.1, abs=0.02)
    assert shown.max() == data.MASK


def test_targets_continue_their_sources_and_tokens_are_the_targets_one_place_later():
    batch = next(data.continued_batches(0, batch=16, seq=20, target_seq=10))
    for sources, tokens, targets, weights in zip(*batch.values(), strict=True):
        read, written = sources[sources != data.PAD], targets[targets != data.PAD]
        assert 10 <= len(read) <= 20
        assert 5 <= len(written) <= 10
        assert is_piece(np.concatenate([read, written]))
        assert tokens[0] == data.START
        np.testing.assert_array_equal(tokens[1:], targets[:-1])
        np.testing.assert_array_equal(weights, np.arange(10) < len(written))
        np.testing.assert_array_equal(sources != data.PAD, np.arange(20) < len(read))


def test_a_text_to_read_and_write_that_is_too_long_is_refused_with_both_numbers():
    with pytest.raises(ValueError, match=rf"seq \+ target_seq is {data.CORPUS_BYTES}, but the text has only"):
        next(data.continued_batches(0, batch=1, seq=data.CORPUS_BYTES - 9, target_seq=9))


def test_noise_has_mean_0_and_the_deviation_asked_for_and_differs_between_pixels_and_channels():
    batch = next(data.noisy_image_batches(0, batch=64, image_size=16, channels=2, noise=0.7))
    np.testing.assert_array_equal(
        batch["images"], next(data.image_batches(0, batch=64, image_size=16, channels=2))["images"]
    )
    noise = batch["noisy"] - batch["images"]
    assert abs(noise.mean()) < 0.02
    assert noise.std() == pytest.approx(0.7, abs=0.02)
    assert abs(np.corrcoef(noise[..., 0].ravel(), noise[..., 1].ravel())[0, 1]) < 0.03
    assert abs(np.corrcoef(noise[:, ::2].ravel(), noise[:, 1::2].ravel())[0, 1]) < 0.03


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
