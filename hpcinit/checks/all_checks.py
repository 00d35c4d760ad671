"""Lists the checks of a request before the job is queued. Their messages are printed in this order.

To add a check, write a function in the file of its subject, and add a line to CHECKS. A check that queries
Slurm runs during the submission: call it in check_with_slurm() of submit/transaction.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hpcinit.base.errors import ConfigError
from hpcinit.checks import (
    checkout,
    dependency,
    environment,
    partition,
    program_source,
    secret_files,
    start_options,
    started_program,
    training,
    unused_settings,
    values,
)
from hpcinit.config.schema import Config


@dataclass(frozen=True)
class RequestCheck:
    """A check of a request, and when it runs.

    find: yields one complete message per problem.
    to_submit: run it only before a submission. `hpcinit plan` skips it.
    if_valid: run it only if the earlier checks have found no problem.
    """

    find: Callable[[Config], Iterable[str]]
    to_submit: bool = False
    if_valid: bool = False


CHECKS = (
    RequestCheck(values.declared),
    RequestCheck(values.finite),
    RequestCheck(values.names),
    RequestCheck(values.texts),
    RequestCheck(start_options.slurm_options),
    RequestCheck(dependency.written),
    RequestCheck(start_options.restarts),
    RequestCheck(started_program.problems, to_submit=True),
    RequestCheck(program_source.cannot_compile, to_submit=True),
    RequestCheck(secret_files.problems, to_submit=True),
    RequestCheck(partition.missing_keys, to_submit=True),
    RequestCheck(environment.problems, to_submit=True),
    RequestCheck(partition.problems),
    RequestCheck(start_options.launch),
    RequestCheck(partition.hetjob_problems),
    RequestCheck(training.problems, if_valid=True),
    RequestCheck(environment.local_machine, to_submit=True, if_valid=True),
    RequestCheck(dependency.problems, to_submit=True, if_valid=True),
    RequestCheck(checkout.problems, to_submit=True, if_valid=True),
    RequestCheck(environment.setup_syntax, to_submit=True, if_valid=True),
)
# Each returns the warnings about a config that has no problems.
WARNINGS = (
    program_source.may_not_compile,
    unused_settings.warnings,
    partition.warnings,
    training.warnings,
)


def problems(config: Config, *, to_submit: bool = True) -> list[str]:
    """Return the messages of all checks.

    to_submit: whether to include the checks that only a submission needs.
    """
    found: list[str] = []
    for check in CHECKS:
        if (to_submit or not check.to_submit) and not (check.if_valid and found):
            found.extend(check.find(config))
    return found


def check(config: Config, document: Mapping[str, Any]) -> None:
    """Raise ConfigError with all problems of a request.

    document: the config as it will be written to config.yaml, including the user's own keys.
    """
    if found := [*problems(config), *secret_files.in_document(document, config.secret_names)]:
        raise ConfigError(*found)


def warnings(config: Config) -> list[str]:
    """Return the warnings about a config that has no problems."""
    return [text for find in WARNINGS for text in find(config)]
