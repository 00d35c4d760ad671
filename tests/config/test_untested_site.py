"""A cluster file that was never used at its site is reported at each submission."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Run
from tests.minislurm import MiniSlurm

LINE = "the file of cluster far was made from the site's documentation and never tested there: "


@pytest.mark.slurm
def test_an_untested_file_is_reported(hpcinit: Run, slurm: MiniSlurm, tmp_path: Path) -> None:
    """One line on stderr names the file's cluster; without the mark, and with cluster.untested=false, there is none."""
    (tmp_path / "conf/cluster").mkdir(parents=True)
    file = tmp_path / "conf/cluster/far.yaml"
    for mark, options, lines in (("true", (), 1), ("true", ("cluster.untested=false",), 0), ("false", (), 0)):
        file.write_text(f"name: far\nuntested: {mark}\ncpus_per_node: 16\n")
        done = hpcinit("submit", "cluster=far", "dry_run=true", *options, "--", "true", env=slurm.env)
        assert done.returncode == 0 and done.stderr.count(LINE) == lines, done.stderr
        assert "dry_run=true" not in done.stderr, "this is a dry run already"
