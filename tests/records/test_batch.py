"""Samples per step: any two of micro batch, accumulation and global batch give the third."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcinit.base.errors import RequestError
from hpcinit.records.batch import Batch, solve

SMALL = st.integers(1, 50)


@given(SMALL, SMALL, SMALL)
def test_any_two_give_the_third(micro: int, accumulation: int, data_parallel: int) -> None:
    """Any two of the three numbers give the same Batch, and all three are accepted if they agree."""
    batch = Batch(micro, accumulation, data_parallel)
    assert batch.total == micro * accumulation * data_parallel
    for missing in range(4):
        given_ = [None if missing == i else n for i, n in enumerate((micro, accumulation, batch.total))]
        assert solve(*given_, data_parallel) == batch


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        ((None, None, None), Batch(1, 1, 8)),
        ((4, None, None), Batch(4, 1, 8)),
        ((None, 2, None), Batch(1, 2, 8)),
        ((None, None, 64), Batch(8, 1, 8)),
    ],
)
def test_missing_numbers_are_one(given_: tuple[int | None, int | None, int | None], expected: Batch) -> None:
    """With one number or none, accumulation is 1, and then the micro batch is 1."""
    assert solve(*given_, 8) == expected


@given(SMALL, st.integers(1, 2000), SMALL)
def test_nothing_is_rounded(micro: int, total: int, data_parallel: int) -> None:
    """A global batch is reached exactly or refused, and each value in the refusal works."""
    try:
        assert solve(micro, None, total, data_parallel).total == total
    except RequestError as error:
        assert total % (micro * data_parallel)
        totals, _, micros = str(error).partition("batch.global=")[2].partition(", or batch.micro=")
        for near in totals.split(" or "):
            assert solve(micro, None, int(near), data_parallel).total == int(near)
        for near in filter(None, micros.split(" or ")):
            assert solve(int(near), None, total, data_parallel).total == total


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        (
            (4, None, 60),
            "batch.global 60 is not a multiple of micro 4 x data parallel 8 = 32; nearest values that work: batch.global=32 or 64",
        ),
        (
            (None, 3, 64),
            "batch.global 64 is not a multiple of accumulation 3 x data parallel 8 = 24; nearest values that work: "
            "batch.global=48 or 72, or batch.accumulation=2 or 4",
        ),
        (
            (4, 2, 60),
            "batch.global is 60, but micro 4 x accumulation 2 x data parallel 8 = 64: remove one of "
            "batch.micro, batch.accumulation and batch.global, or set batch.global=64",
        ),
        ((0, None, None), "batch.micro is 0, expected 1 or more"),
        ((None, -1, 8), "batch.accumulation is -1, expected 1 or more"),
        ((None, None, 0), "batch.global is 0, expected 1 or more"),
    ],
)
def test_a_refusal_shows_the_equation(given_: tuple[int | None, int | None, int | None], message: str) -> None:
    """A refusal shows the numbers and the nearest ones that work."""
    with pytest.raises(RequestError) as caught:
        solve(*given_, 8)
    assert str(caught.value) == message
