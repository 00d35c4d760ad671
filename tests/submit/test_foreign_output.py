"""Output in other encodings and unexpected errors do not lose a job."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcinit.base.errors import MaybeSubmitted, SubmitError
from hpcinit.config import compose
from hpcinit.config.request import Request
from hpcinit.engine import local_job
from hpcinit.slurm import exactly_once
from hpcinit.submit import restart, transaction
from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.submitting import folder_of
from tests.submitting import submit as submit_on

LATER = "+cluster.sbatch.begin=now+1hour"
# The real sbatch with the output of a site's job_submit.lua: "Größe" in Latin-1.
SITE = """#!/bin/bash
printf 'sbatch: Gr\\366\\337e: 1 node\\n' >&2
exec {sbatch} "$@"
"""


@pytest.fixture
def site(tmp_path: Path, idle_slurm: MiniSlurm, monkeypatch: pytest.MonkeyPatch) -> Iterator[MiniSlurm]:
    """Return a Slurm whose sbatch prints bytes that are not UTF-8 (a stand-in for a submit filter)."""
    real = shutil.which("sbatch")
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "sbatch").write_text(SITE.format(sbatch=real))
    (programs / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    yield idle_slurm


def queued(slurm: MiniSlurm) -> list[str]:
    return sorted(slurm.run("squeue", "--all", "--noheader", "--array", "--format=%F").split(), key=int)


@pytest.mark.slurm
@pytest.mark.parametrize("asked", ["true", "false"])
def test_a_filter_that_prints_latin_1(hpcinit: Run, site: MiniSlurm, asked: str) -> None:
    """The job is submitted, with and without the estimate, its folder is kept, and the filter's text is shown."""
    done = submit_on(hpcinit, site, LATER, f"validate={asked}", "--", "true")
    assert done.returncode == 0, done.stderr
    assert "sbatch: Gr\ufffd\ufffde: 1 node" in done.stderr
    assert json.loads((folder_of(done) / "submission.json").read_text())["job_id"] == queued(site)[0]


# The text is saved in Latin-1.
FILTER = b"""
function slurm_job_submit(job, partitions, uid)
    slurm.log_user("Gr\xf6\xdfe: 1 node")
    return slurm.SUCCESS
end
function slurm_job_modify(job, known, partitions, uid)
    return slurm.SUCCESS
end
return slurm.SUCCESS
"""


@pytest.mark.slurm
def test_a_real_job_submit_lua(hpcinit: Run) -> None:
    """A real job_submit.lua, instead of the stand-in, gives the same result."""
    with MiniSlurm(1, name=f"lua-{os.getpid()}") as cluster:
        (cluster.directory / "etc/job_submit.lua").write_bytes(FILTER)
        with cluster.conf.open("a") as file:
            file.write("JobSubmitPlugins=lua\n")
        cluster.stop_controller()
        cluster.start_controller()
        done = submit_on(hpcinit, cluster, LATER, "--", "true")
        assert done.returncode == 0, done.stderr
        assert "Gr\ufffd\ufffde: 1 node" in done.stderr
        assert json.loads((folder_of(done) / "submission.json").read_text())["job_id"] == queued(cluster)[0]


@pytest.mark.slurm
def test_a_chain_with_such_a_filter(hpcinit: Run, site: MiniSlurm) -> None:
    """Every job of a chain is recorded in its folder."""
    done = submit_on(hpcinit, site, LATER, "chain=2", "--", "true")
    assert done.returncode == 0, done.stderr
    assert json.loads((folder_of(done) / "submission.json").read_text())["jobs"] == queued(site)


@pytest.mark.slurm
def test_a_sweep_with_such_a_filter(hpcinit: Run, site: MiniSlurm) -> None:
    """Every task of a sweep has its folder."""
    done = submit_on(hpcinit, site, LATER, "--multirun", "seed=1,2", "--", "true")
    assert done.returncode == 0, done.stderr
    assert len(set(queued(site))) == 1 and len(queued(site)) == 2
    assert len(list(Path("runs").glob("*/[01]/submission.json"))) == 2


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Create a stand-in that accepts every job as 4242."""
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho 4242\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)


def fail(*_: object, **__: object) -> None:
    raise RuntimeError("unexpected")


@pytest.mark.usefixtures("sbatch")
def test_an_error_after_sbatch_keeps_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unexpected error between sbatch and the record of its job keeps the run folder."""
    monkeypatch.setattr(restart, "Links", fail)
    config = compose.compose(["cluster=mini", "job.module=null", "job.command=/bin/true", "validate=false"])
    with pytest.raises(MaybeSubmitted, match="RuntimeError: unexpected\nthe job may exist anyway"):
        transaction.submit(Request(config, {}, "", []), ["hpcinit"])
    assert [path.name for path in (tmp_path / "runs").glob("[!.]*")] == ["smoke-0001"]


@pytest.mark.usefixtures("sbatch")
def test_an_error_at_a_later_job_of_a_chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The earlier jobs are recorded, and the message names the missing ones."""
    real, calls = exactly_once.submit, []

    def second_fails(*args: object, **options: object) -> object:
        calls.append(args)
        return fail() if len(calls) == 2 else real(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(exactly_once, "submit", second_fails)
    config = compose.compose(["cluster=mini", "job.module=null", "job.command=/bin/true", "validate=false", "chain=3"])
    done = transaction.submit(Request(config, {}, "", []), ["hpcinit"])
    assert done.jobs == ["4242"] and "job 2 of a chain of 3 was not submitted: unexpected" in done.missing
    assert json.loads((done.path / "submission.json").read_text())["jobs"] == ["4242"]


def test_an_error_as_the_local_engine_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The local engine runs nothing before it is released, so there is no job, and no folder remains."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(local_job, "write_state", fail)
    config = compose.compose(["cluster=local", "job.module=null", "job.command=/bin/true"])
    with pytest.raises(SubmitError, match=r"cannot start the job of .*unexpected; nothing was submitted"):
        transaction.submit(Request(config, {}, "", []), ["hpcinit"])
    assert not list((tmp_path / "runs").iterdir())
