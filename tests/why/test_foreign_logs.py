"""Logs of jobs that hpcinit did not start, recorded by tests/why/record_foreign_logs.py: each fault under each launcher."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hpcinit.records import causes
from hpcinit.why import diagnosis, foreign_job, log_lines, why_command
from hpcinit.why.evidence import NO_RANK, Verdict
from tests import json_documents
from tests.why import record_foreign_logs

LOGS = Path(__file__).parents[1] / "data/foreign"
LAUNCHERS = sorted({path.stem.partition("-")[0] for path in LOGS.glob("*.log")})
KINDS = {
    **dict.fromkeys(("sigkill", "sigterm", "sigint", "sigsegv", "abort"), "signal"),
    **dict.fromkeys(("os-exit", "sys-exit", "return", "skip"), "early-end"),
    **dict.fromkeys(("loop", "held-gil", "sigstop"), "hang"),
    **dict.fromkeys(("broadcast", "size"), "mismatch"),
    **dict.fromkeys(("memory", "loader"), "host-memory"),
    **dict.fromkeys(("exception", "thread"), "program"),
    "disk": "disk",
}
# torchrun and accelerate list only the ranks that failed, and a thread's exception is printed without a rank. Megatron-LM
# prints the number of ranks. DeepSpeed's launcher does not print which rank a signal killed.
NOT_LISTED = ("os-exit", "sys-exit", "return", "skip", "thread")
WITHOUT_RANK = {
    **dict.fromkeys(("torchrun", "nodes", "accelerate"), NOT_LISTED),
    "deepspeed": ("sigkill", "sigterm"),
}


def verdict(text: str, rank: int | None = None) -> tuple[Verdict, tuple[str, ...]]:
    found = foreign_job.gather([log_lines.Log(text, rank)])
    return diagnosis.diagnose(found.evidence), found.unknown


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_each_fault_in_the_logs_of_another_launcher(launcher: str) -> None:
    """The kind, and the rank if the log shows it. Every fault has a log of this launcher."""
    wrong = []
    for fault in record_foreign_logs.FAULTS[launcher]:
        found, unknown = verdict((LOGS / f"{launcher}-{fault}.log").read_text())
        rank = None if fault in WITHOUT_RANK.get(launcher, ()) else 3
        if (found.rank, found.kind) != (rank, KINDS[fault]) or (rank is None and not unknown):
            wrong.append(f"{launcher}-{fault}: {found.rank} {found.kind} {found.headline} {unknown}")
    assert not wrong, "\n".join(wrong)


def test_errors_of_torchruns_agents_are_secondary() -> None:
    """Two agents without Slurm, recorded: rank 0 raises, then the other agent loses the store and prints three
    tracebacks. Its log alone shows only that."""
    logs = [log_lines.Log((LOGS / f"agents/agent-{number}.log").read_text()) for number in (0, 1)]
    both = foreign_job.gather([logs[1], logs[0]])
    found = diagnosis.diagnose(both.evidence)
    assert (found.headline, found.rank) == ("rank 0 on localhost failed first: ValueError: bad sample 17", 0)
    alone = foreign_job.gather(logs[1:])
    found = diagnosis.diagnose(alone.evidence)
    assert (
        found.headline.startswith("probably the launcher failed first: ")
        and "RendezvousConnectionError" in found.headline
    )
    assert (found.rank, found.kind) == (None, "network") and any("other nodes" in line for line in alone.unknown)


@pytest.mark.parametrize(
    "error", ["AttributeError: 'NoneType' object has no attribute 'is_failed'", "RendezvousClosedError"]
)
def test_later_errors_of_an_agent_are_not_the_first_cause(error: str) -> None:
    """Typed after torch's messages: an agent prints them after it lost another one."""
    frame = '  File "/lib/torch/distributed/elastic/agent/server/api.py", line 745, in run'
    agent = f"Traceback (most recent call last):\n{frame}\n{error}\n"
    rank = 'Traceback (most recent call last):\n  File "train.py", line 9, in <module>\nValueError: bad sample 17\n'
    assert verdict(agent + rank)[0].headline == "a rank failed first: ValueError: bad sample 17"
    assert verdict(agent)[0].headline == f"probably the launcher failed first: {error}"
    over = verdict("step 9 loss 1.5\nTraining done in 4:11:07\n" + agent)[0]
    assert over.kind == "none" and over.headline.startswith("the training finished; afterwards the launcher failed: ")
    assert verdict("Training done in 4:11:07\n" + rank)[0].kind == "program"


