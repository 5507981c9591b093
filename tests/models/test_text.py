"""The text reader: deterministic, of full length, its splits disjoint."""

from itertools import islice

import numpy as np
import pytest

from plait.models.text import batches, corpus, files


def test_splits_are_disjoint_and_both_large() -> None:
    train, held_out = files("train"), files("held_out")
    assert set(train).isdisjoint(held_out)
    assert len(corpus("train")) > 5 * len(corpus("held_out")) > 500_000
    assert list(train) == sorted(train)


def test_no_file_of_tests_or_of_installed_packages() -> None:
    folders = {part for name in files("train") + files("held_out") for part in name.split("/")}
    assert folders.isdisjoint({"test", "tests", "site-packages"})
    assert "json" in folders


def test_equal_seeds_give_equal_batches_and_others_do_not() -> None:
    first, again, other = (list(islice(batches("train", 4, 32, seed), 3)) for seed in (7, 7, 8))
    for a, b, c in zip(first, again, other, strict=True):
        np.testing.assert_array_equal(a["tokens"], b["tokens"])
        assert not np.array_equal(a["tokens"], c["tokens"])


def test_targets_are_the_bytes_that_follow() -> None:
    batch = next(batches("held_out", 3, 16, seed=0))
    assert batch["tokens"].shape == batch["targets"].shape == (3, 16)
    assert batch["tokens"].dtype == batch["targets"].dtype == np.int32
    text = corpus("held_out").tobytes()
    for tokens, targets in zip(batch["tokens"], batch["targets"], strict=True):
        np.testing.assert_array_equal(tokens[1:], targets[:-1])
        assert bytes(tokens.tolist()) + bytes([targets[-1]]) in text


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match=r"unknown split 'test'; there are train, held_out"):
        batches("test", 1, 1, seed=0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"must be >= 1, got 0 and 8"):
        batches("train", 0, 8, seed=0)
