"""All tests are distributed, and those of one file stay together."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

from tests import workers
from tests.skip_or_fail import skip_or_fail

ROOT = Path(__file__).parent.parent


def test_every_name_is_that_of_a_file() -> None:
    """The lists name existing files."""
    assert [name for name in (*workers.DEAR, *workers.APART) if not (ROOT / name).is_file()] == []


def test_the_number_of_workers_follows_from_cores_and_memory() -> None:
    """Two cores and 24 GB have six workers, 8 GB three, and a small machine one."""
    sizes = [(2, 24.0), (2, 8.0), (8, 8.0), (1, 1.0)]
    assert [workers.number_of_workers(*size) for size in sizes] == [6, 3, 3, 1]
    assert 0 < workers.available_gb() < 10**5


def test_what_goes_one_by_one_shares_no_fixture_of_its_module() -> None:
    """Files whose tests run on several workers have no module fixtures, which each worker would make again."""
    shares = re.compile(r'scope="(module|package|class)"')
    assert [name for name in workers.APART if shares.search((ROOT / name).read_text())] == []


def test_a_file_stays_on_one_worker_and_the_dear_ones_come_first(tmp_path: Path) -> None:
    """Two workers run two files: each file stays on one worker, in order, and the expensive one starts first."""
    if not importlib.util.find_spec("xdist"):
        skip_or_fail("pytest-xdist is not installed: pip install '.[test]'")
    (tmp_path / "tests").mkdir()
    dear = workers.DEAR[0]
    for file in ("tests/test_a.py", "tests/test_b.py", dear):
        lines = [
            f"def test_{n}(): open('ran', 'a').write(f'{{os.environ[\"PYTEST_XDIST_WORKER\"]}} {file} {n}\\n')"
            for n in range(4)
        ]
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("\n".join(["import os", *lines]))
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "xdist", "-p", "tests.workers", "-n", "2", "tests"],
        cwd=tmp_path, env={**env, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "12 passed" in done.stdout, done.stdout + done.stderr
    ran: dict[str, list[tuple[str, int]]] = {}
    for line in (tmp_path / "ran").read_text().splitlines():
        worker, file, number = line.split()
        ran.setdefault(file, []).append((worker, int(number)))
    for tests in ran.values():
        assert [number for _, number in tests] == [0, 1, 2, 3] and len({worker for worker, _ in tests}) == 1
    assert set(ran) == {"tests/test_a.py", "tests/test_b.py", dear}
    first: dict[str, str] = {}
    for file, tests in ran.items():
        first.setdefault(tests[0][0], file)
    assert dear in first.values(), ran  # its worker ran no other file before
