"""The ledger: rows that add up to the charged time, the largest loss, and the advice about the time between saves."""

from __future__ import annotations

import json
import os
import random
import time
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from hpcinit.base.errors import RequestError
from hpcinit.records import timeline, training_spans
from hpcinit.records.save_interval import best_interval_s
from hpcinit.records.training_spans import SpanRecord
from hpcinit.report import advice, ledger, pictures, read_job, read_run, report_command
from hpcinit.report.ledger import Allocation, Ledger, Segment, Start, exact
from tests.observe import synthetic

START = synthetic.START


def spans(folder: Path, restart: int, steps: list[tuple[str, float, int]], load: int = -1) -> None:
    """Write what rank 0 did in one attempt: (what, seconds, steps at its end), after the start-up."""
    up = json.loads(next((folder / f"timeline/43.0.{restart}").glob("n0001.jsonl")).read_text().splitlines()[0])["up"]
    record = SpanRecord(up)
    at, last = up, 0
    for what, seconds, step in steps:
        record.switch(what, at)
        if what == training_spans.STEPS:
            for number in range(last + 1, step + 1):
                record.step(number, at + seconds * (number - last) / (step - last))
        at += seconds
        if what == training_spans.LOADING:
            record.loaded(load)
        elif what == training_spans.FIRST:
            record.step(step, at)
        last = step if step > 0 else last
    if steps[-1][0] == training_spans.SAVING:
        record.switch(training_spans.STEPS, at)
    path = folder / f"timeline/43.0.{restart}" / training_spans.FILE
    path.write_text(record.to_json())


def two_attempts(folder: Path) -> Path:
    """A run that was killed at step 50 after a save at step 30, and then completed: without Slurm's accounting."""
    run = synthetic.run(folder, 2, 2)
    spans(run, 0, [("first step", 20, 1), ("steps", 29, 30), ("saving", 4, 30), ("steps", 20, 50)])
    synthetic.run(run, 2, 2, restart=1)
    spans(run, 1, [("loading", 5, -1), ("first step", 3, 31), ("steps", 69, 100), ("saving", 4, -1)], load=30)
    restart = {"job": "43", "restart": 1, "time": START + 120, "reason": "failure", "step": 50}
    (run / "restarts.jsonl").write_text(json.dumps(restart) + "\n")
    end = {"job": "43", "restart": 1, "ended": START + 540, "exit_status": 0}
    (run / "exit.json").write_text(json.dumps(end))
    return run


def test_the_rows_add_up(tmp_path: Path) -> None:
    """Steps after the last save are repeated, all rows add up to the charged time, and the bar names the rows."""
    found = Ledger("train-0001", tuple(read_run.read(two_attempts(tmp_path / "run"), {})))
    assert [one.charged_s for one in found.allocations] == [120.0, 140.0]
    rows = {row: amount.at / 2 for row, amount in found.rows.items()}  # of 2 nodes
    assert abs(sum(rows.values()) - 260.0) < 1e-6 and abs(rows[ledger.UNKNOWN]) < 1e-6
    assert 20 <= rows[ledger.REPEATED] < 23 and abs(rows[ledger.SAVE] - 8) < 0.1 and abs(rows[ledger.RESTORE] - 5) < 0.1
    assert abs(rows[ledger.KEPT] - 100) < 3  # 1 s each, with the usual part of the first steps
    text = list(pictures.lines(found))
    assert text[0].endswith(" in 2 attempts (21 Sep 2026), 38 % kept steps") and " repeated " in text[1]
    assert sum(1 for line in pictures.csv_text([found]).splitlines() if ",steps_repeated," in line) == 2
    assert len(ElementTree.fromstring(pictures.svg(found)).findall("{*}rect")) > 20


