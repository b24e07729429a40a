"""Judges the ranks' heartbeats: which rank is lost, which took another branch, whether no rank goes on. No clock, no store.

The board (board.py) collects one :class:`Heartbeat` per rank and asks :class:`Watch` every half second. A rank is
silent while its heartbeat count does not change. The watching rank measures that by its own clock, so clocks of nodes
may differ.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields

WINDOW = 64  # last calls in a heartbeat
HISTORY = 4096  # last calls that each rank keeps, so that rank 0 can compare its own with those of ranks that lag


@dataclass(frozen=True)
class WatchLimits:
    """Limits in seconds.

    - beat_s: time between two heartbeats
    - lost_s: silence of a lost rank; a C call that holds Python's lock (reading a large file) is silent too
    - suspect_s: the same once a rank has lost a connection
    - stall_s: longest time in which no rank enters or leaves a call or starts a collective
    - grace_s: time for the main thread to end by itself once a failure is known
    - verdict_s: longest wait of a rank with a broken connection for the real cause
    """

    beat_s: float = 0.5
    lost_s: float = 20.0
    suspect_s: float = 6.0
    stall_s: float = 600.0
    grace_s: float = 3.0
    verdict_s: float = 15.0


@dataclass(frozen=True)
class Heartbeat:
    """What one rank reports.

    - count: number of this heartbeat
    - state: ``starting``, ``running`` or ``ended``
    - step: the training step
    - seq, name, site: the last call that the script has entered
    - inside: True while the script is in that call
    - progress: a count that grows with every sign of progress
    - pid, host: the process
    - calls: (sequence number, chained hash of all calls up to it) of the last calls, ascending
    """

    rank: int
    count: int
    state: str
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
        return describe_place(self.name, self.seq, self.site, self.step)


def describe_place(name: str, seq: int, site: str, step: int | None) -> str:
    """Return ``actor.update_actor (call 17, ppo.py:31, step 3)``."""
    if not name:
        return "the start of the program" if not step else f"the script (step {step})"
    parts = [f"call {seq}", site, f"step {step}" if step is not None else ""]
    return f"{name} ({', '.join(filter(None, parts))})"


@dataclass(frozen=True)
class Finding:
    """A failure that the heartbeats show.

    - rank: the rank to blame
    - message: the line to print
    - beat: the last heartbeat of that rank, if it has sent one
    - silent: True if the rank does not answer; a neighbour on its host then kills it
    - call: the call to blame, if the rank has gone on since
    """

    rank: int
    message: str
    beat: Heartbeat | None = None
    silent: bool = False
    call: str = ""


@dataclass
class Watch:
    """Compares the heartbeats of ``ranks`` with this rank's own calls (``self_rank``, normally 0)."""

    self_rank: int
    ranks: Sequence[int]
    limits: WatchLimits
    _beat_counts: dict[int, int] = field(default_factory=dict)  # rank -> number of its last heartbeat
    _silence_s: dict[int, float] = field(default_factory=dict)  # rank -> seconds since that heartbeat
    _last_equal: dict[int, int] = field(default_factory=dict)  # rank -> last sequence number of equal calls
    _unmatched_calls: dict[int, dict[int, int]] = field(
        default_factory=dict
    )  # rank -> calls that this rank has not entered yet
    _progress: int = -1  # sum over ranks
    _seconds_without_progress: float = 0.0
    _last_look: float | None = None

    def judge(
        self,
        now: float,
        beats: dict[int, Heartbeat],
        self_calls: Iterable[tuple[int, int]],
        suspect: bool,
        call_text: Callable[[int, int], tuple[str, str]],
    ) -> Finding | None:
        """Compare all heartbeats once. Return the first failure that they show, or None.

        - now: seconds of a monotonic clock
        - beats: the last heartbeat of each rank that has sent one
        - self_calls: this rank's last calls, as in a heartbeat
        - suspect: True if a rank has lost a connection
        - call_text(rank, seq): returns a call of a rank and its rows, in words
        """
        # time in which the watching rank itself was held up must not count as silence of others
        elapsed = min(now - self._last_look, 4 * self.limits.beat_s) if self._last_look is not None else 0.0
        self._last_look = now
        return (
            self._find_divergence(beats, dict(self_calls), call_text)
            or self._find_early_end(beats)
            or self._find_lost_rank(elapsed, beats, suspect)
            or self._find_stall(elapsed, beats)
        )

    def _find_divergence(
        self, beats: dict[int, Heartbeat], self_calls: dict[int, int], call_text: Callable[[int, int], tuple[str, str]]
    ) -> Finding | None:
        newest = max(self_calls, default=0)
        others = [beats[rank] for rank in self.ranks if rank != self.self_rank and rank in beats]
        differences = [self._first_difference(beat, self_calls, newest) for beat in others]
        first = min(filter(None, differences), default=None)
        if first is None:
            return None
        seq, rank = first
        call, rows = call_text(rank, seq)
        self_call, self_rows = call_text(self.self_rank, seq)
        if call == self_call:
            call = f"{call} with {rows}"
            self_call = f"{self_call} with {self_rows}"
        message = (
            f"call order differs: rank {rank} entered {call} as call {seq}, rank {self.self_rank} entered {self_call}; "
            "a script may branch only on replicated values"
        )
        return Finding(rank, message, beats[rank], call=call.partition(" (")[0])

    def _first_difference(self, beat: Heartbeat, self_calls: dict[int, int], newest: int) -> tuple[int, int] | None:
        """Return sequence number and rank of the first call in which another rank differs from this one, or None."""
        last_equal = self._last_equal.get(beat.rank, 0)
        unmatched = self._unmatched_calls.setdefault(beat.rank, {})
        if beat.seq > last_equal:
            unmatched.update((seq, chain) for seq, chain in beat.calls if seq > last_equal)
        difference = None
        for seq in sorted(seq for seq in unmatched if seq <= newest):
            chain = unmatched.pop(seq)
            if self_calls.get(seq, chain) != chain:
                difference = (seq, beat.rank)
                break
            self._last_equal[beat.rank] = seq
        while len(unmatched) > HISTORY:
            del unmatched[next(iter(unmatched))]
        return difference

    def _find_early_end(self, beats: dict[int, Heartbeat]) -> Finding | None:
        ended = [beat for beat in beats.values() if beat.state == "ended"]
        if not ended:
            return None
        shortest = min(ended, key=lambda beat: (beat.seq, beat.rank))
        longest = max(beats.values(), key=lambda beat: (beat.seq, -beat.rank))
        if longest.seq <= shortest.seq:
            return None
        message = (
            f"call order differs: rank {shortest.rank} ended the script after call {shortest.seq}, rank {longest.rank} "
            f"entered {longest.where}; a script may branch only on replicated values"
        )
        return Finding(shortest.rank, message, shortest)

    def _find_lost_rank(self, elapsed: float, beats: dict[int, Heartbeat], suspect: bool) -> Finding | None:
        for rank in self.ranks:
            beat = beats.get(rank)
            count = beat.count if beat else -1
            if rank in self._beat_counts and count <= self._beat_counts[rank]:  # an old heartbeat sent again is no sign of life
                self._silence_s[rank] += elapsed
            else:
                self._beat_counts[rank] = count
                self._silence_s[rank] = 0.0
        others = [rank for rank in self.ranks if rank != self.self_rank]
        if not others:
            return None

        def limit_s(rank: int) -> float:
            """Return the silence, in seconds, of a lost rank. One that has not started yet may still be importing: it is lost later."""
            lost_s = self.limits.lost_s * (1 if rank in beats else 3)
            return min(lost_s, self.limits.suspect_s) if suspect else lost_s

        rank = max(others, key=lambda rank: (self._silence_s[rank] / limit_s(rank), -rank))
        if self._silence_s[rank] < limit_s(rank):
            return None
        beat = beats.get(rank)
        where = beat.where if beat else "the start of the program"
        verb = "in" if beat is None or beat.inside or not beat.name else "after"
        message = f"rank {rank} stopped answering {verb} {where}: nothing heard from it for {self._silence_s[rank]:.0f} s"
        return Finding(rank, message, beat, silent=True)

    def _find_stall(self, elapsed: float, beats: dict[int, Heartbeat]) -> Finding | None:
        if len(beats) < len(self.ranks) or len(self.ranks) < 2:
            return None
        progress = sum(beat.progress for beat in beats.values())
        is_same = progress == self._progress
        self._seconds_without_progress = self._seconds_without_progress + elapsed if is_same else 0.0
        self._progress = progress
        is_starting = all(beat.seq == 0 for beat in beats.values())  # models are loading: there are no calls to count
        if self._seconds_without_progress < self.limits.stall_s * (3 if is_starting else 1):
            return None
        culprit = min(beats.values(), key=lambda beat: (beat.seq, not beat.inside, beat.rank))
        message = f"no rank went on for {self._seconds_without_progress:.0f} s: {group_places(list(beats.values()))}"
        return Finding(culprit.rank, message, culprit)


def group_places(beats: Sequence[Heartbeat]) -> str:
    """Return the places of ranks in words.

    As in ``ranks 0, 1, 2 in actor.update_actor (call 17, ppo.py:31, step 3); rank 3 after critic.compute_values (...)``.
    """
    ranks_of_place: dict[str, list[int]] = {}
    for beat in sorted(beats, key=lambda beat: beat.rank):
        verb = "ended after" if beat.state == "ended" else "in" if beat.inside or not beat.name else "after"
        ranks_of_place.setdefault(f"{verb} {beat.where}", []).append(beat.rank)
    texts = []
    for place, ranks in ranks_of_place.items():
        numbers = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
        texts.append(f"rank{'s' if len(ranks) > 1 else ''} {numbers} {place}")
    return "; ".join(texts)