@pytest.mark.parametrize(
    ("text", "rank"),
    [
        *((text, 3) for text in ("Rank 3, size 4", "(RankID:3)", "[RANK:3]", "world_rank=3", '"rank": 3', "rank_id=3")),
        *(
            (text, 3)
            for text in ("PMI_RANK=3", "SLURM_PROCID=3", "process_index=3", "/job:w/replica:0/task:3 ", "rank3")
        ),
        *(
            (text, NO_RANK)
            for text in ("local_rank: 3", "node_rank=3", "local rank 3", "from rank 3", "nranks 3", "tp rank 3")
        ),
    ],
)
def test_forms_in_which_programs_name_a_rank(text: str, rank: int) -> None:
    """A local rank, or that of a node, a stage or another process, is not the rank of the line."""
    assert log_lines.named(text) == rank


ERROR = 'Traceback (most recent call last):\n  File "train.py", line 9, in <module>\nValueError: bad sample 17\n'
AGENT = "E0718 23:02 torch/distributed/elastic/multiprocessing/api.py:882] failed (exitcode: 1) local_rank: 1 (pid: 70118) of"


@pytest.mark.parametrize(
    ("text", "rank"),
    [
        (ERROR + AGENT, 1),
        ("--nnodes=2\n" + ERROR + AGENT, None),
        ("group_world_size=2\n  global_ranks=[4, 5]\n" + ERROR + AGENT, 5),
        ("Hostname n23, pid 70118, using GPU 0. Rank 3, size 4\n--nnodes=2\n" + ERROR + AGENT, 3),
        (ERROR + "rank 0: exit code 134\nrank 5: exit code 1\n", 5),
        ("(Worker pid=89, ip=10.0.0.7) set up [rank=2, world_size=4]\n" + ERROR.replace("\n", "\n(Worker pid=89) "), 2),
    ],
)
def test_the_rank_of_an_error_that_was_printed_without_it(text: str, rank: int | None) -> None:
    """torchrun's agent names a local rank, and Ray a process ID; other lines show which ranks these are."""
    found = verdict(text)[0]
    assert (found.kind, found.rank) == ("program", rank)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ("DataLoader worker (pid 7) is killed by signal: Segmentation fault.", "signal"),
        ("DataLoader worker (pid 7) is killed by signal: Killed.", "host-memory"),
        ("DataLoader worker (pid 7) is killed by signal: Bus error.", "shared-memory"),
        ("DataLoader worker (pid(s) 7) exited unexpectedly with exit code 1.", "program"),
        ("unable to open shared memory object </torch_7> in read-write mode: Too many open files (24)", "program"),
        ("unable to write to file </torch_7>: No space left on device (28)", "shared-memory"),
        ("NCCL WARN Call to ibv_reg_mr failed with error Cannot allocate memory", "network"),
        ("OOM when allocating tensor with shape[9] on /device:CPU:0 by allocator cpu", "host-memory"),
        ("ray.exceptions.OutOfMemoryError: Task was killed", "host-memory"),
        ("Message truncated : received 256 bytes instead of 4", "mismatch"),
        ("Loss is nan, stopping training", "not-a-number"),
    ],
)
def test_a_message_shows_no_more_than_its_text(error: str, kind: str) -> None:
    """Messages of torch, NCCL, TensorFlow and Ray that look alike and have different causes."""
    assert causes.kind(error)[0] == kind


def test_a_worker_that_is_gone_when_slurm_ends_the_job() -> None:
    """torch's message about a worker that died of the job's SIGTERM; without an end by Slurm it is the cause."""
    error = "Traceback (most recent call last):\nRuntimeError: DataLoader worker (pid(s) 7) exited unexpectedly\n"
    for state, kind in (("CANCELLED", "cancelled"), ("TIMEOUT", "time-limit"), ("FAILED", "host-memory")):
        found = foreign_job.gather([log_lines.Log(error)], state)
        assert diagnosis.diagnose(found.evidence).kind == kind


