"""The installed DeepSpeed's own parser accepts the ds_config that hpcinit builds."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcinit.base.errors import RequestError
from hpcinit.deepspeed.deepspeed_config import Options, build, build_eval, options, without_ranks
from hpcinit.deepspeed.deepspeed_versions import check
from hpcinit.records.batch import Batch
from hpcinit.records.layout import Layout

pytestmark = pytest.mark.deepspeed


@dataclass(frozen=True)
class Precision:
    param: str = "fp32"
    reduce: str = "fp32"


FP32, BF16 = Precision(), Precision("bf16", "bf16")
BATCH = Batch(micro=2, accumulation=3, data_parallel=4)
DP4 = Layout(dp_replicate=4)


class Read(dict[str, Any]):
    """A config that records which of its keys were read. A copy shares the record."""

    def __init__(self, content: dict[str, Any]) -> None:
        super().__init__({k: Read(v) if isinstance(v, dict) else v for k, v in content.items()})
        self.seen: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.seen.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.seen.add(str(key))
        return super().__contains__(key)


# DeepSpeed makes a pydantic model of these sections, which refuses unknown keys: test_sections_refuse_unknown_keys.
STRICT = ("zero_optimization", "bf16", "fp16", "tensor_parallel", "compile")
# Optimizer parameters are read by the optimizer.
ELSEWHERE = {"optimizer.params"}


def unread(config: Read, at: str = "") -> set[str]:
    found = set()
    for name, value in config.items():
        if f"{at}{name}" not in ELSEWHERE and name not in config.seen:
            found.add(f"{at}{name}")
        elif isinstance(value, Read) and name not in STRICT and f"{at}{name}" not in ELSEWHERE:
            found |= unread(value, f"{at}{name}.")
    return found


def parse(config: dict[str, Any], world_size: int) -> Any:
    """Run DeepSpeed's own parser in a world of `world_size`. Only its queries of the process group are faked."""
    from deepspeed.runtime import config as parser

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parser.dist, "get_rank", lambda *_, **__: 0)
        patch.setattr(parser.dist, "get_world_size", lambda *_, **__: world_size)
        return parser.DeepSpeedConfig(config)


def triple(parsed: Any) -> tuple[int, int, int]:
    return parsed.train_micro_batch_size_per_gpu, parsed.gradient_accumulation_steps, parsed.train_batch_size


@st.composite
def cases(draw: st.DrawFn) -> tuple[Options, Batch, Layout, Precision]:
    """Return any valid choice of options, batch and layout."""
    stage = draw(st.integers(0, 3))
    offload = draw(st.sampled_from(["none", "cpu", "nvme"][: 1 + (stage > 0) + (stage == 3)]))
    offload_param = draw(st.sampled_from(["none", "cpu", "nvme"] if stage == 3 else ["none"]))
    optimizer = draw(st.sampled_from(["none", "adamw", "torch_adamw", "muon"]))
    tp, cp = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (1, 4), (2, 2)]))
    batch = Batch(draw(st.integers(1, 5)), draw(st.integers(1, 5)), draw(st.integers(1, 5)))
    chosen = Options(
        zero_stage=stage,
        offload_optimizer=offload,
        offload_param=offload_param,
        nvme_path="/local" if "nvme" in (offload, offload_param) else "",
        hpz=draw(st.sampled_from([1, batch.data_parallel])) if stage == 3 else 1,
        overlap_comm=draw(st.sampled_from([None, True, False])) if stage else None,
        gradient_clipping=draw(st.sampled_from([0.0, 1.0])),
        deepcompile=draw(st.booleans()),
        universal_checkpoint=draw(st.booleans()),
        optimizer=optimizer,
        optimizer_params={} if optimizer == "none" else {"lr": 1e-3},
    )
    precision = Precision(draw(st.sampled_from(["fp32", "bf16", "fp16"])), draw(st.sampled_from(["fp32", "bf16"])))
    return chosen, batch, Layout(dp_replicate=batch.data_parallel, tp=tp, cp=cp), precision


