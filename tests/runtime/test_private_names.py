"""The private names of torch and DeepSpeed that hpcinit uses: all are in one table, and the installed versions have them."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

import hpcinit
from hpcinit.base import versions
from hpcinit.base.versions import TESTED
from hpcinit.runtime.private_names import NAMES, PrivateName
from tests.skip_or_fail import skip_or_fail

PACKAGE = Path(hpcinit.__file__).parent
FOREIGN = ("torch", "deepspeed")
STANDARD = {"__all__", "__cause__", "__class__", "__code__", "__context__", "_current_frames", "__dict__", "__doc__", "__file__", "__get__", "_getframe", "__init__",
            "__iter__", "__main__", "__module__", "__name__", "__self__", "__traceback__", "__version__"}  # fmt: skip
# Private names in these files that are not torch's or DeepSpeed's: of Python's os, threading, atexit and
# multiprocessing, hpcinit's Runtime, the standard library's _sysconfig*.py files, accelerate.
OTHERS = {"_shared_state", "_exit", "_run_exitfuncs", "_shutdown", "_session", "_sysconfig", "_P",
          "_popen", "_run_server", "_start_method", "_target", "_hpcinit_unblock"}  # fmt: skip


def private(name: str) -> bool:
    return len(name) > 1 and name.startswith("_") and name not in STANDARD


def used(source: str) -> set[str]:
    """Return the private names that `source` uses and does not define: '_world.pg_map', '_flatten', 'torch._C.Store'."""
    tree = ast.parse(source)
    return {name for name in _uses(tree) if name not in OTHERS | _of_its_own(tree)} | set(_imported(tree))


def _imported(tree: ast.Module) -> Iterator[str]:
    """Yield names below a private module, such as 'torch.utils._pytree.tree_map_only'."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FOREIGN:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.split(".")[0] in FOREIGN]
        elif isinstance(node, ast.Constant) and re.fullmatch(r"(torch|deepspeed)(\.\w+)+", str(node.value)):
            names = [str(node.value)]
        else:
            continue
        # An imported module is skipped here, because the names that the file uses from it are found separately.
        modules = {owner.owner for owner in NAMES}
        yield from (name for name in names if any(map(private, name.split("."))) and name not in modules)


def _uses(tree: ast.Module) -> Iterator[str]:
    inner = {id(node.value) for node in ast.walk(tree) if _of_world(node)}
    inner |= {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if id(node) in inner:
            continue
        if _of_world(node):
            yield f"{node.value.attr}.{node.attr}"
        elif isinstance(node, ast.Attribute) and private(node.attr) and not _of_self(node):
            yield node.attr
        elif isinstance(node, ast.Constant) and str(node.value).isidentifier() and private(str(node.value)):
            yield str(node.value)  # getattr(backend, "_set_default_timeout"), and tables of such names


def _of_world(node: ast.AST) -> Any:
    """Return whether the node is an attribute of a module's private `_world`, such as c10d._world.pg_map."""
    outer = node.value if isinstance(node, ast.Attribute) else None
    return isinstance(outer, ast.Attribute) and outer.attr == "_world" and not _of_self(outer)


def _of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}


def _of_its_own(tree: ast.Module) -> set[str]:
    """Return the functions, classes and variables of the file, without attributes of objects."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    names = {node.name for node in ast.walk(tree) if isinstance(node, kinds)}
    return names | {
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


def files() -> list[Path]:
    """Return every file of hpcinit that uses torch or DeepSpeed."""
    found = [
        path
        for path in PACKAGE.rglob("*.py")
        if path.name != "private_names.py"
        and re.search(r"^\s*(import|from) (torch|deepspeed)\b", path.read_text(), re.M)
    ]
    of_the_job = (
        path
        for folder in ("runtime", "rendezvous", "launch", "jobs")
        for path in (PACKAGE / folder).rglob("*.py")
        if path.name != "private_names.py"
    )
    return sorted({*found, *of_the_job})


def spelled(name: PrivateName) -> str:
    """Return the name in the form in which used() returns it."""
    return name.name if private(name.name.split(".")[0]) and not name.is_module else f"{name.owner}.{name.name}"


def find(name: PrivateName) -> bool:
    """Return whether the installed version has it. Raise ImportError if its module is missing."""
    module, _, path = name.owner.partition(":")
    found: Any = importlib.import_module(module)
    for part in filter(None, path.split(".")):
        found = getattr(found, part)
    if name.on_instances:
        return re.search(rf"self\.{name.name}\b[^=\n]*=", inspect.getsource(found)) is not None
    if name.is_module:
        return importlib.import_module(f"{module}.{name.name}") is not None
    for part in name.name.split("."):
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True


def missing(package: str) -> list[str]:
    """Return the names of the table that the installed version should have and lacks."""
    version = versions.installed(package)
    gone = []
    for name in NAMES:
        if name.package == package and name.expected(version):
            try:
                there = find(name)
            except (ImportError, AttributeError):
                there = False
            if not there:
                gone.append(f"{name.owner}: {name.name}")
    return gone


def test_torch_has_them() -> None:
    """The installed torch has every private name of the table."""
    assert missing("torch") == []


@pytest.mark.deepspeed
def test_deepspeed_has_them() -> None:
    """The installed DeepSpeed has every private name of the table."""
    if not versions.installed("deepspeed"):
        skip_or_fail("DeepSpeed is not installed: pip install 'hpcinit[deepspeed]'")
    assert missing("deepspeed") == []


def test_every_private_name_is_in_the_table() -> None:
    """Every private name of torch and DeepSpeed in hpcinit's files is in the table, and the table has no other."""
    found = set().union(*(used(path.read_text()) for path in files()))
    agent = {name.name for name in NAMES if name.owner.endswith(":SimpleElasticAgent")}  # the test below checks these
    assert found == {spelled(name) for name in NAMES} - agent


