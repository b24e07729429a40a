"""Episodes of agents as ``report.html`` shows them: conversations with their branches, each token once.

A row of rollouts.jsonl is a path from a root to a leaf. Paths of an episode share the turns before they part, and each token is learned
in one of them. Here an episode becomes segments: the tokens of a row that no earlier row has, and where they go on from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_spmd.telemetry.run_dir import EXPORT_DIR, equal_runs, finite_number

MAX_EPISODES = 4  # of a step
MAX_TOKENS = 2000  # of an episode
NUM_VERSION_COLORS = 6
# logarithms of about 0.9, 0.5, 0.1 and 0.01: a log-prob above the first has shade 0, one below the last shade 4
LOG_PROB_STEPS = (-0.1, -0.7, -2.3, -4.6)
MAX_ID = 1 << 31
TOKENIZER_FILE = "tokenizer.json"

Decode = Callable[[list[int]], str]


class TokenRow(NamedTuple):
    """A line of rollouts.jsonl with its tokens. The last four have an entry for each token.

    - episode: row id of the episode; without agents that of the row
    - mask: the model drew the token, and this row learns it
    - versions: step of the weights; None for the first tokens, which no model drew
    """

    episode: int
    line: Mapping[str, Any]
    ids: list[int]
    mask: list[bool]
    log_probs: list[float]
    versions: list[int | None]


class Branch(NamedTuple):
    """A row's place among those of its episode.

    - origin: number of the row's branch that it goes on from; None: it begins a conversation
    - begin: the first token that no earlier row has
    - was_drawn: of each token, whether this or an earlier row learns it
    """

    origin: int | None
    begin: int
    was_drawn: list[bool]


def page_episodes(lines: Sequence[Mapping[str, Any]], directory: Path, model: str | None) -> list[dict[str, Any]]:
    """Return what report_episodes.js reads: episodes of the first and the last step that has any.

    - lines: of rollouts.jsonl; those without ``ids``, ``mask`` and ``log_probs`` are left out
    - directory, model: the run's directory and its actor's path, one of which may have the tokenizer
    """
    lines = [line for line in lines if isinstance(line.get("ids"), list)]
    steps = sorted({line["step"] for line in lines})
    decode = _decoder([directory / EXPORT_DIR, *([Path(model)] if model else [])]) if lines else None
    episodes = []
    for step in dict.fromkeys([*steps[:1], *steps[-1:]]):
        by_episode: dict[int, list[TokenRow]] = {}
        for line in lines:
            if line["step"] == step and (row := _token_row(line)) is not None:
                by_episode.setdefault(row.episode, []).append(row)
        for key in sorted(by_episode)[:MAX_EPISODES]:
            episodes.append(_episode(sorted(by_episode[key], key=lambda row: row.line["row_id"]), decode))
    return episodes


def branches(rows: Sequence[TokenRow]) -> list[Branch]:
    """Return the place of each row: it goes on from the earlier one with which it has most tokens in common.

    It parts from that row where a turn begins, at the latest at the first token that it learns.
    """
    placed: list[Branch] = []
    for row in rows:
        first_learned = row.mask.index(True) if True in row.mask else len(row.ids)
        begins = [_shared(row.ids, rows[n].ids, first_learned, branch.was_drawn) for n, branch in enumerate(placed)]
        begin = max(begins, default=0)
        origin = begins.index(begin) if begin else None
        shared = placed[origin].was_drawn[:begin] if origin is not None else []
        placed.append(Branch(origin, begin, [*shared, *row.mask[begin:]]))
    return placed


def token_texts(ids: Sequence[int], decode: Decode) -> list[str]:
    """Return the text of each token behind those before it. Of a character that several tokens make, the last has it."""
    texts: list[str] = []
    begin = 0  # tokens before it are left out of the text: they change nothing
    shown = ""  # of the tokens from ``begin`` on
    for end in range(1, len(ids) + 1):
        text = decode([*ids[begin:end]])
        is_whole = not text.endswith("\ufffd") or end - begin > 8  # which is no part of a character
        texts.append(text[len(shown) :] if is_whole else "")
        if is_whole:
            begin, shown = end - 1, decode([ids[end - 1]])
    return texts


def _token_row(line: Mapping[str, Any]) -> TokenRow | None:
    """Return a line with its tokens; None if it has none, or damaged ones."""
    row_id = line.get("row_id")
    episode = line.get("episode", row_id)
    if not (isinstance(row_id, int) and isinstance(episode, int)):
        return None
    ids, mask, log_probs = line.get("ids"), line.get("mask"), line.get("log_probs")
    if not (isinstance(ids, list) and isinstance(mask, list) and isinstance(log_probs, list)):
        return None
    if not len(ids) == len(mask) == len(log_probs) or not all(isinstance(token, int) and 0 <= token < MAX_ID for token in ids):
        return None
    runs = line.get("versions")
    pairs = [run for run in runs if isinstance(run, list)] if isinstance(runs, list) else []
    pairs = [pair for pair in pairs if len(pair) == 2 and all(isinstance(number, int) for number in pair)]
    versions = [version for version, count in pairs for _ in range(min(count, len(ids)))]
    before = [None] * (len(ids) - len(versions))
    values = [finite_number(value) or 0.0 for value in log_probs]
    return TokenRow(episode, line, ids, list(map(bool, mask)), values, [*before, *versions][: len(ids)])


def _shared(ids: Sequence[int], others: Sequence[int], limit: int, was_drawn: Sequence[bool]) -> int:
    """Return how many tokens two rows have in common, up to the last end of a turn, or of what is read before one."""
    length = next((i for i, (one, two) in enumerate(zip(ids, others, strict=False)) if one != two), min(len(ids), len(others)))
    ends = [end for _, _, end in equal_runs(was_drawn)]
    return max((end for end in ends if end <= min(length, limit)), default=0)


def _episode(rows: Sequence[TokenRow], decode: Decode | None) -> dict[str, Any]:
    """Return an episode for the page: what is known of it, and its segments in the order of their rows."""
    line = rows[0].line
    facts = {key: line[key] for key in ("step", "ending", "score", "answer") if line.get(key) is not None}
    segments = []
    room = MAX_TOKENS
    for row, branch in zip(rows, branches(rows), strict=True):
        end = min(len(row.ids), branch.begin + room)
        room -= end - branch.begin
        turns_before = sum(was_drawn for was_drawn, _, _ in equal_runs(branch.was_drawn[: branch.begin]))
        segments.append(
            {
                "origin": branch.origin,
                "turns_before": turns_before,
                "turns": [*_turns(row, branch.begin, end, decode)],
                "left_out": len(row.ids) - end,
            }
        )
    return {"episode": rows[0].episode, **facts, "segments": segments}


def _turns(row: TokenRow, begin: int, end: int, decode: Decode | None) -> Iterator[list[list[str]]]:
    """Yield the turns of a segment as lists of pieces: text, classes, and what a pointer shows.

    A piece is a token, or neighbours that are not learned here.
    """
    ids = row.ids[begin:end]
    texts = token_texts(ids, decode) if decode else [f"[{token}]" for token in ids]
    for is_learned, numbers in groupby(range(begin, end), key=lambda i: row.mask[i]):
        turn = []
        for version, same in groupby(numbers, key=lambda i: row.versions[i]):
            note = "" if version is None else f", weights of step {version}"
            color = "" if version is None else f" v{version % NUM_VERSION_COLORS}"
            if not is_learned:
                tokens = [*same]
                text = "".join(texts[i - begin] for i in tokens)
                turn.append([text, f"m0{color}", f"{len(tokens)} token{'s' * (len(tokens) > 1)}, not learned here{note}"])
                continue
            for i in same:
                value = row.log_probs[i]
                turn.append([texts[i - begin], f"m1 p{shade(value)}{color}", f"token {row.ids[i]}, log-prob {value:.3g}{note}"])
        yield turn


def shade(log_prob: float) -> int:
    """Return the number of a log-prob's colour: 0 for what the model was sure of."""
    return sum(log_prob < step for step in LOG_PROB_STEPS)


def _decoder(directories: Sequence[Path]) -> Decode | None:
    """Return the decoding of the first tokenizer that one of the directories has; None without one."""
    file = next((path for directory in directories if (path := directory / TOKENIZER_FILE).is_file()), None)
    return None if file is None else _read_decoder(file)


@lru_cache(maxsize=8)  # a page that is served asks again and again
def _read_decoder(file: Path) -> Decode | None:
    """Return the decoding of a tokenizer's file; None if it cannot be read."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception:  # the package raises no other; tokens are shown by their numbers then
        return None
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))
