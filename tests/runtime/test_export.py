"""run.export on 2 real ranks: Transformers and PEFT load what each wrapper wrote, and compute what it computes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.runtime.test_wrap import on_two_ranks
from tests.small_disks import small_disk

# A model with tied weights and with attention heads that two ranks can share. Its steps are large, so that a shard that
# was not trained, or is another rank's, changes the output by far more than 16 bits do.
MODELS = """
import os, shutil
from pathlib import Path
from datetime import timedelta
from torch.distributed.tensor.parallel import RowwiseParallel
from transformers import LlamaConfig, LlamaForCausalLM
from hpcinit.train.checkpoint import export_weights
os.environ["HF_HUB_OFFLINE"] = "1"
tokens = torch.arange(24).view(2, 12) % 30
config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                     num_key_value_heads=2, tie_word_embeddings=True, attn_implementation="sdpa")

def llama(tied=True):
    torch.manual_seed(3)
    config.tie_word_embeddings = tied
    return LlamaForCausalLM(config)

def zero(stage, param="bf16", **more):
    return Training("deepspeed", Precision(param), deepspeed={"zero_stage": stage, **more})

def train(made, steps=3):
    for _ in range(steps):
        logits = made(input_ids=tokens).logits
        made.backward(F.cross_entropy(logits.view(-1, 32), (tokens.view(-1) * 7) % 32))
        made.step()

def logits_of(made):
    with torch.no_grad():
        return made(input_ids=tokens).logits.float()

def export(made, folder, **more):
    return export_weights.export(made, Path(folder), **{"dtype": torch.bfloat16, "tokenizer": None, "timeout": timedelta(minutes=5), "job": "", **more})

def off(one, other):
    return float((one - other).abs().max() / other.abs().max())

def adam(p):
    return torch.optim.AdamW(p, lr=0.02)
"""

WRAPPERS = """
sharded = Layout(dp_replicate=1, dp_shard=2)
plan = {"model.layers.*.self_attn.q_proj": ColwiseParallel(), "model.layers.*.self_attn.k_proj": ColwiseParallel(),
        "model.layers.*.self_attn.v_proj": ColwiseParallel(), "model.layers.*.self_attn.o_proj": RowwiseParallel(),
        "model.layers.*.mlp.gate_proj": ColwiseParallel(), "model.layers.*.mlp.up_proj": ColwiseParallel(),
        "model.layers.*.mlp.down_proj": RowwiseParallel()}
found = {}
for name, layout, training, more in (
    ("ddp", Layout(dp_replicate=2), Training(), {}),
    ("fsdp", sharded, Training("fsdp", Precision("bf16"), "full"), {}),
    ("tp", tp, Training(), {"tp_plan": plan}),
    ("zero 0", sharded, zero(0), {}),
    ("zero 2", sharded, zero(2), {}),
    ("zero 3", sharded, zero(3), {}),
    ("zero 3 fp32, parameters offloaded", sharded, zero(3, "fp32", offload_param="cpu", offload_optimizer="cpu"), {}),
    ("autotp", tp, zero(1), {}),
    ("autotp, zero 3", tp, zero(3), {}),
):
    model = llama(tied="autotp" not in name)  # AutoTP divides a tied head's output, without joining its parts
    before = logits_of(model)
    made = wrapped(model, layout, training, **{"optimizer": adam, **more})
    train(made)
    now = logits_of(made)
    export(made, name)
    again = logits_of(made)
    train(made, 1)
    export(made, name)  # replaces the first
    last = logits_of(made)
    torch.distributed.barrier()
    read = LlamaForCausalLM.from_pretrained(name, dtype="auto").eval()
    found[name] = dict(moved=off(now, before), same=torch.equal(now, again), went_on=off(last, now), off=off(logits_of(read), last),
                       dtype=str(read.dtype), tied=read.lm_head.weight is read.model.embed_tokens.weight,
                       architectures=json.loads(Path(name, "config.json").read_text())["architectures"],
                       files=sorted(os.listdir(name)))
print(json.dumps([found, sorted(each for each in os.listdir() if each.endswith(".tmp"))]))
"""


@pytest.mark.timeout(600)
def test_transformers_loads_the_weights_of_every_wrapper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DDP, FSDP2, tensor parallelism, ZeRO 0 to 3 and AutoTP: the exported model computes what the trained one does,
    training continues, and a second export replaces the first."""
    monkeypatch.chdir(tmp_path)
    for line in on_two_ranks(MODELS + WRAPPERS, tmp_path, deepspeed=True):
        found, left = json.loads(line)
        assert left == []
        for name, each in found.items():
            assert each["moved"] > 0.2 and each["went_on"] > 0.05, (name, each)
            assert each["off"] < 0.05 and each["same"], (name, each)
            assert (each["dtype"], each["tied"], each["architectures"]) == (
                "torch.bfloat16",
                "autotp" not in name,
                ["LlamaForCausalLM"],
            ), (name, each)
            assert each["files"] == [
                "config.json",
                "generation_config.json",
                "hpcinit_export.json",
                "model.safetensors",
            ], (name, each)
        assert len(found) == 9