def test_an_idle_spare_node(tmp_path: Path) -> None:
    """A node that the ranks do not use is its own row, in proportion to the nodes."""
    run = two_attempts(tmp_path / "run")
    known = {
        "43": [
            Allocation("43", 0, START, START + 120, 24.0, 24, 3),
            Allocation("43", 1, START + 400, START + 540, 24.0, 24, 3),
        ]
    }
    found = Ledger("train-0001", tuple(read_run.read(run, known)))
    assert abs(found.rows[ledger.IDLE].at - 260 * 8) < 1 and found.gpus == 24
    document = report_command.document(found)
    assert abs(sum(row["seconds"] for row in document["rows"][1:]) - document["charged_s"]) < 0.1
    assert [attempt["charged_s"] for attempt in document["attempts"]] == [120.0, 140.0]


def test_a_hang_and_a_start_that_failed(tmp_path: Path) -> None:
    """A reported hang is from the last step to the end; a start whose rank is absent has no other row than the start."""
    run = synthetic.run(tmp_path / "run", 2, 1)
    spans(run, 0, [("first step", 5, 1), ("steps", 20, 21)])
    (run / "hang/43.0.0").mkdir(parents=True)
    (run / "hang/43.0.0/report.json").write_text('{"host": "n0002"}')
    (run / "exit.json").write_text(json.dumps({"job": "43", "restart": 0, "ended": START + 300, "exit_status": 76}))
    (one,) = read_run.read(run, {})
    assert 245 < one.rows[ledger.HANG].at < 270 and one.starts[0].fault == "n0002"
    absent = synthetic.run(tmp_path / "absent", 4, 1, absent=2)
    (absent / "exit.json").write_text(json.dumps({"job": "43", "restart": 0, "ended": START + 300, "exit_status": 1}))
    (one,) = read_run.read(absent, {})
    rows = one.rows
    assert (
        rows[ledger.START].at > 74
        and rows[ledger.KEPT].at == 0
        and abs(sum(row.at for row in rows.values()) - 300) < 0.01
    )


def test_a_start_that_failed_in_init_has_no_unknown_time(tmp_path: Path) -> None:
    """One rank has called init(), so the program does, and the others were importing when the job ended."""
    run = synthetic.run(tmp_path / "run", 1, 2, absent=1)
    writer = timeline.Writer(timeline.path(run, "43.0.0", "n0001"))
    about = {"job": "43.0.0", "launcher": "slurm", "world_size": 2, "nodes": 1, "local_rank": 1}
    writer.write(1, {**about, "allocated": START, "started": START + 1, "interpreter": START + 2, "met": START + 3})
    writer.close()
    (run / "exit.json").write_text(json.dumps({"job": "43", "restart": 0, "ended": START + 100, "exit_status": 2}))
    (one,) = read_run.read(run, {})
    assert one.rows[ledger.UNKNOWN].at == 0 and one.rows[ledger.IMPORTS].at > 45 and one.rows[ledger.INIT].at > 40


def test_the_record_of_a_long_run_is_small() -> None:
    """10,000 saves leave at most 200 spans, whose sums and steps are exact."""
    record = SpanRecord(0.0)
    record.step(1, 2.0)
    now = 2.0
    for save in range(10_000):
        for step in range(10):
            now += 1
            record.step(2 + 10 * save + step, now)
        record.switch(training_spans.SAVING, now)
        now += 3
        record.switch(training_spans.STEPS, now)
    document = json.loads(record.to_json())["spans"]
    found = [training_spans.Span(*one) for one in document]
    assert len(found) <= training_spans.MOST + 1 and len(record.to_json()) < 30_000
    saves = [one for one in found if one.what == training_spans.SAVING]
    assert sum(one.number for one in saves) == 10_000 and sum(one.end - one.begin for one in saves) == 30_000
    assert all(abs(a.end - b.begin) < 1e-6 for a, b in pairwise(found))
    assert found[-2].what == training_spans.SAVING and found[-1].last == 100_001


