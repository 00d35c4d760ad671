"""Start `python -m hpcinit.fork` as a step of the local engine does, for tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcinit.engine import local_step
from hpcinit.records.layout import Layout
from hpcinit.records.spec import Launch, Program, Spec
from hpcinit.records.stop_reasons import Stopping


class Node:
    """One node whose fork server starts ranks; every rank runs `code`, as a script."""

    def __init__(
        self, folder: Path, code: str, ranks: int = 2, *, preload: Sequence[str] = (), signal: str = "",
        env: Mapping[str, str] | None = None, entry: Sequence[str] = ("-m", "hpcinit.fork"), **launch: Any,
    ) -> None:  # fmt: skip
        self.folder, self.ranks = folder, ranks
        for below in ("logs", "errors"):
            (folder / below).mkdir(parents=True, exist_ok=True)
        (folder / "script.py").write_text(code)
        spec = Spec(
            name="forked", cluster="local", nodes=1, ranks_per_node=ranks, workdir=str(folder), nonce="0" * 32,
            program=Program("script", "script.py"), layout=Layout(dp_replicate=ranks).over(ranks, ranks),
            stop=Stopping(signal=signal), launch=Launch("fork", tuple(preload), **launch),
        )  # fmt: skip
        (folder / "spec.json").write_text(spec.to_json())
        job = local_step.batch_variables(os.getpid(), "forked", 1, 1, str(folder))
        self.process = subprocess.Popen(
            [sys.executable, "-u", *entry, str(folder / "spec.json")],
            env={**os.environ, **job, **local_step.task_variables(job, 1, 1, 0), **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def end(self, timeout: float = 120) -> tuple[int, str]:
        """Wait. Return the fork server's exit status, as in subprocess, and its output."""
        said, _ = self.process.communicate(timeout=timeout)
        return self.process.returncode, said

    def log(self, rank: int) -> str:
        path = self.folder / f"logs/rank-{rank}.log"
        return path.read_text() if path.exists() else ""

    def printed(self, rank: int) -> Any:
        """Return the JSON in the last line of a rank's log."""
        return json.loads(self.log(rank).splitlines()[-1])
