"""python -m tests.minislurm up | down | status | install: a real Slurm on this machine, from the shell."""

import argparse
import sys

from tests.minislurm.cluster import MiniSlurm, names
from tests.minislurm.errors import MiniSlurmError
from tests.minislurm.packages import install, missing


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        return options.do(options)
    except MiniSlurmError as error:
        print(f"minislurm: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.minislurm", description=__doc__)
    commands = parser.add_subparsers(required=True)
    for do in (_up, _down, _status, _install):
        command = commands.add_parser(do.__name__.strip("_"), help=do.__doc__, description=do.__doc__)
        command.set_defaults(do=do)
        if do in (_up, _down):
            command.add_argument("--name", default="hpcinit", help="default: hpcinit; several may be up")
        if do is _up:
            command.add_argument("--nodes", type=int, default=4)
            command.add_argument("--gpus", type=int, default=8, help="stand-in GPUs per node (default: 8)")
            command.add_argument("--accounting", action="store_true", help="with slurmdbd, for sacct")
    return parser


def _up(options: argparse.Namespace) -> int:
    """start a cluster; it runs until `down`"""
    lacks = missing(options.accounting)
    if lacks:
        print("this machine lacks:", *lacks, sep="\n  ", file=sys.stderr)
        if any(line.startswith("Debian package") for line in lacks):
            print("To install the packages, as root: python -m tests.minislurm install", file=sys.stderr)
        return 1
    cluster = MiniSlurm(options.nodes, options.gpus, options.accounting, options.name, owned=False).up()
    print(f"Slurm {cluster.version()}: {options.nodes} nodes with {options.gpus} stand-in GPUs each")
    print("# Partitions: main (default) and high, which preempts main by requeue.")
    print(f"# Use it: put the next line into your shell, then e.g. `srun -N{options.nodes} hostname`.")
    print(f"# Stop it: python -m tests.minislurm down --name {options.name}")
    print(f"export SLURM_CONF={cluster.conf}")
    return 0


def _down(options: argparse.Namespace) -> int:
    """stop a cluster and all its processes"""
    MiniSlurm(name=options.name).down()
    return 0


def _status(_: argparse.Namespace) -> int:
    """list the clusters on this machine"""
    for name in names():
        cluster = MiniSlurm(name=name)
        try:
            up = cluster.answers()
            nodes = cluster.run("sinfo") if up else ""
        except (MiniSlurmError, OSError, ValueError) as error:
            print(f"{name}: it starts or ends at this moment: {error}")
            continue
        print(f"{name}: {'up' if up else 'left over, no reply'}, SLURM_CONF={cluster.conf}")
        if up:
            print(nodes)
    if not names():
        print("no cluster is up")
    return 0


def _install(_: argparse.Namespace) -> int:
    """install the Debian packages that are missing (root)"""
    print("installed:", *(install() or ["nothing, no package was missing"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
