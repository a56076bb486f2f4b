"""The parts of a store, made from its options and closed together."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tiercache.accesses import Accesses
from tiercache.clean import Cleaner
from tiercache.clock import Clock
from tiercache.codecs.factory import CodecFactory
from tiercache.coding import PageCodecs
from tiercache.config import StoreConfig
from tiercache.demote import Demotion
from tiercache.discards import Discards
from tiercache.entrance import Entrance
from tiercache.entry import PageKey
from tiercache.errors import StoreClosedError, StoreTimeoutError
from tiercache.keeper import Keeper
from tiercache.lending import Loans
from tiercache.opening import create_staging, create_tiers, io_of
from tiercache.placement import Books
from tiercache.policy_note import PolicyNote, about
from tiercache.promote import Promotion
from tiercache.reading import Leases
from tiercache.staging import Staging
from tiercache.stats import Stats
from tiercache.streams import Engines
from tiercache.sums import Sums
from tiercache.taking import HandOver
from tiercache.threads import WorkerThreads
from tiercache.tiers.base import Tier
from tiercache.trace import AccessTrace, Timeline
from tiercache.transfer import Transfer
from tiercache.writing import Puts

# Of pages and their codecs: records of another one are misses.
_FORMAT = b"tiercache pages 1\0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a store hands its work on to; each part says what it does."""

    books: Books
    staging: Staging
    threads: WorkerThreads
    puts: Puts
    leases: Leases
    sums: Sums
    hand_over: HandOver
    discards: Discards
    loans: Loans
    accesses: Accesses
    entrance: Entrance
    keeper: Keeper
    recorders: tuple[AccessTrace | Timeline, ...]

    def stats(self) -> Stats:
        """What the store did so far; a copy."""
        books = self.books
        with books.changed:
            if not books.closed:
                self.entrance.collect()  # a page that finalizers gave up is gone
            counts = copy.deepcopy(books.counts)
            counts.pages = sum(entry.visible for entry in books.table.values())
            counts.bytes_capacity = {tier.name: tier.capacity_bytes for tier in books.tiers}
            counts.bytes_used = {tier.name: tier.used_bytes - tier.spare_bytes for tier in books.tiers}
            counts.bytes_kept = sum(tier.spare_bytes for tier in books.tiers)
            counts.staging_capacity_bytes = self.staging.capacity_bytes
            counts.staging_used_bytes, counts.staging_peak_bytes = self.staging.usage()
            counts.io = "" if books.closed else io_of(books.tiers)
            return counts

    def close(self, timeout_s: float) -> None:
        """Ends transfers, threads and tiers, drops every page and writes the records. Once only.

        Raises:
            StoreTimeoutError: a thread was still blocked in a copy at the deadline.
        """
        books, clock = self.books, self.books.clock
        deadline = clock.now() + timeout_s
        joined = self.threads.close(timeout_s)
        with books.changed:
            for entry in [entry for entry in books.by_id if entry is not None]:
                if entry.rise is not None and not entry.rise.started:
                    books.abandon(entry, entry.rise, StoreClosedError("the store was closed"))
            while any(books.transient) and clock.now() < deadline:
                clock.wait(books.changed, deadline - clock.now())
            ended = joined and not any(books.transient)
            books.forget_all()
        if not ended:
            raise StoreTimeoutError("close: a copy did not end", remedy="its tiers are left as they are")
        for tier in books.tiers:
            tier.close()
        self.staging.close()
        for recorder in self.recorders:
            recorder.save()


def create_parts(
    config: StoreConfig,
    tiers: Sequence[Tier] | None,
    create_policy: Callable[..., Any],
    clock: Clock,
    on_bug: Callable[[BaseException], None],
) -> Parts:
    """The parts of a new store; `on_bug` is given what a worker thread's job raised."""
    start_s = clock.now()
    factory = CodecFactory(instructions=config.codec_instructions, threads=config.codec_threads)
    codecs = PageCodecs(config.codec, factory)
    engines = Engines(config.accelerator)
    chosen = list(tiers) if tiers is not None else create_tiers(config, pin=engines.any_late)
    codecs.attach(chosen)
    policies = []
    for tier in chosen[:-1]:
        name, params = config.policy_of(tier.name)
        policies.append(create_policy(name, capacity_bytes=tier.capacity_bytes, **params))

    def next_use(key: PageKey) -> int | None:
        return accesses.next_use(key)

    books = Books(chosen, [*policies, None], engines, clock, next_use)
    threads = WorkerThreads(config.transfer_threads, on_bug)
    timeline = books.timeline = Timeline(config.timeline, start_s) if config.timeline is not None else None
    trace = AccessTrace(config.trace) if config.trace is not None else None
    namespace = hashlib.blake2b(_FORMAT + config.namespace, digest_size=32).digest()
    if trace is not None:
        _note_policies(books, config, trace, start_s)
    staging = create_staging(config, chosen, pin=engines.any_late)
    transfer = Transfer(books, codecs, threads, staging, namespace)
    demotion = Demotion(transfer)
    room, timeout_s = demotion.room, config.timeout_s
    promotion = Promotion(transfer, room)
    accesses = Accesses(transfer, room, promotion, trace, start_s, timeout_s)
    books.recompute_s, books.distance = accesses.recompute_s, accesses.distance
    books.on_publish = Cleaner(transfer, demotion, accesses, timeout_s).poke
    leases, loans = Leases(books, room, promotion, timeout_s), Loans(books, room)
    discards = Discards(books)
    keeper = Keeper(transfer, demotion, namespace, timeout_s)
    return Parts(
        books=books,
        staging=transfer.staging,
        threads=threads,
        puts=Puts(transfer, codecs, demotion, keeper, timeout_s),
        leases=leases,
        sums=Sums(transfer, room, promotion, timeout_s),
        hand_over=HandOver(promotion, books, timeout_s),
        discards=discards,
        loans=loans,
        accesses=accesses,
        entrance=Entrance(books, leases, loans, discards, accesses),
        keeper=keeper,
        recorders=tuple(recorder for recorder in (trace, timeline) if recorder is not None),
    )


def _note_policies(books: Books, config: StoreConfig, trace: AccessTrace, start_s: float) -> None:
    """Puts the trace between the books and every tier's policy."""

    def key_of(page: int) -> PageKey | None:
        entry = books.by_id[page]
        return entry.key if entry is not None else None

    for level, (tier, policy) in enumerate(zip(books.tiers, books.policies, strict=True)):
        if policy is None:
            continue
        name, options = config.policy_of(tier.name)
        trace.tiers.append(about(tier.name, tier.capacity_bytes, name, options))
        books.policies[level] = PolicyNote(
            policy, trace, tier.name, key_of, lambda: books.clock.now() - start_s
        )
