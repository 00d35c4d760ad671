"""A draft for Spack, never built: packaging/README.md."""

from spack.package import *
from spack_repo.builtin.build_systems.python import PythonPackage


class PyHpcinit(PythonPackage):
    """Submit PyTorch jobs to Slurm and initialize their process groups, or name the host at fault."""

    pypi = "hpcinit/hpcinit-0.0.0.tar.gz"

    license("MIT")

    version("0.0.0", sha256="0" * 64)

    variant("job", default=False, description="Also install PyTorch, for the programs of jobs")

    with default_args(type="build"):
        depends_on("py-hatchling@1.24:")
        depends_on("py-hatch-vcs@0.4:")

    with default_args(type=("build", "run")):
        depends_on("python@3.10:3.14")
        depends_on("py-hydra-core@1.3.2:1.4")
        depends_on("py-omegaconf@2.3:2.4")
        depends_on("py-submitit@1.5.2:1.5")
        depends_on("py-pyyaml@6.0.1:")
        depends_on("py-rich@13:")
        depends_on("py-psutil@5.9.6:")
        depends_on("py-torch@2.10:2.14", when="+job")
        depends_on("py-numpy", when="+job")
