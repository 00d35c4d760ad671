"""`hpcinit report`: how long each phase of a start took, who was slow, and the page."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from hpcinit.base.errors import Failure, RequestError
from hpcinit.report import page, report_command, startup_phases
from hpcinit.report.startup_phases import seconds
from tests.conftest import Run
from tests.leaving_out import leave_out
from tests.minislurm import MiniSlurm
from tests.minislurm.packages import BROWSERS
from tests.minislurm.plugin import HINT
from tests.observe import synthetic
from tests.submitting import folder_of, submit

# In every Python of the job, before anything else: the second node's clock is 40 s ahead.
SKEW = """
import os, time
if os.environ.get("SLURM_NODEID") == "1":
    right = time.time
    time.time = lambda: right() + 40
"""
NEVER = """
import os, time
if os.environ.get("SLURM_PROCID") == "2":
    time.sleep(600)
"""
TRAIN = """
import os, time
began = time.monotonic()
import torch, hpcinit
if os.environ["RANK"] == "3":  # as long again, and more: however busy this machine is, it is the slow one
    time.sleep(3 + time.monotonic() - began)
hpcinit.init()
"""
WORDS = ["nodes=2", "ranks_per_node=2", "cluster.gpus_per_node=0", "cluster.cpus_per_node=null", "wait=true"]


def test_a_slow_node_is_named(tmp_path: Path) -> None:
    """64 ranks: the node whose imports took three times as long is named, and the last of its ranks as awaited."""
    (report,) = report_command.gather_reports(synthetic.run(tmp_path / "run", 8, 8, slow="n0002"))
    rows = {line.split("  ")[1]: line for line in list(page.report_lines(report))[2:-3]}
    assert "n0002 (ranks 8-15) " in rows["imports"]
    assert re.search(r"for rank (8|9|1[0-5]) on n0002, 1\d\.\d s after half of them", rows["waits for all ranks *"])
    assert "328 s; the longest wait under it was 1" in page.timeout(report)
    document = page.document(report)
    (imports,) = [phase for phase in document["phases"] if phase["ends"] == "imported"]
    assert imports["slowest"][0]["ranks"] == list(range(8, 16)) and imports["slowest"][0]["whole_node"]


def test_a_rank_that_never_came_and_a_restart(tmp_path: Path) -> None:
    """Both attempts are told apart; of the first, who never came and how far the others were."""
    run = synthetic.run(tmp_path / "run", 4, 2, absent=5)
    synthetic.run(run, 4, 2, restart=1)
    again = {"job": "43", "restart": 1, "time": synthetic.BEGUN + 390, "reason": "failure"}
    (run / "restarts.jsonl").write_text(json.dumps(again) + "\n")
    first, second = (list(page.report_lines(report)) for report in report_command.gather_reports(run))
    assert "not all are up" in first[0] and "rank 5 never came: no line of theirs" in first
    assert any(line.startswith("ranks 0-4,6-7 on n0001, n0002, n0003, n0004 came as far as 'device'") for line in first)
    assert "job 43.0.1: 8 ranks on 4 nodes (slurm)" in second[0]
    assert any(line.startswith("  queue") and " 10.0 s" in line for line in second)  # since the restart, not before


def test_a_program_without_init(tmp_path: Path) -> None:
    """A script that makes its process group itself ends its timeline where it begins: no rank is said to be missing."""
    (report,) = report_command.gather_reports(synthetic.run(tmp_path / "run", 2, 2))
    began = ("submitted", "started", "interpreter", "met")
    ranks = [
        replace(rank, events={name: rank.events[name] for name in began if name in rank.events})
        for rank in report.attempt.ranks
    ]
    without = startup_phases.startup_phases(replace(report.attempt, ranks=tuple(ranks)))
    assert page.headline(without).endswith(", the program has not called hpcinit.init()")
    assert startup_phases.missing_ranks(without)[-1].startswith(
        "a program that calls init_process_group itself, and not hpcinit.init()"
    )
    one_late = replace(report.attempt, ranks=(*ranks[:3], report.attempt.ranks[3]))
    assert page.headline(startup_phases.startup_phases(one_late)).endswith(", not all are up")


@pytest.mark.parametrize(("late_s", "queue"), [(-0.1, [0.1]), (0.4, [0.0]), (1.1, [])])
def test_a_job_that_begins_at_once(tmp_path: Path, late_s: float, queue: list[float]) -> None:
    """Slurm's own whole second of the start does not lie before the submission in it; a record written later says
    nothing of the queue."""
    run = synthetic.run(tmp_path / "run", 1, 2)
    record = json.loads((run / "submission.json").read_text()) | {"submitted": synthetic.BEGUN + late_s}
    (run / "submission.json").write_text(json.dumps(record))
    (report,) = report_command.gather_reports(run)
    assert [round(phase.most, 6) for phase in report.phases if phase.ends == "allocated"] == queue


def test_a_node_nobody_came_from(tmp_path: Path) -> None:
    """With one rank per node, the silent node itself is named."""
    (report,) = report_command.gather_reports(synthetic.run(tmp_path / "run", 4, 1, absent=2))
    assert "rank 2 never came: no line of theirs; nobody came from n0003" in list(page.report_lines(report))


def test_a_run_that_has_not_started(tmp_path: Path) -> None:
    """The message says what was looked for, and what it may mean."""
    (tmp_path / "submission.json").write_text('{"job_id": "43", "engine": "slurm"}')
    with pytest.raises(RequestError, match=r"has no timeline/ with a rank's line in it: job 43 has not started yet"):
        report_command.gather_reports(tmp_path)


def test_a_sweep_is_refused(hpcinit: Run, tmp_path: Path) -> None:
    """A sweep has many starts: one task is to be named."""
    hpcinit("submit", "-m", "name=x", "seed=1,2", "dry_run=true")
    folder = tmp_path / "runs/x-0001"
    (folder / "0").mkdir(parents=True)
    (folder / "sweep.json").write_text('{"tasks": {"0": "seed=1", "1": "seed=2"}}')
    (folder / "submission.json").write_text('{"job_id": "43", "engine": "slurm", "sweep": []}')
    with pytest.raises(RequestError, match=r"is a sweep of the tasks .*, expected one: hpcinit report"):
        report_command.main([str(folder)])


def test_a_page_that_cannot_be_written(tmp_path: Path) -> None:
    """Asked for by name, that is an error with what to do."""
    run = synthetic.run(tmp_path / "run", 2, 1)
    with pytest.raises(Failure, match=r"cannot be written: No such file .*choose another place with --html FILE"):
        report_command.main([str(run), "--html", str(tmp_path / "none/report.html")])


@pytest.mark.parametrize(
    ("value", "said"), [(0.0004, "0.4 ms"), (0.012, "12 ms"), (0.5, "0.50 s"), (3.21, "3.2 s"), (512.3, "512 s")]
)
def test_seconds(value: float, said: str) -> None:
    """As exact as it is of use."""
    assert seconds(value) == said


class Parser(HTMLParser):
    """Checks that elements are closed in their order, and keeps what the page would load."""

    VOID = frozenset({"meta", "link", "br", "img", "input", "line", "rect"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    """Well-formed, nothing loaded from anywhere, no path of the machine, hostile names harmless."""
    run = synthetic.run(tmp_path / "a<b>&'c", 8, 8, slow="n0002")
    html = page.render_html(run, report_command.gather_reports(run), run / "report.html")
    parser = Parser()
    parser.feed(html)
    assert parser.open == [] and set(parser.loads) == {"data:,"}
    assert not re.search(r"https?:|url\(|@import|import\s*\(|fetch\(", html)
    assert str(tmp_path) not in html and "a&lt;b&gt;&amp;&#x27;c" in html
    data = json.loads(html.partition('id="data">')[2].partition("</script>")[0])
    assert data["logs"] == "logs" and len(data["attempts"][0]["ranks"]) == 64
    elsewhere = page.render_html(run, report_command.gather_reports(run), tmp_path / "pages/report.html")
    assert '"logs":"../a%3Cb%3E%26%27c/logs"' in elsewhere


@pytest.mark.parametrize(("nodes", "per_node", "pressed"), [(8, 8, "ranks"), (512, 8, "nodes")])
def test_the_page_in_a_browser(tmp_path: Path, nodes: int, per_node: int, pressed: str) -> None:
    """It draws without an error in Chromium: a lane per rank up to 64, a lane per node beyond."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None) or leave_out(f"no {BROWSERS[0]}: {HINT}")
    run = synthetic.run(tmp_path / "run", nodes, per_node, slow="n0002")
    (run / "report.html").write_text(page.render_html(run, report_command.gather_reports(run), run / "report.html"))
    words = ["--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=3000"]
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    done = subprocess.run(
        [browser, *words, profile, "--dump-dom", f"file://{run / 'report.html'}"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert "CONSOLE" not in done.stderr, done.stderr
    assert f'aria-pressed="true">a lane per {pressed.removesuffix("s")}</button>' in done.stdout
    assert re.search(
        rf'<canvas [^>]*aria-label="{64 if pressed == "ranks" else 512} {pressed}, a lane each', done.stdout
    )


@pytest.mark.slurm
def test_a_real_start_with_a_slow_rank_and_a_wrong_clock(hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path) -> None:
    """Two nodes, two ranks each: the rank that sleeps is named, the clock that is 40 s ahead is found and corrected
    (all nodes here share one clock, so Python's is set ahead on one), and the page lies in the run folder."""
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "skew").mkdir()
    (tmp_path / "skew/sitecustomize.py").write_text(SKEW)
    done = submit(hpcinit, idle_slurm, *WORDS, f"+job.env.PYTHONPATH={tmp_path}/skew", "--", "train.py", timeout=280)
    said = hpcinit("report", folder_of(done).name).stdout
    rows = {line.split("  ")[1]: line for line in said.splitlines() if line.startswith("  ")}
    assert re.search(r"rank 3 on \S+ \d+(\.\d)? s$", rows["imports"]), said
    assert "for rank 3 on " in rows["waits for all ranks *"]
    assert {"queue", "Slurm starts the task", "Python starts", "first collective *", "rest of init"} <= rows.keys()
    assert re.search(r"clocks of 1 node differ .*: by \+(39\.[89]|40\.)\d* s to within", said), said
    assert re.search(r"= 307 s; the longest wait under it was \d", said)
    document = json.loads(hpcinit("report", "--json", folder_of(done).name).stdout)["attempts"][0]
    assert document["complete"] and all(phase["min_s"] > -1 for phase in document["phases"][1:])
    assert all(phase["spread_s"] < 39 for phase in document["phases"] if phase["ends"] == "collective")
    assert (folder_of(done) / "report.html").read_text().count("<canvas") == 0  # which the script makes


@pytest.mark.slurm
def test_a_real_rank_that_never_comes(hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path) -> None:
    """It is named, and how far the others came, though all of them were ended by the time-out."""
    (tmp_path / "train.py").write_text("import hpcinit; hpcinit.init()")
    (tmp_path / "never").mkdir()
    (tmp_path / "never/sitecustomize.py").write_text(NEVER)
    words = [f"+job.env.PYTHONPATH={tmp_path}/never", "comm.timeout_base_s=20", "comm.timeout_per_node_s=0"]
    done = submit(hpcinit, idle_slurm, *WORDS, *words, "--", "train.py", timeout=280)
    said = hpcinit("report", folder_of(done).name).stdout
    assert "rank 2 never came: no line of theirs" in said and "not all are up" in said, said
    assert re.search(r"ranks? [013].* came as far as '(device|imported|met)'", said), said
    assert "= 20 s" in said
