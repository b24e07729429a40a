"""Prompts (text or chat messages) and conversations to token ids."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from rlhf_spmd.config.schema import first_line
from rlhf_spmd.data.chat_variables import check_variables, unread_variables
from rlhf_spmd.data.files import DataError
from rlhf_spmd.data.tokenizer import PROBE, REFUSALS, Decoding, TurnFrame, added_ids, encode, turn_frame

ENCODE_ROWS = 1024  # texts per call of the tokenizer
LONG_TOKEN = 64  # characters; few tokens have more
TEMPLATE_FILE = "chat_template.jinja"  # transformers' name, beside a tokenizer


@dataclass(frozen=True)
class EncodingConfig:
    """How a prompt becomes tokens; part of ``data``.

    - apply_chat_template: `auto`: messages go through the chat template, text stays as it is; `true`: text too, as one
      user message; `false`: messages are an error
    - chat_template: a file or Jinja text in place of the tokenizer's own template
    - chat_template_kwargs: variables of the chat template: `{enable_thinking: false}`
    - system_prompt: system message for messages that have none
    """

    apply_chat_template: bool | str = "auto"
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    system_prompt: str | None = None

    def check(self, where: str) -> None:
        if self.apply_chat_template not in ("auto", True, False):
            raise ValueError(f"{where}.apply_chat_template={self.apply_chat_template!r} must be auto, true or false")
        if self.system_prompt is not None and self.apply_chat_template is False:
            raise ValueError(f"{where}.system_prompt needs {where}.apply_chat_template=true (or auto, with chat messages)")
        check_variables(f"{where}.chat_template_kwargs", self.chat_template_kwargs)

    def warnings(self, where: str, tokenizer: Any) -> list[str]:
        """Returns a line for each variable that the template never reads. Raises DataError for a template's file."""
        template = read_template(self.chat_template, f"{where}.chat_template")
        return unread_variables(f"{where}.chat_template_kwargs".lstrip("."), self.chat_template_kwargs, tokenizer, template)


