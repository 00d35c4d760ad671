"""Why a start-up failed, as rank 0 tells it to all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hpcinit.base import errors as kinds
from hpcinit.base.errors import BringUpError
from hpcinit.rendezvous import protocol

KINDS = (kinds.PROGRAM, kinds.START_UP, kinds.PEER_LOST)


@dataclass(frozen=True)
class StartupFailure:
    """kind: one of KINDS. rank, host: at fault, None and '' if not known. False if the message is empty."""

    message: str
    kind: str = kinds.PROGRAM
    rank: int | None = None
    host: str = ""

    def __bool__(self) -> bool:
        return bool(self.message)

    def error(self) -> BringUpError:
        return BringUpError(self.message, kind=self.kind, rank_at_fault=self.rank, host_at_fault=self.host)

    def fields(self, name: str) -> dict[str, Any]:
        """Return the fields of a message whose text has this name."""
        return {name: self.message, "kind": self.kind, "rank": self.rank, "host": self.host}


def of(message: dict[str, Any], name: str) -> StartupFailure:
    """Return what fields() made the message of. The fields beside the text count as unknown where they cannot be used:
    another version of hpcinit may have sent them."""
    kind, rank, host = message.get("kind"), message.get("rank"), message.get("host")
    return StartupFailure(
        protocol.cut(str(message[name]), protocol.LONGEST_TEXT),
        kind if kind in KINDS else kinds.PROGRAM,
        rank if isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank < 2**31 else None,
        protocol.cut(host, protocol.LONGEST_HOST) if isinstance(host, str) else "",
    )
