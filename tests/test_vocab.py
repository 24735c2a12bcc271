"""The draft vocabulary: choice, files, and refusals."""

from __future__ import annotations

import importlib.util
import json
import time
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_chat import tokenizer

from helpers.errors import DamagedInput, DataError, MissingInput, ParameterError, StaleInput
from helpers.vocab import build, check, load, load_counts, save_counts, special_ids, token_counts


@lru_cache(maxsize=1)
def library():
    """speculators.train.vocab_mapping by its file: importing the package around it takes eight seconds."""
    package = importlib.util.find_spec("speculators").submodule_search_locations[0]
    spec = importlib.util.spec_from_file_location("vocab_mapping", Path(package) / "train" / "vocab_mapping.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def library_map(counts: np.ndarray, size: int, vocab: int):
    return library().build_vocab_mappings_from_distribution({i: int(c) for i, c in enumerate(counts) if c}, size, vocab)


def test_only_supervised_tokens_are_counted_from_lists_arrays_and_dataset_rows():
    rows = [([1, 1, 2], [0, 1, 1]), {"input_ids": torch.tensor([2, 4]), "loss_mask": torch.tensor([1, 1])}, (np.array([3]), np.array([0]))]
    assert token_counts(rows, 6).tolist() == [0, 1, 2, 0, 1, 0]


def test_counting_in_pieces_is_counting_at_once():
    draw = np.random.default_rng(0)
    rows = [(draw.integers(0, 10, 30), draw.integers(0, 2, 30)) for _ in range(20)]  # 30 ids a row: several pieces of 4 · 10
    joined = np.concatenate([ids[mask == 1] for ids, mask in rows])
    assert token_counts(rows, 10).tolist() == np.bincount(joined, minlength=10).tolist()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([([1, 2], [1, 1]), ([1, 6], [0, 1])], "token id 6 in a vocabulary of 6"),
        ([([-1], [1])], "token id -1"),
        ([([1, 2], [1])], "differ in length"),
        ([([1, 2], [0, 0])], "no supervised token"),
        ([], "no supervised token"),
    ],
)
def test_rows_that_cannot_be_counted_are_named(rows, message):
    with pytest.raises(DataError, match=message):
        token_counts(rows, 6)


def test_counts_are_written_as_speculators_writes_them(tmp_path):
    from datasets import Dataset

    rows = Dataset.from_dict({"input_ids": [[1, 2, 2], [5, 1, 0]], "loss_mask": [[0, 1, 1], [1, 1, 0]]}).with_format("torch")
    library().save_token_frequency_distribution(rows, tmp_path / "theirs.pt")
    save_counts(token_counts(rows, 8), tmp_path / "ours.pt")
    ours, theirs = (torch.load(tmp_path / name, weights_only=True) for name in ("ours.pt", "theirs.pt"))
    assert ours == theirs == {1: 1, 2: 2, 5: 1}
    assert load_counts(tmp_path / "theirs.pt", 8).tolist() == [0, 1, 2, 0, 0, 1, 0, 0]


def test_counts_missing_damaged_or_beyond_the_vocabulary_are_errors(tmp_path):
    with pytest.raises(MissingInput):
        load_counts(tmp_path / "absent.pt", 8)
    (tmp_path / "bad.pt").write_bytes(b"garbage")
    torch.save({9: 1}, tmp_path / "beyond.pt")
    torch.save({-1: 1}, tmp_path / "negative.pt")
    for name in ("bad.pt", "beyond.pt", "negative.pt"):
        with pytest.raises(DamagedInput, match="cannot be read"):
            load_counts(tmp_path / name, 8)


COUNTS = np.array([0, 5, 3, 3, 0, 9, 3, 0])


def test_the_most_frequent_tokens_are_chosen_and_ties_go_to_the_lower_id():
    # by count: 5 (9), 1 (5), then 2, 3, 6 with 3 each: of these the two lowest
    made = build(COUNTS, 4, 8)
    assert made.ids.tolist() == [1, 2, 3, 5] and made.filled == 0
    assert made.d2t.tolist() == [1, 1, 1, 2] and made.d2t.dtype == np.int64
    assert np.flatnonzero(made.t2d).tolist() == [1, 2, 3, 5] and made.t2d.dtype == bool


def test_tokens_always_kept_push_out_the_least_frequent_one():
    made = build(COUNTS, 4, 8, always_keep=[7, 5])
    assert made.ids.tolist() == [1, 2, 5, 7] and made.kept == [5, 7] and made.filled == 0


def test_too_few_distinct_tokens_are_filled_from_the_lowest_ids_and_said():
    made = build(COUNTS, 7, 8, always_keep=[7])
    assert made.ids.tolist() == [0, 1, 2, 3, 5, 6, 7] and made.filled == 1


def test_a_vocabulary_padded_beyond_the_tokenizer_is_padded_in_the_counts():
    made = build(COUNTS, 4, 12)
    assert made.ids.tolist() == [1, 2, 3, 5] and made.t2d.shape == (12,)
    with pytest.raises(DataError, match="do not fit"):
        build(COUNTS, 2, 4)


def test_the_whole_vocabulary_is_the_identity():
    made = build(COUNTS, 8, 8, always_keep=[0])
    assert not made.d2t.any() and made.t2d.all() and made.filled == 2  # 4 and 7; 0 is kept


@pytest.mark.parametrize("size", [0, -3, 9])
def test_sizes_outside_the_vocabulary_are_refused(size):
    with pytest.raises(ParameterError, match="the verifier has 8"):
        build(COUNTS, size, 8)


