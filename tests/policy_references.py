"""Every policy once more, slowly and plainly: lists and dictionaries, no links, no heap, no bitmap.

A reference has the engine's protocol: it sees hits, misses (before room is made), insertions, evictions and
removals, and names a victim among pages that are not leased. `sizes`, `costs`, `next_uses` are the model's own.
"""

from __future__ import annotations

NEVER = 1 << 62


class Reference:
    """What a policy may know; `order` is a list from the next victim to the last one."""

    over = False  # whether it wants to give up more though there is room

    def __init__(self, capacity):
        self.capacity = capacity
        self.sizes = {}
        self.costs = {}
        self.next_uses = {}
        self.leases = {}
        self.resident = set()
        self.incoming = None

    def free(self, order):
        return next((k for k in order if not self.leases.get(k)), None)

    def bytes_of(self, pages):
        return sum(self.sizes[k] for k in pages)

    @property
    def used(self):
        return self.bytes_of(self.resident)

    def on_miss(self, k):
        pass

    def admit(self, k):
        return True

    def on_remove(self, k):
        if k in self.resident:
            self.on_evict(k)


class Fifo(Reference):
    def __init__(self, capacity):
        super().__init__(capacity)
        self.queue = []

    def on_insert(self, k):
        self.queue.append(k)

    def on_hit(self, k):
        pass

    def on_evict(self, k):
        self.queue.remove(k)

    def victim(self):
        return self.free(self.queue)


class Lru(Fifo):
    def on_hit(self, k):
        self.queue.remove(k)
        self.queue.append(k)


class Clock(Fifo):
    def __init__(self, capacity):
        super().__init__(capacity)
        self.used_again = set()

    def on_hit(self, k):
        self.used_again.add(k)

    def on_evict(self, k):
        super().on_evict(k)
        self.used_again.discard(k)

    def victim(self):
        at = 0
        while True:
            if at >= len(self.queue):
                at = 0
            k = self.queue[at]
            if self.leases.get(k):
                at += 1
            elif k in self.used_again:
                self.used_again.discard(k)
                self.queue.append(self.queue.pop(at))
            else:
                return k


class Sieve(Fifo):
    def __init__(self, capacity):
        super().__init__(capacity)
        self.marked = set()
        self.hand = None

    def on_hit(self, k):
        self.marked.add(k)

    def on_evict(self, k):
        if self.hand == k:
            after = self.queue.index(k) + 1
            self.hand = self.queue[after] if after < len(self.queue) else None
        super().on_evict(k)
        self.marked.discard(k)

    def victim(self):
        at = 0 if self.hand is None else self.queue.index(self.hand)
        while True:
            k = self.queue[at % len(self.queue)]
            if not self.leases.get(k):
                if k not in self.marked:
                    self.hand = k
                    return k
                self.marked.discard(k)
            at = (at % len(self.queue)) + 1


class Ranked(Reference):
    """The least (key, time of last change) goes first."""

    def __init__(self, capacity):
        super().__init__(capacity)
        self.keys = {}
        self.clock = 0

    def rank(self, k, key):
        self.clock += 1
        self.keys[k] = (key, self.clock)

    def on_evict(self, k):
        del self.keys[k]

    def victim(self):
        return self.free(sorted(self.keys, key=self.keys.get))


class Lfu(Ranked):
    def on_insert(self, k):
        self.rank(k, 1)

    def on_hit(self, k):
        self.rank(k, self.keys[k][0] + 1)


class Gdsf(Ranked):
    def __init__(self, capacity):
        super().__init__(capacity)
        self.floor = 0.0
        self.uses = {}
        self.entry_key = {}

    def value(self, k):
        return self.floor + self.uses[k] * (1e6 * self.costs[k]) / max(self.sizes[k], 1)

    def on_miss(self, k):
        self.uses[k] = 1
        self.entry_key[k] = self.floor + 1e6 * self.costs[k] / max(self.sizes[k], 1)

    def on_insert(self, k):
        self.rank(k, self.entry_key[k])

    def on_hit(self, k):
        self.uses[k] += 1
        self.rank(k, self.value(k))

    def on_evict(self, k):
        self.floor = max(self.floor, self.keys[k][0])
        super().on_evict(k)

    def on_remove(self, k):
        self.keys.pop(k, None)

    def victim(self):
        k = super().victim()
        wanted = self.incoming
        if wanted is not None and (k is None or self.entry_key[wanted] < self.keys[k][0]):
            self.floor = max(self.floor, self.entry_key[wanted])
            return wanted
        return k


