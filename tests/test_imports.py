"""Who may import whom, and what must stay out of a login node."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hpcinit
from tests.packages import PACKAGES, PAGE, page

PACKAGE = Path(hpcinit.__file__).parent
HEAVY = ("torch", "deepspeed")
ONLY_IN = {
    "submitit": {"submit/slurm_executor.py"},
    "hydra": {"config/compose.py", "config/combinations.py", "config/variations.py", "config/search_space.py"},
    "omegaconf": {"config/compose.py", "config/variations.py", "config/search_space.py", "config/schema.py"},
}
SITES = (
    *("juwels", "jupiter", "jean", "leonardo", "lumi", "marenostrum", "perlmutter", "frontier", "delta", "alps"),
    *(path.stem for path in (PACKAGE.parent / "conf/cluster").glob("*_*.yaml")),  # lumi_g
    *("clariden", "mini"),
)


def imports(path: Path) -> set[str]:
    """Return the full names that a file imports anywhere, functions included, but for imports for type checks alone."""
    found = set()
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def modules_after(statement: str) -> set[str]:
    """sys.modules of a fresh interpreter that ran `statement`."""
    code = f"{statement}\nimport sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    "statement",
    [
        "import hpcinit",
        "import hpcinit.cli.main, hpcinit.submit, hpcinit.world, hpcinit.run, hpcinit.nodelist",
        "from hpcinit.slurm import exactly_once, reasons, sbatch_errors, tokens",
        "from hpcinit.submit import submit_command, script, slurm_executor",
        "from hpcinit.submit import follow; from hpcinit.observe import status, logs, cancel",
        "from hpcinit.why import why_command; from hpcinit.report import report_command",
        "from hpcinit.discover import discover_command",
        "from hpcinit.timeouts import timeouts_command, fit",
        "from hpcinit.doctor import doctor_command",
    ],
)
def test_login_node_never_imports_torch(statement: str) -> None:
    """Neither `import hpcinit` nor anything on the login node's path imports torch or DeepSpeed."""
    assert not modules_after(statement) & set(HEAVY)


def test_a_whole_submission_never_imports_torch(tmp_path: Path) -> None:
    """Composing, checking and rendering a request imports neither torch nor DeepSpeed."""
    submit = "from hpcinit.cli.main import main; main(['submit', 'cluster=mini', 'dry_run=true'])"
    code = f"import os; os.chdir({str(tmp_path)!r}); {submit}"
    assert not modules_after(code) & set(HEAVY)


def test_the_check_for_torch_can_fail() -> None:
    """The check above sees torch where it is imported: the first use of hpcinit.init brings it in."""
    assert "torch" in modules_after("import hpcinit; hpcinit.init")


def test_import_hpcinit_is_the_standard_library_only() -> None:
    """`import hpcinit` brings in no third-party package at all."""
    new = modules_after("import hpcinit") - modules_after("pass")
    roots = {name.partition(".")[0] for name in new}
    assert roots - set(sys.stdlib_module_names) == {"hpcinit"}


def test_every_package_is_in_the_table() -> None:
    """The table of packages has each folder of hpcinit, and no other."""
    assert set(PACKAGES) == {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}


def test_the_table_has_no_cycle() -> None:
    """A package imports only packages that stand above it in the table."""
    known: set[str] = set()
    for name, package in PACKAGES.items():
        assert set(package.imports) <= known | {name}, name
        known.add(name)


def test_the_architecture_page_has_the_table() -> None:
    """docs/architecture.md contains the table of today: python -m tests.packages writes it."""
    assert PAGE.read_text() == page(PAGE.read_text())


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_downhill(path: Path) -> None:
    """A module imports from the packages that the table allows, and one file alone knows each dependency of others."""
    relative = path.relative_to(PACKAGE)
    package = PACKAGES.get(relative.parts[0])
    for name in imports(path):
        parts = name.split(".")
        if parts[0] in ONLY_IN:
            assert str(relative) in ONLY_IN[parts[0]], f"{relative} imports {name}"
        if package is None or path.name == "__main__.py":  # what a shell starts may import all
            continue
        if parts[0] == "hpcinit" and len(parts) > 1 and parts[1] in PACKAGES:
            assert parts[1] in {relative.parts[0], *package.imports}, f"{relative} imports {name}"
        elif parts[0] != "hpcinit":
            assert parts[0] in {*sys.stdlib_module_names, *package.others}, f"{relative} imports {name}"


def test_no_two_modules_have_the_same_name() -> None:
    """A module's file name is its own, so that a search for it finds one file."""
    names = [path.name for path in PACKAGE.rglob("*.py") if path.name not in ("__init__.py", "__main__.py")]
    names.remove("nodelist.py")  # hpcinit/nodelist.py, the public names of slurm/nodelist.py
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_only_one_module_starts_slurms_commands() -> None:
    """No other module of the packages that call Slurm starts one of its commands."""
    commands = re.compile(r"[\[(]\"(squeue|sacct|scontrol|sinfo|scancel|sbatch|sacctmgr)\",")
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        if path != PACKAGE / "slurm/slurm_client.py" and commands.search(text):
            assert "import subprocess" not in text, f"{path} starts Slurm's commands without slurm/slurm_client.py"


def test_nothing_in_python_names_a_site() -> None:
    """All site knowledge is YAML: no file of the package mentions a cluster by name."""
    for path in PACKAGE.rglob("*.py"):
        words = {word.strip("'\"`.,:;()=").lower() for word in path.read_text().split()}
        assert not words & {f"cluster={site}" for site in SITES[:-1]} and not words & set(SITES[:-1]), path