class PromptEncoder:
    """Renders and tokenises prompts. Raises DataError that names the row, or the tokenizer without a template.

    ``section``: key of the configuration for messages, or "".
    """

    def __init__(self, tokenizer: Any, config: EncodingConfig, section: str = "data") -> None:
        self.tokenizer = tokenizer
        self.config = config
        self.key = f"{section}.chat_template".lstrip(".")
        self.template = read_template(config.chat_template, self.key)

    @cached_property
    def frame(self) -> TurnFrame:
        """How the template opens and closes a turn of the assistant."""
        return turn_frame(self.tokenizer, self.template, **self.config.chat_template_kwargs)

    def render(self, prompt: Any, where: str, tools: list[Any] | None = None) -> tuple[str, bool]:
        """Returns the text to tokenise, and whether the template wrote it, special tokens included."""
        if isinstance(prompt, str):
            if not prompt:
                raise DataError(f"{where}: the prompt is empty")
            if tools and self.config.apply_chat_template == "auto":
                remedy = "set data.apply_chat_template=true, or false if the text tells of them"
                raise DataError(f"{where}: the prompt is text, and the model has tools: {remedy}")
            if self.config.apply_chat_template is not True:
                if self.config.system_prompt is not None:
                    raise DataError(f"{where}: data.system_prompt with a text prompt needs data.apply_chat_template=true")
                return prompt, False
            messages: list[dict[str, Any]] = [{"role": "user", "content": prompt}]
        else:
            messages = check_messages(prompt, where)
        return self.apply_template(self.with_system(messages, where), where, tools=tools), True

    def with_system(self, messages: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
        """Returns ``messages``, with the system prompt if they have none. Raises DataError if messages are not allowed."""
        if self.config.apply_chat_template is False:
            raise DataError(f"{where}: the prompt is chat messages, but data.apply_chat_template=false")
        if self.config.system_prompt is not None and messages[0]["role"] != "system":
            return [{"role": "system", "content": self.config.system_prompt}, *messages]
        return messages

    def encode(
        self, prompts: Sequence[Any], wheres: Sequence[str], tools: Sequence[Any] = (), most_characters: int | None = None
    ) -> list[tuple[list[int], str]]:
        """Returns token ids and rendered text of each prompt; they are tokenised in batches.

        ``tools``: schemas (or None) of each prompt. A prompt that is going to be dropped for its length returns only
        its first ids. Raises DataError before tokenising if a text is longer than ``most_characters``, because
        tokenising takes time and memory.
        """
        rendered = [self.render(*one) for one in zip(prompts, wheres, tools or [None] * len(prompts), strict=True)]
        for (text, _), where in zip(rendered, wheres, strict=True):
            if most_characters is not None and len(text) > most_characters:
                raise DataError(f"{where} has {len(text)} characters, and no more than {most_characters} can fit; shorten it")
        read = [(self.first_part(text), templated) for text, templated in rendered]
        from_template = self.tokenize([text for text, templated in read if templated], special_tokens=False)
        from_text = self.tokenize([text for text, templated in read if not templated], special_tokens=True)
        encoded = [(next(from_template if templated else from_text), text) for text, templated in rendered]
        for (tokens, _), where in zip(encoded, wheres, strict=True):
            if not tokens:
                raise DataError(f"{where}: the prompt has no tokens")
        return encoded

    def first_part(self, text: str) -> str:
        """Returns enough of a text to tell whether the prompt is dropped for its length: tokenising megabytes takes
        minutes.

        Returns the whole text if nothing is dropped, or if the first part has few tokens (one token may stand for many
        characters).
        """
        if not getattr(self.config, "filter_overlong_prompts", False):
            return text
        most = self.config.max_prompt_length  # type: ignore[attr-defined]  # of PromptsConfig, beside the other
        part = text[: LONG_TOKEN * most]
        # twice as many, because the last tokens of a part may differ from those of the whole text
        cut = len(part) < len(text) and len(next(self.tokenize([part], special_tokens=False))) > 2 * most
        return part if cut else text

    def tokenize(self, texts: Sequence[str], special_tokens: bool) -> Iterator[list[int]]:
        """Yields the token ids of each text.

        ``special_tokens`` prepends the tokenizer's own start tokens, unless the text begins with them. End tokens are
        never added: a prompt goes on, and a response's end has its own setting.
        """
        begin = added_ids(self.tokenizer)[0] if special_tokens else []
        for start in range(0, len(texts), ENCODE_ROWS):
            batch = list(texts[start : start + ENCODE_ROWS])
            for ids in self.tokenizer(batch, add_special_tokens=False, truncation=False, verbose=False)["input_ids"]:
                yield ids if ids[: len(begin)] == begin else [*begin, *ids]

    def tokenize_pairs(self, pairs: Sequence[tuple[str, str]], special_tokens: bool) -> Iterator[tuple[list[int], list[int]]]:
        """Yields the token ids of each prompt and response, tokenised as one text.

        A tokenizer may merge the prompt's last characters with the response's first. The prompt keeps the ids that it
        has both alone and in the whole text, so a token across the border belongs to the response. If that leaves no
        prompt, both are tokenised separately.
        """
        prompts = dict.fromkeys(prompt for prompt, _ in pairs)
        alone = dict(zip(prompts, self.tokenize(list(prompts), special_tokens), strict=True))
        whole = self.tokenize([prompt + response for prompt, response in pairs], special_tokens)
        for (prompt, response), ids in zip(pairs, whole, strict=True):
            by_itself = alone[prompt]
            same = next(
                (i for i, (a, b) in enumerate(zip(by_itself, ids, strict=False)) if a != b), min(len(by_itself), len(ids))
            )
            yield (ids[:same], ids[same:]) if same else (by_itself, encode(self.tokenizer, response))

    def between_turns(self, messages: list[dict[str, Any]], where: str) -> str:
        """Returns what the template writes between two texts of the assistant, with ``messages`` in between.

        Raises DataError, also if the template leaves the messages out.
        """
        begun = [{"role": "user", "content": "?"}, {"role": "assistant", "content": PROBE}]
        said, silent = (self.apply_template([*begun, *more], where).partition(PROBE)[2] for more in (messages, []))
        if said == silent:
            roles = ", ".join(sorted({repr(message["role"]) for message in messages}))
            raise DataError(f"{where}: the chat template leaves out messages of the role {roles}")
        return said

    def apply_template(
        self, messages: list[dict[str, Any]], where: str, add_generation_prompt: bool = True, tools: list[Any] | None = None
    ) -> str:
        """Returns the rendered text. Raises DataError.

        ``add_generation_prompt``: ends where an answer begins. ``tools``: schemas of the tools that the model is told
        about.
        """
        from jinja2 import TemplateError, TemplateSyntaxError

        if self.template is None and not getattr(self.tokenizer, "chat_template", None):
            given = f"set {self.key} to a Jinja file" if "." in self.key else "give LLM.chat its chat_template"
            remedy = f"put {TEMPLATE_FILE} beside it, {given}"
            raise DataError(
                f"{where}: the prompt needs a chat template, and tokenizer '{self.tokenizer.name_or_path}' has none; "
                f"{remedy}, or use text prompts"
            )
        if tools and "tools" not in self.tokenizer.get_chat_template(self.template, tools):
            raise DataError(f"{where}: the chat template does not tell the model of tools; give {self.key}, one that does")
        try:
            options = {"tokenize": False, "add_generation_prompt": add_generation_prompt, "chat_template": self.template}
            text = self.tokenizer.apply_chat_template(messages, tools, **options, **self.config.chat_template_kwargs)
        except TemplateSyntaxError as error:
            its = f"the chat template of tokenizer '{self.tokenizer.name_or_path}'"
            owner = self.key if self.template else its
            raise DataError(f"{owner}, line {error.lineno}: not valid Jinja: {error.message}") from error
        except (TemplateError, *REFUSALS) as error:
            raise DataError(f"{where}: the chat template refuses these messages: {first_line(error)}") from error
        return str(text)


def check_messages(prompt: Any, where: str) -> list[dict[str, Any]]:
    """Returns a list of ``{"role": ..., "content": text}`` without keys whose value is None (parquet adds those). Raises
    DataError."""
    if not isinstance(prompt, Sequence) or isinstance(prompt, (str, bytes)):
        raise DataError(f"{where}: a prompt must be text or a list of chat messages, not {type(prompt).__name__}")
    if not prompt:
        raise DataError(f"{where}: the prompt is an empty list of messages")
    for number, message in enumerate(prompt):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DataError(f"{where}: message {number} must be an object with 'role' and 'content'")
        if not isinstance(message.get("content"), str):
            raise DataError(
                f"{where}: the content of message {number} must be text, not {type(message.get('content')).__name__}"
            )
    return [{key: value for key, value in message.items() if value is not None} for message in prompt]


def check_ids(ids: Any, vocab_size: int | None, where: str, key: str) -> list[int]:
    """Returns token ids from the data: a non-empty list of integers in [0, vocab_size). Raises DataError."""
    if not isinstance(ids, list) or not ids or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise DataError(f"{where}: '{key}' must be a non-empty list of token ids")
    if min(ids) < 0 or (vocab_size is not None and max(ids) >= vocab_size):
        wrong = min(ids) if min(ids) < 0 else max(ids)
        limit = "at least 0" if wrong < 0 else f"less than the vocabulary size {vocab_size}"
        raise DataError(f"{where}: token id {wrong} in '{key}' must be {limit}")
    return ids


def read_template(setting: str | None, key: str) -> str | None:
    """Returns the Jinja text that ``key`` gives directly or as a file. Raises DataError."""
    if setting is None:
        return None
    if "{" in setting:
        return setting
    try:
        return Path(setting).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{key}='{setting}' is neither Jinja text (it has no '{{') nor a file that can be read: {error}"
        ) from error


MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")  # the template marks what the assistant generates
CharSpan = tuple[int, int]  # begin and end (exclusive) in the rendered text
MaskedPair = tuple[list[int], list[int], list[bool]]  # prompt ids, response ids, response mask


def end_ids(tokenizer: Any, append_eos: bool) -> list[int]:
    """Returns the end token of a response if wanted. Raises DataError if the tokenizer has none."""
    if append_eos and tokenizer.eos_token_id is None:
        raise DataError(f"tokenizer '{tokenizer.name_or_path}' has no eos token; set data.append_eos=false")
    return [int(tokenizer.eos_token_id)] if append_eos else []


class ConversationEncoder:
    """Tokenises conversations, with a mask of the tokens to learn: those of the assistant's turns from message ``first``
    on.

    If the template has ``{% generation %}``, the mask is that of transformers' ``return_assistant_tokens_mask``.
    Otherwise the template renders the messages before a turn with the generation prompt, and those up to the turn: the
    difference, up to the token that closes the turn, is learnt. The whole conversation must begin with these
    renderings. One case is exempt: if only the last turn is learnt, its text is put behind the generation prompt, as in
    generation.
    """

    def __init__(self, encoder: PromptEncoder) -> None:
        self.encoder, self.tokenizer = encoder, encoder.tokenizer
        if not getattr(self.tokenizer, "is_fast", False):
            raise DataError(
                f"conversations need a fast tokenizer (tokenizer.json), which '{self.tokenizer.name_or_path}' is not: it must say "
                "which characters a token stands for"
            )
        self._special = Decoding(self.tokenizer).special_ids
        self._marked = bool(MARKED.search(self.tokenizer.get_chat_template(encoder.template) if self._has_template else ""))

    @property
    def _has_template(self) -> bool:
        return bool(self.encoder.template or getattr(self.tokenizer, "chat_template", None))

    def encode(self, given: Sequence[Any], first: int, where: str) -> tuple[list[int], list[bool]]:
        """Returns token ids and the mask of those to learn. Raises DataError."""
        messages = self.encoder.with_system(check_messages(given, where), where)
        first += len(messages) - len(given) if first else 0
        text = self.encoder.apply_template(messages, where, add_generation_prompt=False)
        turns = [number for number, message in enumerate(messages) if number >= first and message["role"] == "assistant"]
        if not self._marked and turns == [len(messages) - 1]:
            prompt, frame = self._before(messages, turns[0], where), self.encoder.frame
            if not text.startswith(prompt):
                text = prompt + frame.opening + self._after(prompt, messages, where) + frame.closing
        encoded = self.tokenizer(text, add_special_tokens=False, truncation=False, verbose=False, return_offsets_mapping=True)
        ids, places = encoded["input_ids"], encoded["offset_mapping"]
        if self._marked:
            options: dict[str, Any] = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
            options |= {"chat_template": self.encoder.template, **self.encoder.config.chat_template_kwargs}
            found = self.tokenizer.apply_chat_template(messages, **options)
            start = len(self._prefix(messages, first, text, where)) if first else 0
            mask = [bool(said) and at >= start for said, (at, _) in zip(found["assistant_masks"], places, strict=True)]
        else:
            spans = [self._turn(messages, number, text, where) for number in turns]
            added = self.tokenizer.added_tokens_decoder  # an added token may swallow the blanks that begin a response
            mask = [
                any(at < end and start < to and not (at < start and token in added) for start, end in spans)
                for token, (at, to) in zip(ids, places, strict=True)
            ]
        if not any(mask):
            raise DataError(f"{where}: no message is the assistant's, or none of its tokens; there is nothing to learn from")
        return ids, mask

    def encode_pair(self, messages: Sequence[Any], first: int, where: str, end: list[int]) -> MaskedPair:
        """Splits the conversation into prompt and response; the response spans the first to the last token to learn.

        ``end`` is appended if the template writes no end of its own. Raises DataError.
        """
        ids, mask = self.encode(messages, first, where)
        start, stop = max(mask.index(True), 1), len(mask) - mask[::-1].index(True)
        if start == stop:
            raise DataError(f"{where}: the response has no tokens")
        own = [] if ids[stop - 1] in self._special.values() else end
        return ids[:start], [*ids[start:stop], *own], [*mask[start:stop], *(True for _ in own)]

    def _after(self, prompt: str, messages: Sequence[dict[str, Any]], where: str) -> str:
        """Returns the part of the last message that follows a generation prompt which begins it.

        Templates of reasoning models open ``<think>`` in the generation prompt, and the data may repeat it. Raises
        DataError if the message closes no such part.
        """
        probed = [*messages[:-1], {**messages[-1], "content": PROBE}]
        header = self.encoder.apply_template(probed, where, add_generation_prompt=False).partition(PROBE)[0]
        begun, content = prompt.removeprefix(header) if prompt.startswith(header) else "", str(messages[-1]["content"])
        if begun.strip() and content.lstrip().startswith(begun.strip()):
            return content.lstrip().removeprefix(begun.strip()).removeprefix("\n" * begun.endswith("\n"))
        for name in re.findall(r"<(\w+)>", begun):
            if f"</{name}>" not in content:
                raise DataError(
                    f"{where}: the generation prompt ends with {begun!r}, and the response has no </{name}>, so all of it would be "
                    "learnt as thoughts; give the thoughts, or a data.chat_template that does not begin them"
                )
        return content

    def _before(self, messages: list[dict[str, Any]], number: int, where: str) -> str:
        """Returns what is rendered before the content of message ``number``, the assistant's."""
        if number:
            return self.encoder.apply_template(messages[:number], where, add_generation_prompt=True)
        # no template renders a conversation without messages: what it writes before the content is the header
        return self.encoder.apply_template([{**messages[0], "content": PROBE}], where, False).partition(PROBE)[0]

    def _prefix(self, messages: list[dict[str, Any]], number: int, text: str, where: str) -> str:
        """Like :meth:`_before`. Raises DataError if the text does not begin with it."""
        before = self._before(messages, number, where)
        if not text.startswith(before):
            raise self._not_nested(number, where)
        return before

    def _turn(self, messages: list[dict[str, Any]], number: int, text: str, where: str) -> CharSpan:
        """Returns the characters of the assistant's message ``number`` that are learnt."""
        start = len(self._prefix(messages, number, text, where))
        if number == len(messages) - 1:
            whole = text
        else:
            whole = self.encoder.apply_template(messages[: number + 1], where, add_generation_prompt=False)
        whole = whole.removesuffix(self.encoder.frame.rest)
        if not text.startswith(whole) or len(whole) < start:
            raise self._not_nested(number, where)
        said = whole[start:].rstrip()
        return start, start + len(said) if said.endswith(tuple(self._special)) else len(whole)

    def _not_nested(self, number: int, where: str) -> DataError:
        return DataError(
            f"{where}: the chat template renders the messages before message {number} otherwise than inside the whole conversation, so "
            "the assistant's part cannot be told; set data.chat_template to one with {% generation %} around what the assistant says"
        )
