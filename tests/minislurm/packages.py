"""Find what this machine lacks for a cluster, and install it on Debian and Ubuntu."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.minislurm.errors import MiniSlurmError
from tests.minislurm.shell import PATH, run

# command: Debian package that contains it
BASE = {
    "slurmctld": "slurmctld", "slurmd": "slurmd", "srun": "slurm-client", "munged": "munge",
    "ip": "iproute2", "unshare": "util-linux", "setsid": "util-linux",
}  # fmt: skip
ACCOUNTING = {"slurmdbd": "slurmdbd", "mariadbd": "mariadb-server"}
# Commands of other tests. MPICH's Hydra is in the package mpich; the package hydra is another program.
OTHERS = {
    "mpirun.openmpi": "openmpi-bin",
    "mpiexec.hydra": "mpich",
    "zsh": "zsh",
    "fish": "fish",
    "modulecmd": "environment-modules",
    "strace": "strace",
}

POLICY = Path("/usr/sbin/policy-rc.d")
# Everything that a cluster needs of the kernel, in namespaces that end with the command.
REHEARSAL = """
set -e
ip link add one type veth peer name two
ip link add br0 type bridge
mount -t tmpfs none /dev/shm
"""


def missing(accounting: bool = False) -> list[str]:
    """Return what this machine lacks for a cluster, one line each."""
    lacks = _lacking(BASE | ACCOUNTING if accounting else BASE)
    found = [f"Debian package {package}" for package in lacks]
    if os.geteuid() != 0:
        return ["root (namespaces and daemons need it)", *found]
    if not {"iproute2", "util-linux"} & set(lacks):
        try:
            run(["unshare", "--net", "--uts", "--mount", "sh", "-c", REHEARSAL])
        except MiniSlurmError as error:
            reason = str(error).splitlines()[-1].strip()
            found.append(f"the right to make namespaces and links (in a container: --privileged): {reason}")
    return found


def _lacking(wanted: dict[str, str]) -> list[str]:
    lacks = [package for command, package in wanted.items() if not shutil.which(command, path=PATH)]
    return list(dict.fromkeys(lacks))


def install() -> list[str]:
    """Install the packages that the tests need with apt-get, and return them. No daemon stays running.

    Debian's packages make /etc/slurm, /etc/munge and /etc/mysql; the clusters made here use none of them.
    """
    packages = _lacking(BASE | ACCOUNTING | OTHERS)
    if packages:
        fetch(packages)
        _disable_services(packages)
    return packages


def fetch(packages: list[str]) -> None:
    """Install packages with apt-get without starting their services."""
    if os.geteuid() != 0:
        raise MiniSlurmError(f"not root: cannot install {' '.join(packages)}")
    if not shutil.which("apt-get", path=PATH):
        raise MiniSlurmError(f"no apt-get here: install the equivalent of {' '.join(packages)} for this system")
    with _services_stay_off():
        for command in (["update"], ["install", "--yes", "--no-install-recommends", *packages]):
            done = subprocess.run(
                ["apt-get", *command], env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"}, check=False
            )
            if done.returncode:
                raise MiniSlurmError(f"apt-get {' '.join(command)}: exit status {done.returncode}")


@contextmanager
def _services_stay_off() -> Iterator[None]:
    """Keep Debian from starting services during an installation: it runs this file, and status 101 forbids it."""
    if POLICY.exists():  # as in Debian's and Ubuntu's container images
        yield
        return
    POLICY.write_text("#!/bin/sh\nexit 101\n")
    POLICY.chmod(0o755)
    try:
        yield
    finally:
        POLICY.unlink()


def _disable_services(packages: list[str]) -> None:
    """Disable the services of the packages just installed, so that the next boot does not start them."""
    services = {"slurmctld": "slurmctld", "slurmd": "slurmd", "munge": "munge", "slurmdbd": "slurmdbd",
                "mariadb-server": "mariadb"}  # fmt: skip
    units = [services[package] for package in packages if package in services]
    if units and Path("/run/systemd/system").is_dir():
        subprocess.run(["systemctl", "disable", "--now", *units], check=False)