class Slru(Reference):
    def __init__(self, capacity):
        super().__init__(capacity)
        self.lists = [[], [], [], []]
        self.limit = capacity // 4

    def admit(self, k):
        return self.sizes[k] <= self.limit

    def on_insert(self, k):
        fits = [s for s in self.lists if self.bytes_of(s) + self.sizes[k] <= self.limit]
        (fits[0] if fits else self.lists[0]).append(k)

    def on_hit(self, k):
        at = next(i for i, s in enumerate(self.lists) if k in s)
        self.lists[at].remove(k)
        up = min(at + 1, 3)
        self.lists[up].append(k)
        for level in range(up, 0, -1):
            while self.bytes_of(self.lists[level]) > self.limit:
                self.lists[level - 1].append(self.lists[level].pop(0))

    def on_evict(self, k):
        next(s for s in self.lists if k in s).remove(k)

    def victim(self):
        return self.free([k for s in self.lists for k in s])


class TwoQ(Reference):
    def __init__(self, capacity):
        super().__init__(capacity)
        self.new, self.main, self.ghosts = [], [], []
        self.known = False

    def on_miss(self, k):
        self.known = k in self.ghosts
        if self.known:
            self.ghosts.remove(k)

    def on_insert(self, k):
        (self.main if self.known else self.new).append(k)
        self.known = False

    def on_hit(self, k):
        if k in self.main:
            self.main.remove(k)
            self.main.append(k)

    def on_evict(self, k):
        if k in self.new:
            self.new.remove(k)
            self.ghosts.append(k)
            while self.bytes_of(self.ghosts) > int(self.capacity * 0.5):
                self.ghosts.pop(0)
        else:
            self.main.remove(k)

    def on_remove(self, k):
        for pages in (self.new, self.main, self.ghosts):
            if k in pages:
                pages.remove(k)

    def victim(self):
        full = self.bytes_of(self.new) > int(self.capacity * 0.25)
        first, second = (self.new, self.main) if full else (self.main, self.new)
        k = self.free(first)
        return k if k is not None else self.free(second)


class Arc(Reference):
    def __init__(self, capacity):
        super().__init__(capacity)
        self.t1, self.t2, self.b1, self.b2 = [], [], [], []
        self.target = 0.0
        self.hit_list = None
        self.no_ghost = set()
        self.missed = None

    def on_miss(self, k):
        self.missed = k
        self.hit_list = None
        b1, b2 = self.bytes_of(self.b1), self.bytes_of(self.b2)
        if k in self.b1:
            self.target = min(self.target + max(b2 / max(b1, 1), 1.0), float(self.capacity))
            self.b1.remove(k)
            self.hit_list = "b1"
        elif k in self.b2:
            self.target = max(self.target - max(b1 / max(b2, 1), 1.0), 0.0)
            self.b2.remove(k)
            self.hit_list = "b2"

    def on_insert(self, k):
        (self.t2 if self.hit_list else self.t1).append(k)
        self.no_ghost.discard(k)
        self.hit_list = None
        self.missed = None

    def on_hit(self, k):
        (self.t1 if k in self.t1 else self.t2).remove(k)
        self.t2.append(k)

    def on_evict(self, k):
        live, ghosts = (self.t1, self.b1) if k in self.t1 else (self.t2, self.b2)
        live.remove(k)
        if k not in self.no_ghost:
            ghosts.append(k)
        self.no_ghost.discard(k)

    def on_remove(self, k):
        for pages in (self.t1, self.t2, self.b1, self.b2):
            if k in pages:
                pages.remove(k)

    def victim(self):
        c = self.capacity
        t1 = self.bytes_of(self.t1)
        if self.hit_list is None:
            recent = t1 + self.bytes_of(self.b1)
            coming = self.sizes[self.incoming] if self.incoming is not None else 0
            if recent + coming > c:
                if not self.b1:
                    k = self.free(self.t1)
                    if k is not None:
                        self.no_ghost.add(k)
                        return k
                else:
                    self.b1.pop(0)
            elif recent + self.bytes_of(self.t2) + self.bytes_of(self.b2) >= 2 * c and self.b2:
                self.b2.pop(0)
        from_t1 = self.t1 and (t1 > self.target or (t1 == self.target and self.hit_list == "b2"))
        first, second = (self.t1, self.t2) if from_t1 else (self.t2, self.t1)
        k = self.free(first)
        return k if k is not None else self.free(second)