ADAPTERS = """
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
sharded, found = Layout(dp_replicate=1, dp_shard=2), {}
wanted = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["norm"], task_type="CAUSAL_LM", base_model_name_or_path=None)
for name, layout, training in (("ddp", Layout(dp_replicate=2), Training()), ("fsdp", sharded, Training("fsdp")), ("zero 3", sharded, zero(3))):
    model = get_peft_model(llama(), wanted)
    before = logits_of(model)
    made = wrapped(model, layout, training, optimizer=lambda p: torch.optim.AdamW([x for x in p if x.requires_grad], lr=0.05))
    train(made, 6)
    now = logits_of(made)
    gathered = []
    whole = made.whole_weights
    made.whole_weights = lambda wanted: (gathered.append(len(wanted)), whole(wanted))[1]
    export(made, name, dtype=torch.float32 if name == "ddp" else torch.bfloat16)
    torch.distributed.barrier()
    with safe_open(f"{name}/adapter_model.safetensors", "pt") as file:
        names, dtypes = sorted(file.keys()), sorted({str(file.get_tensor(each).dtype) for each in file.keys()})
    read = PeftModel.from_pretrained(llama(), name).eval()
    found[name] = dict(moved=off(now, before), off=off(logits_of(read), now), names=names, dtypes=dtypes, gathered=gathered, files=sorted(os.listdir(name)))
print(json.dumps(found))
"""


@pytest.mark.more
def test_peft_loads_the_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a PEFT model only the adapters, and the modules that are trained whole, are gathered and written."""
    monkeypatch.chdir(tmp_path)
    for line in on_two_ranks(MODELS + ADAPTERS, tmp_path, deepspeed=True):
        found = json.loads(line)
        for name, each in found.items():
            assert each["moved"] > 0.05 and each["off"] < 0.03, (name, each)
            assert each["dtypes"] == ["torch.float32" if name == "ddp" else "torch.bfloat16"], name
            assert len(each["names"]) == 13 and each["gathered"] == [13], (name, each)
            assert "base_model.model.model.norm.weight" in each["names"], name
            assert "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight" in each["names"], name
            assert "adapter_config.json" in each["files"] and "model.safetensors" not in each["files"], name
        assert list(found) == ["ddp", "fsdp", "zero 3"]


OTHER = """
from safetensors.torch import load_model
class Tokenizer:
    def __init__(self, fail=False):
        self.fail = fail
    def save_pretrained(self, folder):
        Path(folder, "tokens.txt").write_text("a b c")
        if self.fail:
            raise ValueError("no vocabulary\\nof two lines")
        assert run.rank == 0 and Path(folder).name.startswith(".out.") and not Path("out").exists()
def tied():
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), nn.Linear(8, 8), nn.Linear(8, 8))
    model[2].weight = model[1].weight
    return model
def refused(call, *args, **more):
    try:
        call(*args, **more)
    except hpcinit.HpcinitError as error:
        return [type(error).__name__, str(error)]
class Mpu:
    def get_model_parallel_world_size(self):
        return 2
made = wrapped(tied(), Layout(dp_replicate=1, dp_shard=2), Training("fsdp"))
assert hpcinit.Runtime.export(run, made, "out", tokenizer=Tokenizer()) == Path("out").absolute()
torch.distributed.barrier()
read = tied()
missing = load_model(read, "out/model.safetensors")
first = sorted(os.listdir("out"))
same = off(read[1].weight, made.model[1].weight.full_tensor().bfloat16().float())
message = {"tokenizer": refused(export, made, "out", tokenizer=Tokenizer(fail=True))}
message["disk"] = refused(export, wrapped(nn.Linear(1024, 1024)), "disk/full")
message["place"] = refused(export, made, "/proc/here/out")
message["not wrapped"] = refused(export, tied(), "out")
message["dtype"] = refused(export, made, "out", dtype=torch.int8)
message["file"] = refused(export, made, "disk/file")
message["foreign"] = refused(export, made, ".")
made.offload_states(["optim_states"])
message["offloaded"] = refused(export, made, "out")
from hpcinit.train.wrap.deepspeed_engine import Engine
engine = object.__new__(Engine)
engine._divided = 2
message["divided"] = refused(export, engine, "out")
left = [each for where in (".", "disk") for each in os.listdir(where) if ".tmp" in each]
print(json.dumps([first, same, sorted(map(str, missing[0])), message, sorted(os.listdir("out")), left]))
"""


def test_other_models_and_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is not Transformers' own has model.safetensors; every error reaches all ranks and leaves the older
    export as it was, also that of a disk that is full (real)."""
    monkeypatch.chdir(tmp_path)
    with small_disk(tmp_path / "disk"):
        Path("disk", "file").touch()
        lines = [json.loads(line) for line in on_two_ranks(MODELS + OTHER, tmp_path)]
    for first, same, missing, message, out, left in lines:
        assert first == out == ["hpcinit_export.json", "model.safetensors", "tokens.txt"]
        assert (same, missing, left) == (0, [], [])
        assert message == lines[0][3]
    expected = {
        "tokenizer": ("CheckpointError", f"cannot export to {tmp_path}/out: rank 0 on ", "ValueError: no vocabulary; "),
        "disk": ("CheckpointError", f"cannot export to {tmp_path}/disk/full: rank 0 on ", "No space left on device", "0.0 GB are free on this disk"),
        "place": ("CheckpointError", "cannot export to /proc/here/out: rank 0 on ", "No such file or directory: '/proc/here'"),
        "not wrapped": ("RequestError", "export() got a Sequential, expected the object that run.wrap() returned: wrapped = run.wrap(model)"),
        "dtype": ("RequestError", "export() got dtype torch.int8, expected a floating-point type"),
        "file": ("RequestError", f"cannot export to {tmp_path}/disk/file: it is not a folder"),
        "foreign": ("RequestError", f"cannot export to {tmp_path}: it contains files that no export wrote (disk/file, out/", "Export into a new folder"),
        "offloaded": ("RequestError", "cannot call export() while optim_states are offloaded"),
        "divided": ("RequestError", "export() cannot collect the weights, because the program's mpu divides the model am"),
    }  # fmt: skip
    message = lines[0][3]
    assert set(message) == set(expected)
    for name, (kind, *texts) in expected.items():
        assert message[name][0] == kind, message[name]
        assert [text for text in texts if text not in message[name][1]] == [], message[name]
