"""Responses that follow a JSON schema, a regular expression, choices or a grammar, as a mask on the logits.

llguidance, an optional package, reads the grammar and says which tokens may come next. The mask is a logits processor: it depends on
the row's tokens alone, so all ranks of a replica have the same, also after a preemption.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Collection
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from rlhf_spmd.config.words import listed, printable
from rlhf_spmd.data.tokenizer import decode, encode_continued, token_bytes
from rlhf_spmd.kernels import on_device

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_GRAMMAR_BYTES = 1 << 16
MAX_ERROR_CHARACTERS = 300  # llguidance's words may repeat the grammar
# where JSON may have blanks there is at most one, or a model could write them without end; a schema's x-guidance goes first
JSON_OPTIONS: Any = {"whitespace_pattern": "[ ]?"}


@dataclass(frozen=True)
class StructuredOutputsParams:
    """What a response must be: exactly one of these, as in vLLM.

    - json: text that this JSON schema allows
    - regex: text that this regular expression, in Rust's syntax, matches from its first to its last character
    - choice: one of these texts
    - grammar: text of this grammar, in Lark's form
    - json_object: a JSON object
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def check(self, where: str) -> None:
        """Raise ValueError unless exactly one is given."""
        names = [each.name for each in fields(self)]
        asked = [name for name in names if getattr(self, name) not in (None, False, [])]
        if len(asked) != 1:
            raise ValueError(f"{where}: give exactly one of {listed(names)}; there is {listed(asked) or 'none'}")

    @cached_property  # the requests of many prompts share it
    def text(self) -> str:
        """Return the grammar as llguidance reads it. Raises ValueError."""
        from llguidance import LLMatcher

        if self.regex is not None:
            return LLMatcher.grammar_from_regex(self.regex)
        if self.choice:
            return LLMatcher.grammar_from_lark(f"start: {' | '.join(json.dumps(text) for text in self.choice)}")
        if self.grammar is not None:
            return LLMatcher.grammar_from_lark(self.grammar)
        schema: Any = {"type": "object"} if self.json is None else self.json
        return LLMatcher.grammar_from_json_schema(schema, defaults=JSON_OPTIONS)


class TokenTable:
    """The bytes of a tokenizer's tokens, in the form that llguidance asks for. ``num_ids``: only ids below it are drawn.

    The id ``num_ids`` is no token. In a mask it says that the response may end.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None
    special_token_ids = ()

    def __init__(self, tokenizer: Any, num_ids: int) -> None:
        from llguidance import LLTokenizer

        self.tokenizer = tokenizer
        self.eos_token_id = num_ids
        texts = decode(tokenizer, [[token] for token in range(num_ids)])
        # a token without bytes, such as a special one, is in no text
        self.tokens = [bytes(token_bytes(tokenizer, token, text) or ()) for token, text in enumerate(texts)] + [b""]
        self.for_matchers = LLTokenizer(self)  # type: ignore[arg-type]  # it reads these attributes

    @cached_property
    def bytes_of_tokens(self) -> frozenset[int]:
        """Return all bytes that the tokens have."""
        return frozenset(b"".join(self.tokens))

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of a text that a grammar leaves no choice about: those that the tokenizer makes, if they spell it."""
        ids = encode_continued(self.tokenizer, text)
        spelled = b"".join(self.tokens[token] for token in ids if token < self.eos_token_id)
        return ids if spelled == text.encode() else self.for_matchers.greedy_tokenize(text)


token_table = lru_cache(maxsize=8)(TokenTable)  # making one takes a second for 150,000 tokens


def _refusal(words: str) -> ValueError:
    line = printable(" ".join(words.split()))
    return ValueError(f"structured_outputs: {line[:MAX_ERROR_CHARACTERS]}")


@lru_cache(maxsize=32)
def _compile(text: str, tokenizer: Any, num_ids: int) -> LLMatcher:
    from llguidance import LLMatcher, LLParserLimits

    size = len(text.encode())
    if size > MAX_GRAMMAR_BYTES:
        raise ValueError(f"structured_outputs: the grammar has {size} bytes, and may have {MAX_GRAMMAR_BYTES}")
    limits = LLParserLimits(verbose_errors=False)
    matcher = LLMatcher(token_table(tokenizer, num_ids).for_matchers, text, log_level=0, limits=limits)
    if matcher.is_error():
        raise _refusal(matcher.get_error())
    matcher.compute_bitmask()  # before any work, since it may fail too
    if matcher.is_error():
        raise ValueError(
            "structured_outputs: no token of the model begins such a text, or finding those that do takes too long"
        )
    return matcher