class S3Fifo(Reference):
    current = True

    def __init__(self, capacity):
        super().__init__(capacity)
        self.small, self.main, self.ghosts = [], [], []
        self.uses = {}
        self.small_limit = int(capacity * 0.1)
        self.known = self.has_evicted = False

    def on_miss(self, k):
        self.known = k in self.ghosts
        if self.known:
            self.ghosts.remove(k)

    def on_insert(self, k):
        early = self.current and not self.has_evicted and self.bytes_of(self.small) >= self.small_limit
        to_main = self.known or early or self.sizes[k] >= self.small_limit
        (self.main if to_main else self.small).append(k)
        self.uses[k] = 0
        self.known = False

    def on_hit(self, k):
        self.uses[k] += 1

    def on_evict(self, k):
        limit = int(self.capacity * 0.9)
        if k in self.main:
            self.main.remove(k)
            return
        self.small.remove(k)
        if self.sizes[k] <= limit:
            while self.bytes_of(self.ghosts) + self.sizes[k] > limit:
                self.ghosts.pop(0)
            self.ghosts.append(k)

    def on_remove(self, k):
        for pages in (self.small, self.main, self.ghosts):
            if k in pages:
                pages.remove(k)

    def victim(self):
        self.has_evicted = True
        forced = []
        while True:
            if forced:
                queue = forced[0]
            else:
                main_first = self.bytes_of(self.main) > self.capacity - self.small_limit or not self.small
                queue = self.main if main_first else self.small
            k = self.free(queue)
            if k is None:
                forced = forced[1:] if forced else [self.small, self.main]
                if not forced:
                    return None
            elif queue is self.small and self.uses[k] >= 2:
                self.small.remove(k)
                self.main.append(k)
                self.uses[k] = 0
            elif queue is self.main and self.uses[k] >= 1:
                self.main.remove(k)
                self.main.append(k)
                self.uses[k] = min(self.uses[k], 3) - 1
            else:
                return k


class S3Fifo2023(S3Fifo):
    current = False


class Belady(Reference):
    bypass = False

    def __init__(self, capacity):
        super().__init__(capacity)
        self.arrivals = []

    def far(self, k):
        return self.next_uses.get(k, NEVER)

    def on_insert(self, k):
        self.arrivals.append(k)

    def on_hit(self, k):
        self.arrivals.remove(k)
        self.arrivals.append(k)

    def on_evict(self, k):
        self.arrivals.remove(k)

    def order(self):
        dead = [k for k in self.arrivals if self.far(k) >= NEVER]
        return dead + sorted((k for k in self.arrivals if self.far(k) < NEVER), key=self.far, reverse=True)

    def victim(self):
        order = [k for k in self.order() if not self.leases.get(k)]
        wanted = self.incoming
        if self.bypass and wanted is not None and self.first_round:
            if self.far(wanted) >= NEVER:
                return wanted
            need = self.used + self.sizes[wanted] - self.capacity
            for k in order:
                if self.far(k) < self.far(wanted):
                    return wanted
                need -= self.sizes[k]
                if need <= 0:
                    break
        return order[0] if order else None


class BeladyBypass(Belady):
    bypass = True


class Planned(Belady):
    now = 0

    def victim(self):
        def score(k):
            when = self.far(k)
            if when >= NEVER or when < self.now:
                return 1e300
            return self.sizes[k] * float(when - self.now) / (self.costs[k] + 1e-12)

        return self.free(sorted(self.arrivals, key=lambda k: -score(k)))


class Lirs(Reference):
    """Stack S, queue Q and ghosts as lists, oldest first."""

    share = 0.3  # a queue that holds more than one page of the traces

    def __init__(self, capacity):
        super().__init__(capacity)
        self.stack, self.queue, self.ghosts, self.hot = [], [], [], set()
        self.queue_limit = max(1, int(self.share * capacity))
        self.hot_limit = capacity - self.queue_limit
        self.coming = 0
        self.as_hot = False

    @property
    def over(self):
        return self.bytes_of(self.queue) + self.coming > self.queue_limit

    def admit(self, k):
        return k in self.ghosts or self.sizes[k] <= min(self.queue_limit, self.hot_limit)

    def touch(self, k):
        self.stack.remove(k)
        self.stack.append(k)

    def prune(self):
        while len(self.stack) > 1 and self.stack[0] not in self.hot:
            k = self.stack.pop(0)
            if k in self.ghosts:
                self.ghosts.remove(k)

    def make_hot_room(self, size):
        while self.hot and self.bytes_of(self.hot) + size > self.hot_limit:
            if self.stack[0] not in self.hot:
                self.prune()
                if self.stack[0] not in self.hot:
                    return
            k = self.stack.pop(0)
            self.hot.discard(k)
            self.queue.insert(len(self.queue) if self.sizes[k] <= self.queue_limit else 0, k)
            self.prune()

    def bound(self, coming):
        while self.bytes_of(self.stack) > 2 * self.capacity and self.ghosts:
            self.stack.remove(self.ghosts.pop(0))
        self.coming = coming

    def on_miss(self, k):
        if k in self.ghosts:
            self.ghosts.remove(k)
            self.touch(k)
            self.make_hot_room(self.sizes[k])
            self.as_hot = True
        else:
            self.as_hot = self.bytes_of(self.hot) + self.sizes[k] <= self.hot_limit
        self.bound(0 if self.as_hot else self.sizes[k])

    def on_insert(self, k):
        if k not in self.stack:
            self.stack.append(k)
        if self.as_hot:
            self.hot.add(k)
        else:
            self.queue.append(k)
        self.bound(0)

    def on_hit(self, k):
        if k in self.hot:
            self.touch(k)
            self.prune()
        elif k in self.stack:
            self.touch(k)
            self.queue.remove(k)
            self.make_hot_room(self.sizes[k])
            self.hot.add(k)
        else:
            self.queue.remove(k)
            self.queue.append(k)
            self.make_hot_room(self.sizes[k])
            self.stack.append(k)
        self.bound(0)

    def on_evict(self, k):
        coming = self.coming if self.over else 0
        if k in self.queue:
            self.queue.remove(k)
            if k in self.stack:
                self.ghosts.append(k)
        else:
            self.stack.remove(k)
            self.hot.discard(k)
            self.prune()
        self.bound(coming)

    def on_remove(self, k):
        for pages in (self.queue, self.ghosts):
            if k in pages:
                pages.remove(k)
        self.hot.discard(k)
        if k in self.stack:
            self.stack.remove(k)
            self.prune()
        self.bound(0)

    def victim(self):
        k = self.free(self.queue)
        return k if k is not None else self.free([k for k in self.stack if k in self.hot])


