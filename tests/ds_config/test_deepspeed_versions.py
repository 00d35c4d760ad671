"""Versions are compared as versions, and what DeepSpeed silently does wrong is an error."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from hpcinit.base.versions import installed, key
from hpcinit.deepspeed.deepspeed_versions import KEYS, check, tp_to_divide, unread, waiting

pytestmark = pytest.mark.deepspeed

DEEPCOMPILE = {"compile": {"deepcompile": True}}


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **more}}


number = st.integers(0, 30).map(str)
releases = st.lists(number, min_size=1, max_size=4).map(".".join)
before = st.sampled_from(["a0", "b1", "rc2", ".alpha3", "-beta", ".dev0"])
builds = st.sampled_from(["", "+cu128", "+cpu.git12"])


@given(releases, releases, before, builds)
def test_versions_sort_as_packaging_sorts_them(one: str, other: str, before: str, build: str) -> None:
    """key() orders releases as packaging.version does, with a pre-release before its release, and ignores builds."""
    assert (key(one + build) < key(other)) == (Version(one) < Version(other))
    assert (key(one + before + build) < key(other)) == (Version(one + before) < Version(other))


def test_versions_are_not_compared_as_text() -> None:
    """0.16.10 is later than 0.16.4, and 0.9.5 is earlier, although as text the order is reversed."""
    ages = ["0.9.5", "0.16.4", "0.16.10"]
    assert sorted(sorted(ages), key=key) == ages != sorted(ages)


def test_an_invalid_version() -> None:
    """The error for an invalid version contains it."""
    with pytest.raises(ValueError, match="'unknown' is not a version, expected something like"):
        key("unknown")


@pytest.mark.parametrize(
    ("deepspeed", "refused"), [("0.18.5", True), ("0.19.0rc1", True), ("0.19.0", False), ("0.19.8", False)]
)
def test_deepcompile_with_a_torch_that_is_too_new(deepspeed: str, refused: bool) -> None:
    """Before DeepSpeed 0.19.0, DeepCompile prepares nothing with torch 2.9 and later, and fails in its first step."""
    problems = check(DEEPCOMPILE | zero(3), deepspeed)
    assert bool(problems) == refused
    assert all(f"DeepSpeed {deepspeed} is installed, expected 0.19.0 or later" in each for each in problems)


def test_deepspeed_itself_refuses_removed_keys() -> None:
    """For each key that the installed DeepSpeed removed, its own parser raises an error that names the key."""
    from deepspeed.runtime import config as parser

    for name, message in getattr(parser, "_REMOVED_TOP_LEVEL_CONFIG_KEYS", {}).items():
        assert check({name: {}}, installed("deepspeed")) == []
        with pytest.raises(parser.DeepSpeedConfigError) as caught:
            parser.DeepSpeedConfig({"train_batch_size": 1, name: {}})
        assert str(caught.value) == message and len(message) > 40


def test_combinations_that_no_version_supports() -> None:
    """AutoTP without bf16, and DeepCompile without ZeRO, are errors with any version."""
    assert "AutoTP needs it: set precision.param=bf16" in check({"tensor_parallel": {"autotp_size": 4}}, "0.19.8")[0]
    assert "DeepCompile needs stage 1 to 3" in check(DEEPCOMPILE, "0.19.8")[0]


def test_an_ordinary_config_has_no_problems() -> None:
    """Plain ZeRO with AdamW works with any version, and autotp_size 1 is not AutoTP."""
    config = zero(3) | {"optimizer": {"type": "AdamW"}, "tensor_parallel": {"autotp_size": 1}, "nebula": None}
    assert check(config, "0.18.5") == [] == check(config, "0.19.8")


def test_stage_3_on_cpus_gathers_one_by_one_before_0_19_8() -> None:
    """If DeepSpeed does not wait for all gathers, the sequential path is used; a user who disables it gets a note."""
    fixed = {"zero_optimization": {"stage": 3, "stage3_allgather_sequential": True}}
    for version in ("0.18.5", "0.19.7"):
        assert waiting(zero(3), version, "cpu") == waiting(fixed, version, "cpu") == (fixed, [])
        assert waiting(zero(3), version, "cuda") == (zero(3), [])
        assert waiting(zero(2), version, "cpu") == (zero(2), [])
    assert waiting(zero(3), "0.19.8", "cpu") == (zero(3), [])
    forbidden = {"zero_optimization": {"stage": 3, "stage3_allgather_sequential": False}}
    config, (note,) = waiting(forbidden, "0.18.5", "cpu")
    assert config == forbidden
    assert "stage3_allgather_sequential is False: DeepSpeed 0.18.5 on CPUs then gives wrong losses" in note
    assert "remove the key, or update DeepSpeed" in note


def test_before_0_18_6_the_model_is_divided_before_initialize() -> None:
    """From 0.18.6 on initialize() divides the model for AutoTP, before that tp_model_init() does."""
    autotp = {"tensor_parallel": {"autotp_size": 4}}
    assert [tp_to_divide(autotp, version) for version in ("0.18.5", "0.18.6", "0.19.8")] == [4, 1, 1]
    assert tp_to_divide(zero(1), "0.18.5") == 1


def test_versions_are_read_without_an_import() -> None:
    """installed() finds torch's version without importing it; it is '' for a missing package."""
    code = "import sys; from hpcinit.base.versions import installed as i; print(i('torch'), 'torch' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert printed == [installed("torch"), "False"]
    assert installed("no-such-package-as-this") == ""


# Prints every key that DeepSpeed reads at the top level of a ds_config.
READ_KEYS = """
import warnings; warnings.simplefilter("ignore")
keys = set()
class Noting(dict):
    def get(self, key, default=None): keys.add(key); return super().get(key, default)
    def __getitem__(self, key): keys.add(key); return super().__getitem__(key)
    def __contains__(self, key): keys.add(key); return super().__contains__(key)
    def __deepcopy__(self, memo): return self
    def keys(self): return Names(self)
class Names:
    def __init__(self, of): self.of = of
    def __contains__(self, key): return key in self.of
    def __iter__(self): return dict.__iter__(self.of)
from deepspeed.runtime.config import DeepSpeedConfig
DeepSpeedConfig(Noting(train_batch_size=1, train_micro_batch_size_per_gpu=1))
print("FOUND", *sorted(keys))
"""


def test_the_keys_are_those_that_deepspeed_reads() -> None:
    """KEYS contains every key that the installed DeepSpeed reads, so no valid key causes a warning."""
    done = subprocess.run([sys.executable, "-c", READ_KEYS], capture_output=True, text=True, check=True)
    [line] = [line for line in done.stdout.splitlines() if line.startswith("FOUND")]
    top = set(line.removeprefix("FOUND").split())
    assert len(top) > 50 and "zero_optimization" in top and "optimizer" in top and top <= KEYS


def test_a_key_that_deepspeed_ignores_is_named() -> None:
    """A key that DeepSpeed would ignore is reported with the key that was probably meant."""
    right = {"steps_per_print": 5, "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 1}, "fp16": {}}
    assert unread(right) == []
    assert unread({"step_per_print": 5, "gradient_cliping": 1, "mine": 0}) == [
        "ds_config.step_per_print: DeepSpeed has no such key and would silently ignore it; "
        "did you mean steps_per_print?",
        "ds_config.gradient_cliping: DeepSpeed has no such key and would silently ignore it; "
        "did you mean gradient_clipping?",
        "ds_config.mine: DeepSpeed has no such key and would silently ignore it",
    ]
