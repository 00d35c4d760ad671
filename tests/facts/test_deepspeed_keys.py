"""The keys that we take for DeepSpeed's are those that the installed one reads, and a slip is named beside them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hpcinit.facts.deepspeed_keys import TOP, ZERO, unread

# Every key that is looked up at the top of a ds_config while DeepSpeed reads one, and every name that ZeRO's takes.
ASK = """
import warnings; warnings.simplefilter("ignore")
asked = set()
class Noting(dict):
    def get(self, key, default=None): asked.add(key); return super().get(key, default)
    def __getitem__(self, key): asked.add(key); return super().__getitem__(key)
    def __contains__(self, key): asked.add(key); return super().__contains__(key)
    def __deepcopy__(self, memo): return self
    def keys(self): return Names(self)
class Names:
    def __init__(self, of): self.of = of
    def __contains__(self, key): return key in self.of
    def __iter__(self): return dict.__iter__(self.of)
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
DeepSpeedConfig(Noting(train_batch_size=1, train_micro_batch_size_per_gpu=1))
zero = {word for name, field in DeepSpeedZeroConfig.model_fields.items() for word in (name, field.alias) if word}
print("FOUND", *sorted(asked), "|", *sorted(zero))
"""


@pytest.mark.deepspeed
def test_they_are_deepspeeds() -> None:
    """Whatever the installed DeepSpeed looks up in a ds_config is known here: no right key is called a slip."""
    done = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=True)
    [line] = [line for line in done.stdout.splitlines() if line.startswith("FOUND")]
    top, zero = (set(part.split()) for part in line.removeprefix("FOUND").split("|"))
    assert len(top) > 50 and "zero_optimization" in top and "optimizer" in top and len(zero) > 40
    assert top <= TOP and zero <= ZERO


def test_a_slip_is_named() -> None:
    """A key that DeepSpeed passes over, or that ends the job, is said with what was probably meant; others are silent."""
    right = {"steps_per_print": 5, "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 1}, "fp16": {}}
    assert unread(right) == []
    assert unread({"step_per_print": 5, "gradient_cliping": 1, "mine": 0}) == [
        "ds_config.step_per_print: DeepSpeed reads no such key, and passes over it in silence; "
        "did you mean steps_per_print?",
        "ds_config.gradient_cliping: DeepSpeed reads no such key, and passes over it in silence; "
        "did you mean gradient_clipping?",
        "ds_config.mine: DeepSpeed reads no such key, and passes over it in silence",
    ]
    assert unread({"zero_optimization": {"reduce_buckets_size": 1}}) == [
        "ds_config.zero_optimization.reduce_buckets_size: DeepSpeed knows no such key there, and ends the job over it; "
        "did you mean reduce_bucket_size?"
    ]
