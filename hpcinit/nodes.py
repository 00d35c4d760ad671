"""`hpcinit nodes [cluster=x ...]`: with the limits that a submission with the same words would have."""

from __future__ import annotations

from collections.abc import Sequence

from hpcinit.observe import nodes
from hpcinit.observe.nodes import Limits

parser = nodes.parser


def main(argv: Sequence[str]) -> int:
    return nodes.main(argv, _configured)


def _configured(overrides: Sequence[str]) -> Limits:
    """Raises ConfigError."""
    from hpcinit.config.compose import compose  # noqa: PLC0415 - where limits are asked for: Hydra takes its time

    config = compose(overrides)
    return Limits(config.cluster.name, config.bad_nodes.limit, config.bad_nodes.expiry_h)
