"""Who may import whom, and what must stay out of a login node."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hpcinit

PACKAGE = Path(hpcinit.__file__).parent
HEAVY = ("torch", "deepspeed")
# Room -> the rooms it may import from. Top-level modules (cli, submit, run, world) may import all.
MAY_IMPORT = {
    "facts": {"facts", "slurm"},  # of slurm/ the nodelist alone
    "slurm": {"facts", "slurm"},  # of facts/ the modules of SLURM_MAY_IMPORT alone
    "config": {"facts", "config"},
    "local": {"facts", "local"},
    "submission": {"facts", "slurm", "config", "local", "submission", "observe"},
    "observe": {"facts", "slurm", "local", "observe"},
    "discover": {"facts", "slurm", "config", "discover"},
    "doctor": {"facts", "slurm", "config", "submission", "observe", "doctor"},
    "timeouts": {"facts", "config", "discover", "observe", "timeouts"},
    "runtime": {"facts", "slurm", "runtime"},
    "jobs": {"facts", "jobs"},  # else the public interface only, as users write it
}
SLURM_MAY_IMPORT = {"errors", "telling"}
ONLY_IN = {
    "submitit": {"submission/slurm_executor.py"},
    "hydra": {"config/compose.py", "config/combinations.py", "config/variations.py", "config/search.py"},
    "omegaconf": {"config/compose.py", "config/variations.py", "config/search.py", "config/schema.py"},
}
SITES = (
    *("juwels", "jupiter", "jean", "leonardo", "lumi", "marenostrum", "perlmutter", "frontier", "delta", "alps"),
    *(path.stem for path in (PACKAGE.parent / "conf/cluster").glob("*_*.yaml")),  # lumi_g
    *("clariden", "mini"),
)


def imports(path: Path) -> set[str]:
    """Full names of the modules that a file imports anywhere, functions included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
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
        "import hpcinit.cli, hpcinit.submit, hpcinit.world, hpcinit.run, hpcinit.nodelist",
        "from hpcinit.slurm import exactly_once, reasons, sbatch_errors, tokens",
        "from hpcinit.submission import command, script, slurm_executor",
        "from hpcinit.observe import follow, status, logs, cancel, why; import hpcinit.observe.report.command",
        "from hpcinit.discover import command",
        "from hpcinit.timeouts import command, fit",
        "from hpcinit.doctor import command",
    ],
)
def test_login_node_never_imports_torch(statement: str) -> None:
    """Neither `import hpcinit` nor anything on the login node's path imports torch or DeepSpeed."""
    assert not modules_after(statement) & set(HEAVY)


def test_a_whole_submission_never_imports_torch(tmp_path: Path) -> None:
    """Composing, checking and rendering a request imports neither torch nor DeepSpeed."""
    code = f"import os; os.chdir({str(tmp_path)!r}); from hpcinit.cli import main; main(['submit', 'cluster=mini', 'dry_run=true'])"
    assert not modules_after(code) & set(HEAVY)


def test_the_check_for_torch_can_fail() -> None:
    """The check above sees torch where it is imported: the first use of hpcinit.init brings it in."""
    assert "torch" in modules_after("import hpcinit; hpcinit.init")


def test_import_hpcinit_is_the_standard_library_only() -> None:
    """`import hpcinit` brings in no third-party package at all."""
    new = modules_after("import hpcinit") - modules_after("pass")
    roots = {name.partition(".")[0] for name in new}
    assert roots - set(sys.stdlib_module_names) == {"hpcinit"}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_downhill(path: Path) -> None:
    """A room imports only from the rooms below it, and one file alone knows each dependency we do not own."""
    relative = path.relative_to(PACKAGE)
    room = relative.parts[0] if len(relative.parts) > 1 else ""
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "hpcinit" and room in MAY_IMPORT and len(parts) > 1 and parts[1] in MAY_IMPORT:
            assert parts[1] in MAY_IMPORT[room], f"{relative} imports {name}"
        if parts[0] in ONLY_IN:
            assert str(relative) in ONLY_IN[parts[0]], f"{relative} imports {name}"


def test_slurm_needs_base_modules_only() -> None:
    """slurm/ imports the standard library and base modules; facts/ imports only the nodelist of slurm/."""
    for path in (PACKAGE / "slurm").rglob("*.py"):
        names = [name.split(".") for name in imports(path)]
        assert {name[0] for name in names} <= set(sys.stdlib_module_names) | {"hpcinit", "__future__"}, path
        assert {name[2] for name in names if name[:2] == ["hpcinit", "facts"]} <= SLURM_MAY_IMPORT, path
    for path in (PACKAGE / "facts").rglob("*.py"):
        names = [name.split(".") for name in imports(path)]
        assert {name[2] for name in names if name[:2] == ["hpcinit", "slurm"]} <= {"nodelist"}, path


def test_only_one_module_starts_slurms_commands() -> None:
    """No other module of the packages that call Slurm starts one of its commands."""
    commands = re.compile(r"[\[(]\"(squeue|sacct|scontrol|sinfo|scancel|sbatch|sacctmgr)\",")
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        if path != PACKAGE / "slurm/client.py" and commands.search(text):
            assert "import subprocess" not in text, f"{path} starts Slurm's commands without slurm/client.py"


def test_facts_need_the_standard_library_only() -> None:
    """Everything in facts/ imports the standard library and facts/ alone."""
    for path in (PACKAGE / "facts").rglob("*.py"):
        roots = {name.partition(".")[0] for name in imports(path)}
        assert roots <= set(sys.stdlib_module_names) | {"hpcinit", "__future__"}, path


def test_nothing_in_python_names_a_site() -> None:
    """All site knowledge is YAML: no file of the package mentions a cluster by name."""
    for path in PACKAGE.rglob("*.py"):
        words = {word.strip("'\"`.,:;()=").lower() for word in path.read_text().split()}
        assert not words & {f"cluster={site}" for site in SITES[:-1]} and not words & set(SITES[:-1]), path
