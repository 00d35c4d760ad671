"""The ds_config that we build, judged by the parser of the installed DeepSpeed."""

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
    """A config that remembers which of its keys were looked at. A copy shares the memory."""

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


# Of these DeepSpeed makes a pydantic model that refuses what it does not know: test_sections_refuse_what_they_...
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


class Sequences:
    """Stands for run.wrap's mpu: how many ranks share a sequence."""

    def __init__(self, cp: int) -> None:
        self.get_sequence_parallel_world_size = lambda: cp


def parse(config: dict[str, Any], world_size: int, cp: int = 1) -> Any:
    """DeepSpeed's own parser, in a world of `world_size`: only what it asks the process group is stood in for."""
    from deepspeed.runtime import config as parser

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parser.dist, "get_rank", lambda *_, **__: 0)
        patch.setattr(parser.dist, "get_world_size", lambda *_, **__: world_size)
        return parser.DeepSpeedConfig(config, mpu=Sequences(cp) if cp > 1 else None)


def triple(parsed: Any) -> tuple[int, int, int]:
    return parsed.train_micro_batch_size_per_gpu, parsed.gradient_accumulation_steps, parsed.train_batch_size


@st.composite
def cases(draw: st.DrawFn) -> tuple[Options, Batch, Layout, Precision]:
    """Any valid choice of options, batch and layout."""
    stage = draw(st.integers(0, 3))
    offload = draw(st.sampled_from(["none", "cpu", "nvme"][: 1 + (stage > 0) + (stage == 3)]))
    offload_param = draw(st.sampled_from(["none", "cpu", "nvme"] if stage == 3 else ["none"]))
    optimizer = draw(st.sampled_from(["none", "adamw", "torch_adamw", "muon"]))
    tp, cp = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (1, 4)]))
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
    """DeepSpeed's parser takes any config that we build, looks at every key of it, and counts the batch as we do."""
    chosen, batch, layout, precision = case
    for builder, accumulation in ((build, batch.accumulation), (build_eval, 1)):
        config, notes = builder(chosen, batch, layout, precision)
        read = Read(config)
        parsed = parse(read, batch.data_parallel * layout.tp * layout.cp, layout.cp)
        assert unread(read) == set()
        assert triple(parsed) == (
            batch.micro,
            accumulation,
            batch.micro * accumulation * batch.data_parallel * layout.tp,
        )
        assert len(notes) == (layout.tp > 1)
        assert parsed.gradient_clipping == chosen.gradient_clipping or builder is build_eval
        assert parsed.zero_config.stage == (chosen.zero_stage if builder is build else chosen.zero_stage // 3 * 3)
        assert parsed.bfloat16_config.enabled == (precision.param == "bf16")
        assert parsed.float16_config.enabled == (precision.param == "fp16")


@settings(max_examples=60, deadline=None)
@given(cases(), st.sampled_from(["train_batch_size", "gradient_accumulation_steps", "zero_optimization"]))
def test_the_memory_of_keys_can_fail(case: tuple[Options, Batch, Layout, Precision], name: str) -> None:
    """The check above sees a key that DeepSpeed does not look at, at the top and below a section."""
    chosen, batch, layout, precision = case
    config, _ = build(chosen, batch, layout, precision)
    config |= {"no_such_key": 1, "checkpoint": {"load_universal": True, "no_such_key": 1}}
    read = Read(config)
    parse(read, batch.data_parallel * layout.tp * layout.cp, layout.cp)
    assert unread(read) == {"no_such_key", "checkpoint.no_such_key"} and name in read.seen


@pytest.mark.parametrize("section", STRICT)
def test_sections_refuse_what_they_do_not_know(section: str) -> None:
    """The sections left out of the check above raise at an unknown key, so that parsing them is the check."""
    with pytest.raises(Exception, match="no_such_key"):
        parse({"train_batch_size": 1, section: {"no_such_key": 1}}, 1)


def test_a_whole_config() -> None:
    """ZeRO 3 with all of offload, hpZ and Ulysses, as one dict to read."""
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
    assert notes == []
    assert config == {
        "train_batch_size": 24,
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
    assert check(config, "0.19.8", "2.13.0") == []


def test_an_evaluation_config_trains_nothing() -> None:
    """Of a stage-3 training config the evaluation keeps the partition, and nothing of optimizer or compiler."""
    chosen = Options(
        zero_stage=3,
        offload_param="cpu",
        offload_optimizer="cpu",
        deepcompile=True,
        optimizer="adamw",
        ds_config={"optimizer": {"type": "Lion"}, "train_batch_size": 24, "zero_optimization": {"stage": 2}, "x": 1},
    )
    config, notes = build_eval(chosen, BATCH, DP4, BF16)
    zero = {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": True}}
    sizes = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}
    assert config == {**sizes, "bf16": {"enabled": True}, "zero_optimization": zero, "x": 1} and notes == []
    assert build_eval(Options(zero_stage=2), BATCH, DP4, FP32)[0]["zero_optimization"] == {"stage": 0}


def test_optimizers() -> None:
    """Each name gives DeepSpeed what makes it choose that optimizer; Muon goes without reduce_scatter."""
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


REFUSED = [  # options, words of the message
    ({"zero_stage": 4}, "deepspeed.zero_stage is 4, expected one of: 0, 1, 2, 3"),
    ({"offload_param": "disk"}, "deepspeed.offload_param is 'disk', expected one of: none, cpu, nvme"),
    ({"optimizer": "adam"}, "deepspeed.optimizer is 'adam', expected one of: none, adamw, torch_adamw, muon"),
    (
        {"zero_stage": 2, "offload_param": "cpu"},
        "offload_param is cpu with deepspeed.zero_stage 2, and DeepSpeed does so",
    ),
    ({"offload_optimizer": "cpu"}, "DeepSpeed does so from stage 1 on"),
    ({"zero_stage": 2, "offload_optimizer": "nvme", "nvme_path": "/x"}, "would use the CPU below stage 3"),
    ({"zero_stage": 3, "offload_param": "nvme"}, "deepspeed.nvme_path is not set: give a folder"),
    ({"nvme_path": "/x"}, "nvme_path is '/x', and nothing is offloaded"),
    ({"zero_stage": 2, "hpz": 4}, "hpz is 4 with deepspeed.zero_stage 2"),
    ({"hpz": 0}, "deepspeed.hpz is 0, expected 1"),
    ({"overlap_comm": True}, "overlap_comm is True with deepspeed.zero_stage 0"),
    ({"gradient_clipping": -1.0}, "gradient_clipping is -1.0, expected 0"),
    ({"optimizer_params": {"lr": 1}}, "deepspeed.optimizer is none: choose one"),
    ({"zero": 3}, "deepspeed.zero is no option, expected one of: zero_stage, offload_param"),
]


@pytest.mark.parametrize(("given_", "words"), REFUSED)
def test_what_deepspeed_would_not_heed_is_refused(given_: dict[str, Any], words: str) -> None:
    """An option that DeepSpeed would drop in silence, or refuse in the job, is refused with its key and its value."""
    with pytest.raises(RequestError) as raised:
        options(given_)
    assert words in str(raised.value)


def test_layouts_that_deepspeed_cannot_count() -> None:
    """Tensor parallel ranks that DeepSpeed does not know of, or beside sequence parallel ones, are refused."""
    tp = Layout(dp_replicate=4, tp=2)
    with pytest.raises(RequestError, match=r"average gradients over tensor parallel ranks; set deepspeed.autotp=true"):
        build(Options(autotp=False), BATCH, tp, BF16)
    with pytest.raises(RequestError, match=r"parallel.tp 2 x parallel.cp 2: .*use one of the two"):
        build(Options(), BATCH, Layout(dp_replicate=4, tp=2, cp=2), BF16)
    config, notes = build(Options(mpu=True, autotp=False), BATCH, tp, BF16)
    assert config["train_batch_size"] == 24 and "tensor_parallel" not in config and notes == []
    config, notes = build(Options(), BATCH, tp, BF16)
    assert config["tensor_parallel"] == {"autotp_size": 2}
    assert notes[0].endswith("train_batch_size 48 = global batch 24 x tp 2")
    with pytest.raises(RequestError, match=r"deepspeed.hpz is 3, expected a divisor of the 8 ranks"):
        build(Options(zero_stage=3, hpz=3), BATCH, tp, BF16)
    with pytest.raises(RequestError, match=r"precision.param is 'int8', expected one of: fp32"):
        build(Options(), BATCH, DP4, Precision("int8", "fp32"))


def test_what_the_user_wrote_wins_and_is_named() -> None:
    """Nested keys are merged, theirs stand, and only those that contradict ours are named, with both values."""
    by_hand = {
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 1000},
        "gradient_clipping": None,
        "steps_per_print": 10,
        "zero_allow_untested_optimizer": True,
    }
    before = copy.deepcopy(by_hand)
    config, notes = build(Options(zero_stage=2, gradient_clipping=1.0, ds_config=by_hand), BATCH, DP4, FP32)
    assert config["zero_optimization"] == {"stage": 3, "reduce_bucket_size": 1000}
    assert config["steps_per_print"] == 10 and "gradient_clipping" not in config
    assert notes == [
        "ds_config.zero_optimization.stage: 3, by your hand, and not 2 as the options say",
        "ds_config.gradient_clipping: None, by your hand, and not 1.0 as the options say",
    ]
    assert by_hand == before


def test_another_optimizer_takes_no_parameters_of_ours() -> None:
    """With a type of their own our parameters go; with the same type they are merged."""
    ours = Options(optimizer="adamw", optimizer_params={"lr": 1e-3, "betas": [0.9, 0.95]})
    lion = Options(**{**vars(ours), "ds_config": {"optimizer": {"type": "Lion", "params": {"lr": 1}}}})
    config, notes = build(lion, BATCH, DP4, FP32)
    assert config["optimizer"] == {"type": "Lion", "params": {"lr": 1}} and len(notes) == 1
    same = Options(**{**vars(ours), "ds_config": {"optimizer": {"type": "adamw", "params": {"lr": 1}}}})
    assert build(same, BATCH, DP4, FP32)[0]["optimizer"]["params"] == {"lr": 1, "betas": [0.9, 0.95]}


def test_another_precision_is_theirs_alone() -> None:
    """fp16 by hand over our bf16 leaves fp16 alone, which DeepSpeed takes, and is named."""
    config, notes = build(Options(ds_config={"fp16": {"enabled": True}}), BATCH, DP4, BF16)
    assert "bf16" not in config and parse(config, 4).float16_config.enabled
    assert notes == ["ds_config.fp16.enabled: True, by your hand, and not bf16 as the options say"]


def test_the_word_auto_is_left_out_and_named() -> None:
    """'auto' of a config written for Hugging Face is left out, so that ours stands; where DeepSpeed knows it it stays."""
    by_hand = {"train_batch_size": "auto", "bf16": {"enabled": "auto"}, "data_types": {"keep_in_fp32_modules": "auto"}}
    config, notes = build(Options(ds_config=by_hand), BATCH, DP4, BF16)
    assert config["train_batch_size"] == 24 and config["bf16"] == {"enabled": True}
    assert config["data_types"] == {"keep_in_fp32_modules": "auto"}
    assert [note.partition(":")[0] for note in notes] == ["ds_config.train_batch_size", "ds_config.bf16.enabled"]


BY_HAND = [  # what the user set of the three; micro, accumulation, total of 4 data parallel ranks with ours at 2, 3, 24
    ({"train_batch_size": 48}, (2, 6, 48)),
    ({"train_micro_batch_size_per_gpu": 1}, (1, 3, 12)),
    ({"gradient_accumulation_steps": 1}, (2, 1, 8)),
    ({"train_batch_size": 48, "gradient_accumulation_steps": 1}, (12, 1, 48)),
    ({"train_batch_size": 48, "train_micro_batch_size_per_gpu": 1}, (1, 12, 48)),
    ({"train_batch_size": 4, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}, (1, 1, 4)),
]


@pytest.mark.parametrize(("by_hand", "expected"), BY_HAND)
def test_a_batch_by_hand_is_completed_without_rounding(by_hand: dict[str, int], expected: tuple[int, int, int]) -> None:
    """What is set of DeepSpeed's three numbers stands, the others follow, and DeepSpeed agrees."""
    config, notes = build(Options(ds_config=by_hand), BATCH, DP4, FP32)
    assert triple(parse(config, 4)) == expected
    assert len(notes) == len(by_hand)


def test_a_batch_by_hand_that_does_not_divide_is_refused() -> None:
    """DeepSpeed would floor, even to zero; we say which numbers work."""
    with pytest.raises(RequestError, match=r"ds_config.train_batch_size: .*26 is not a multiple of micro 2.*24 or"):
        build(Options(ds_config={"train_batch_size": 26}), BATCH, DP4, FP32)
    with pytest.raises(RequestError, match=r"ds_config.train_batch_size is 2.5, expected a whole number"):
        build(Options(ds_config={"train_batch_size": 2.5}), BATCH, DP4, FP32)


@settings(max_examples=30, deadline=None)
@given(cases())
def test_what_depends_on_no_ranks_is_part_of_the_whole(case: tuple[Options, Batch, Layout, Precision]) -> None:
    """without_ranks() says of optimizer, ZeRO and compiler what build() says, and leaves a batch by hand alone."""
    chosen, batch, layout, precision = case
    whole, _ = build(chosen, batch, layout, precision)
    part = without_ranks(Options(**{**vars(chosen), "ds_config": {"train_batch_size": 7}}))
    assert part.items() <= whole.items()
    assert {"optimizer", "zero_optimization", "compile"} & whole.keys() <= part.keys()
