"""`python -m hpcinit.run`: it runs the user's program as Python would."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Run


def test_a_script_runs_as_under_python(hpcinit: Run, tmp_path: Path) -> None:
    """argv, __name__, __file__, sys.path[0] and classes in __main__ are as under `python script.py`."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/neighbor.py").write_text("value = 3\n")
    (tmp_path / "sub/script.py").write_text(
        "import multiprocessing, sys, pickle, neighbor\n"
        "class Thing: pass\n"
        "def work(x): return x + neighbor.value\n"
        "if __name__ == '__main__':\n"
        "    pickle.loads(pickle.dumps(Thing()))\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(sys.argv, __file__, pool.map(work, [1]))\n"
    )
    done = hpcinit("run", "sub/script.py", "--a", "b c")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"['sub/script.py', '--a', 'b c'] {tmp_path}/sub/script.py [4]\n"


def test_main_module_is_as_pythons(hpcinit: Run, tmp_path: Path) -> None:
    """A script, a module with -m and a package with -m have the same name, file, package and loader as under Python."""
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/near.py").write_text("value = 3\n")
    (tmp_path / "pkg/__main__.py").write_text("from .near import value\nimport pkg.show\n")
    show = "print(__name__, __file__, __package__, __spec__ and __spec__.name, __loader__.name)\n"
    (tmp_path / "pkg/show.py").write_text(show)
    (tmp_path / "pkg/tool.py").write_text("from .near import value\n" + show)
    for words in (["pkg/show.py"], ["-m", "pkg.tool"], ["-m", "pkg"]):
        python = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, check=True)
        assert hpcinit("run", *words).stdout == python.stdout != ""


def test_data_loader_workers(hpcinit: Run, tmp_path: Path) -> None:
    """Forked and spawned DataLoader workers, and torch's spawn, find the script's definitions, even after a chdir."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/script.py").write_text("""
import argparse, os, torch
from torch.utils.data import DataLoader, Dataset
class Squares(Dataset):
    def __len__(self): return 4
    def __getitem__(self, index): return index ** 2
def work(index, queue): queue.put(index)
if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--how", nargs="+")
    os.chdir("/")
    for how in parser.parse_args().how:
        print(how, [batch.tolist() for batch in DataLoader(Squares(), 2, num_workers=1, multiprocessing_context=how)])
    queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(work, (queue,), nprocs=1)
    print("spawned", queue.get())
""")
    done = hpcinit("run", "sub/script.py", "--how", "fork", "spawn")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "fork [[0, 1], [4, 9]]\nspawn [[0, 1], [4, 9]]\nspawned 0\n"


# A fake of torch, which interpreter_exit.end checks for; importing the real one would take time.
WITH_TORCH = "import sys\nsys.modules['torch'] = sys\n"


@pytest.mark.parametrize("frozen", [False, True])
def test_nothing_is_lost_at_exit_with_torch(hpcinit: Run, tmp_path: Path, frozen: bool) -> None:
    """With torch loaded, threads, exit handlers and every buffered file are finished before the process exits, also if
    the program called gc.freeze().

    torch is a fake, because only its presence is checked.
    """
    (tmp_path / "neighbor.py").write_text("log = open('module.txt', 'w')\nlog.write('a')\n")
    (tmp_path / "script.py").write_text(
        WITH_TORCH
        + """
import atexit, ctypes, threading, time, neighbor
mine = open("main.txt", "w")
mine.write("b")
class Holder: file = open("class.txt", "w")
Holder.file.write("c")
neighbor.holder = Holder
def late():
    time.sleep(0.2)
    print("thread")
threading.Thread(target=late).start()
atexit.register(print, "handler")
atexit.register(lambda: 1 / 0)
ctypes.CDLL(None).printf(b"from C\\n")
"""
        + "import gc; gc.freeze()\n" * frozen
        + "sys.exit(3)\n"
    )
    done = hpcinit("run", "script.py")
    assert done.returncode == 3 and "ZeroDivisionError" in done.stderr
    assert sorted(done.stdout.splitlines()) == ["from C", "handler", "thread"]
    assert [(tmp_path / f"{name}.txt").read_text() for name in ("module", "main", "class")] == ["a", "b", "c"]


@pytest.mark.parametrize(
    "last",
    ["sys.exit(256 + 7)", "sys.exit(-1)", "sys.exit(2 ** 40)", "os._exit(5)", "print('x'); sys.stdout = open('/dev/full', 'w'); print('y')"],
)  # fmt: skip
def test_exit_status_with_torch(hpcinit: Run, tmp_path: Path, last: str) -> None:
    """The status is Python's, also if it is out of range or if output cannot be written.

    torch is a fake, because only its presence is checked.
    """
    (tmp_path / "script.py").write_text("import os\n" + WITH_TORCH + last + "\n")
    python = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    done = hpcinit("run", "script.py")
    assert (done.returncode, done.stdout) == (python.returncode, python.stdout)


def test_module_and_command(hpcinit: Run, tmp_path: Path) -> None:
    """-m runs a module of the working folder; anything else is a program on PATH that replaces the process."""
    (tmp_path / "mod.py").write_text("import sys; print(__name__, sys.argv[1:])\n")
    assert hpcinit("run", "-m", "mod", "x").stdout == "__main__ ['x']\n"
    assert hpcinit("run", "sh", "-c", "echo $RANK of $WORLD_SIZE at $MASTER_ADDR").stdout == "0 of 1 at 127.0.0.1\n"


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("raise SystemExit(7)", 7, ""),
        ("raise SystemExit('no data')", 1, "no data\n"),
        ("raise SystemExit", 0, ""),
        ("raise KeyboardInterrupt", 130, ""),
        ("1/0", 1, "ZeroDivisionError: division by zero\n"),
        ("x = (", 1, "SyntaxError: '(' was never closed\n"),
    ],
)
def test_exit_status_and_message_are_pythons(hpcinit: Run, tmp_path: Path, code: str, status: int, said: str) -> None:
    """However a script ends, the status and the last line are Python's, without hpcinit's frames."""
    (tmp_path / "script.py").write_text(code + "\n")
    done = hpcinit("run", "script.py")
    assert done.returncode == status and done.stderr.endswith(said)
    assert "hpcinit" not in done.stderr and "runpy" not in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nope.py"], "cannot read"),
        (["no-such-program"], "cannot run 'no-such-program': No such file or directory (searched PATH)"),
        (["-m"], "-m without a module"),
        (["-m", "no_such.module"], "no module 'no_such.module' on this node: searched "),
        (["nope.json"], "cannot read nope.json: No such file or directory. Is the run folder on a file system"),
        (["bad.json"], "does not have format 1"),
        (["text.json"], "is not JSON"),
    ],
)
def test_programs_that_cannot_run_are_named(hpcinit: Run, tmp_path: Path, words: list[str], said: str) -> None:
    """A missing or invalid program or spec gives a message and exit status 2."""
    (tmp_path / "bad.json").write_text("{}")
    (tmp_path / "text.json").write_text("hello")
    done = hpcinit("run", *words)
    assert done.returncode == 2 and said.replace("nope.json", str(tmp_path / "nope.json")) in done.stderr
    assert "Traceback" not in done.stderr
