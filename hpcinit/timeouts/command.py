"""`hpcinit timeouts [OVERRIDES...]`: the law of start-up timeouts that is in force; `hpcinit timeouts fit RUN...`."""

from __future__ import annotations

import json
from collections.abc import Sequence

from hpcinit.facts.errors import RequestError

NODES = tuple(2**power for power in range(15))  # 1 to 16384


def main(argv: Sequence[str]) -> int:
    """Raises RequestError, ConfigError."""
    if list(argv[:1]) == ["fit"]:
        from hpcinit.timeouts import proposal  # noqa: PLC0415 - needs no Hydra, as this does no timelines

        return proposal.main(argv[1:])
    if {"-h", "--help"} & set(argv):
        print(f"{__doc__}\nOverrides as for hpcinit submit, such as cluster=x nodes=8; --json for programs.")
        return 0
    from hpcinit.config import compose, timeouts  # noqa: PLC0415

    words = [word for word in argv if word != "--json"]
    if flags := [word for word in words if word.startswith("-")]:
        raise RequestError(f"{flags[0]} is no option of timeouts, which has --json; overrides are words like cluster=x")
    config = compose.compose(words)
    law, told = timeouts.law(config), timeouts.coefficients(config)
    seconds = {nodes: law.start_up(nodes).total_seconds() for nodes in NODES}
    if "--json" in argv:
        values = {name: {"value": value, "from": source} for name, (value, source) in told.items()}
        print(json.dumps({"law": values, "start_up_s": seconds}))
        return 0
    print(f"start_up = {law.formula(config.nodes)}, and never more than what is left of the job - 30 s\n")
    for name, (value, source) in told.items():
        print(f"  {name:10} {value:8g}   {source}")
    print("\n  nodes  seconds")
    for nodes, each in seconds.items():
        print(f"  {nodes:5}  {each:7g}")
    return 0