def test_what_the_elastic_agent_overrides_is_in_the_table() -> None:
    """Private methods and attributes that our subclass of torch's agent shares with torch's class are in the table."""
    from torch.distributed.elastic.agent.server import api

    from hpcinit.launch.torchrun.agent import Agent

    ours = set(re.findall(r"(?:self\.|def )(_[a-z]\w+)", inspect.getsource(Agent)))
    torchs = {*dir(api.SimpleElasticAgent), *re.findall(r"self\.(_\w+)", inspect.getsource(api))}
    assert {name for name in ours & torchs if private(name)} == {
        name.name for name in NAMES if name.owner.endswith(":SimpleElasticAgent")
    }


def test_the_scan_finds_a_private_name() -> None:
    """Each way in which a file can use a private name is found, and the file's own names are not."""
    source = """
        import torch._dynamo
        from torch.utils import _foreach_utils
        from torch.nn.parallel import DistributedDataParallel
        def _ours(): ...
        def use(group, c10d):
            _ours()
            group._made_up(c10d._world.pg_coalesce)
            getattr(group, "_made_up_too", None)
            group.public(c10d._private)
        """
    assert used(textwrap.dedent(source)) == {
        "torch._dynamo", "torch.utils._foreach_utils", "_made_up", "_world.pg_coalesce", "_made_up_too", "_private",
    }  # fmt: skip


def test_a_missing_name_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name of the table that torch does not have is reported; one that only a newer torch has is not."""
    gone = (
        PrivateName("torch", "torch.distributed.distributed_c10d", "_world.pg_gone", ""),
        PrivateName("torch", "torch.gone", "_name", ""),
        PrivateName("torch", "torch.cuda", "_of_a_later_torch", "", since="99"),
    )
    monkeypatch.setattr(f"{__name__}.NAMES", gone)
    assert missing("torch") == ["torch.distributed.distributed_c10d: _world.pg_gone", "torch.gone: _name"]


LOSE = """
import os, sys
import torch, torch.distributed as dist
from torch.distributed.elastic.agent.server import api
from torch.utils.data._utils import worker
import hpcinit
from hpcinit.base import versions
from hpcinit.runtime import bringup, private_names
from hpcinit.runtime.lifecycle import flight_dump

hpcinit.init  # imported before the forks
versions.TESTED["torch"] = versions.Tested("1.0", "1.1")
names = [name for name in private_names.NAMES if name.package == "torch" and not (name.on_instances or name.is_module)]


def without(name, use):
    # Return the exit status of a fork that loses the name and then calls use().
    pid = os.fork()
    if not pid:
        try:
            module, _, path = name.owner.partition(":")
            owner = sys.modules[module]
            *parts, last = [*filter(None, path.split(".")), *name.name.split(".")]
            for part in parts:
                owner = getattr(owner, part)
            if parts and parts[-1] == "_world":  # an instance whose attributes are properties
                owner = type(owner)
            delattr(owner, last)
            use()
        except BaseException as error:
            print(f"{use.__name__} without {name.name}: {error!r}", file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def torch_alone():
    torch.manual_seed(0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.barrier()
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()


def with_hpcinit():
    run = hpcinit.init()
    assert not run.should_stop()
    flight_dump.collectives()
    dist.all_reduce(torch.ones(1))
    hpcinit.shutdown()


for name in names:
    if name.owner.partition(":")[0] in sys.modules and without(name, torch_alone) == 0:
        print(name.name, without(name, with_hpcinit), flush=True)
"""


def test_without_a_name_the_rest_works_and_a_warning_names_what_does_not(tmp_path: Path) -> None:
    """With a newer torch that lacks a name, init() prints a warning, and a rank starts, computes and ends.

    Only names that this torch does not need itself can be removed from it.
    """
    done = subprocess.run(
        [sys.executable, "-c", LOSE],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    removed = dict(line.split() for line in done.stdout.splitlines() if not line.startswith(("hpcinit:", "[Gloo]")))
    assert set(removed.values()) == {"0"}, done.stdout + done.stderr
    assert len(removed) >= 10 and {"_device_types", "_timeout", "_dump_fr_trace_json"} <= removed.keys()
    for name in NAMES:
        if name.name in removed:
            assert f".{name.name}, so this feature does not work: {name.lost}." in done.stderr, name


def test_the_installed_versions_are_tested_ones() -> None:
    """The installed versions are between the oldest and the newest tested version that hpcinit declares."""
    for package, tested in TESTED.items():
        if found := versions.installed(package):
            release = Version(Version(found).public)
            assert Version(tested.oldest) <= release <= Version(tested.newest), package