@settings(max_examples=150, deadline=None)
@given(cases())
def test_deepspeed_reads_every_key_and_derives_our_batch(case: tuple[Options, Batch, Layout, Precision]) -> None:
    """DeepSpeed's parser accepts every config that we build, reads all of its keys, and computes the same batch."""
    chosen, batch, layout, precision = case
    for builder, accumulation in ((build, batch.accumulation), (build_eval, 1)):
        config, notes = builder(chosen, batch, layout, precision)
        read = Read(config)
        parsed = parse(read, batch.data_parallel * layout.tp * layout.cp)
        assert unread(read) == set()
        assert triple(parsed) == (
            batch.micro,
            accumulation,
            batch.micro * accumulation * batch.data_parallel * layout.tp * layout.cp,
        )
        assert len(notes) == (layout.tp * layout.cp > 1)
        assert parsed.gradient_clipping == chosen.gradient_clipping or builder is build_eval
        assert parsed.zero_config.stage == (chosen.zero_stage if builder is build else chosen.zero_stage // 3 * 3)
        assert parsed.bfloat16_config.enabled == (precision.param == "bf16")
        assert parsed.float16_config.enabled == (precision.param == "fp16")


@settings(max_examples=60, deadline=None)
@given(cases(), st.sampled_from(["train_batch_size", "gradient_accumulation_steps", "zero_optimization"]))
def test_the_check_for_unread_keys_can_fail(case: tuple[Options, Batch, Layout, Precision], name: str) -> None:
    """The check above finds a key that DeepSpeed does not read, at the top level and in a section."""
    chosen, batch, layout, precision = case
    config, _ = build(chosen, batch, layout, precision)
    config |= {"no_such_key": 1, "checkpoint": {"load_universal": True, "no_such_key": 1}}
    read = Read(config)
    parse(read, batch.data_parallel * layout.tp * layout.cp)
    assert unread(read) == {"no_such_key", "checkpoint.no_such_key"} and name in read.seen


@pytest.mark.parametrize("section", STRICT)
def test_sections_refuse_unknown_keys(section: str) -> None:
    """The sections that the check above skips raise an error for an unknown key."""
    with pytest.raises(Exception, match="no_such_key"):
        parse({"train_batch_size": 1, section: {"no_such_key": 1}}, 1)


def test_a_whole_config() -> None:
    """ZeRO 3 with offload, hpZ and Ulysses gives exactly this dict."""
    chosen = Options(
        zero_stage=3,
        offload_param="nvme",
        offload_optimizer="cpu",
        nvme_path="/local",
        hpz=4,
        overlap_comm=True,
        gradient_clipping=1.0,
        deepcompile=True,
        universal_checkpoint=True,
        optimizer="adamw",
        optimizer_params={"lr": 3e-4},
    )
    config, notes = build(chosen, BATCH, Layout(dp_replicate=4, cp=2), Precision("bf16", "fp32"))
    assert notes == [
        "DeepSpeed counts context parallel ranks as data parallel ranks: train_batch_size 48 = global batch 24 x cp 2"
    ]
    assert config == {
        "train_batch_size": 48,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "bf16": {"enabled": True},
        "communication_data_type": "fp32",
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "overlap_comm": True,
            "offload_param": {"device": "nvme", "pin_memory": True, "nvme_path": "/local"},
            "zero_hpz_partition_size": 4,
        },
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
        "compile": {"deepcompile": True},
        "checkpoint": {"load_universal": True},
    }
    assert check(config, "0.19.8") == []


def test_an_evaluation_config_trains_nothing() -> None:
    """The evaluation config keeps stage 3's partition options, but nothing about optimizer or compiler."""
    chosen = Options(
        zero_stage=3,
        offload_param="cpu",
        offload_optimizer="cpu",
        deepcompile=True,
        optimizer="adamw",
        ds_config={
            "optimizer": {"type": "Lion"},
            "train_batch_size": 24,
            "zero_optimization": {"stage": 2},
            "x": 1,
            "compile": {"deepcompile": True},
        },
    )
    config, notes = build_eval(chosen, BATCH, DP4, BF16)
    zero = {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": True}}
    sizes = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}
    assert config == {**sizes, "bf16": {"enabled": True}, "zero_optimization": zero, "x": 1} and notes == []
    assert build_eval(Options(zero_stage=2), BATCH, DP4, FP32)[0]["zero_optimization"] == {"stage": 0}


def test_optimizers() -> None:
    """Each name makes DeepSpeed choose that optimizer; Muon disables reduce_scatter."""
    named = {
        name: build(Options(zero_stage=2, optimizer=name), BATCH, DP4, BF16)[0]
        for name in ("none", "adamw", "torch_adamw", "muon")
    }
    assert {name: config.get("optimizer") for name, config in named.items()} == {
        "none": None,
        "adamw": {"type": "AdamW", "params": {}},
        "torch_adamw": {"type": "AdamW", "params": {"torch_adam": True}},
        "muon": {"type": "Muon", "params": {}},
    }
    assert {name for name, config in named.items() if "reduce_scatter" in config["zero_optimization"]} == {"muon"}
    assert {name for name, config in named.items() if "zero_force_ds_cpu_optimizer" in config} == {"none"}