def failed(times: int, lost_s: float, save_s: float, between_s: float) -> Ledger:
    """Return a ledger of allocations of 10 h on 8 GPUs, each of which lost `lost_s` of steps."""
    found = []
    for number in range(times + 1):
        at, until = number * 40_000.0, number * 40_000.0 + 36_000
        parts, now = [], at
        while now + between_s + save_s < until - lost_s:
            parts.append(Segment(ledger.KEPT, exact(now), exact(now + between_s), count=1))
            parts.append(Segment(ledger.SAVE, exact(now + between_s), exact(now + between_s + save_s), count=1))
            now += between_s + save_s
        row = ledger.REPEATED if number < times else ledger.KEPT
        parts.append(Segment(row, exact(now), exact(until), count=1))
        reason = "preempted" if number < times else ""
        found.append(Allocation("1", number, at, until, 8.0, 8, 1, 60.0, "", reason, (Start(tuple(parts)),)))
    return Ledger("train-0001", tuple(found))


def test_the_largest_loss_has_an_action() -> None:
    """Rare saves are advised to be more frequent, with the hours that this would have kept; frequent ones are not."""
    loss = advice.largest(failed(3, 3000, 10, 3600))
    assert loss is not None and loss.row == ledger.REPEATED
    assert " after 3 preemptions; a save every 1" in loss.text and " min instead of " in loss.text
    few = advice.largest(failed(3, 900, 10, 600))
    assert few is not None and "close to the best" in few.text
    start = Segment(ledger.IMPORTS, exact(0), exact(100)), Segment(ledger.KEPT, exact(100), exact(200))
    slow = advice.largest(Ledger("x", (Allocation("1", 0, 0.0, 200.0, starts=(Start(start),)),)))
    assert slow is not None and slow.row == ledger.IMPORTS and "launch=fork" in slow.text


def test_a_node_with_failures_is_named_only_beside_others() -> None:
    """A node with two failures is named; the only node of a run is not, since the program may be the cause."""

    def ledger_of(nodes: int) -> Ledger:
        hung = Start((Segment(ledger.HANG, exact(0), exact(3600)),), fault="n7")
        return Ledger("x", tuple(Allocation(str(job), 0, 0.0, 3600.0, 8.0, 8, nodes, starts=(hung,)) for job in (1, 2)))

    (sentence,) = advice.by_node(ledger_of(2))
    assert sentence.startswith("node n7 had the failed rank in 2 of 2 failures (16.0 GPU-hours): if hpcinit why ")
    assert not list(advice.by_node(ledger_of(1)))


def test_spare_nodes_that_were_needed_stay() -> None:
    """Idle spare nodes are advised against only if no rank was restarted inside the job."""
    start = Start((Segment(ledger.KEPT, exact(0), exact(100)),), used=0.5)
    idle = advice.largest(Ledger("x", (Allocation("1", 0, 0.0, 100.0, 8.0, 8, 2, starts=(start,)),)))
    used = advice.largest(Ledger("x", (Allocation("1", 0, 0.0, 100.0, 8.0, 8, 2, starts=(start, start)),)))
    assert idle is not None and "spare_nodes=0, because no failure needed a spare node" in idle.text
    assert used is not None and used.text.endswith("compare spare_nodes with the failures: 1 restart inside the job")


def loss_s(interval_s: float, save_s: float, failures: list[float], work_s: float) -> float:
    """Return the time that saves, and steps after the last save, cost until `work_s` of training are done."""
    lost, done, at, next_failure = 0.0, 0.0, 0.0, iter(failures)
    failure = next(next_failure)
    while done < work_s:
        length = min(interval_s, work_s - done) + save_s
        if at + length <= failure:
            at, done, lost = at + length, done + length - save_s, lost + save_s
        else:
            lost, at = lost + failure - at, failure
            failure = at + next(next_failure)
    return lost


