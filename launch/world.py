"""This process among those that were started together, as its launcher's environment says."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

STORE_SECONDS = 5.0
"""How long the launcher's store is waited for where it only serves to say something once."""


@dataclass(frozen=True)
class World:
    """Ranks that were launched together.

    Attributes:
        rank, size: this process's, and how many there are.
        local_rank: among those of this machine: which GPU is its own.
        address, port: where the launcher's store is; empty and 0 for one rank.
        hosted: the launcher hosts the store; otherwise rank 0 does.
        restart: how often the launcher has started the ranks anew.
        missing: variables that several ranks need to find each other, and that are not set.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    address: str = ""
    port: int = 0
    hosted: bool = False
    restart: int = 0
    missing: tuple[str, ...] = ()

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> "World":
        """As torchrun, or a launcher that sets the same variables, says.

        Args:
            environment: of this process by default.

        Raises:
            ValueError: a variable is no number, or contradicts another.
        """
        given = os.environ if environment is None else environment
        numbers = {
            name: _number(given, name)
            for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
        }
        size, rank = numbers["WORLD_SIZE"], numbers["RANK"]
        size = 1 if size is None else size
        if size < 1 or not 0 <= (rank or 0) < size:
            raise ValueError(f"RANK={rank} of WORLD_SIZE={size}: must lie in 0..WORLD_SIZE - 1; {REMEDY}")
        return cls(
            rank=rank or 0,
            size=size,
            local_rank=numbers["LOCAL_RANK"] or 0,
            address=given.get("MASTER_ADDR", ""),
            port=numbers["MASTER_PORT"] or 0,
            hosted=given.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            restart=numbers["TORCHELASTIC_RESTART_COUNT"] or 0,
            missing=tuple(name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not given.get(name)),
        )

    def join(self, backend: str, *, timeout: float) -> None:
        """Form the default process group with the other ranks. Collective.

        The launcher's store outlives its restarts, and so do the addresses of ranks that have died since; under a
        prefix of its own each start finds only those of its own ranks.

        Args:
            timeout: seconds for the others to come, and of each collective.

        Raises:
            ValueError: the launcher did not say where the others are.
        """
        if self.missing:
            raise ValueError(f"{', '.join(self.missing)}: must be set beside WORLD_SIZE={self.size}; {REMEDY}")
        import torch.distributed as dist

        wait = timedelta(seconds=timeout)
        host = self.rank == 0 and not self.hosted
        store = dist.TCPStore(self.address, self.port, self.size, host, wait, multi_tenant=True)
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(f"start-{self.restart}", store),
            rank=self.rank,
            world_size=self.size,
            timeout=wait,
        )

    def is_first(self, what: str) -> bool:
        """Whether no rank has said ``what`` since the ranks were started; true as well where nobody can be asked."""
        if self.size == 1 or self.missing:
            return True
        try:
            import torch.distributed as dist

            # A connection of its own: that of the process group may be what failed.
            store = dist.TCPStore(self.address, self.port, is_master=False, timeout=timedelta(seconds=STORE_SECONDS))
            key = hashlib.blake2b(what.encode("utf-8", "backslashreplace"), digest_size=8).hexdigest()
            return store.add(f"said-{self.restart}/{key}", 1) == 1
        except (RuntimeError, OSError, ValueError, ImportError):
            return True


REMEDY = "start the ranks with torchrun, or unset these variables for one rank"


def _number(given: Mapping[str, str], name: str) -> int | None:
    """A variable as a whole number of at least 0; None if it is not set.

    Raises:
        ValueError: it is none.
    """
    text = given.get(name, "")
    if not text:
        return None
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{name}={text!r}: must be a whole number of at least 0; {REMEDY}")
    return int(text)