def test_more_kept_tokens_than_room_or_outside_the_vocabulary_are_refused():
    with pytest.raises(ParameterError, match="3 special"):
        build(COUNTS, 2, 8, always_keep=[0, 1, 2])
    with pytest.raises(ParameterError, match="the vocabulary has 8"):
        build(COUNTS, 2, 8, always_keep=[8])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.data())
def test_with_nothing_to_keep_it_is_speculators_own_mapping(counts, data):
    counts, size = np.array(counts), data.draw(st.integers(1, len(counts)))
    d2t, t2d = library_map(counts, size, len(counts))
    made = build(counts, size, len(counts))
    assert made.d2t.tolist() == d2t.tolist() and made.t2d.tolist() == t2d.tolist()


def test_the_full_size_case_takes_seconds_and_agrees_with_the_library(tmp_path):
    vocab, size = 163_840, 32_000
    draw = np.random.default_rng(0)
    ids = np.minimum(draw.zipf(1.2, 1_000_000) - 1, vocab - 1)
    start = time.perf_counter()
    counts = token_counts([(ids[i : i + 1000], np.ones(1000, dtype=np.int64)) for i in range(0, len(ids), 1000)], vocab)
    made = build(counts, size, vocab, always_keep=range(163_584, 163_840))  # Kimi's 256 special ids
    made.save(tmp_path, verifier="kimi", data="f")
    again = load(tmp_path, verifier="kimi", data="f")
    assert time.perf_counter() - start < 5
    assert again.ids.tolist() == made.ids.tolist() and again.t2d[163_584:].all() and again.size == size
    d2t, t2d = library_map(counts, size, vocab)
    plain = build(counts, size, vocab)
    assert np.array_equal(plain.d2t, d2t.numpy()) and np.array_equal(plain.t2d, t2d.numpy())


def test_special_ids_hold_added_specials_and_the_verifiers_own_stops():
    tok = tokenizer()
    named = {tok.convert_tokens_to_ids(t) for t in ("<s>", "<|im_start|>", "<|im_end|>", "<|pad|>", "<tool>")}
    assert set(special_ids(tok, [300, 10**6], vocab_size=400)) == named | {300}


IDENTITY = (np.zeros(4, dtype=np.int64), np.array([True] * 4 + [False] * 2))


@pytest.mark.parametrize(
    ("d2t", "t2d", "fault"),
    [
        ([0, 0, 0, 3], [1, 1, 1, 1, 0, 0], "point outside"),
        ([0, 0, 0, -1], [1, 1, 1, 1, 0, 0], "share a verifier token"),
        ([1, -1, 0, 0], [1, 1, 1, 1, 0, 0], "do not rise"),
        ([0, 0, 0, 1], [1, 1, 1, 1, 0, 0], "t2d marks"),
        ([0, 0, 0, 0], [1, 1, 1, 1, 1, 0], "t2d marks 5"),
    ],
)
def test_an_inconsistent_map_is_found(d2t, t2d, fault):
    check(*IDENTITY)
    with pytest.raises(DataError, match=fault):
        check(np.array(d2t, dtype=np.int64), np.array(t2d, dtype=bool))
    with pytest.raises(DataError, match="must be int64"):
        check(np.array(d2t, dtype=np.int32), np.array(t2d, dtype=bool))


def test_a_saved_map_comes_back_and_is_in_speculators_layout(tmp_path):
    made = build(COUNTS, 4, 8, always_keep=[7])
    paths = made.save(tmp_path, verifier="v", data="f")
    assert [p.name for p in paths] == ["d2t-4.npy", "t2d-4.npy", "vocab_map.json"]
    assert np.load(paths[0]).dtype == np.int64 and np.load(paths[1]).dtype == bool
    again = load(tmp_path, verifier="v", data="f")
    assert (again.ids.tolist(), again.vocab_size, again.kept, again.filled) == (made.ids.tolist(), 8, [7], 0)


def test_another_verifiers_or_datas_map_is_refused(tmp_path):
    build(COUNTS, 4, 8).save(tmp_path, verifier="v", data="f")
    with pytest.raises(StaleInput, match="verifier v, this run has w"):
        load(tmp_path, verifier="w", data="f")
    with pytest.raises(StaleInput, match="data f, this run has g"):
        load(tmp_path, verifier="v", data="g")


def test_missing_and_damaged_maps_are_told_apart(tmp_path):
    with pytest.raises(MissingInput):
        load(tmp_path, verifier="v", data="f")
    d2t, t2d, facts = build(COUNTS, 4, 8).save(tmp_path, verifier="v", data="f")
    whole = d2t.read_bytes()
    np.save(d2t, np.array([0, 0, 0, 9]))
    with pytest.raises(DamagedInput, match="point outside"):
        load(tmp_path, verifier="v", data="f")
    d2t.write_bytes(whole[:-5])
    with pytest.raises(DamagedInput):
        load(tmp_path, verifier="v", data="f")
    d2t.unlink()
    with pytest.raises(MissingInput, match="d2t-4.npy"):
        load(tmp_path, verifier="v", data="f")
    d2t.write_bytes(whole)
    facts.write_text(json.dumps(json.loads(facts.read_text()) | {"vocab_size": 9}))
    with pytest.raises(DamagedInput, match="instead of 4 and 9"):
        load(tmp_path, verifier="v", data="f")
    facts.write_text("{")
    with pytest.raises(DamagedInput, match="cannot be read"):
        load(tmp_path, verifier="v", data="f")