def test_the_advice_on_simulated_histories() -> None:
    """On 100 histories with random failures, the interval of the formula loses at most 5 % more than the best one."""
    chance = random.Random(43)
    advised = best = 0.0
    for _ in range(100):
        save_s, between_s = chance.uniform(1, 120), chance.uniform(1, 24) * 3600
        failures = [chance.expovariate(1 / between_s) for _ in range(4000)]
        work_s = 60 * between_s
        own = best_interval_s(save_s, between_s)
        advised += loss_s(own, save_s, failures, work_s) / work_s
        best += (
            min(
                loss_s(own * factor, save_s, failures, work_s)
                for factor in (0.4, 0.6, 0.8, 0.9, 1, 1.1, 1.25, 1.6, 2.5)
            )
            / work_s
        )
    assert advised <= 1.05 * best, (advised, best)


def test_many_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--since adds up all runs of the last days, lists the largest, and refuses a time without a unit."""
    for number in range(3):
        two_attempts(tmp_path / f"runs/train-000{number}")
    assert report_command.main(["--since", "2d", "--runs-dir", str(tmp_path / "runs")]) == 0
    text = capsys.readouterr().out
    assert " in 6 attempts " in text and text.count("train-000") == 3
    assert report_command.main(["--since", "2d", "--json", "--runs-dir", str(tmp_path / "runs")]) == 0
    assert abs(json.loads(capsys.readouterr().out)["charged_s"] - 3 * 260) < 0.1
    with pytest.raises(RequestError, match=r"--since 30: expected a number with h, d or w"):
        report_command.main(["--since", "30", "--runs-dir", str(tmp_path)])
    os.utime(tmp_path / "runs/train-0000/submission.json", (time.time() - 9e5,) * 2)
    assert report_command.main(["--since", "2d", "--csv", "--runs-dir", str(tmp_path / "runs")]) == 0
    assert "train-0000" not in capsys.readouterr().out


LOG = """{0} INFO world size 8
{1} INFO step 10 loss 5.1
{2} INFO step 20 loss 4.1
{3} INFO saved checkpoint /data/step_20.pt
{4} INFO step 30 loss 3.1
{5} INFO step 40 loss 2.1
"""


def test_a_job_that_hpcinit_did_not_submit(tmp_path: Path) -> None:
    """Without accounting, the times in a log show steps and a save, with ranges."""
    stamps = [time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(START + at)) for at in (0, 140, 240, 270, 370, 470)]
    (tmp_path / "slurm-77.out").write_text(LOG.format(*stamps))
    os.utime(tmp_path / "slurm-77.out", (START + 475, START + 475))
    found = read_job.find(str(tmp_path))
    assert found is not None and 470 <= found.charged_s <= 531
    rows = found.rows
    assert abs(rows[ledger.KEPT].at - 400) <= 25 and rows[ledger.SAVE].low <= 30 <= rows[ledger.SAVE].high
    assert rows[ledger.KEPT].low < rows[ledger.KEPT].high


def clocked(*lines: tuple[float, str]) -> str:
    """Return a log with a clock in each line, from (seconds since START, text)."""
    stamp = "%Y-%m-%d %H:%M:%S"
    return "".join(f"{time.strftime(stamp, time.localtime(START + at))} {text}\n" for at, text in lines)


def rows_of(folder: Path, text: str, seconds: float, state: str = "COMPLETED") -> dict[str, ledger.Amount]:
    """Return the rows of a job that took `seconds`, from its log."""
    (folder / "slurm-77.out").write_text(text)
    os.utime(folder / "slurm-77.out", (START + seconds, START + seconds))
    job = Allocation("77", 0, START, START + seconds, state=state)
    rows = read_job._ledger("77", [job], [folder / "slurm-77.out"], [], folder).rows
    assert abs(sum(row.at for row in rows.values()) - seconds) < 0.01
    assert all(0 <= row.low <= row.at <= row.high <= seconds for row in rows.values()), rows
    return rows


def inside(amount: ledger.Amount, seconds: float) -> bool:
    return amount.low - 3 <= seconds <= amount.high + 3


STEPS = [(100.0 + 10 * step, f"step {step}/20 loss 1.5") for step in range(1, 21)]


def test_rows_that_a_log_does_not_separate_share_a_range(tmp_path: Path) -> None:
    """Before the first line: start or imports. Between two lines before the first step: init or a long first step."""
    rows = rows_of(tmp_path, clocked((30, "world size 8"), *STEPS), 310)
    assert all(inside(rows[row], seconds) for row in (ledger.START, ledger.IMPORTS) for seconds in (0, 30))
    assert all(inside(rows[row], seconds) for row in (ledger.INIT, ledger.FIRST) for seconds in (0, 70))
    assert rows[ledger.KEPT].low > 190 and rows[ledger.HANG].high == 0
    begun = rows_of(tmp_path, clocked((30, "world size 8"), (40, "Training starts at step 1."), *STEPS), 310)
    assert abs(begun[ledger.FIRST].low - 60) < 4 and begun[ledger.FIRST].high < 64


def test_a_printed_duration_is_exact_and_a_gap_without_a_line_is_open(tmp_path: Path) -> None:
    """'in 54 s' is the save. A gap that no line explains is a step, a save or an evaluation."""
    later = [(at + 54, text) for at, text in STEPS[10:]]
    stated = (254.0, "Finished saving the checkpoint in 54.0 seconds.")
    rows = rows_of(tmp_path, clocked((30, "world size 8"), *STEPS[:10], stated, *later), 360)
    assert abs(rows[ledger.SAVE].at - 54) < 2 and inside(rows[ledger.SAVE], 54) and rows[ledger.SAVE].low > 50
    rows = rows_of(tmp_path, clocked((30, "world size 8"), *STEPS[:10], *later), 360)
    assert all(inside(rows[row], seconds) for row in (ledger.SAVE, ledger.PHASES) for seconds in (0, 54))
    assert inside(rows[ledger.KEPT], 200) and inside(rows[ledger.KEPT], 254)


def test_a_log_without_a_clock_leaves_a_hang_open(tmp_path: Path) -> None:
    """Numbers of steps alone do not show when training stopped; a progress bar shows how long it lasted."""
    steps = "".join(f"step {step} loss 1.5\n" for step in range(1, 21))
    rows = rows_of(tmp_path, steps, 2000, "FAILED")
    assert inside(rows[ledger.HANG], 1700) and inside(rows[ledger.KEPT], 200)
    bars = "".join(f"\r{5 * at}%|█| {at}/20 [{at // 6:02}:{at % 6 * 10:02}<00:10, 10.0s/it]" for at in range(1, 20))
    rows = rows_of(tmp_path, bars, 2000, "FAILED")
    assert inside(rows[ledger.HANG], 1700) and 180 <= rows[ledger.KEPT].low <= 200


def test_a_line_of_the_launcher_shows_no_step_and_no_start(tmp_path: Path) -> None:
    """What is between the last step and a launcher's line about the end was a step, lost or not, a hang, or the end."""
    launcher = "torch/distributed/run.py:852] Setting OMP_NUM_THREADS environment variable"
    lines = [(5, launcher), *STEPS, (340, "torch/distributed/elastic/agent: Received 15 death signal")]
    rows = rows_of(tmp_path, clocked(*lines), 342, "CANCELLED")
    assert inside(rows[ledger.REPEATED], 42) and inside(rows[ledger.KEPT], 200) and rows[ledger.HANG].high == 0
    assert all(inside(rows[row], seconds) for row in (ledger.START, ledger.IMPORTS) for seconds in (5, 95))
    lines = [*lines[:-1], (440, lines[-1][1])]
    rows = rows_of(tmp_path, clocked(*lines), 442, "CANCELLED")
    assert inside(rows[ledger.HANG], 142) and rows[ledger.HANG].low == 0 and rows[ledger.KEPT].low > 190


