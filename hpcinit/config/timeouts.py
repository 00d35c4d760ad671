"""The law of start-up timeouts that a request is under: its own coefficients, else its cluster's, else the defaults."""

from __future__ import annotations

from dataclasses import fields

from hpcinit.config.schema import Config
from hpcinit.facts.timeouts import TimeoutLaw


def law(config: Config) -> TimeoutLaw:
    """Raises RequestError for a law that gives no positive time."""
    return TimeoutLaw(**{name: value for name, (value, _) in coefficients(config).items()})


def coefficients(config: Config) -> dict[str, tuple[float, str]]:
    """base_s, per_node_s and max_s: the value, and the key that says so; 'default' where none does."""
    found = {}
    for each in fields(TimeoutLaw):
        found[each.name] = (float(str(each.default)), "default")
        for room, holder in (("cluster", config.cluster), ("comm", config.comm)):
            value = getattr(holder, f"timeout_{each.name}")
            if value is not None:
                found[each.name] = (value, f"{room}.timeout_{each.name}")
    return found
