"""Record further shapes beside those of tests.record_slurm_environments: leaks, MPI, odd steps.

Run it manually as root, on a machine with Slurm: python -m tests.world.record_worlds --out tests/data/worlds
The files have the same form. These shapes show whether a task can be distinguished from something that looks like
one, and where rank 0's host is hard to find.
"""

import argparse
import json
from pathlib import Path

from tests.minislurm import MiniSlurm
from tests.record_slurm_environments import HET, SRUN, Shape, record

HOSTS = (("hosts", "n3\nn1\nn3\nn2\n"),)
PROBE_ONLY = (("nested", "#!/bin/sh\n./probe\n"),)
INSIDE = "srun --overlap sh -c '[ $SLURM_PROCID != 1 ] || "
SHAPES = {
    # These look like a rank but are none.
    "batch_script_one_task": Shape("sbatch -N1 -n1", "./probe", tasks=1),
    "batch_script_nodes_only": Shape("sbatch -N2", "./probe", tasks=1),
    "batch_script_exclusive": Shape("sbatch -N1 --exclusive", "./probe", tasks=1),
    "batch_script_het_one_each": Shape("sbatch -n1 : -n1", "./probe", tasks=1),
    "nested_same_shape": Shape(
        "sbatch -N2 -n2", f"{INSIDE}sbatch -N2 -n2 --output=job-nested.out nested'", 1, PROBE_ONLY
    ),
    "nested_one_task": Shape(
        "sbatch -N2 -n2", f"{INSIDE}sbatch -N1 -n1 --output=job-nested.out nested'", 1, PROBE_ONLY
    ),
    "nested_salloc": Shape("sbatch -N2 -n2", f"{INSIDE}salloc -N1 -n2 ./probe > job-nested.out'", 1),
    "nested_salloc_same_shape": Shape("sbatch -N2 -n2", f"{INSIDE}salloc -N2 -n2 ./probe > job-nested.out'", 1),
    "interactive_step": Shape("salloc -N2 -n4 srun --interactive --preserve-env ./probe", tasks=1),
    # Real ranks in unusual steps.
    "preserve_env": Shape("sbatch -N2 -n4", "srun --preserve-env -N1 -n2 --label ./probe", tasks=2),
    "nodelist_backwards": Shape("sbatch -N4 --ntasks-per-node=2", "srun -w n4,n2 -N2 -n4 --label ./probe"),
    "arbitrary_file_as_nodelist": Shape(
        "sbatch -N3 -n4", "srun --distribution=arbitrary -w ./hosts --label ./probe", files=HOSTS
    ),
    "arbitrary_nodelist": Shape("sbatch -N3 -n4", "srun --distribution=arbitrary -w n3,n1,n3,n2 -n4 --label ./probe"),
    "arbitrary_alone": Shape("srun --distribution=arbitrary -w n3,n1,n2 -n3 --label ./probe", tasks=3),
    "hostfile_without_distribution": Shape("sbatch -N3 -n4", f"export SLURM_HOSTFILE=$PWD/hosts\n{SRUN}", files=HOSTS),
    "hostfile_alone": Shape("env SLURM_HOSTFILE=hosts srun -n4 --label ./probe", files=HOSTS),
    "het_groups_swapped": Shape(HET, "srun --het-group=1,0 --label ./probe", tasks=5),
    "het_three": Shape("sbatch -w n4 -n1 : -w n2 -n2 : -w n1 -n1", "srun --het-group=0,2 --label ./probe", tasks=2),
    "het_step_in_plain_job": Shape(
        "sbatch -N3 --ntasks-per-node=2", "srun --label -N1 -n2 ./probe : -N2 -n3 ./probe", tasks=5
    ),
    "het_step_in_plain_job_reversed": Shape(
        "sbatch -N3 --ntasks-per-node=2",
        "srun --label -w n3 -N1 -n2 ./probe : -w n1,n2 -N2 -n3 ./probe",
        tasks=5,
    ),
    # Slurm's support for MPI's process managers.
    "mpi_pmi2": Shape("sbatch -N2 -n4", "srun --mpi=pmi2 --label ./probe"),
    "mpi_pmix": Shape("sbatch -N1 -n2", "srun --mpi=pmix --label ./probe", tasks=2),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", choices=SHAPES, default=list(SHAPES), metavar="SHAPE")
    options = parser.parse_args()
    with MiniSlurm(nodes=4, gpus=0, name="world") as slurm:
        folder = options.out / slurm.version()
        folder.mkdir(parents=True, exist_ok=True)
        for name in options.only:
            try:
                found = record(slurm, SHAPES[name])
            except SystemExit as error:  # a refusal of this Slurm version is a result too
                print(f"{name}: not recorded: {error}", flush=True)
                continue
            (folder / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
            print(name, *(f"{task['launch']}/{task['rank']}={task['host']}" for task in found["tasks"]), flush=True)


if __name__ == "__main__":
    main()
