"""Why a start-up failed, as rank 0 reports it to all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hpcinit.base import failure_kinds
from hpcinit.base.errors import BringUpError
from hpcinit.rendezvous import protocol

KINDS = (failure_kinds.PROGRAM, failure_kinds.START_UP, failure_kinds.PEER_LOST)


@dataclass(frozen=True)
class StartupFailure:
    """kind: one of KINDS. rank, host: at fault; None and '' if unknown. An empty message makes it false."""

    message: str
    kind: str = failure_kinds.PROGRAM
    rank: int | None = None
    host: str = ""

    def __bool__(self) -> bool:
        return bool(self.message)

    def error(self) -> BringUpError:
        return BringUpError(self.message, kind=self.kind, rank_at_fault=self.rank, host_at_fault=self.host)

    def fields(self, name: str) -> dict[str, Any]:
        """Return the fields of a message. name: the field for the text."""
        return {name: self.message, "kind": self.kind, "rank": self.rank, "host": self.host}


def of(message: dict[str, Any], name: str) -> StartupFailure:
    """Return the failure from a message that fields() made. Unusable fields beside the text count as unknown: another
    version of hpcinit may have sent them."""
    kind, rank, host = message.get("kind"), message.get("rank"), message.get("host")
    return StartupFailure(
        protocol.cut(str(message[name]), protocol.LONGEST_TEXT),
        kind if kind in KINDS else failure_kinds.PROGRAM,
        rank if isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank < 2**31 else None,
        protocol.cut(host, protocol.LONGEST_HOST) if isinstance(host, str) else "",
    )