class WTinyLfu(Reference):
    def __init__(self, capacity):
        super().__init__(capacity)
        self.window, self.probation, self.protected = [], [], []
        self.counts = {}
        self.window_limit = int(capacity * 0.01)
        self.protected_limit = int(0.8 * (capacity - self.window_limit))
        self.aged = self.uses = self.found = 0
        self.rate, self.step = 0.0, 0.0625
        self.candidate = None

    def count(self, k, found):
        self.counts[k] = min(self.counts.get(k, 0) + 1, 15)
        self.aged += 1
        self.uses += 1
        self.found += found
        full = 10 * max(len(self.resident), 16)
        if self.aged >= full:
            self.counts = {page: n >> 1 for page, n in self.counts.items()}
            self.aged //= 2
        if self.uses >= full:
            self.climb()

    def climb(self):
        rate = self.found / self.uses
        change = rate - self.rate
        step = self.step if change >= 0 else -self.step
        fresh = 0.0625 if step >= 0 else -0.0625
        self.step = fresh if abs(change) >= 0.05 else 0.98 * step
        self.rate, self.uses, self.found = rate, 0, 0
        c = self.capacity
        self.window_limit = min(max(self.window_limit + int(step * c), c // 100), c * 4 // 5)
        self.protected_limit = int(0.8 * (c - self.window_limit))

    def overflow(self, coming):
        while self.window and self.bytes_of(self.window) + coming > self.window_limit:
            self.candidate = self.window.pop(0)
            self.probation.append(self.candidate)

    def on_miss(self, k):
        self.count(k, 0)

    def on_insert(self, k):
        self.window.append(k)
        self.overflow(0)

    def on_hit(self, k):
        self.count(k, 1)
        if k in self.window:
            self.window.remove(k)
            self.window.append(k)
        else:
            (self.probation if k in self.probation else self.protected).remove(k)
            self.protected.append(k)
        while self.bytes_of(self.protected) > self.protected_limit and self.protected[0] != k:
            self.probation.append(self.protected.pop(0))

    def on_evict(self, k):
        if self.candidate == k:
            self.candidate = None
        next(pages for pages in (self.window, self.probation, self.protected) if k in pages).remove(k)

    def on_remove(self, k):
        if k in self.resident:
            self.on_evict(k)
        self.counts.pop(k, None)

    def victim(self):
        self.overflow(self.sizes[self.incoming] if self.incoming is not None else 0)
        oldest = self.free(self.probation)
        if oldest is None:
            oldest = self.free(self.protected)
        if oldest is None:
            return self.free(self.window)
        k, self.candidate = self.candidate, None
        if k is None or k == oldest or k not in self.probation or self.leases.get(k):
            return oldest
        return oldest if self.counts.get(k, 0) > self.counts.get(oldest, 0) else k


REFERENCES = {
    "fifo": Fifo,
    "lru": Lru,
    "clock": Clock,
    "sieve": Sieve,
    "lfu": Lfu,
    "slru": Slru,
    "2q": TwoQ,
    "arc": Arc,
    "s3fifo": S3Fifo,
    "s3fifo_2023": S3Fifo2023,
    "lirs": Lirs,
    "gdsf": Gdsf,
    "wtinylfu": WTinyLfu,
    "belady": Belady,
    "belady_bypass": BeladyBypass,
    "planned": Planned,
}
