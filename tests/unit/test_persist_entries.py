"""Entries of the queue of results, and the progress that makes a repeated delivery harmless."""

import itertools

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.persist.entries import EntryDamaged, pack, split, unpack
from penstock.persist.names import safe
from penstock.persist.progress import WriteProgress

UNSIGNED = st.integers(0, (1 << 64) - 1)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
ROWS = st.lists(st.tuples(st.text(max_size=30), st.one_of(st.none(), st.integers(-100, 100))), max_size=40)


def table(rows):
    words, counts = zip(*rows, strict=True) if rows else ((), ())
    return pa.table({"word": pa.array(words, pa.string()), "count": pa.array(counts, pa.int64())})


@given(NAMES, UNSIGNED, UNSIGNED, ROWS)
def test_an_entry_comes_back_as_it_was(writer, incarnation, number, rows):
    entry = unpack(pack(writer, incarnation, number, table(rows)))
    assert (entry.writer, entry.incarnation, entry.number, entry.rows) == (writer, incarnation, number, len(rows))
    assert entry.table().equals(table(rows))


def test_only_the_rows_of_a_part_are_packed():
    whole = table([("x" * 100, number) for number in range(10_000)])
    assert len(pack("w", 1, 1, whole.slice(17, 3))) < 2_000
    assert unpack(pack("w", 1, 1, whole.slice(17, 3))).table().equals(whole.slice(17, 3))


@pytest.mark.parametrize("data", [b"", b"pst1", b"{}" * 30, b"pst2" + bytes(60)])
def test_what_is_no_entry_is_refused(data):
    with pytest.raises(EntryDamaged, match=f"this version of Penstock did not put there: {len(data)} bytes"):
        unpack(data)


@given(ROWS, st.integers(1, 600))
def test_rows_are_split_into_all_of_them_in_order(rows, most):
    whole = table(rows)
    parts = list(split(whole, most))
    assert pa.concat_tables([whole.slice(0, 0), *parts]).equals(whole)
    assert all(parts), "none is empty"
    assert all(part.num_rows == 1 or part.nbytes <= 2 * most for part in parts)
    assert [part.num_rows for part in split(whole, most)] == [part.num_rows for part in parts]


def test_one_large_row_among_small_ones_is_on_its_own():
    rows = [("s", 1)] * 100 + [("x" * 100_000, 2)] + [("s", 3)] * 100
    sizes = [len(pack("w", 1, 1, part)) for part in split(table(rows), 10_000)]
    assert sum(size > 20_000 for size in sizes) == 1
    assert sum(size < 20_000 for size in sizes) == len(sizes) - 1


# -- progress


def entry(writer, incarnation, number):
    return unpack(pack(writer, incarnation, number, table([])))


def deliveries():
    """Incarnations of two writers, each numbering its entries, and their deliveries to the store. An entry may be
    delivered again later, and so may whole sequences when a processor or a writer repeats them."""
    kept = st.lists(st.tuples(st.sampled_from("ab"), st.booleans()), max_size=12)
    return st.tuples(kept, st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), max_size=5))


@given(deliveries())
def test_each_entry_is_new_once_however_often_it_comes(drawn):
    made, repeats = drawn
    incarnation, number, sent = {"a": 1, "b": 1}, {"a": 0, "b": 0}, []
    for writer, reborn in made:
        if reborn:
            incarnation[writer], number[writer] = incarnation[writer] + 1, 0
        number[writer] += 1
        sent.append(entry(writer, incarnation[writer], number[writer]))
    delivered = list(sent)
    for begin, end in repeats:  # the entries delivered in this range are delivered again right after it
        delivered[end:end] = delivered[begin:end]
    progress, stored = WriteProgress(), []
    for each in delivered:
        if progress.is_new(each):
            stored.append(each)
            progress.add(each)
        progress = WriteProgress.decode(progress.encode())
    names = [(each.writer, each.incarnation, each.number) for each in stored]
    assert sorted(names) == sorted((each.writer, each.incarnation, each.number) for each in sent)
    for writer in "ab":
        assert [each for each in names if each[0] == writer] == sorted(each for each in names if each[0] == writer)


def test_an_earlier_incarnation_is_over_once_a_later_one_was_seen():
    progress = WriteProgress()
    progress.add(entry("w", 1, 9))
    progress.add(entry("w", 2, 1))
    assert not progress.is_new(entry("w", 1, 10))
    assert progress.is_new(entry("w", 2, 2))
    assert progress.is_new(entry("other", 1, 1))


def test_the_same_progress_is_the_same_text():
    """Stores compare the encoded progress."""
    one, other = WriteProgress(), WriteProgress()
    for each in ("ü", "b", "a"):
        one.add(entry(each, 1 << 63, 2))
    for each in ("a", "ü", "b"):
        other.add(entry(each, 1 << 63, 2))
    assert one.encode() == other.encode()
    assert WriteProgress.decode("").is_new(entry("w", 0, 0))


# -- names


@given(st.lists(st.one_of(NAMES, st.sampled_from(["x" * 300, "x" * 299 + "y", "ü" * 99])), unique=True))
def test_safe_names_are_short_plain_and_different(names):
    found = [safe(name) for name in names]
    assert len(set(found)) == len(names)
    for name in found:
        assert len(name) <= 100
        assert all(character.isascii() and (character.isalnum() or character in "_.-~%") for character in name)
    assert all(safe(name) == plain for name, plain in itertools.zip_longest(names, found))
