"""A report that cannot be written gives one warning and another attempt, and never blocks forever."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcinit.base import background_writer
from tests.waiting import until


@pytest.fixture(autouse=True)
def _own_writer(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    writer = background_writer._Writer()
    monkeypatch.setattr(background_writer, "_writer", writer)
    monkeypatch.setattr(background_writer, "_failing", set())
    monkeypatch.setattr(background_writer, "_warned", set())
    yield
    writer._waiting.clear()  # otherwise its thread would warn during other tests


def full() -> None:
    raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), "/home/me/x")


def test_one_warning_for_many_failures(capsys: pytest.CaptureFixture[str]) -> None:
    """The first failure names the report and the error; a success after it is printed, further failures are not."""
    for write in (full, full, lambda: None, full):
        with background_writer.suppressed("progress.json"):
            write()
    assert capsys.readouterr().err.splitlines() == [
        "hpcinit: warning: progress.json cannot be written: [Errno 122] Disk quota exceeded: '/home/me/x'; the program "
        "continues, and hpcinit tries again",
        "hpcinit: progress.json can be written again",
    ]


def test_other_errors_are_raised() -> None:
    with pytest.raises(ZeroDivisionError), background_writer.suppressed("x"):
        print(1 / 0)


def test_the_latest_text_is_written(tmp_path: Path) -> None:
    """Texts that arrive during a write replace each other; with keep_first the first one is kept."""
    release, started, path = threading.Event(), threading.Event(), tmp_path / "x"

    def slow() -> None:
        started.set()
        release.wait(10)

    background_writer.later("x", slow)
    started.wait(10)
    for number in range(5):
        background_writer.later("x", lambda number=number: path.write_text(f"{number}"))  # type: ignore[misc]
        background_writer.later("y", lambda number=number: (tmp_path / "y").write_text(f"{number}"), keep_first=True)  # type: ignore[misc]
    release.set()
    assert background_writer.flush()
    assert (path.read_text(), (tmp_path / "y").read_text()) == ("4", "0")


def test_a_failure_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed write is retried after some seconds, and immediately by flush()."""
    place = tmp_path / "later"
    background_writer.later("x", lambda: (place / "x").write_text("1"))
    assert not background_writer.flush()
    place.mkdir()
    assert background_writer.flush() and (place / "x").read_text() == "1"
    monkeypatch.setattr(background_writer, "RETRY_S", 0.1)
    (tmp_path / "other").mkdir()
    background_writer.later("y", lambda: (tmp_path / "new/y").write_text("1"))
    time.sleep(0.2)
    (tmp_path / "new").mkdir()
    until((tmp_path / "new/y").exists, 10, 0.05)


def test_a_write_that_hangs_is_waited_for_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second flush() does not wait again for a hanging write. A FIFO is the fake of a hanging file server."""
    os.mkfifo(tmp_path / "x")
    background_writer.later("x", lambda: (tmp_path / "x").write_text("1"))
    start = time.monotonic()
    assert not background_writer.flush(0.3)
    assert not background_writer.flush(30)
    assert time.monotonic() - start < 10
    assert "x was not written within 0.3 s: its file system does not answer" in capsys.readouterr().err
    with (tmp_path / "x").open() as reader:  # it answers again
        assert reader.read() == "1"
    assert background_writer.flush()


def test_an_invalid_report_does_not_stop_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An error that is not from the disk is printed, and the report is dropped."""
    background_writer.later("x", lambda: (tmp_path / "x").write_text("\ud800", encoding="utf-8"))
    background_writer.later("y", lambda: (tmp_path / "y").write_text("1"))
    assert background_writer.flush() and (tmp_path / "y").exists()
    assert "warning: x cannot be written: UnicodeEncodeError" in capsys.readouterr().err


def test_a_forked_child_has_its_own_writer(tmp_path: Path) -> None:
    """The parent's waiting reports stay with the parent; the child starts its own thread."""
    background_writer.later("x", full)
    background_writer.flush()
    pid = os.fork()
    if pid == 0:
        background_writer.later("y", lambda: (tmp_path / "y").write_text("1"))
        os._exit(0 if background_writer.flush(5) else 1)
    assert os.waitpid(pid, 0)[1] == 0 and (tmp_path / "y").exists()
