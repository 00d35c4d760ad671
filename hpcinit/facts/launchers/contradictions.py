"""What other launchers left in the environment that contradicts the chosen one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hpcinit.facts.world import ENV_WORLD, World


def find(
    env: Mapping[str, str], world: World, chosen: Mapping[str, str], others: Iterable[tuple[str, Mapping[str, str]]]
) -> tuple[str, ...]:
    """One sentence per foreign launcher, with every value that differs beside the one in use.

    chosen, others: the names of the variables by what they hold ({"rank": "RANK"}); others with whom they belong to.
    """
    sentences = [
        _sentence(owner, found, world)
        for owner, variables in others
        if (found := _differing(env, world, chosen, variables))
    ]
    if meeting := _meeting(env, world, chosen):
        sentences.append(_sentence("torch", meeting, world))
    return tuple(dict.fromkeys(sentences))


def _sentence(owner: str, found: list[str], world: World) -> str:
    return f"left aside from {owner}: {'; '.join(found)}. In use is what {world.launcher} says"


def _differing(
    env: Mapping[str, str], world: World, chosen: Mapping[str, str], variables: Mapping[str, str]
) -> list[str]:
    found = []
    for field, name in variables.items():
        text, value = env.get(name), getattr(world, field)
        if text is None or name in chosen.values() or text.strip() == str(value):
            continue
        source = chosen.get(field, "")
        own = f"{source} is {_shown(env[source])}" if source in env else f"{field} is {value}"
        found.append(f"{name} is {_shown(text)}, {own}")
    return found


def _meeting(env: Mapping[str, str], world: World, chosen: Mapping[str, str]) -> list[str]:
    """MASTER_ADDR and MASTER_PORT, unless they are of no use, are the launcher's own or hpcinit's."""
    if world.world_size == 1 or "RANK" in chosen.values() or env.get(ENV_WORLD) == world.job:
        return []
    found = []
    if env.get("MASTER_ADDR", world.master_addr) != world.master_addr:
        found.append(f"MASTER_ADDR is {_shown(env['MASTER_ADDR'])}, rank 0's host is {world.master_addr}")
    ports = [str(port) for port in world.master_ports]
    if env.get("MASTER_PORT", ports[0]) not in ports:
        found.append(f"MASTER_PORT is {_shown(env['MASTER_PORT'])}, the port is {ports[0]}")
    return found


def _shown(text: str) -> str:
    return text or "''"
