"""Version facts: compared as versions, and each one refuses below its bound and lets pass from there."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from hpcinit.facts.deepspeed_versions import FACTS, check, states_can_move, tp_to_divide, waiting
from hpcinit.facts.versions import installed, key

pytestmark = pytest.mark.deepspeed

BF16 = {"bf16": {"enabled": True}}
TP = BF16 | {"tensor_parallel": {"autotp_size": 2}}
MUON = {"optimizer": {"type": "Muon", "params": {}}}
DEEPCOMPILE = {"compile": {"deepcompile": True}}


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **more}}


number = st.integers(0, 30).map(str)
versions = st.builds(
    "".join,
    st.tuples(
        st.lists(number, min_size=1, max_size=4).map(".".join),
        st.sampled_from(["", "a", "b1", "rc2", ".alpha3", "-beta", "_pre4", "c", "preview1"]),
        st.sampled_from(["", ".post1", "-2", "r", "post"]),
        st.sampled_from(["", ".dev0", "dev7"]),
        st.sampled_from(["", "+cu128", "+cpu.git12"]),
    ),
)


@given(versions, versions)
def test_versions_sort_as_packaging_sorts_them(one: str, other: str) -> None:
    """key() orders any two versions as packaging.version does, leaving out what follows '+'."""
    ours = (key(one) > key(other)) - (key(one) < key(other))
    left, right = Version(Version(one).public), Version(Version(other).public)
    assert ours == (left > right) - (left < right)


def test_versions_are_not_compared_as_text() -> None:
    """0.16.10 comes after 0.16.4 and 0.9.5 before it, which as strings is the other way round."""
    ages = ["0.9.5", "0.16.4", "0.16.10"]
    assert sorted(sorted(ages), key=key) == ages != sorted(ages)


def test_what_is_no_version_is_named() -> None:
    """A text that is no version raises and is shown."""
    with pytest.raises(ValueError, match="'unknown' is not a version, expected something like"):
        key("unknown")


CASES = [  # ds_config, DeepSpeed that refuses, DeepSpeed that does it, torch, words of the message
    (
        TP,
        "0.16.3",
        "0.16.4",
        "2.7",
        "tensor_parallel.autotp_size 2: DeepSpeed 0.16.3 is installed, it needs DeepSpeed 0.16.4",
    ),
    (TP, "0.9.5", "0.16.10", "2.7", "0.16.4 or later"),
    (TP | zero(3), "0.18.5", "0.19.4", "2.7", "needs DeepSpeed 0.19.4 or later"),
    (TP | zero(3), "0.19.4rc1", "0.19.8", "2.13", "use ZeRO stage 0 to 2"),
    (MUON | zero(2), "0.17.5", "0.17.6", "2.7", "optimizer.type 'Muon'"),
    (MUON | zero(3), "0.18.5", "0.18.9", "2.7", "use ZeRO stage 1 or 2"),
    (
        {"optimizer": {"type": "muon", "params": {"muon_lr": 0.1}}},
        "0.18.2",
        "0.18.3",
        "2.7",
        "optimizer.params.muon_lr 0.1",
    ),
    (
        {"optimizer": {"type": "muon", "params": {"adam_lr": 0.1}}},
        "0.18.2",
        "0.18.3",
        "2.7",
        "optimizer.params.adam_lr 0.1",
    ),
    (DEEPCOMPILE | zero(1), "0.16.5", "0.16.6", "2.6.0", "0.16.6 or later"),
    (DEEPCOMPILE | zero(2), "0.17.1", "0.17.2", "2.6.0", "use ZeRO stage 1 or 3"),
    (DEEPCOMPILE | zero(1), "0.18.3", "0.18.4", "2.7.0+cu126", "torch 2.7.0+cu126 with DeepSpeed 0.18.3"),
    (DEEPCOMPILE | zero(3), "0.18.5", "0.19.0", "2.9.0+cu128", "it needs torch below 2.9"),
    (DEEPCOMPILE | zero(3), "0.18.5", "0.19.8", "2.13.0", "update DeepSpeed to 0.19.0"),
    (
        {"nebula": {}},
        "0.19.7",
        "0.19.6",
        "2.13",
        "nebula: DeepSpeed 0.19.7 is installed, it needs DeepSpeed below 0.19.7",
    ),
    (zero(3, mics_shard_size=2), "0.19.7", "0.19.6", "2.13", "zero_optimization.mics_shard_size 2"),
    ({"amp": {"enabled": True}}, "0.19.8", "0.19.7", "2.13", "take it out of ds_config"),
    ({"elasticity": {"enabled": False}}, "0.19.8", "0.18.5", "2.13", "removed in 0.19.8"),
]


@pytest.mark.parametrize(("config", "refuses", "does", "torch", "words"), CASES)
def test_each_fact_refuses_on_its_one_side(
    config: dict[str, Any], refuses: str, does: str, torch: str, words: str
) -> None:
    """Below its bound a fact says the key, what is installed, what is needed; from there on nothing."""
    said = check(config, refuses, torch)
    assert len(said) == 1 and words in said[0]
    assert check(config, does, torch) == []


def test_every_fact_has_a_case() -> None:
    """No row of the table goes without a case above: each one speaks for at least one of them, or for a removed key."""
    spoken = {fact for config, refuses, _, torch, _ in CASES for fact in FACTS if fact.problem(config, refuses, torch)}
    left = [fact for fact in FACTS if fact not in spoken]
    assert all(fact.source.startswith("removed in") or fact.torch_since for fact in left), left


def test_removed_keys_are_those_that_the_installed_deepspeed_refuses() -> None:
    """For the installed DeepSpeed, the keys we call removed are exactly those that its parser refuses."""
    from deepspeed.runtime import config as parser

    theirs = {*getattr(parser, "_REMOVED_TOP_LEVEL_CONFIG_KEYS", ())} | {
        f"zero_optimization.{name}" for name in getattr(parser, "_REMOVED_ZERO_CONFIG_KEYS", ())
    }
    now = key(installed("deepspeed"))
    assert {fact.path for fact in FACTS if fact.below and now >= key(fact.below)} == theirs


def test_torch_too_old_for_deepcompile_is_named() -> None:
    """DeepCompile with torch 2.5 is refused whatever the DeepSpeed."""
    assert "needs torch 2.6 or later" in check(DEEPCOMPILE | zero(1), "0.19.8", "2.5.1")[0]


def test_combinations_that_no_version_does_are_named() -> None:
    """AutoTP without bf16, and DeepCompile without ZeRO, are said at any version."""
    assert "needs it: precision.param=bf16" in check({"tensor_parallel": {"autotp_size": 4}}, "0.19.8", "2.13")[0]
    assert "DeepCompile does stages 1 to 3" in check(DEEPCOMPILE, "0.19.8", "2.13")[0]


def test_an_ordinary_config_is_left_alone() -> None:
    """Plain ZeRO with AdamW needs nothing of any version, and autotp_size 1 is no AutoTP."""
    config = zero(3) | {"optimizer": {"type": "AdamW"}, "tensor_parallel": {"autotp_size": 1}, "nebula": None}
    assert check(config, "0.18.5", "2.7.0") == [] == check(config, "0.19.8", "2.13.0")


def test_states_move_outside_stage_3_above_0_17_5() -> None:
    """offload_states works in stage 3 from 0.15.2 on, in 1 and 2 from 0.17.6 on, and never without ZeRO."""
    assert [states_can_move(stage, "0.17.5") for stage in range(4)] == [False, False, False, True]
    assert [states_can_move(stage, "0.17.6") for stage in range(4)] == [False, True, True, True]


def test_stage_3_on_cpus_gathers_one_by_one_before_0_19_8() -> None:
    """Where DeepSpeed does not wait for all gathers, ours goes another way; who forbids that is told what comes of it."""
    mended = {"zero_optimization": {"stage": 3, "stage3_allgather_sequential": True}}
    for version in ("0.18.5", "0.19.7"):
        assert waiting(zero(3), version, "cpu") == waiting(mended, version, "cpu") == (mended, [])
        assert waiting(zero(3), version, "cuda") == (zero(3), [])
        assert waiting(zero(2), version, "cpu") == (zero(2), [])
    assert waiting(zero(3), "0.19.8", "cpu") == (zero(3), [])
    forbidden = {"zero_optimization": {"stage": 3, "stage3_allgather_sequential": False}}
    config, (note,) = waiting(forbidden, "0.18.5", "cpu")
    assert config == forbidden
    assert "stage3_allgather_sequential: False, by your hand; DeepSpeed 0.18.5 on CPUs then reads" in note
    assert "leave the key out, or update DeepSpeed" in note


def test_before_0_18_6_the_model_is_divided_before_initialize() -> None:
    """AutoTP's division is initialize()'s work from 0.18.6 on, and tp_model_init()'s before; without AutoTP nobody's."""
    autotp = {"tensor_parallel": {"autotp_size": 4}}
    assert [tp_to_divide(autotp, version) for version in ("0.18.5", "0.18.6", "0.19.8")] == [4, 1, 1]
    assert tp_to_divide(zero(1), "0.18.5") == 1


def test_versions_are_read_without_an_import() -> None:
    """installed() finds torch's version and does not import it; what is not there is ''."""
    code = "import sys; from hpcinit.facts.versions import installed as i; print(i('torch'), 'torch' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert said == [installed("torch"), "False"]
    assert installed("no-such-package-as-this") == ""
