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
        ([1, 2.5], [1.0, 2.5]),
        ((1e-9,), [1e-9]),
        (torch.ones(1, 1) / 2, 0.5),
        (np.ones(1), 1.0),
        ("low", "low"),
        (None, None),
        (True, True),
        ({"loss": torch.ones(()), 2: [None]}, {"loss": 1.0, "2": [None]}),
    ],
)
def test_what_is_written_is_read(tmp_path: Path, value: object, expected: object) -> None:
    """What JSON can contain, and tensors with one element, are read back, and no other file is left."""
    results.write(tmp_path, results.reported(value))
    assert results.read(tmp_path) == expected
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (b"x", "the result is \"b'x'\" (bytes), expected numbers, text, None, or lists and dicts of them"),
        ({"a": {1}}, "the result is '{1}' (set), expected"),
        (
            torch.ones(2),
            "(Tensor), expected numbers, text, None, or lists and dicts of them; for a tensor use tensor.tolist()",
        ),
    ],
)
def test_values_that_json_cannot_hold(value: object, message: str) -> None:
    """A value that is not a result is named with its type, and a tensor with the advice to use tolist()."""
    with pytest.raises(RequestError) as raised:
        results.reported(value)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", 'expected content such as {"value": 0.25}'),
        ("0.25", 'expected content such as {"value": 0.25}'),
        ('{"loss": 0.25}', "cannot be used: KeyError('value')"),
        ('{"value": "low"}', "the result is 'low' (str)"),
        ('{"value": null}', "the result is 'None' (NoneType)"),
        ('{"value": []}', "the result is '[]' (list), expected a number or a list of numbers"),
        ('{"value": [1, true]}', "the result is '[1, True]' (list)"),
        ('{"value": [1, NaN]}', "expected a number. Did the training diverge?"),
    ],
)
def test_a_file_that_a_search_cannot_use(tmp_path: Path, text: str, message: str) -> None:
    """A file that the program wrote and that a search cannot use is refused with its path."""
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(RequestError) as raised:
        results.read_numbers(tmp_path)
    assert message in str(raised.value) and str(tmp_path / "result.json") in str(raised.value)


def test_numbers(tmp_path: Path) -> None:
    """A search gets one number, or several as a tuple."""
    results.write(tmp_path, 3)
    assert results.read_numbers(tmp_path) == 3.0
    results.write(tmp_path, [1, 2.5])
    assert results.read_numbers(tmp_path) == (1.0, 2.5)


def test_no_file(tmp_path: Path) -> None:
    """A run without a result is not an error here."""
    assert results.read(tmp_path) is None and results.read_numbers(tmp_path) is None
