"""Loads a tokenizer from a local directory, without network or remote code; finds the tokens that end a response."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_spmd.config.json_input import parse_json
from rlhf_spmd.config.words import first_line
from rlhf_spmd.data.files import DataError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json")

UNFINISHED = "\ufffd"  # what a tokenizer writes for an incomplete character


def load_tokenizer(path: str | Path, required: bool = True) -> Any:
    """Return the tokenizer in a Hugging Face directory (Any, because its files choose the class).

    Returns None if there is none and ``required`` is false. Raises DataError, one line.
    """
    directory = Path(path).expanduser()
    if not directory.is_dir():
        raise DataError(f"tokenizer directory '{path}' does not exist")
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        if not required:
            return None
        raise DataError(f"'{path}' holds no tokenizer; looked for {', '.join(TOKENIZER_FILES)}")
    try:
        return _tokenizer_class(directory).from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, RecursionError) as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise DataError(f"the tokenizer in '{path}' cannot be loaded: {reason}") from error


def _tokenizer_class(directory: Path) -> Any:
    """Return transformers' class for these files.

    ``AutoTokenizer`` would choose the general class for the families below anyway, but it imports torch's compiler and
    a model server first, which costs each rank more than a second.
    """
    files: dict[str, dict[str, Any]] = {}
    for name in ("config.json", "tokenizer_config.json"):
        with suppress(OSError, ValueError):
            files[name] = parse_json((directory / name).read_bytes())
    settings = files.get("tokenizer_config.json", {})
    general = settings.get("tokenizer_class") in ("PreTrainedTokenizerFast", "TokenizersBackend") and "auto_map" not in settings
    family = files.get("config.json", {}).get("model_type")
    if general and family in ("llama", "qwen3", "qwen3_moe") and (directory / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def decode(tokenizer: Any, rows: Sequence[Sequence[int]], skip_special_tokens: bool = True) -> list[str]:
    """Return the text of each row of token ids as it continues other text, like a response; spaces are kept.

    SentencePiece tokenizers drop a leading space. So each row is decoded behind a word, and the word is removed.
    """
    options = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
    word_ids, word = _word_before(tokenizer)
    return [tokenizer.decode([*word_ids, *map(int, ids)], **options)[len(word) :] for ids in rows]


@lru_cache(maxsize=8)
def _word_before(tokenizer: Any) -> tuple[list[int], str]:
    """Return a word that the tokenizer round-trips, and its token ids; empty if it has none."""
    for word in ("a", "1", "A", "."):
        ids = encode(tokenizer, word)
        if ids and tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False) == word:
            return ids, word
    return [], ""


def prompt_texts(tokenizer: Any, prompts: Sequence[list[int]]) -> list[str]:
    """Decode prompts without the start tokens that the tokenizer adds; tokens of a chat template are shown.

    Returns empty texts without a tokenizer.
    """
    if tokenizer is None:
        return [""] * len(prompts)
    begin, _ = added_ids(tokenizer)
    without_start = [ids[len(begin) * (ids[: len(begin)] == begin) :] for ids in prompts]
    return [tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) for ids in without_start]


@lru_cache(maxsize=8)
def added_ids(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the special tokens that the tokenizer puts before and after a text."""
    without_special, word = _word_before(tokenizer)
    with_special = list(tokenizer(word)["input_ids"])
    length = len(without_special)
    for start in range(len(with_special) - length + 1):
        if without_special and with_special[start : start + length] == without_special:
            return with_special[:start], with_special[start + length :]
    end = with_special[-1:] if with_special[-1:] == [tokenizer.eos_token_id] else []
    return with_special[: len(with_special) - len(end)], end


@lru_cache(maxsize=8)
def added_tokens(tokenizer: Any) -> dict[str, int]:
    """Return the tokens that were added to the vocabulary, but for the runs of blanks that some have among them."""
    return {added.content: token for token, added in tokenizer.added_tokens_decoder.items() if added.content.strip()}


def added_places(tokenizer: Any, ids: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return each added token of a response: its id, and where it begins and ends in the text with special tokens."""
    names = {token: name for name, token in added_tokens(tokenizer).items()}
    runs = [(is_added, list(run)) for is_added, run in groupby(ids, names.__contains__)]
    texts = iter(decode(tokenizer, [run for is_added, run in runs if not is_added], skip_special_tokens=False))
    places, end = list[tuple[int, int, int]](), 0
    for is_added, run in runs:
        for token in run if is_added else ():
            places.append((token, end, end := end + len(names[token])))
        end += 0 if is_added else len(next(texts))
    return places


def spelled_marks(tokenizer: Any, ids: list[int], text: str) -> dict[str, list[int]]:
    """Return where added tokens begin in ``text``, that of ``ids`` with special tokens, by their own text.

    Only for tokens whose text other tokens spell there, too.
    """
    starts: dict[str, list[int]] = {}
    for mark, token in added_tokens(tokenizer).items():
        if mark in text and text.count(mark) > ids.count(token):
            starts[mark] = [begin for token_id, begin, _ in added_places(tokenizer, ids) if token_id == token]
    return starts


def shared_length(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return how many characters, tokens or messages both sequences begin with."""
    return next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))


@lru_cache(maxsize=8)
def longest_token(tokenizer: Any) -> int:
    """Return the length of the vocabulary's longest token, in characters; its text is no longer."""
    return max(map(len, tokenizer.get_vocab()))


