"""spec.json is read back as it was written, and other documents are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcinit.base.errors import SpecError
from hpcinit.records.layout import Layout
from hpcinit.records.spec import Comm, Precision, Program, Samples, Spec, Training, load
from hpcinit.records.startup_timeout import StartupTimeout

SPEC = Spec(
    name="x", cluster="mini", nodes=2, ranks_per_node=3, program=Program("script", "a.py", ("--x", "it's\n")),
    workdir="/w", nonce="n", seed=4, layout=Layout(dp_replicate=3, tp=2), comm=Comm("gloo", True, StartupTimeout(1, 2, 3), 4.0, "", "auto"),
    seed_by="rank", deterministic=True, batch=Samples(2, None, 64),
    training=Training("deepspeed", Precision("bf16", "fp32"), "full", True, 1.0, {"zero_stage": 3, "ds_config": {"a": [1]}}),
)  # fmt: skip


def test_round_trip(tmp_path: Path) -> None:
    """A spec that is written and read is equal, including types."""
    (tmp_path / "spec.json").write_text(SPEC.to_json())
    assert load(tmp_path / "spec.json") == SPEC


def test_specs_of_earlier_versions_are_read(tmp_path: Path) -> None:
    """A spec that was written before a field was added has the field's default."""
    document = json.loads(SPEC.to_json())
    del document["seed_by"], document["deterministic"], document["comm"]["device_id"]
    del document["batch"], document["training"]
    for name in ("ep", "cp_kind", "tp_across_nodes"):
        del document["layout"][name]
    (tmp_path / "spec.json").write_text(json.dumps(document))
    spec = load(tmp_path / "spec.json")
    assert (spec.seed_by, spec.deterministic, spec.comm.device_id) == ("same", False, "never")
    assert (spec.batch, spec.training, spec.layout.ep) == (Samples(), Training(), 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "does not have format 1: the job and the submission use different versions of hpcinit"),
        ({"program": {"kind": "pickle", "target": "x", "args": []}}, "program.kind is 'pickle', expected one of"),
        ({"comm": 3}, "does not contain a spec"),
        ({"training": {"wrap": "x"}}, "parallel.wrap is 'x', expected one of: ddp, fsdp, deepspeed, none"),
        ({"training": {"precision": {"param": "x"}}}, "precision.param is 'x', expected one of: fp32, bf16, fp16"),
        ({"training": {"precision": {"reduce": "x"}}}, "precision.reduce is 'x', expected one of: fp32, bf16"),
        (
            {"training": {"activation_checkpointing": "x"}},
            "activation_checkpointing is 'x', expected one of: none, full",
        ),
        ({"seed_by": "x"}, "seed_by is 'x', expected one of: same, rank, data"),
        ({"unknown": 1}, "does not contain a spec"),
    ],
)
def test_other_documents_are_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    """A document of another version or form is refused with the path of the file."""
    (tmp_path / "spec.json").write_text(json.dumps({**json.loads(SPEC.to_json()), **change}))
    with pytest.raises(SpecError, match=message) as caught:
        load(tmp_path / "spec.json")
    assert str(tmp_path) in str(caught.value) or "is '" in str(caught.value)
