"""Typing errors give one clear line and exit status 2, without the jargon of Hydra."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcinit.cli.main import main
from hpcinit.submit import submit_command
from tests.conftest import Run

FILES = {
    "cluster/noname.yaml": b"engine: local\n",
    "job/noname.yaml": b"module: x\n",
    "cluster/latin.yaml": "name: caf\xe9\n".encode("latin1"),
    "cluster/alist.yaml": b"- name\n",
    "cluster/text.yaml": b"just text\n",
    "cluster/same.yaml": b"defaults: [same]\n",
    "cluster/tab.yaml": b"name: x\nenv:\n\tA: 1\n",
    "cluster/twice.yaml": b"name: x\nname: y\n",
    "cluster/type.yaml": b"name: x\ngpus_per_node: many\n",
    "cluster/badref.yaml": b"name: x\npartition: ${nosuch.key}\n",
    "job/scalar.yaml": b"name: x\nmodule: y\nargs: 3\n",
    "bare.yaml": b"nodes: 2\n",
    "wrong.yaml": b"defaults: [hpcinit, _self_]\nnodez: 2\n",
}
JARGON = (
    "ListConfig",
    "DictConfig",
    "Structured",
    "full_key",
    "override must",
    "object_type",
    "usage:",
)

CASES = [
    # several values, and values of the wrong type
    ("nodes=1,2", "nodes=1,2: Ambiguous value for argument 'nodes=1,2' 1. To use it as a list, use key=[value1,value2] 2. "),
    ("nodes=range(1,3)", "nodes=range(1,3): Sweep parameters 'nodes=range(1,3)' requires --multirun"),
    ("cluster=local,mini", "3. To sweep over it, add --multirun to your command line"),
    ("nodes=abc", "nodes=abc: expected a whole number"),
    ("nodes=[1,2]", "nodes=[1,2]: expected a whole number"),
    ("nodes=null", "nodes=null: expected a whole number"),
    ("mem_gb=much", "mem_gb=much: expected a number of GB, or null"),
    ("wait=maybe", "wait=maybe: expected true or false"),
    ("name=[a]", "name=[a]: expected text"),
    ("job.args=3", "job.args=3: expected a list, as in job.args=[a,b]"),
    ("job.args=[[a]]", "job.args has ['a'], expected a list of strings"),
    ("cluster.setup=[{a: b}]", "cluster.setup has {'a': 'b'}, expected a list of strings"),
    ("comm.backend=[nccl]", "comm.backend=[nccl]: expected one of: auto, nccl, gloo"),
    ("cluster.name=null", "cluster.name=null: expected text"),
    ("cluster.name=''", "cluster.name is '', expected a name"),
    ("cluster.env=3", "cluster.env=3: expected a table; add an entry with +cluster.env.NAME=VALUE"),
    ("seed=-1", "seed is -1, expected 0 or more"),
    ("runs_dir=", "runs_dir is '', expected a folder"),
    ("partition=", "partition is '', expected a value, or null"),
    ("name='a\nb'", "name is 'a\\nb', expected letters"),
    (f"name={'a' * 300}", "name has 300 characters, expected at most 2"),
    # choices
    ("cluster=nope", "cluster=nope: no such cluster, expected one of: alist"),
    ("cluster=conf/cluster/alist.yaml", "did you mean 'alist'?"),
    ("cluster=null", "cluster=null: no such cluster, expected one of: alist"),
    ("cluster=", "cluster=: no such cluster, expected one of: alist"),
    ("cluster=../x", "cluster=../x: no such cluster, expected one of: alist"),
    ("cluster=a/b", "cluster=a/b: no such cluster, expected one of: alist"),
    ("parallel=2", "parallel=2: no such parallel, expected one of: ddp"),
    ("hydra/launcher=nosuch", "hydra/launcher=nosuch: no such hydra/launcher, expected one of: basic"),
    # a user's own YAML
    ("cluster=noname", "cluster.name is not set, expected text: add `name: ...` to conf/cluster/noname.yaml"),
    ("job=noname", "job.name is not set, expected text: add `name: ...` to conf/job/noname.yaml"),
    ("cluster=latin", "cluster=latin: conf/cluster/latin.yaml: 'utf-8' codec can't decode byte 0xe9 in position 9"),
    ("cluster=alist", "conf/cluster/alist.yaml: Merge error: list is not a subclass of Cluster. value: ['name'], expected lines of key: value"),
    ("cluster=same", "conf/cluster/same.yaml includes itself, directly or through another file: its defaults list has 'same'"),
    ("name=größe", "name=größe: expected key=value; a value with spaces, commas, quotes, brackets or letters such as ü needs quotes"),
    ("comment=für", "letters such as ü needs quotes inside the shell's quotes: 'comment=\"it is, well: special\"'"),
    ("job.args=[a,ü]", "job.args=[a,ü]: expected key=value; a value with"),
    ("nöme=3", "nöme=3: expected key=value"),
    ("cluster=text", "conf/cluster/text.yaml: no such key 'cluster.just text', expected one of: account"),
    ("cluster=tab", "conf/cluster/tab.yaml\", line 3"),
    ("cluster=twice", "found duplicate key name"),
    ("cluster=type", "conf/cluster/type.yaml: cluster.gpus_per_node is 'many', expected a whole number"),
    ("cluster=badref", "cluster.partition=${nosuch.key}: Interpolation key 'nosuch.key' not found"),
    ("job=scalar", "conf/job/scalar.yaml: job.args: expected a list, as in job.args=[a,b]"),
    # interpolation
    ("name=${nope}", "name=${nope}: Interpolation key 'nope' not found"),
    ("name=${name}", "name=${name}: Recursive interpolation detected"),
    ("comment=${partition} partition=${comment}", "partition=${comment}: Recursive interpolation detected"),
    ("nodes=${job.name}", "nodes=${job.name}: nodes is 'smoke', expected a whole number"),
    ("comment=${oc.env:NOSUCH}", "Environment variable 'NOSUCH' not found"),
    ("comment=${nosuch:1}", "comment=${nosuch:1}: Unsupported interpolation type nosuch"),
    ("comment=${cluster}", "comment=${cluster}: comment: expected text, or null"),
    # plus, tilde, at
    ("nodez=3", "nodez=3: no such key 'nodez'; did you mean 'nodes'?\n"),
    ("qwerty=3", "qwerty=3: no such key 'qwerty'; hpcinit submit --help all lists all keys; arguments of your program go after it: -- train.py qwerty=3\n"),
    ("hang.after=3", "hang.after=3: no such key 'hang.after'; did you mean 'hang.after_s'?"),
    # options of sbatch and torchrun
    ("gpus_per_task=1", "gpus_per_task=1: use gpus_per_node=4 or gpus=8"),
    ("requeue=true", "requeue=true: use restart.max_restarts=3, which requeues the job"),
    ("--requeue", "--requeue: use restart.max_restarts=3"),
    ("-a 1-3", "hpcinit submits sweeps as arrays: give a key several values and --multirun"),
    ("ntasks=4", "ntasks=4: set the number of ranks with nodes=2 ranks_per_node=8"),
    ("time=soon", "time=soon: expected a time as in 24:00:00, 1-12:00:00 or 90 (minutes)"),
    ("walltime=3600", "walltime=3600: expected a time as in walltime=24:00:00, or minutes as in time_min=90"),
    ("mem=32", "mem=32: expected a size with a unit, as in 32G"),
    ("--mem 32", "--mem 32: expected a size with a unit"),
    ("--nodes=two", "nodes=two: expected a whole number"),
    ("--gres=gpu:4", "--gres=gpu:4: use gpus_per_node=4 or gpus=8"),
    # spaces
    ("nodes = 4", "nodes 4: expected key=value without spaces, as in nodes=..."),
    ("nodes= 4", "4: expected key=value without spaces"),
    ("nodes =4", "nodes: expected key=value without spaces, as in nodes=..."),
    ("wait", "wait: expected key=value without spaces, as in wait=true"),
    ("time_min=1:00:00", "time_min=1:00:00: expected a whole number of minutes"),
    ("NODES=3", "did you mean 'nodes'?"),
    ("~nodes", "~nodes: hpcinit's own keys cannot be removed; set another value: nodes=..."),
    ("~cluster", "~cluster: hpcinit's own keys cannot be removed"),
    ("~nosuch", "~nosuch: Could not delete from config. 'nosuch' does not exist."),
    ("+nodes=2", "+nodes=2: Could not append to config. An item is already at 'nodes'. Either remove + prefix: 'nodes=2'"),
    ("+cluster=mini", "+cluster=mini: cluster exists already; remove the plus"),
    ("cluster.env.X=1", "cluster.env.X=1: Could not override 'cluster.env.X'. To append to your config use +cluster.env.X=1"),
    ("+cluster.partitions.a.nodes=3", "partitions are set in the cluster's file"),
    ("cluster@foo=mini", "cluster@foo=mini: Could not override 'cluster@foo'. Did you mean to override cluster?"),
    # arguments that are not key=value
    ("nodes", "nodes: expected key=value without spaces, as in nodes=..."),
    ("nodes 4", "nodes 4: expected key=value without spaces, as in nodes=..."),
    (["nodes 4"], "nodes 4: expected key=value without spaces"),
    (["nodes = 4"], "nodes = 4: expected key=value; a value with spaces"),
    ("nodez 4", "nodez 4: expected key=value without spaces, as in nodes=..."),
    ("nodes:4", "nodes:4: expected key=value without spaces"),
    ("=4", "=4: expected key=value"),
    ("train.py", "train.py: expected key=value without spaces, as in nodes=...; the program goes after --: hpcinit submit -- train.py"),
    ("name=it's", "name=it's: expected key=value; a value with spaces, commas, quotes, brackets"),
    (["comment=a\n'b"], "comment=a\\n'b: expected key=value"),
    ("comment=f(1)", "comment=f(1): Unknown function 'f' Available: bool,choice"),
    # flags
    ("--lr 3", "--lr 3: no such option, expected key=value; for an option of sbatch: +cluster.sbatch.lr=3; for your"),
    ("--lr 3", "for your program's option: -- train.py --lr 3"),
    ("--Lr=3", "for your program's option: -- train.py --Lr=3"),
    ("--waitt", "--waitt: no such option, expected key=value; did you mean wait=..."),
    ("-n 4", "-n 4: set the number of ranks with nodes=2 ranks_per_node=8"),
    ("--export=NONE", "--export=NONE: the job needs its whole environment; set a variable with job.env"),
    ("-p high", "-p high works only together with --cfg; to choose a partition: partition=high"),
    ("--cfg", "argument --cfg/-c: expected one argument"),
    ("--cfg x", "invalid choice: 'x' (choose from"),
    ("-- -m", "no module after -- -m, expected one"),
    ("--", "no program after --, expected one"),
    ("--config-name x", "--config-name x: no file x.yaml, expected one of: bare, hpcinit, wrong"),
    ("--config-name bare", "conf/bare.yaml does not include hpcinit's config: its defaults list must start with hpcinit (with"),
    ("--config-name wrong", "conf/wrong.yaml: no such key 'nodez'; did you mean 'nodes'?"),
    ("--config-dir nosuch", "--config-dir nosuch: expected a folder that exists"),
    ("--config-path /", "--config-path /: hpcinit's own configs cannot be replaced; use --config-dir"),
    ("--cfg job nodes=abc", "nodes=abc: expected a whole number"),
    ("hydra.verbose=true nodes=0", "nodes is 0, expected 1 or more"),
    # sweeps
    ("-m nodes=0,1", "with nodes=0: nodes is 0, expected 1 or more"),
    ("-m nodes=abc,1 seed=1,2", "with nodes=abc seed=1 and 1 more combination: nodes=abc: expected a whole number"),
    ("-m nodes=1,2 seed=-1", "hpcinit: error: seed is -1, expected 0 or more"),
    ("-m cluster=local,nope", "hpcinit: error: cluster=nope: no such cluster"),
    ("-m nodes=1,2 nodez=3", "hpcinit: error: nodez=3: no such key 'nodez'"),
    ("-m nodes=1,'2", "nodes=1,'2: expected key=value"),
    ("-m nodes=range(3,1)", "nodes=range(3,1): the sweep has no combinations"),
    ("-m nodes=interval(1,2)", "nodes=interval(1,2): a sweep needs a list of values"),
    ("-m hydra.verbose=true,false", "hydra.verbose=true,false: a sweep needs a list of values, as in nodes=1,2, and cannot change hydra.* keys"),
    ("-m nodes=1,2 hydra/launcher=nosuch", "hydra/launcher=nosuch: no such hydra/launcher"),
    ("-m nodes=1,2 hydra.sweeper._target_=x.Y", "hydra/sweeper is x.Y, which cannot be created: "),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _own_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, content in FILES.items():
        (tmp_path / "conf" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "conf" / name).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HPCINIT_CONF", raising=False)


@pytest.mark.parametrize(("line", "message"), CASES, ids=[str(line)[:40] for line, _ in CASES])
def test_one_clear_line(
    line: str | list[str], message: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong request gives one line on stderr and exit status 2, and creates no files."""
    words = line.split() if isinstance(line, str) and "\n" not in line and "{a: b}" not in line else line
    words = [words] if isinstance(words, str) else words
    monkeypatch.setattr(submit_command.submission, "submit", None)  # no case may reach this
    assert main(["submit", *words]) == 2
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1) and err.startswith("hpcinit: error: ")
    assert message in err and not [word for word in JARGON if word in err]
    assert [path.name for path in Path().iterdir()] == ["conf"]


