"""Imports follow the package table, and the login node imports neither torch nor DeepSpeed."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hpcinit
from tests.packages import IN_FUNCTIONS, PACKAGES, PAGE, page

PACKAGE = Path(hpcinit.__file__).parent
HEAVY = ("torch", "deepspeed")
ONLY_IN = {
    "submitit": {"submit/executor.py", "submit/function_executor.py", "jobs/function.py"},
    "cloudpickle": {"jobs/hydra_task.py"},
    "hydra": {
        "config/hydra_compose.py",
        "config/hydra_setup.py",
        "config/combinations.py",
        "config/search_space.py",
        "config/typed_text.py",
        "jobs/hydra_task.py",
    },
    "omegaconf": {
        "config/hydra_compose.py",
        "config/hydra_setup.py",
        "config/combinations.py",
        "config/search_space.py",
        "config/typed_text.py",
    },
}
SITES = (
    *("juwels", "jupiter", "jean", "leonardo", "lumi", "marenostrum", "perlmutter", "frontier", "delta", "alps"),
    *(path.stem for path in (PACKAGE.parent / "conf/cluster").glob("*_*.yaml")),  # lumi_g
    *("clariden", "mini"),
)


def imports(path: Path, types: bool = False) -> set[str]:
    """Return the full names that a file imports anywhere, also in functions; under TYPE_CHECKING only with `types`."""
    found = set()
    tree = ast.parse(path.read_text())
    for node in [] if types else ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def modules_after(statement: str) -> set[str]:
    """Return sys.modules of a new interpreter that ran `statement`."""
    code = f"{statement}\nimport sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    "statement",
    [
        "import hpcinit",
        "import hpcinit.cli.main, hpcinit.submit, hpcinit.world, hpcinit.run, hpcinit.nodelist",
        "from hpcinit.slurm import exactly_once, reasons, sbatch_errors, tokens",
        "from hpcinit.submit import submit_command, script, executor",
        "from hpcinit.submit import follow; from hpcinit.observe import status, logs, cancel",
        "from hpcinit.why import why_command; from hpcinit.report import report_command",
        "from hpcinit.discover import discover_command",
        "from hpcinit.submit import timeouts_command",
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


def test_status_imports_neither_the_spec_nor_hang_reports() -> None:
    """`hpcinit status` imports these only for runs that need them: they take a fifth of its start."""
    rare = {"hpcinit.records.spec", "hpcinit.records.hang_report", "rich", "psutil"}
    assert not modules_after("from hpcinit.observe import status") & rare


def test_the_check_for_torch_can_fail() -> None:
    """The check above finds torch where it is imported: at the first use of hpcinit.init."""
    assert "torch" in modules_after("import hpcinit; hpcinit.init")


def test_import_hpcinit_is_the_standard_library_only() -> None:
    """`import hpcinit` imports no third-party package."""
    new = modules_after("import hpcinit") - modules_after("pass")
    roots = {name.partition(".")[0] for name in new}
    assert roots - set(sys.stdlib_module_names) == {"hpcinit"}


def test_every_package_is_in_the_table() -> None:
    """The table of packages has exactly the folders of hpcinit."""
    assert set(PACKAGES) == {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}


def test_the_table_has_no_cycle() -> None:
    """A package imports only packages above it in the table."""
    known: set[str] = set()
    for name, package in PACKAGES.items():
        assert set(package.imports) <= known | {name}, name
        known.add(name)


def test_no_two_modules_need_each_other() -> None:
    """There is no import cycle, not even through imports in functions or for type annotations."""
    names = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
    modules = {name.removesuffix(".__init__"): path for name, path in names.items()}
    graphlib.TopologicalSorter(
        {
            module: {name if name in modules else name.rpartition(".")[0] for name in imports(path, types=True)}
            for module, path in modules.items()
        }
    ).prepare()  # raises CycleError with the modules


def test_the_architecture_page_has_the_table() -> None:
    """docs/development/architecture.md contains the current table: python -m tests.packages writes it."""
    assert PAGE.read_text() == page(PAGE.read_text())


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_follow_the_table(path: Path) -> None:
    """A module imports only what the table allows, and each third-party package only in the listed files."""
    relative = path.relative_to(PACKAGE)
    package = PACKAGES.get(relative.parts[0])
    for name in imports(path):
        parts = name.split(".")
        if parts[0] in ONLY_IN:
            assert str(relative) in ONLY_IN[parts[0]], f"{relative} imports {name}"
        if package is None or path.name == "__main__.py":  # modules that a shell starts may import everything
            continue
        if parts[0] == "hpcinit" and len(parts) > 1 and parts[1] in PACKAGES:
            allowed = {relative.parts[0], *package.imports, *IN_FUNCTIONS.get(str(relative), ())}
            assert parts[1] in allowed, f"{relative} imports {name}"
        elif parts[0] != "hpcinit":
            assert parts[0] in {*sys.stdlib_module_names, *package.others}, f"{relative} imports {name}"


def test_the_training_layer_is_imported_when_it_is_used() -> None:
    """Importing hpcinit.init imports nothing of hpcinit.train."""
    assert not {name for name in modules_after("import hpcinit; hpcinit.init") if name.startswith("hpcinit.train")}


def test_no_two_modules_have_the_same_name() -> None:
    """File names of modules are unique, so that a search finds one file."""
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


ENGINES = {"slurm", "local", "engine", "SLURM", "LOCAL", "ENV_ENGINE", "HPCINIT_ENGINE"}


def _names(side: ast.expr) -> set[str]:
    """Return the names and texts that a side of a comparison consists of: those of x.engine, x["engine"], ("slurm",)."""
    if isinstance(side, ast.Call):  # x.get("engine")
        return set().union(*map(_names, side.args))
    if isinstance(side, (ast.Tuple, ast.Set, ast.List)):
        return set().union(*map(_names, side.elts))
    last = side.slice if isinstance(side, ast.Subscript) else side
    return {str(getattr(last, field)) for field in ("attr", "id", "value") if hasattr(last, field)}


def compared_engines(text: str) -> list[int]:
    """Return the lines of Python code that compare an engine, its name, or the variable of its jobs."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if isinstance(node.ops[0], ast.In):  # "slurm" in text, or x in SLURM, compares no engine
                texts = isinstance(node.left, ast.Constant) and node.left.value in ("slurm", "local")
                sides = [side for side in sides[texts:] if side is node.left or hasattr(side, "elts")]
            names = set().union(*map(_names, sides))
            # 'slurm' is also the name of a launcher: who started this rank.
            if names & ENGINES and not names & {"None", "launcher"} and not names >= {"engine", "job_id"}:
                found.append(node.lineno)
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_the_package_engine_distinguishes_engines(path: Path) -> None:
    """Outside of hpcinit/engine nothing depends on an engine's name, so another scheduler is one more module there."""
    if path.parent.name != "engine":
        assert not compared_engines(path.read_text()), f"{path}: use a fact or a method of hpcinit.engine.Engine"


@pytest.mark.parametrize(
    "code",
    [
        'config.cluster.engine == "local"',
        'record["engine"] != "slurm"',
        'record.get("engine") in ("slurm", "pbs")',
        "now.engine is LOCAL",
        "run_folder.ENV_ENGINE in env",
        'kind == "slurm"',
    ],
)
def test_the_check_for_compared_engines_can_fail(code: str) -> None:
    """The check above finds every way in which engines were compared."""
    assert compared_engines(code) and not compared_engines('world.launcher == "slurm"')


def test_nothing_in_python_names_a_site() -> None:
    """Everything about sites is in YAML: no Python file contains the name of a cluster."""
    for path in PACKAGE.rglob("*.py"):
        words = {word.strip("'\"`.,:;()=").lower() for word in path.read_text().split()}
        assert not words & {f"cluster={site}" for site in SITES[:-1]} and not words & set(SITES[:-1]), path