@cache
def byte_alphabet() -> dict[str, int]:
    """Return GPT-2's table: how byte-level BPE writes each byte in its vocabulary."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = sorted({*range(256)} - {*printable})
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def token_bytes(tokenizer: Any, token: int, text: str) -> list[int] | None:
    """Return the bytes of a token whose own text is ``text``, or None if the vocabulary does not tell them."""
    if UNFINISHED not in text:
        return list(text.encode())
    piece = str(tokenizer.convert_ids_to_tokens(token))
    alphabet = byte_alphabet()
    if re.fullmatch("<0x[0-9A-F]{2}>", piece):  # SentencePiece's fallback
        return [int(piece[3:5], 16)]
    return [alphabet[character] for character in piece] if alphabet.keys() >= {*piece} else None


def encode(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of a text alone, without added special tokens (those written in the text are recognised)."""
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
    return ids


def encode_continued(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of a text that continues other text, like an observation; see :func:`decode`.

    SentencePiece tokenizers put a space before what begins a text. There the text is tokenised behind a character that
    does not merge with it.
    """
    word_ids, word = _word_before(tokenizer)
    if not text or decode(tokenizer, [word_ids])[0] == word:
        return encode(tokenizer, text)
    for character in (".", "a", "1", ")", "\n"):
        start = encode(tokenizer, character)
        ids = encode(tokenizer, character + text)
        if start and ids[: len(start)] == start:
            return ids[len(start) :]
    return encode(tokenizer, text)


@lru_cache(maxsize=8)
def _special_ids(tokenizer: Any) -> dict[str, int]:
    return {token.content: number for number, token in tokenizer.added_tokens_decoder.items() if token.special}


@dataclass(frozen=True)
class Decoding:
    """Decodes the token ids of one row, as :func:`decode` does."""

    tokenizer: Any

    def __call__(self, ids: Sequence[int]) -> str:
        return decode(self.tokenizer, [ids])[0]

    @cached_property
    def special_ids(self) -> dict[str, int]:
        """Return the ids of the special tokens, which text does not show, by their names."""
        return _special_ids(self.tokenizer)


def decoding(tokenizer: Any) -> Decoding | None:
    """Return the decoding of ``tokenizer``; None without one."""
    return None if tokenizer is None else Decoding(tokenizer)


# a template is a program: what it may raise for messages that it refuses, besides jinja's TemplateError
REFUSALS = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
PROBE = "A-TURN-OF-THE-MODEL"  # which no template writes by itself


class TurnFrame(NamedTuple):
    """What a template writes around the assistant's message, after the generation prompt.

    - opening: text before the content (Llama 2 has a space)
    - closing: text behind the content, up to the first token that was added to the vocabulary (``<|im_end|>``); without
      such a token all text there
    - after_closing: text behind ``closing``
    - end_id: id of that token; None without one
    - prompt_thoughts: the generation prompt from its first tag of thoughts on (``<think>\\n``); "" if it has none
    - tag: the name in that tag; "" if there is none
    """

    opening: str
    closing: str
    after_closing: str
    end_id: int | None
    prompt_thoughts: str = ""
    tag: str = ""

    @property
    def opens_thoughts(self) -> bool:
        """Return True if the generation prompt leaves the thoughts open."""
        thoughts = self.prompt_thoughts
        return bool(self.tag) and thoughts.rfind(f"<{self.tag}>") > thoughts.rfind(f"</{self.tag}>")


NO_TURN = TurnFrame("", "", "", None)


def turn_frame(tokenizer: Any, template: str | None = None, **arguments: Any) -> TurnFrame:
    """Return the frame of ``template``, by default the tokenizer's own; ``arguments`` are the template's variables.

    Returns ``NO_TURN`` without a template, or if it refuses a plain question and answer.
    """
    from jinja2 import TemplateError

    if template is None and not getattr(tokenizer, "chat_template", None):
        return NO_TURN
    question = [{"role": "user", "content": "?"}]
    answered = [*question, {"role": "assistant", "content": PROBE}]
    options = {"tokenize": False, "chat_template": template, **arguments}
    try:
        question_text = tokenizer.apply_chat_template(question, add_generation_prompt=False, **options)
        prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, **options)
        answered_text = tokenizer.apply_chat_template(answered, add_generation_prompt=False, **options)
    except (TemplateError, *REFUSALS):
        return NO_TURN
    before, _, after = answered_text.partition(PROBE)
    # some vocabularies have runs of blanks among their added tokens
    added = {token.content: number for number, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}
    places = [(after.find(text), -len(text), text) for text in added if text in after]
    opening = before[len(prompt) :] if before.startswith(prompt) else ""
    thoughts = _thoughts(question_text, prompt, answered_text)
    if not places:
        return TurnFrame(opening, after, "", None, *thoughts)
    start, _, text = min(places)
    stop = start + len(text)
    return TurnFrame(opening, after[:stop], after[stop:], added[text], *thoughts)


def _thoughts(question: str, prompt: str, answered: str) -> tuple[str, str]:
    """Return the generation prompt from its first tag of thoughts on, and the tag's name; "" and "" without a tag.

    ``question``: the text without a generation prompt; ``prompt``: with it; ``answered``: with an answer. Marks of
    roles may look like tags: they are in the question, or they open the answer and are never closed.
    """
    start = shared_length(question, prompt)
    for mark in re.finditer(r"</?(\w[\w:-]*)>", prompt[start:]):
        opening, closing = f"<{mark[1]}>", f"</{mark[1]}>"
        if opening not in question and (opening not in answered or closing in answered):
            return prompt[start + mark.start() :], mark[1]
    return "", ""


def end_token_ids(tokenizer: Any, template: str | None = None) -> tuple[int, ...]:
    """Return the sorted ids of the tokens that end a response: the end token, and the one that closes the assistant's turn.

    Without a tokenizer there are none.
    """
    if tokenizer is None:
        return ()
    ids = {getattr(tokenizer, "eos_token_id", None), turn_frame(tokenizer, template).end_id}
    return tuple(sorted(token for token in ids if token is not None))
