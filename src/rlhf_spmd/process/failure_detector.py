"""Judges the ranks' heartbeats: who is lost, who took another branch, whether everything stands still. No clock, no store.

The board (board.py) collects one :class:`Heartbeat` per rank and asks :class:`Watch` every half second. A rank is
silent while its heartbeat count does not change. The watcher measures that by its own clock, so clocks of nodes may
differ.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields

WINDOW = 64  # calls in a heartbeat; each rank keeps HISTORY of its own, which rank 0 compares with ranks that lag
HISTORY = 4096


@dataclass(frozen=True)
class WatchLimits:
    """Limits in seconds. ``stall_s``: longest time in which no rank enters or leaves a call or starts a collective."""

    beat_s: float = 0.5
    lost_s: float = 20.0  # silence of a lost rank; a C call that holds Python's lock (reading a large file) is silent too
    suspect_s: float = 6.0  # the same once a rank has lost a connection
    stall_s: float = 600.0
    grace_s: float = 3.0  # time for the main thread to end by itself once a failure is known
    verdict_s: float = 15.0  # wait of a rank with a broken connection for the real cause


@dataclass(frozen=True)
class Heartbeat:
    """What one rank reports. ``calls``: (sequence number, chained hash of all calls up to it), ascending."""

    rank: int
    count: int
    state: str  # starting | running | ended
    step: int
    seq: int
    name: str
    site: str
    inside: bool
    progress: int
    pid: int
    host: str
    calls: Sequence[Sequence[int]] = ()

    def encode(self) -> str:
        return json.dumps([getattr(self, f.name) for f in fields(self)], separators=(",", ":"))

    @staticmethod
    def decode(data: str) -> Heartbeat:
        return Heartbeat(*json.loads(data))

    @property
    def where(self) -> str:
        return place(self.name, self.seq, self.site, self.step)


def place(name: str, seq: int, site: str, step: int | None) -> str:
    """Return ``actor.update_actor (call 17, ppo.py:31, step 3)``."""
    if not name:
        return "the start of the program" if not step else f"the script (step {step})"
    parts = [f"call {seq}", site, f"step {step}" if step is not None else ""]
    return f"{name} ({', '.join(p for p in parts if p)})"


@dataclass(frozen=True)
class Finding:
    """What the watch found: the rank to blame, its last heartbeat if known, and the line to print."""

    rank: int
    message: str
    beat: Heartbeat | None = None
    silent: bool = False  # the rank does not answer: a neighbour on its host kills it
    call: str = ""  # the call to blame, if the rank has gone on since


@dataclass
class Watch:
    """Compares the heartbeats of ``ranks`` with this rank's own calls (``self_rank``, normally 0)."""

    self_rank: int
    ranks: Sequence[int]
    limits: WatchLimits
    _counts: dict[int, int] = field(default_factory=dict)
    _silence: dict[int, float] = field(default_factory=dict)
    _compared: dict[int, int] = field(default_factory=dict)  # rank -> last sequence number found equal
    _ahead: dict[int, dict[int, int]] = field(default_factory=dict)  # rank -> calls that this rank has not entered yet
    _progress: int = -1
    _still: float = 0.0
    _last: float | None = None

    def judge(
        self,
        now: float,
        beats: dict[int, Heartbeat],
        self_calls: Iterable[tuple[int, int]],
        suspect: bool,
        call_text: Callable[[int, int], tuple[str, str]],
    ) -> Finding | None:
        """Look at all heartbeats once, and return a finding, or None. ``now``: seconds of a monotonic clock.

        ``self_calls``: this rank's last calls, as in a heartbeat. ``call_text(rank, seq)`` names a call of a rank, and its rows.
        """
        # time in which the watcher itself was held up must not count as silence of others
        elapsed = min(now - self._last, 4 * self.limits.beat_s) if self._last is not None else 0.0
        self._last = now
        return (
            self._diverged(beats, dict(self_calls), call_text)
            or self._ended_early(beats)
            or self._lost(elapsed, beats, suspect)
            or self._stalled(elapsed, beats)
        )

    def _diverged(
        self, beats: dict[int, Heartbeat], self_calls: dict[int, int], call_text: Callable[[int, int], tuple[str, str]]
    ) -> Finding | None:
        newest = max(self_calls, default=0)
        first: tuple[int, int] | None = None
        for rank in self.ranks:
            if rank == self.self_rank or rank not in beats:
                continue
            done = self._compared.get(rank, 0)
            ahead = self._ahead.setdefault(rank, {})
            if beats[rank].seq > done:
                ahead.update((seq, chain) for seq, chain in beats[rank].calls if seq > done)
            for seq in sorted(ahead):
                if seq > newest:
                    break
                chain = ahead.pop(seq)
                if self_calls.get(seq, chain) != chain:
                    first = min(first or (seq, rank), (seq, rank))
                    break
                self._compared[rank] = seq
            while len(ahead) > HISTORY:
                del ahead[next(iter(ahead))]
        if first is None:
            return None
        seq, rank = first
        (entered, rows), (self_call, self_rows) = call_text(rank, seq), call_text(self.self_rank, seq)
        if entered == self_call:
            entered, self_call = f"{entered} with {rows}", f"{self_call} with {self_rows}"
        message = (
            f"call order differs: rank {rank} entered {entered} as call {seq}, rank {self.self_rank} entered {self_call}; "
            "a script may branch only on replicated values"
        )
        return Finding(rank, message, beats[rank], call=entered.partition(" (")[0])

    def _ended_early(self, beats: dict[int, Heartbeat]) -> Finding | None:
        ended = [b for b in beats.values() if b.state == "ended"]
        if not ended:
            return None
        shortest = min(ended, key=lambda b: (b.seq, b.rank))
        longest = max(beats.values(), key=lambda b: (b.seq, -b.rank))
        if longest.seq <= shortest.seq:
            return None
        message = (
            f"call order differs: rank {shortest.rank} ended the script after call {shortest.seq}, rank {longest.rank} "
            f"entered {longest.where}; a script may branch only on replicated values"
        )
        return Finding(shortest.rank, message, shortest)

    def _lost(self, elapsed: float, beats: dict[int, Heartbeat], suspect: bool) -> Finding | None:
        for rank in self.ranks:
            beat = beats.get(rank)
            count = beat.count if beat else -1
            if rank in self._counts and count <= self._counts[rank]:  # an old heartbeat written again is no sign of life
                self._silence[rank] += elapsed
            else:
                self._counts[rank], self._silence[rank] = count, 0.0
        silent = [r for r in self.ranks if r != self.self_rank]
        if not silent:
            return None

        def limit(rank: int) -> float:
            """Return the silence, in seconds, of a lost rank. One that has not started yet may still be importing: it is lost later."""
            lost_s = self.limits.lost_s * (1 if rank in beats else 3)
            return min(lost_s, self.limits.suspect_s) if suspect else lost_s

        rank = max(silent, key=lambda r: (self._silence[r] / limit(r), -r))
        if self._silence[rank] < limit(rank):
            return None
        beat = beats.get(rank)
        inside = beat.where if beat else "the start of the program"
        verb = "in" if beat is None or beat.inside or not beat.name else "after"
        message = f"rank {rank} stopped answering {verb} {inside}: nothing heard from it for {self._silence[rank]:.0f} s"
        return Finding(rank, message, beat, silent=True)

    def _stalled(self, elapsed: float, beats: dict[int, Heartbeat]) -> Finding | None:
        if len(beats) < len(self.ranks) or len(self.ranks) < 2:
            return None
        progress = sum(b.progress for b in beats.values())
        self._still = self._still + elapsed if progress == self._progress else 0.0
        self._progress = progress
        first = all(b.seq == 0 for b in beats.values())  # before the first call, models are loading: no calls to count
        if self._still < self.limits.stall_s * (3 if first else 1):
            return None
        culprit = min(beats.values(), key=lambda b: (b.seq, not b.inside, b.rank))
        message = f"no rank went on for {self._still:.0f} s: {group_places(list(beats.values()))}"
        return Finding(culprit.rank, message, culprit)


def group_places(beats: Sequence[Heartbeat]) -> str:
    """Return ``ranks 0, 1, 2 in actor.update_actor (call 17, ppo.py:31, step 3); rank 3 after critic.compute_values
    (...)``."""
    places: dict[str, list[int]] = {}
    for beat in sorted(beats, key=lambda b: b.rank):
        verb = "ended after" if beat.state == "ended" else "in" if beat.inside or not beat.name else "after"
        places.setdefault(f"{verb} {beat.where}", []).append(beat.rank)
    texts = []
    for text, ranks in places.items():
        shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
        texts.append(f"rank{'s' if len(ranks) > 1 else ''} {shown} {text}")
    return "; ".join(texts)
