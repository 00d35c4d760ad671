"""`python -m hpcinit.run`: the user's program as Python itself would run it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Run


def test_script_sees_what_python_would_show(hpcinit: Run, tmp_path: Path) -> None:
    """argv, __name__, __file__, sys.path[0] and classes in __main__ are as under `python script.py`."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/neighbour.py").write_text("value = 3\n")
    (tmp_path / "sub/code.py").write_text(
        "import multiprocessing, sys, pickle, neighbour\n"
        "class Thing: pass\n"
        "def work(x): return x + neighbour.value\n"
        "if __name__ == '__main__':\n"
        "    pickle.loads(pickle.dumps(Thing()))\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(sys.argv, __file__, pool.map(work, [1]))\n"
    )
    done = hpcinit("run", "sub/code.py", "--a", "b c")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "['sub/code.py', '--a', 'b c'] sub/code.py [4]\n"


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
def test_exit_status_and_message_are_the_programs(
    hpcinit: Run, tmp_path: Path, code: str, status: int, said: str
) -> None:
    """However a script ends, the status and the last line are what Python itself gives, without our frames."""
    (tmp_path / "code.py").write_text(code + "\n")
    done = hpcinit("run", "code.py")
    assert done.returncode == status and done.stderr.endswith(said)
    assert "hpcinit" not in done.stderr and "runpy" not in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nope.py"], "cannot read"),
        (["no-such-program"], "cannot run 'no-such-program': No such file or directory; looked for it on PATH"),
        (["-m"], "-m names no module"),
        (["-m", "no_such.module"], "no module 'no_such.module' on this node: looked in "),
        (["nope.json"], "cannot read nope.json: No such file or directory; is the run folder on a file system"),
        (["bad.json"], "is not of format 1"),
        (["text.json"], "is not JSON"),
    ],
)
def test_what_cannot_be_run_is_named(hpcinit: Run, tmp_path: Path, words: list[str], said: str) -> None:
    """A program or spec that is not there, or not one, is a message and exit status 2."""
    (tmp_path / "bad.json").write_text("{}")
    (tmp_path / "text.json").write_text("hello")
    done = hpcinit("run", *words)
    assert done.returncode == 2 and said.replace("nope.json", str(tmp_path / "nope.json")) in done.stderr
    assert "Traceback" not in done.stderr