def check_available(tokenizer: Any) -> None:
    """Raise ValueError if llguidance is not installed, or the model has no tokenizer."""
    if importlib.util.find_spec("llguidance") is None:
        raise ValueError("structured_outputs need the package: pip install llguidance")
    if tokenizer is None:
        raise ValueError("structured_outputs need a tokenizer, and this model has none")


def compile_grammar(params: StructuredOutputsParams, tokenizer: Any, num_ids: int) -> LLMatcher:
    """Return a matcher of no text yet, which rows copy. A grammar that was compiled a moment ago is not compiled again.

    Local; any thread may call. Raises ValueError, one line.
    """
    check_available(tokenizer)
    check_characters("".join(params.choice or ()), tokenizer, num_ids, "structured_outputs.choice")
    try:
        text = params.text
    except (TypeError, ValueError) as error:
        raise _refusal(str(error)) from error
    return _compile(text, tokenizer, num_ids)


def check_characters(text: str, tokenizer: Any, num_ids: int, where: str) -> None:
    """Raise ValueError for a character that no token has: a response that needs it would come to a dead end.

    Local; any thread may call. ``where``: stands before what is wrong.
    """
    check_available(tokenizer)
    known = token_table(tokenizer, num_ids).bytes_of_tokens
    if absent := next((character for character in text if not known.issuperset(character.encode())), None):
        raise ValueError(f"{where}: no token of the model has the character {absent!r}, which the response needs")


class GrammarMask:
    """Keeps one row inside a grammar: a logits processor.

    - compiled: what :func:`compile_grammar` returned for ``num_ids``
    - stop_ids: the tokens that end a response. They are allowed where the grammar may end, and alone where it must
    - thoughts_end: the token behind which the grammar begins; None: with the response

    A matcher has read ``token_ids``, the row's first tokens. Should others come, it begins anew.
    """

    def __init__(self, compiled: LLMatcher, num_ids: int, stop_ids: Collection[int], thoughts_end: int | None = None) -> None:
        self.compiled = compiled
        self.thoughts_end = thoughts_end
        self.num_ids = num_ids
        self.stop_ids = sorted(token for token in stop_ids if token < num_ids)
        self.matcher: LLMatcher | None = None  # rows that wait need none
        self.token_ids: list[int] = []

    def __call__(self, token_ids: list[int], logits: Tensor) -> Tensor:
        """Return ``logits`` with minus infinity for tokens that may not come next. Where none may, the response ends."""
        bits = self._allowed(token_ids)
        if bits is None:
            return logits
        allowed = np.zeros(len(logits), np.bool_)
        allowed[: self.num_ids] = bits[:-1]
        masked = logits.where(on_device(allowed, logits.device), -math.inf)
        if bits[-1]:
            masked[self.stop_ids] = logits[self.stop_ids]
        # no token goes on, or other rules, as ``min_tokens``, keep out all that may follow; a condition would wait for the device
        is_dead_end = masked.amax() == -math.inf
        masked[self.stop_ids] = masked[self.stop_ids].masked_fill(is_dead_end, 0.0)
        return masked

    def allows(self, token_ids: list[int]) -> bool:
        """Return False if the last of these tokens ended a response that the grammar does not let end there."""
        bits = self._allowed(token_ids[:-1])
        return bits is None or bool(bits[-1] or bits[token_ids[-1]])

    def _allowed(self, token_ids: list[int]) -> np.ndarray[Any, np.dtype[np.bool_]] | None:
        """Return for each id whether it may come next, and last whether the response may end: nothing, if llguidance gave up.

        None: the grammar has not begun.
        """
        if self.thoughts_end is not None:
            if self.thoughts_end not in token_ids:
                return None
            token_ids = token_ids[token_ids.index(self.thoughts_end) + 1 :]
        num_read = len(self.token_ids)
        if self.matcher is None or token_ids[:num_read] != self.token_ids:
            self.matcher = self.compiled.deep_copy()
            num_read = 0
        self.matcher.consume_tokens(token_ids[num_read:])
        self.token_ids = [*token_ids]
        packed = np.frombuffer(self.matcher.compute_bitmask(), np.uint8)
        if self.matcher.is_error():
            return np.zeros(self.num_ids + 1, np.bool_)
        return np.unpackbits(packed, count=self.num_ids + 1, bitorder="little").view(np.bool_)
