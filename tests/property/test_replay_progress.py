"""The stored position, compared with a plain list."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.replay.progress import ReadProgress


@given(
    st.lists(st.tuples(st.integers(0, 4), st.lists(st.integers(0, 60), max_size=8)), max_size=12),
    st.integers(0, 9),
)
def test_the_position_passes_only_what_is_done_and_all_before_it(steps, start):
    progress, read, done, end = ReadProgress(start), [], set(), start
    for count, marks in steps:
        fresh = [end + 2 * index for index in range(count)]  # with gaps
        end = fresh[-1] + 2 if fresh else end
        progress.read(fresh, end)
        read += fresh
        known = [mark for mark in marks if mark in read]
        progress.done(known)
        done.update(known)
        left = [position for position in read if position not in done]
        assert progress.position == (left[0] if left else end)
        assert progress.finished == (not left)
        assert progress.end == end