REFUSED = [  # options, part of the message
    ({"zero_stage": 4}, "deepspeed.zero_stage is 4, expected one of: 0, 1, 2, 3"),
    ({"offload_param": "disk"}, "deepspeed.offload_param is 'disk', expected one of: none, cpu, nvme"),
    ({"optimizer": "adam"}, "deepspeed.optimizer is 'adam', expected one of: none, adamw, torch_adamw, muon"),
    (
        {"zero_stage": 2, "offload_param": "cpu"},
        "offload_param is cpu with deepspeed.zero_stage 2, but DeepSpeed supports",
    ),
    ({"offload_optimizer": "cpu"}, "DeepSpeed supports that only in stages 1 to 3"),
    ({"zero_stage": 2, "offload_optimizer": "nvme", "nvme_path": "/x"}, "would offload to cpu instead"),
    ({"zero_stage": 3, "offload_param": "nvme"}, "deepspeed.nvme_path is not set: set it to a folder"),
    ({"nvme_path": "/x"}, "nvme_path is '/x', but nothing is offloaded"),
    ({"zero_stage": 2, "hpz": 4}, "hpz is 4 with deepspeed.zero_stage 2"),
    ({"hpz": 0}, "deepspeed.hpz is 0, expected 1 (off)"),
    ({"overlap_comm": True}, "overlap_comm is True with deepspeed.zero_stage 0"),
    ({"gradient_clipping": -1.0}, "gradient_clipping is -1.0, expected 0"),
    ({"optimizer_params": {"lr": 1}}, "deepspeed.optimizer is none: choose an optimizer"),
    ({"zero": 3}, "deepspeed.zero: no such option, expected one of: zero_stage, offload_param"),
]


@pytest.mark.parametrize(("given_", "part"), REFUSED)
def test_options_that_deepspeed_would_ignore(given_: dict[str, Any], part: str) -> None:
    """An option that DeepSpeed would silently ignore, or refuse in the job, is an error with its key and value."""
    with pytest.raises(RequestError) as raised:
        options(given_)
    assert part in str(raised.value)


def test_layouts_that_deepspeed_cannot_count() -> None:
    """Tensor parallel ranks unknown to DeepSpeed are an error; for ranks that it counts twice there is a note."""
    tp = Layout(dp_replicate=4, tp=2)
    with pytest.raises(RequestError, match=r"average gradients over tensor parallel ranks. Set deepspeed.autotp=true"):
        build(Options(autotp=False), BATCH, tp, BF16)
    config, notes = build(Options(), BATCH, Layout(dp_replicate=4, tp=2, cp=2), BF16)
    assert config["tensor_parallel"] == {"autotp_size": 2}
    assert notes[0].startswith("DeepSpeed counts AutoTP's and context parallel ranks as data parallel ranks: train_")
    assert notes[0].endswith("batch_size 96 = global batch 24 x tp 2 x cp 2")
    config, notes = build(Options(mpu=True, autotp=False), BATCH, tp, BF16)
    assert config["train_batch_size"] == 24 and "tensor_parallel" not in config and notes == []
    config, notes = build(Options(), BATCH, tp, BF16)
    assert config["tensor_parallel"] == {"autotp_size": 2}
    assert notes[0].endswith("train_batch_size 48 = global batch 24 x tp 2")
    with pytest.raises(RequestError, match=r"deepspeed.hpz is 3, expected a divisor of 8, the number of ranks"):
        build(Options(zero_stage=3, hpz=3), BATCH, tp, BF16)
    with pytest.raises(RequestError, match=r"precision.param is 'int8', expected one of: fp32"):
        build(Options(), BATCH, DP4, Precision("int8", "fp32"))


def test_the_users_ds_config_wins_with_notes() -> None:
    """Nested keys are merged, the user's win, and each that overrides an option gives a note with both values."""
    given_config = {
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 1000},
        "gradient_clipping": None,
        "steps_per_print": 10,
        "zero_allow_untested_optimizer": True,
    }
    before = copy.deepcopy(given_config)
    config, notes = build(Options(zero_stage=2, gradient_clipping=1.0, ds_config=given_config), BATCH, DP4, FP32)
    assert config["zero_optimization"] == {"stage": 3, "reduce_bucket_size": 1000}
    assert config["steps_per_print"] == 10 and "gradient_clipping" not in config
    assert notes == [
        "ds_config.zero_optimization.stage: your value 3 overrides 2 from the deepspeed options",
        "ds_config.gradient_clipping: your value None overrides 1.0 from the deepspeed options",
    ]
    assert given_config == before


