"""The fast composition of a sweep gives the same as Hydra's composition of each combination."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import hydra
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig

from hpcinit.base.errors import ConfigError
from hpcinit.config import combinations, hydra_compose, hydra_setup
from hpcinit.config.request import Request

FILES = {
    "hpcinit.yaml": "",
    "experiment/a.yaml": "# @package _global_\nseed: 7\ndepth: {inner: '${seed}'}\n",
    "experiment/b.yaml": "# @package _global_\nname: b-${nodes}\nlist: ['${name}', x]\n",
    "job/mine.yaml": "name: mine\ncommand: 'true'\nargs: ['--seed', '${seed}', '${oc.env:HOME}']\nenv: {A: '1', B: 'x${nodes}'}\n",
}
# Two values each, except for three that are swept alone: Hydra composes each combination, in 0.2 s.
ALONE = ("seed=1,2,3", "name='${job.name}-1',z,z2", "job.args=['${seed}'],[b],[c]")
SWEPT = (
    *("nodes=1,2", "name=a,b", "job=smoke,mine", "job=mine,train_gpt", "time_min=5,10", "cluster.time_min=5,9"),
    *("+lr=1e-3,0.5", "+a.b.c=1,x", "+a.b.c=x,null", "++seed=4,5", "comment=null,'a b'", "+experiment=a,b"),
    *("job.name=p,q", "cluster=mini,local", "cluster=local,example", "parallel=ddp,zero3", "gradient_clip=0,2.5"),
    *("comm.device_id=auto,never", "+job.env.B=1,'x y'", "job.args=[a],[b,c]", "job.args=[a],[]", "wait=true,false"),
    *("seed=range(0,2)", "gradient_clip=range(0,0.5,0.25)", "name='${job.name}-1',z", "job.args=['${seed}'],[b]"),
    *("seed='1',2", "mem_gb=null,8.5", "job.script=a.py,null", "+cluster.sbatch.nice=1,2", "wait=false,false"),
    *("deepspeed.zero_stage=0,2", "batch.global=8,16", "comm.backend=gloo,nccl", "comm.backend=auto,gloo"),
)
FIXED = (
    *("seed=9", "name=x-${seed}", "+sum=${nodes}-${seed}", "+deep.er=${a.b.c}", "job=mine", "cluster=mini"),
    *("job.args=[--lr,'${lr}',x]", "job.args=['${job.name}','${hydra:job.num}']", "name=n${hydra:job.id}"),
    *("+copy=${job}", "+copy=${job.env}", "+where=${oc.env:HOME}-${nodes}", "+rel.a=1", "+rel.b=${.a}", "~cluster.env"),
    *("comment='${seed} it is'", "+name2=${hydra:job.name}", "+pick=${job.args[0]}", "+nest=${job.${comment}}"),
    *(
        "+experiment=a",
        "gradient_clip=${seed}",
        "+cluster.env.SEED='${seed}'",
        "job.env={}",
        "+when=${hydra:runtime.cwd}",
    ),
    *("+s=${hydra:overrides.task}", "partition=p${name}", "+lr=1"),
)


@pytest.fixture(autouse=True)
def _conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in FILES.items():
        if text:
            (tmp_path / "conf" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "conf" / name).write_text(text)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def _composed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compose each list of overrides once: an invalid sweep composes many of them several times."""
    done: dict[tuple[str, ...], DictConfig | Exception] = {}
    compose = hydra.compose

    def once(name: str, overrides: list[str], return_hydra_config: bool) -> DictConfig:
        if tuple(overrides) not in done:
            try:
                done[tuple(overrides)] = compose(name, overrides, return_hydra_config)
            except hydra_compose.UNUSABLE as error:
                done[tuple(overrides)] = error
        if isinstance(found := done[tuple(overrides)], Exception):
            raise found
        return copy.deepcopy(found)

    monkeypatch.setattr(hydra, "compose", once)


def sweep(words: Sequence[str]) -> list[Request] | list[str]:
    """Return the requests, or the problems."""
    hydra_setup.register()
    try:
        return combinations.requests(words, hydra_compose._composer("hpcinit"), lambda request: None)
    except ConfigError as error:
        return list(error.problems)


def in_full(words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> list[Request] | list[str]:
    with monkeypatch.context() as patch:
        patch.setattr(combinations.Quick, "request", lambda *_: None)
        return sweep(words)


CHOSEN = st.sampled_from([(word,) for word in ALONE]) | st.tuples(st.sampled_from(SWEPT), st.sampled_from(SWEPT)).filter(lambda two: two[0] != two[1])  # fmt: skip


def as_dict(request: Request) -> dict[str, object]:
    """Return the whole config; `vars` includes keys that were added with a plus."""
    config = request.config
    return {"fields": dataclasses.asdict(config), "added": {k: v for k, v in vars(config).items() if not dataclasses.is_dataclass(v)}}  # fmt: skip


@pytest.mark.usefixtures("_composed_once")
@settings(
    max_examples=12,
    deadline=None,
    phases=[Phase.generate],  # shrinking would take minutes with Hydra
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(CHOSEN, st.lists(st.sampled_from(FIXED), max_size=4, unique=True), st.randoms(use_true_random=False))  # fmt: skip
def test_fast_composition_equals_full_composition(monkeypatch: pytest.MonkeyPatch, swept: tuple[str, ...], fixed: list[str], shuffle) -> None:  # type: ignore[no-untyped-def]  # fmt: skip
    """Config, document, label and warnings of each combination, or the problems of the sweep, are the same."""
    words = [*fixed, *swept]
    shuffle.shuffle(words)
    quick, full = sweep(words), in_full(words, monkeypatch)
    assert len(quick) == len(full)
    for mine, its in zip(quick, full, strict=True):
        if isinstance(its, str) or isinstance(mine, str):
            assert mine == its
            continue
        assert mine.document == its.document and str(mine.document) == str(its.document)
        assert as_dict(mine) == as_dict(its) and repr(mine.config) == repr(its.config)
        assert (mine.combination, mine.number, list(mine.warnings)) == (its.combination, its.number, list(its.warnings))


@pytest.mark.parametrize(
    "words",
    [
        ["seed=range(0,9)"],
        ["seed=range(0,9)", "cluster=mini,local"],
        ["+lr=1,2,3", "job.args=[--lr,'${lr}']"],
        ["name=x-${hydra:job.num}", "seed=1,2,3"],
        ["job=mine", "nodes=1,2,3"],
    ],
)
def test_common_sweeps_are_composed_fast(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each choice of groups is composed exactly once."""
    composed = []
    monkeypatch.setattr(hydra_compose, "_compose", lambda words, name, true=hydra_compose._compose: composed.append(words) or true(words, name))  # fmt: skip
    assert len(sweep(words)) >= 3
    assert len(composed) == (2 if "cluster=mini,local" in words else 1)


def test_requests_of_a_sweep_share_no_mutable_values() -> None:
    """Changing the job of one request does not change another request."""
    one, two, _ = sweep(["seed=1,2,3", "+job.env.A=x"])
    one.config.job.script, one.document["job"]["script"] = "other.py", "other.py"  # type: ignore[union-attr]
    assert (two.config.job.script, two.document["job"]["script"]) == (None, None)  # type: ignore[union-attr]
