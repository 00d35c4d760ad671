"""Record the environment that Slurm really gives to tasks, with the true values beside it.

Run it manually as root, on a machine with Slurm: python -m tests.record_slurm_environments --out tests/data/slurm

It starts its own cluster, launches every shape below, and writes
<out>/<slurm version>/<shape>.json:

    {"slurm_version", "command", "tasks": [{"host", "launch", "rank", "tasks_on_host", "env"}, ...]}

The true values are independent of the environment. `host` is the kernel's name of the node on which the task ran.
`rank` is the number with which `srun --label` marks the task's output; it is null without srun (in a batch script, in
salloc's shell). `tasks_on_host` is the number of tasks that reported from there. `launch` distinguishes the two jobs of
an array, which have separate ranks; elsewhere it is 0.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tests.minislurm import MiniSlurm

# It writes its findings to a file and prints only the file's name: srun then adds the rank in front of it.
PROBE = f"""#!{sys.executable} -I
import json, os, pathlib, uuid
kept = ("SLURM", "SBATCH", "SRUN", "CUDA_", "GPU_", "ROCR_", "PMI", "HOSTNAME")
env = {{name: value for name, value in sorted(os.environ.items()) if name.startswith(kept)}}
token = "found-" + uuid.uuid4().hex
folder = pathlib.Path(__file__).parent / "found"
(folder / token).write_text(json.dumps({{"host": os.uname().nodename, "env": env}}))
print(token, flush=True)
"""
TOKEN = re.compile(r"^(?: *(\d+): )?(found-[0-9a-f]{32})$", re.MULTILINE)
HOME = "/home/user"  # replaces the folder from which everything is submitted


@dataclass(frozen=True)
class Shape:
    """One way to start tasks. sbatch runs the script; without a script the command starts the tasks."""

    command: str
    script: str = ""
    tasks: int = 4  # the number of tasks that must report
    files: tuple[tuple[str, str], ...] = ()  # name and text of further files that the script needs


SRUN = "srun --label ./probe"
HET = "sbatch -N1 -n2 : -N2 -n3"
SHAPES = {
    # The batch script itself, which has no ranks.
    "batch_script": Shape("sbatch -N2 --ntasks-per-node=4", "./probe", tasks=1),
    "batch_script_het": Shape(HET, "./probe", tasks=1),
    # Layouts of tasks.
    "one_task": Shape("sbatch -N1 -n1", SRUN, tasks=1),
    "single_node": Shape("sbatch -N1 -n4", SRUN),
    "block": Shape("sbatch -N2 --ntasks-per-node=2", SRUN),
    "block_four_nodes": Shape("sbatch -N4 --ntasks-per-node=2", SRUN, tasks=8),
    "ntasks_uneven": Shape("sbatch -N3 -n6", SRUN, tasks=6),
    "ntasks_cpus_per_task": Shape("sbatch -n5 -c8", "srun -c8 --label ./probe", tasks=5),
    "cyclic": Shape("sbatch -N3 --ntasks-per-node=2 --distribution=cyclic", SRUN, tasks=6),
    "cyclic_uneven": Shape("sbatch -N3 -n7 --distribution=cyclic", SRUN, tasks=7),
    "plane": Shape("sbatch -N2 --ntasks-per-node=3", "srun --distribution=plane=2 --label ./probe", tasks=6),
    "arbitrary": Shape(
        "sbatch -N3 -n4",
        "export SLURM_HOSTFILE=$PWD/hosts\nsrun --distribution=arbitrary --label ./probe",
        files=(("hosts", "n3\nn1\nn3\nn2\n"),),
    ),
    "ntasks_per_node_larger_than_used": Shape("sbatch -N3 --ntasks-per-node=4", "srun -n5 --label ./probe", tasks=5),
    "multi_prog": Shape(
        "sbatch -N2 -n3",
        "srun --multi-prog --label programs",
        tasks=3,
        files=(("programs", "0 ./probe\n1-2 ./probe\n"),),
    ),
    # Steps that are smaller than the job.
    "subset_nodelist": Shape("sbatch -N4 --ntasks-per-node=2", "srun -w n2,n4 -N2 -n4 --label ./probe"),
    "subset_exclude": Shape("sbatch -N4 --ntasks-per-node=2", "srun -x n1 -N3 -n3 --label ./probe", tasks=3),
    "subset_relative": Shape("sbatch -N4 --ntasks-per-node=2", "srun --relative=2 -N2 -n4 --label ./probe"),
    "subset_fewer_nodes": Shape("sbatch -N4 --ntasks-per-node=2", "srun -N2 -n3 --label ./probe", tasks=3),
    "overlap": Shape("sbatch -N2 --ntasks-per-node=2", "srun sleep 60 &\nsleep 1\nsrun --overlap --label ./probe"),
    "exclusive_step": Shape(
        "sbatch -N2 --ntasks-per-node=4",
        "srun --exclusive -N1 -n2 sleep 60 &\nsleep 1\nsrun --exclusive -N2 -n4 --label ./probe",
    ),
    "exclusive_job": Shape("sbatch -N2 --exclusive --ntasks-per-node=2", SRUN),
    # Heterogeneous jobs.
    "het_both": Shape(HET, "srun --het-group=0,1 --label ./probe", tasks=5),
    "het_both_reversed_hosts": Shape("sbatch -w n4 -n2 : -w n1,n2 -n2", "srun --het-group=0,1 --label ./probe"),
    "het_colon": Shape(HET, "srun --label -n1 ./probe : -n3 ./probe"),
    "het_component_0": Shape(HET, "srun --het-group=0 --label ./probe", tasks=2),
    "het_component_1": Shape(HET, "srun --het-group=1 --label ./probe", tasks=3),
    "het_srun_alone": Shape("srun --label -N1 -n2 ./probe : -N2 -n2 ./probe"),
    # Arrays, requeue, nesting.
    "array": Shape("sbatch --array=3,5 -N2 -n2", SRUN),
    "requeued": Shape(
        "sbatch -N2 -n2 --requeue",
        f'[ -n "$SLURM_RESTART_COUNT" ] || {{ scontrol requeue $SLURM_JOB_ID; sleep 60; }}\n{SRUN}',
        tasks=2,
    ),
    "nested_batch_script": Shape(
        "sbatch -N2 -n4 --array=7",
        "srun --overlap sh -c '[ $SLURM_PROCID != 3 ] || sbatch -N1 -n2 --output=job-nested.out nested'",
        files=(("nested", "#!/bin/sh\n./probe\n"),),
        tasks=1,
    ),
    "nested_srun": Shape(
        "sbatch -N2 -n4 --array=7",
        "srun --overlap sh -c '[ $SLURM_PROCID != 3 ] || sbatch -N2 -n2 --output=job-nested.out nested'",
        files=(("nested", f"#!/bin/sh\n{SRUN}\n"),),
        tasks=2,
    ),
    "nested_from_batch_script": Shape(
        "sbatch -N2 -n4",
        "sbatch -N2 -n3 --output=job-nested.out nested",
        files=(("nested", f"#!/bin/sh\n{SRUN}\n"),),
        tasks=3,
    ),
    "export_none": Shape("sbatch -N2 -n2 --export=NONE", "srun --export=ALL --label ./probe", tasks=2),
    # Interactive.
    "salloc_shell": Shape("salloc -N2 -n4 ./probe", tasks=1),
    "salloc_srun": Shape(f"salloc -N2 -n4 {SRUN}"),
    "srun_alone": Shape("srun --label -N2 -n4 ./probe"),
    "srun_alone_uneven": Shape("srun --label -N3 -n4 ./probe"),
    # Devices.
    "gpus_per_node": Shape("sbatch -N2 --ntasks-per-node=2 --gpus-per-node=4", SRUN),
    "gpus_per_node_fewer_in_step": Shape(
        "sbatch -N2 --ntasks-per-node=2 --gpus-per-node=4", "srun --gpus-per-node=2 --label ./probe"
    ),
    "gpus_per_task": Shape("sbatch -N2 -n4 --ntasks-per-node=2 --gpus-per-task=1", SRUN),
    "gpu_bind_none": Shape(
        "sbatch -N2 -n4 --ntasks-per-node=2 --gpus-per-task=1", "srun --gpu-bind=none --label ./probe"
    ),
    "gpu_bind_single": Shape(
        "sbatch -N2 --ntasks-per-node=2 --gpus-per-node=2", "srun --gpu-bind=single:1 --label ./probe"
    ),
    "gpu_bind_map": Shape(
        "sbatch -N2 --ntasks-per-node=2 --gpus-per-node=2", "srun --gpu-bind=map_gpu:1,0 --label ./probe"
    ),
    "ntasks_per_gpu": Shape("sbatch --gpus=4 --ntasks-per-gpu=1", SRUN),
    "gres_gpu": Shape("sbatch -N2 --ntasks-per-node=2 --gres=gpu:2", SRUN),
    "gpus_second_job_on_the_node": Shape(
        "sbatch -w n1 -n2 --gpus-per-node=2",
        "sbatch -w n1 -n2 --gpus-per-node=3 --output=job-nested.out nested\nsleep 60",
        files=(("nested", "#!/bin/sh\nsrun -n2 --label ./probe\n"),),
        tasks=2,
    ),
}


def record(slurm: MiniSlurm, shape: Shape) -> dict:
    """Launch the shape and return the findings of its tasks."""
    with tempfile.TemporaryDirectory(prefix="minislurm-record-") as name:
        folder = Path(name)
        try:
            printed = launch(slurm, shape, folder)
        finally:
            slurm.cancel_all()
        tasks = [task for number, text in enumerate(printed) for task in reported(folder, number, text)]
    files = [f"{name}: {text}" for name, text in shape.files]
    command = "\n".join([shape.command, *filter(None, [shape.script]), *files])
    return {"slurm_version": slurm.version(), "command": command, "tasks": tasks}


def reported(folder: Path, launch: int, printed: str) -> list[dict]:
    """Return the tasks of one launch in the order of their ranks."""
    tasks = []
    for rank, token in TOKEN.findall(printed):
        found = json.loads((folder / "found" / token).read_text())
        env = {name: value.replace(str(folder), HOME) for name, value in found["env"].items()}
        tasks.append((int(rank) if rank else None, found["host"], env))
    on_host = Counter(host for _, host, _ in tasks)
    return [
        {"host": host, "launch": launch, "rank": rank, "tasks_on_host": on_host[host], "env": env}
        for rank, host, env in sorted(tasks, key=lambda task: task[0] or 0)
    ]


def launch(slurm: MiniSlurm, shape: Shape, folder: Path) -> list[str]:
    """Run the command until all its tasks have reported. Return the output of each of its jobs."""
    (folder / "found").mkdir()
    for name, text in (("probe", PROBE), ("job", f"#!/bin/sh\n{shape.script}\n"), *shape.files):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    command = shlex.split(shape.command)
    if shape.script:
        command = [command[0], "--output=job-%A-%a.out", *command[1:], "job"]
    printed = [as_login(slurm, command, folder)]
    deadline = time.monotonic() + 30
    while (reports := sum(len(TOKEN.findall(text)) for text in printed)) != shape.tasks:
        if time.monotonic() > deadline:
            everything = "".join(path.read_text() for path in folder.glob("job-*.out"))
            queue = slurm.run("squeue", "--format=%A %T %r %S")
            raise SystemExit(f"{shape.command}: {reports} of {shape.tasks} tasks in 30 s\n{queue}{everything}")
        time.sleep(0.1)
        start_requeued(slurm)
        texts = [path.read_text() for path in sorted(folder.glob("job-*.out"))]
        printed = [text for text in texts if TOKEN.search(text)]
    return printed


def as_login(slurm: MiniSlurm, command: list[str], folder: Path) -> str:
    """Run a command as on a host called `login`, without this shell's environment."""
    env = {"PATH": os.defpath, "HOSTNAME": "login", "HOME": str(folder), "USER": "root", "SHELL": "/bin/sh"}
    inside = ["unshare", "--uts", "sh", "-c", 'hostname login; exec "$@"', "sh", *command]
    done = subprocess.run(
        inside, env=env | slurm.env, cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode:
        raise SystemExit(f"{shlex.join(command)}: exit status {done.returncode}\n{done.stderr}")
    return done.stdout


def start_requeued(slurm: MiniSlurm) -> None:
    """Release requeued jobs, which Slurm delays by two minutes."""
    for job in slurm.run("squeue", "--noheader", "--states=PENDING", "--format=%A %r").splitlines():
        number, _, reason = job.partition(" ")
        if reason == "BeginTime":
            slurm.wait_idle()  # the first attempt has left its nodes
            time.sleep(1)
            slurm.run("scontrol", "update", f"JobId={number}", "StartTime=now")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", choices=SHAPES, default=list(SHAPES), metavar="SHAPE")
    options = parser.parse_args()
    with MiniSlurm(nodes=4, gpus=8, name="record") as slurm:
        folder = options.out / slurm.version()
        folder.mkdir(parents=True, exist_ok=True)
        for name in options.only:
            found = record(slurm, SHAPES[name])
            (folder / f"{name}.json").write_text(json.dumps(found, indent=0) + "\n")
            print(
                name,
                *(f"{task['launch']}/{task['rank']}={task['host']}" for task in found["tasks"]),
                flush=True,
            )


if __name__ == "__main__":
    main()