def test_a_later_attempt_without_steps_may_have_repeated_those_after_the_last_save() -> None:
    """A start whose steps no line shows may have repeated steps after the last save, but not those before it."""
    ends = [(ledger.KEPT, 0, 50), (ledger.SAVE, 50, 55), (ledger.KEPT, 55, 95)]
    early = Start(tuple(Segment(row, exact(begin), exact(end), count=1) for row, begin, end in ends))
    late = Start((Segment(ledger.UNKNOWN, exact(100), exact(200)),))
    jobs = [Allocation("1", 0, 0.0, 95.0, starts=(early,)), Allocation("1", 1, 100.0, 200.0, starts=(late,))]
    rows = ledger.with_repeats(jobs)[0].rows
    assert rows[ledger.KEPT] == (90, 50, 90) and rows[ledger.REPEATED] == (0, 0, 40)


def test_checkpoints_limit_the_times_of_steps_without_a_clock(tmp_path: Path) -> None:
    """The first step was before the first checkpoint, the last one after the last; the rest depends on their pace."""
    text = "".join(f"step {step}/100 loss 1.5 (1.000 s/step)\n" for step in range(1, 101))
    (tmp_path / "slurm-77.out").write_text(text)
    places = [tmp_path / f"step_{step}.pt" for step in (40, 80)]
    for place, at in zip(places, (90, 140), strict=True):
        place.write_text("x")
        os.utime(place, (START + at, START + at))
    os.utime(tmp_path / "slurm-77.out", (START + 170, START + 170))
    job = Allocation("77", 0, START, START + 170, state="CANCELLED")
    start = read_job._ledger("77", [job], [tmp_path / "slurm-77.out"], places, tmp_path).allocations[0]
    assert all(inside(start.rows[ledger.INIT], seconds) for seconds in (45, 55)), start.rows
    assert all(inside(start.rows[ledger.KEPT], seconds) for seconds in (95, 115)), start.rows


