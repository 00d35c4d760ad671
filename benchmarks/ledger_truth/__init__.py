"""Checks the rows of `hpcinit report` against the truth, which the programs record, or a generator of histories draws.

    python -m benchmarks.ledger_truth histories FOLDER   200 generated jobs that hpcinit did not submit (sacct is fake).
    python -m benchmarks.ledger_truth runs FOLDER        50 runs with random faults on a real Slurm (tests/minislurm).
    python -m benchmarks.ledger_truth foreign FOLDER     20 real jobs of programs without hpcinit on a real Slurm.
    python -m benchmarks.ledger_truth score FOLDER       compare truth and report of any of them.

The truth is from what the programs record themselves, and from sacct; nothing here imports hpcinit.report. A case is a
folder with case.json, truth.json and report.json. Of a third of the cases, drawn by chance, `score` prints only
numbers.
"""
