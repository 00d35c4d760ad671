"""result.json: a number or several, from the job to the program that waits for it."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from hpcinit.base.errors import RequestError
from hpcinit.records import results


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.25, 0.25),
        (3, 3.0),
        (np.float32(0.5), 0.5),
        (Fraction(1, 4), 0.25),
        ([1, 2.5], (1.0, 2.5)),
        ((1e-9,), (1e-9,)),
    ],
)
def test_what_is_written_is_read(tmp_path: Path, value: object, expected: results.Value) -> None:
    """Numbers of every kind and sequences of them are read back as floats, and no other file is left."""
    results.write(tmp_path, results.checked_value(value))
    assert results.read(tmp_path) == expected
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("0.25", "the result is '0.25' (str), expected a number or a sequence of numbers"),
        (None, "the result is 'None' (NoneType), expected"),
        (True, "the result is 'True' (bool), expected"),
        ([], "the result is '[]' (list), expected"),
        ([1, "2"], "the result is \"[1, '2']\" (list), expected"),
        (torch.ones(()), "(Tensor), expected a number or a sequence of numbers; for a tensor use tensor.item()"),
    ],
)
def test_values_that_are_not_a_result(value: object, message: str) -> None:
    """A value that is not a number is refused with its type, and a tensor with the advice to use item()."""
    with pytest.raises(RequestError) as raised:
        results.checked_value(value)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", 'expected {"value": 0.25} in it'),
        ("0.25", 'expected {"value": 0.25} in it'),
        ('{"loss": 0.25}', "cannot be used: KeyError('value')"),
        ('{"value": "low"}', "the result is 'low' (str)"),
        ('{"value": [1, NaN]}', "expected a number: did training diverge?"),
    ],
)
def test_an_unusable_file(tmp_path: Path, text: str, message: str) -> None:
    """A file that the program wrote and that cannot be used is refused with its path."""
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(RequestError) as raised:
        results.read(tmp_path)
    assert message in str(raised.value) and str(tmp_path / "result.json") in str(raised.value)


def test_no_file(tmp_path: Path) -> None:
    """A run without a result is not an error here."""
    assert results.read(tmp_path) is None