def test_a_progress_bar_shows_the_pace_of_steps_beside_slow_saves(tmp_path: Path) -> None:
    """The bar shows 5 steps per second, and after a save 2 s per step. What is left between two steps is the save."""
    folder = tmp_path / "out"
    bar, at, lines = "  1%|1 | {}/100 [00:{:02d}<01:00, {}]\r", 0.0, []
    for step in range(1, 101):
        slow = step > 1 and step % 25 == 1  # a save of 5 s before this step
        at += 5.2 if slow else 0.2
        lines.append(bar.format(step, int(at), "2.00s/it" if slow else "5.01it/s"))
        if step % 25 == 0 and step < 100:
            (folder / f"checkpoint-{step}").mkdir(parents=True)
            saved = folder / f"checkpoint-{step}" / "model.safetensors"
            saved.write_text("x")
            os.utime(saved, (START + 20 + at + 5, START + 20 + at + 5))
    log = tmp_path / "slurm-77.out"
    log.write_text("".join(lines))
    os.utime(log, (START + 20 + at, START + 20 + at))
    job = Allocation("77", 0, START, START + 20 + at, state="COMPLETED")
    saves = sorted(folder.glob("*/*"))
    rows = read_job._ledger("77", [job], [log], saves, tmp_path).rows
    assert rows[ledger.SAVE].high > 10 and rows[ledger.KEPT].low < 25, rows