@pytest.mark.parametrize("line", ["nodes=2", "--cfg job", "-m nodes=1,2"])
def test_a_primary_config_that_includes_itself(line: str, capfd: pytest.CaptureFixture[str]) -> None:
    """The error for a conf/hpcinit.yaml that includes 'hpcinit', which is itself, names the file and the solution."""
    Path("conf/hpcinit.yaml").write_text("defaults: [hpcinit, _self_]\nnodes: 2\n")
    Path("conf/cluster/same.yaml").unlink()
    assert main(["submit", *line.split()]) == 2
    assert "conf/hpcinit.yaml includes itself, directly or through another file: its defaults list has 'hpcinit'" in (
        err := capfd.readouterr().err
    )
    assert err.count("\n") == 1 and "Give one of the files another name" in err


def test_configs_that_include_each_other(capfd: pytest.CaptureFixture[str]) -> None:
    """Several files that include each other in a circle give one message."""
    for name, other in (("same", "back"), ("back", "same")):
        Path(f"conf/cluster/{name}.yaml").write_text(f"defaults: [{other}]\n")
    assert main(["submit", "cluster=same"]) == 2
    err = capfd.readouterr().err
    assert "includes itself, directly or through another file" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "warning"),
    [
        ("-m nodes=1 nodes=2", "nodes is given 2 times; the last one counts: nodes=2"),
        ("+foo=1", "+foo=1 has no effect: hpcinit has no key foo, and no other key refers to ${foo}"),
        ("+cluster.gpus_per_nod=1", "hpcinit has no key cluster.gpus_per_nod, and no other key refers to "
         "${cluster.gpus_per_nod}; did you mean 'gpus_per_node'?"),
    ],
)  # fmt: skip
def test_legal_but_odd_is_a_warning(line: str, warning: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Unusual requests that Hydra's users may intend are accepted, with one warning on stderr."""
    assert main(["submit", "dry_run=true", *line.split()]) == 0
    out, err = capfd.readouterr()
    assert out.startswith("#!/bin/bash") and (err.count("\n"), err.startswith("hpcinit: warning: ")) == (1, True)
    assert warning in err


@pytest.mark.parametrize(
    "line",
    [
        "parallel=zero3 +deepspeed.ds_config.zero_optimization.sub_group_size=1",
        "+cluster.env.X=1",
        "+lr=1 job.args=[${lr}]",
        "~cluster.env.OMP_NUM_THREADS",
        "++nodes=2",
        "-m nodes=1",
    ],
)
def test_legal_and_usual_is_silent(line: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Common requests give no warning, such as a new entry of a table or a key that another key reads."""
    assert main(["submit", "dry_run=true", *line.split()]) == 0
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("line", "printed"),
    [
        ("--version", "hpcinit 0."),
        ("--help", "cluster: alist"),
        ("--hydra-help", "--multirun"),
        ("--info searchpath", "file://"),
        ("--cfg job nodes=3", "nodes: 3"),
        ("--cfg hydra", "job_logging"),
    ],
)
def test_what_hydra_prints(hpcinit: Run, line: str, printed: str) -> None:
    """Hydra's own help pages work, and --version prints hpcinit's version."""
    done = hpcinit("submit", *line.split())
    assert (done.returncode, done.stderr) == (0, "") and printed in done.stdout