def test_why_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The JSON has the verdict, the culprits, secondary errors and what is unknown; the text shows the same."""
    log = tmp_path / "train.out"
    shutil.copy(LOGS / "torchrun-exception.log", log)
    assert why_command.main([str(log), "--json"]) == 0
    [found] = json_documents.parse(capsys.readouterr().out, "why")
    assert found["verdict"] == "rank 3 on n3 failed first: ValueError: bad sample 17"
    (culprit,) = found["culprits"]
    assert (culprit["rank"], culprit["host"], culprit["kind"]) == (3, "n3", "program")
    assert culprit.keys() >= {"group", "collective", "number", "waiting_ranks", "evidence"}
    assert any("Connection closed by peer" in line for line in found["secondary"])
    assert any("sacct" in line for line in found["unknown"])
    assert why_command.main([str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        lines[0] == found["verdict"] and f"read: {log}" in lines and any(line.startswith("unknown: ") for line in lines)
    )


def test_one_file_for_each_rank(tmp_path: Path) -> None:
    """The rank is in the name of the file, of srun's %t or of torchrun's --log-dir."""
    for rank in range(4):
        error = "ValueError: bad sample 17" if rank == 3 else "RuntimeError: Connection closed by peer"
        text = f'Traceback (most recent call last):\n  File "train.py", line 9, in <module>\n{error}\n'
        (tmp_path / f"slurm-7_rank{rank}.out").write_text(text)
        below = tmp_path / "torchrun" / "attempt_0" / str(rank)
        below.mkdir(parents=True)
        (below / "stderr.log").write_text(text)
    for place in (tmp_path / "torchrun", tmp_path):
        found = foreign_job.find(str(place))
        assert found is not None
        assert diagnosis.diagnose(found.logs.evidence).headline == "rank 3 failed first: ValueError: bad sample 17"


@pytest.mark.parametrize(
    ("text", "kind", "rank"),
    [
        # NCCL's watchdog, as torch 2.x prints it on every rank; the rank without it did not call.
        (
            "".join(
                f"[rank{rank}]:[E1122 20:00:00.1 ProcessGroupNCCL.cpp:629] [Rank {rank}] Watchdog caught collective "
                "operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=4, Timeout(ms)=600000) ran for 600010 "
                "milliseconds before timing out.\n"
                for rank in (0, 1, 3)
            )
            + "world_size: 4\n",
            "hang",
            2,
        ),
        # The driver's message of a lost GPU.
        ("[rank1]: NVRM: Xid (PCI:0000:3b:00): 79, pid=4242, GPU has fallen off the bus.\n", "gpu", 1),
        # DeepSpeed's launcher, which prints the command of its last rank, whichever rank failed.
        (
            "[2026-11-22 20:00:00,000] [ERROR] [launch.py:325:sigkill_handler] ['/usr/bin/python', '-u', 'train.py', "
            "'--local_rank=3'] exits with return code = -9\n",
            "signal",
            None,
        ),
        # Lightning's prefix.
        (
            '[rank: 2] Traceback (most recent call last):\n[rank: 2]   File "train.py", line 9, in <module>\n'
            "[rank: 2] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n",
            "cuda-memory",
            2,
        ),
        # Slurm's time limit.
        (
            "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-22T20:00:00 DUE TO TIME LIMIT ***\n",
            "time-limit",
            None,
        ),
    ],
)
def test_messages_of_other_programs(text: str, kind: str, rank: int | None) -> None:
    """Messages typed after those of NCCL, the driver, DeepSpeed, Lightning and Slurm: no GPU is here."""
    found, _ = verdict(text)
    assert (found.kind, found.rank) == (kind, rank), found.headline


def test_a_run_folder_and_a_folder_without_logs_are_not_foreign(tmp_path: Path) -> None:
    assert foreign_job.find(str(tmp_path)) is None and foreign_job.find("") is None
    (tmp_path / "spec.json").write_text("{}")
    (tmp_path / "a.log").write_text("x")
    assert foreign_job.find(str(tmp_path)) is None