def written(path: Path, at: float) -> Path:
    """Write a file whose time is `at` seconds after START."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("x")
    os.utime(path, (START + at, START + at))
    return path


def test_a_bar_of_each_epoch_omits_the_save_at_its_end(tmp_path: Path) -> None:
    """Three epochs of 100 s, each with a save of 60 s at its end. The bar of the next epoch starts at 00:00."""
    bar = "Epoch {}: {}%|█| {}/100 [{:02}:{:02}<00:10, 1.00it/s]\r"
    lines = [bar.format(epoch, at, at, *divmod(at, 60)) for epoch in range(3) for at in range(5 - epoch, 100, 7)]
    ends = [180, 340, 500]
    saves = [written(tmp_path / f"epoch={at}-step={100 * at + 100}.ckpt", end) for at, end in enumerate(ends)]
    (log := tmp_path / "slurm-77.out").write_text("".join(lines))
    os.utime(log, (START + 500, START + 500))
    rows = read_job._ledger("77", [Allocation("77", 0, START, START + 510, state="COMPLETED")], [log], saves, tmp_path)
    assert abs(rows.rows[ledger.SAVE].at - 180) < 15 and inside(rows.rows[ledger.SAVE], 180), rows.rows


def test_checkpoints_without_a_log_do_not_show_how_long_a_save_took(tmp_path: Path) -> None:
    """The time between two checkpoints of an attempt whose log was overwritten was steps, saves or evaluations."""
    saves = [written(tmp_path / f"global_step{step}" / "model_states.pt", 20 + 2 * step) for step in (50, 100, 150)]
    log = written(tmp_path / "slurm-77.out", 900)
    log.write_text(clocked(*((at + 600, text.replace("step ", "step 15")) for at, text in STEPS[:9])))
    jobs = [
        Allocation("77", 0, START, START + 330, state="REQUEUED"),
        Allocation("77", 1, START + 600, START + 900, state="COMPLETED"),
    ]
    first = read_job._ledger("77", jobs, [log], saves, tmp_path).allocations[0]
    assert all(inside(first.rows[ledger.SAVE], seconds) for seconds in (0, 100)), first.rows
    assert all(inside(first.rows[ledger.KEPT], seconds) for seconds in (100, 300)), first.rows


def test_a_requeue_a_few_seconds_later_takes_no_lines_of_the_attempt_before(tmp_path: Path) -> None:
    """Each line of a log belongs to one attempt, although Slurm started the next one after 4 s."""
    later = [(at + 334, text) for at, text in STEPS]
    (tmp_path / "slurm-77.out").write_text(clocked(*STEPS, (304, "step 21/40 loss 1.5"), (330, "world size 8"), *later))
    jobs = [Allocation("77", 0, START, START + 305, state="REQUEUED"), Allocation("77", 1, START + 309, START + 700)]
    first, second = read_job._ledger("77", jobs, [tmp_path / "slurm-77.out"], [], tmp_path).allocations
    assert first.rows[ledger.START].high < 120 and second.rows[ledger.START].high < 140
    assert inside(second.rows[ledger.KEPT], 200) and len(second.starts) == 1


def test_an_overwritten_log_leaves_all_rows_open(tmp_path: Path) -> None:
    """The time of an attempt without a log belongs to no row for certain; 'unknown' itself may be nothing."""
    rows = rows_of(tmp_path, "nothing about training\n", 900, "FAILED")
    assert all(inside(rows[row], seconds) for row in (ledger.START, ledger.KEPT, ledger.HANG) for seconds in (0, 900))
    assert rows[ledger.UNKNOWN] == (900, 0, 900)


def test_job_ids_are_no_step_numbers() -> None:
    """Neither 'step 1500' nor a short number in a file's name is the id of a job, but slurm-1.out is."""
    assert read_job.JOB_IN_NAME.findall("slurm-1.out train-123456.log epoch_20.txt") == ["1", "123456"]
    text = "Step 1500 loss 2; *** STEP 4711.0 ON n1 CANCELLED; SLURM_JOB_ID=12; job 3 of 4"
    assert read_job.JOB_IN_TEXT.findall(text) == ["4711", "12"]


def test_the_wait_for_a_save_at_the_exit_is_the_end() -> None:
    """After the last step, the time in which the exit waits for a background save is no kept step."""
    kinds = [("first step", 0, 2, 0), ("steps", 2, 12, 10), ("saving", 12, 13, 1), ("steps", 13, 20, 0)]
    found = [training_spans.Span(what, begin, end, 1, 11, number) for what, begin, end, number in kinds]
    segments, _ = read_run._training(found, 0.0, 21.0, hung=False, stopped=True, state="COMPLETED")
    assert sum(one.amount.at for one in segments if one.row == ledger.END) == 8