def test_another_optimizer_drops_our_parameters() -> None:
    """If the user sets another optimizer type, our parameters are dropped; with the same type they are merged."""
    ours = Options(optimizer="adamw", optimizer_params={"lr": 1e-3, "betas": [0.9, 0.95]})
    lion = Options(**{**vars(ours), "ds_config": {"optimizer": {"type": "Lion", "params": {"lr": 1}}}})
    config, notes = build(lion, BATCH, DP4, FP32)
    assert config["optimizer"] == {"type": "Lion", "params": {"lr": 1}} and len(notes) == 1
    same = Options(**{**vars(ours), "ds_config": {"optimizer": {"type": "adamw", "params": {"lr": 1}}}})
    assert build(same, BATCH, DP4, FP32)[0]["optimizer"]["params"] == {"lr": 1, "betas": [0.9, 0.95]}


def test_another_precision_replaces_ours() -> None:
    """The user's fp16 replaces our bf16, DeepSpeed accepts it, and a note names it."""
    config, notes = build(Options(ds_config={"fp16": {"enabled": True}}), BATCH, DP4, BF16)
    assert "bf16" not in config and parse(config, 4).float16_config.enabled
    assert notes == ["ds_config.fp16.enabled: your value True overrides bf16 from precision.param"]


def test_auto_is_skipped_with_a_note() -> None:
    """'auto' from a config for Hugging Face is skipped in favor of our value, unless DeepSpeed accepts it there."""
    given_config = {
        "train_batch_size": "auto",
        "bf16": {"enabled": "auto"},
        "data_types": {"keep_in_fp32_modules": "auto"},
    }
    config, notes = build(Options(ds_config=given_config), BATCH, DP4, BF16)
    assert config["train_batch_size"] == 24 and config["bf16"] == {"enabled": True}
    assert config["data_types"] == {"keep_in_fp32_modules": "auto"}
    assert [note.partition(":")[0] for note in notes] == [
        "skipping ds_config.train_batch_size",
        "skipping ds_config.bf16.enabled",
    ]


GIVEN = [  # the user's numbers; the resulting micro, accumulation, total for 4 data parallel ranks, ours being 2, 3, 24
    ({"train_batch_size": 48}, (2, 6, 48)),
    ({"train_micro_batch_size_per_gpu": 1}, (1, 3, 12)),
    ({"gradient_accumulation_steps": 1}, (2, 1, 8)),
    ({"train_batch_size": 48, "gradient_accumulation_steps": 1}, (12, 1, 48)),
    ({"train_batch_size": 48, "train_micro_batch_size_per_gpu": 1}, (1, 12, 48)),
    ({"train_batch_size": 4, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}, (1, 1, 4)),
]


@pytest.mark.parametrize(("given_config", "expected"), GIVEN)
def test_the_users_batch_is_completed_exactly(given_config: dict[str, int], expected: tuple[int, int, int]) -> None:
    """The user's numbers are kept, the others are computed from them, and DeepSpeed agrees."""
    config, notes = build(Options(ds_config=given_config), BATCH, DP4, FP32)
    assert triple(parse(config, 4)) == expected
    assert len(notes) == len(given_config)


def test_a_users_batch_that_does_not_divide() -> None:
    """DeepSpeed would round down, even to zero; our error names the numbers that work."""
    with pytest.raises(RequestError, match=r"ds_config.train_batch_size: .*26 is not a multiple of micro 2.*24 or"):
        build(Options(ds_config={"train_batch_size": 26}), BATCH, DP4, FP32)
    with pytest.raises(RequestError, match=r"ds_config.train_batch_size is 2.5, expected a whole number"):
        build(Options(ds_config={"train_batch_size": 2.5}), BATCH, DP4, FP32)


@settings(max_examples=30, deadline=None)
@given(cases())
def test_the_config_without_ranks_is_part_of_the_whole(case: tuple[Options, Batch, Layout, Precision]) -> None:
    """without_ranks() has the same optimizer, ZeRO and compiler sections as build(), and no batch."""
    chosen, batch, layout, precision = case
    whole, _ = build(chosen, batch, layout, precision)
    part = without_ranks(Options(**{**vars(chosen), "ds_config": {"train_batch_size": 7}}))
    assert part.items() <= whole.items()
    assert {"optimizer", "zero_optimization", "compile"} & whole.keys() <= part.keys()
