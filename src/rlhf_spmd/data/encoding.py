"""Prompts (text or chat messages) to token ids, and the rendering of messages by a chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from itertools import takewhile
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

from rlhf_spmd.config.rules import Rule, Rules
from rlhf_spmd.config.words import first_line
from rlhf_spmd.data.files import DataError, RowError, named_row
from rlhf_spmd.data.messages import (
    NO_OPTIONS,
    ChatOptions,
    Message,
    all_arguments,
    argument_text,
    check_messages,
    check_variables,
    normalise_message,
    unread_variables,
    with_arguments,
)
from rlhf_spmd.data.tokenizer import PROBE, REFUSALS, TurnFrame, added_ids, encode, encode_continued, shared_length, turn_frame

ENCODE_ROWS = 1024  # texts per call of the tokenizer
LONG_TOKEN = 64  # characters; few tokens have more
TEMPLATE_FILE = "chat_template.jinja"  # transformers' names, beside a tokenizer
NAMED_TEMPLATES = "additional_chat_templates"  # a directory of further ones, such as tool_use.jinja
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")  # the template marks what the assistant generates
NOW = re.compile(r"""strftime_now\(\s*(?:"([^"]*)"|'([^']*)')\s*\)""")  # a template's call for today's date
ROLES = ("system", "user", "assistant", "tool")  # which templates know
ARGUMENTS_PROBE = {PROBE: PROBE}  # shows how a template writes an object
ROLE_PROBE = f"{PROBE}-OR-ANOTHER"
CharSpan = tuple[int, int]  # begin and end (exclusive) in the rendered text


@dataclass(frozen=True)
class EncodingConfig:
    """How a prompt becomes tokens; part of ``data``.

    - apply_chat_template: `auto`: messages go through the chat template, text stays as it is; `true`: text too, as one
      user message; `false`: messages are an error
    - chat_template: a file or Jinja text in place of the tokenizer's own template
    - chat_template_kwargs: variables of the chat template: `{enable_thinking: false}`
    - system_prompt: system message for messages that begin with none, nor with a developer's
    - template_date: the day, as `2026-01-31`, that templates write which ask for today's date; null: today, which a
      run that trains writes to its `config.yaml`
    """

    apply_chat_template: bool | Literal["auto"] = "auto"
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    system_prompt: str | None = None
    template_date: str | None = None

    rules: ClassVar[Rules] = (
        Rule(
            ("system_prompt", "apply_chat_template"),
            lambda s: s.system_prompt is not None and s.apply_chat_template is False,
            "only a chat template writes a system message",
            "set the second to true, or to auto with chat messages",
        ),
    )

    def check(self, where: str) -> None:
        check_variables(f"{where}.chat_template_kwargs", self.chat_template_kwargs)
        if self.template_date is not None:
            try:
                date.fromisoformat(self.template_date)
            except ValueError as error:
                raise ValueError(f"{where}.template_date={self.template_date!r} must be a day, such as 2026-01-31") from error

    def asks_for_date(self, tokenizer: Any) -> bool:
        """Return True if a template writes today's date. Raises DataError for a template's file."""
        template = read_template(self.chat_template, "data.chat_template")
        return "strftime_now" in str(template or getattr(tokenizer, "chat_template", None))

    def warnings(self, where: str, tokenizer: Any) -> list[str]:
        """Return a line for each variable that the template never reads. Raises DataError for a template's file."""
        template = read_template(self.chat_template, f"{where}.chat_template")
        return unread_variables(f"{where}.chat_template_kwargs".lstrip("."), self.chat_template_kwargs, tokenizer, template)


class PromptEncoder:
    """Renders and tokenises prompts. Raises DataError that names the row, or the tokenizer without a template.

    ``section``: the configuration's section in messages to the user, or "".
    """

    def __init__(self, tokenizer: Any, config: EncodingConfig, section: str = "data") -> None:
        self.tokenizer = tokenizer
        self.config = config
        self.key = f"{section}.chat_template".lstrip(".")
        self.template = read_template(config.chat_template, self.key)
        self._frames: dict[str, TurnFrame] = {}

    @property
    def frame(self) -> TurnFrame:
        """Return how the template opens and closes a turn of the assistant."""
        return self.frame_of(NO_OPTIONS)

    def frame_of(self, options: ChatOptions) -> TurnFrame:
        """Return how the template opens and closes a turn of the assistant with the row's variables."""
        variables = self._variables(options)
        key = json.dumps(variables, sort_keys=True)
        if key not in self._frames:
            self._frames[key] = turn_frame(self.tokenizer, self.template, **variables)
        return self._frames[key]

    @property
    def _remedy(self) -> str:
        """Return what to do about a template that cannot write what it should."""
        if "." in self.key:
            return f"give {self.key}, one that does"
        return f"put a {TEMPLATE_FILE} that does beside the tokenizer, or give LLM.chat its chat_template"

    def _variables(self, options: ChatOptions) -> dict[str, Any]:
        return {**self.config.chat_template_kwargs, **options.variables}

    def render(self, prompt: Any, options: ChatOptions = NO_OPTIONS) -> tuple[str, bool]:
        """Return the text to tokenise, and whether the template wrote it, special tokens included.

        A last message of the assistant is the beginning of its answer, which the response continues.
        """
        if isinstance(prompt, str):
            if not prompt:
                raise RowError("the prompt is empty")
            if options.tools and self.config.apply_chat_template == "auto":
                remedy = "set data.apply_chat_template=true, or false if the text tells of them"
                raise RowError(f"the prompt is text, and the model has tools: {remedy}")
            if self.config.apply_chat_template is not True:
                if self.config.system_prompt is not None:
                    raise RowError("data.system_prompt with a text prompt needs data.apply_chat_template=true")
                return prompt, False
            messages: list[Message] = [{"role": "user", "content": prompt}]
        else:
            messages = check_messages(prompt)
        messages = self.with_system(messages)
        continues = messages[-1]["role"] == "assistant"
        if continues and "tool_calls" in messages[-1]:
            raise RowError("the prompt ends with the assistant's calls of tools; give the messages that answer them")
        return self.apply_template(messages, not continues, options, continues), True

    def with_system(self, messages: list[Message]) -> list[Message]:
        """Return ``messages``, with the system prompt if they have none. Raises DataError if messages are not allowed."""
        if self.config.apply_chat_template is False:
            raise RowError("the prompt is chat messages, but data.apply_chat_template=false")
        if self.config.system_prompt is not None and messages[0]["role"] not in ("system", "developer"):
            return [{"role": "system", "content": self.config.system_prompt}, *messages]
        return messages

    def encode(
        self,
        prompts: Sequence[Any],
        wheres: Sequence[str],
        options: Sequence[ChatOptions] = (),
        max_characters: int | None = None,
        max_kept_tokens: int | None = None,
    ) -> list[tuple[list[int], str]]:
        """Return token ids and rendered text of each prompt; they are tokenised in batches.

        ``options``: tools and variables of each prompt. A prompt with more than ``max_kept_tokens`` is going to be
        dropped, so it may return its first ids only. Raises DataError before tokenising if a text is longer than
        ``max_characters``, because tokenising takes time and memory.
        """
        rendered = []
        for prompt, where, option in zip(prompts, wheres, options or [NO_OPTIONS] * len(prompts), strict=True):
            with named_row(where):
                rendered.append(self.render(prompt, option))
        for (text, _), where in zip(rendered, wheres, strict=True):
            if max_characters is not None and len(text) > max_characters:
                raise DataError(f"{where} has {len(text)} characters, and no more than {max_characters} can fit; shorten it")
        texts = [(self._first_part(text, max_kept_tokens), is_templated) for text, is_templated in rendered]
        from_template = self.tokenize([text for text, is_templated in texts if is_templated], special_tokens=False)
        from_text = self.tokenize([text for text, is_templated in texts if not is_templated], special_tokens=True)
        encoded = [(next(from_template if is_templated else from_text), text) for text, is_templated in rendered]
        for (tokens, _), where in zip(encoded, wheres, strict=True):
            if not tokens:
                raise RowError("the prompt has no tokens", where)
        return encoded

    def _first_part(self, text: str, max_tokens: int | None) -> str:
        """Return enough of a text to tell whether it has more than ``max_tokens``: tokenising megabytes takes minutes.

        This is the whole text without ``max_tokens``, or if the first part has few tokens (one token may stand for many
        characters).
        """
        if max_tokens is None:
            return text
        part = text[: LONG_TOKEN * max_tokens]
        # twice as many, because the last tokens of a part may differ from those of the whole text
        is_long = len(part) < len(text) and len(next(self.tokenize([part], special_tokens=False))) > 2 * max_tokens
        return part if is_long else text

    def tokenize(self, texts: Sequence[str], special_tokens: bool) -> Iterator[list[int]]:
        """Yield the token ids of each text.

        ``special_tokens``: prepend the tokenizer's own start tokens, unless the text begins with them. End tokens are
        never added: a prompt goes on, and a response's end has its own setting.
        """
        begin = added_ids(self.tokenizer)[0] if special_tokens else []
        for start in range(0, len(texts), ENCODE_ROWS):
            batch = list(texts[start : start + ENCODE_ROWS])
            for ids in self.tokenizer(batch, add_special_tokens=False, truncation=False, verbose=False)["input_ids"]:
                yield ids if ids[: len(begin)] == begin else [*begin, *ids]

    def tokenize_pairs(self, pairs: Sequence[tuple[str, str]], special_tokens: bool) -> Iterator[tuple[list[int], list[int]]]:
        """Yield the token ids of each prompt and response, tokenised as one text.

        A tokenizer may merge the prompt's last characters with the response's first. The prompt keeps the ids that it
        has both alone and in the whole text, so a token across the border belongs to the response. If that leaves no
        prompt, both are tokenised separately.
        """
        prompts = dict.fromkeys(prompt for prompt, _ in pairs)
        prompt_ids = dict(zip(prompts, self.tokenize(list(prompts), special_tokens), strict=True))
        whole_texts = self.tokenize([prompt + response for prompt, response in pairs], special_tokens)
        for (prompt, response), ids in zip(pairs, whole_texts, strict=True):
            length = shared_length(prompt_ids[prompt], ids)
            yield (ids[:length], ids[length:]) if length else (prompt_ids[prompt], encode(self.tokenizer, response))

    def ids_between_turns(
        self,
        last: int,
        messages: Sequence[Any],
        end_ids: Collection[int],
        options: ChatOptions = NO_OPTIONS,
        calls: Sequence[Message] = (),
    ) -> list[int]:
        """Return the tokens between a turn of the assistant, whose last token is ``last``, and the next one.

        A template's end-of-message token is left out if the turn has it already. ``calls``: of tools, in the turn.
        Raises DataError as :meth:`between_turns`.
        """
        text, text_without = self.between_turns(messages, options, calls)
        ids = encode_continued(self.tokenizer, text) or [last]  # a template may leave nothing of the messages
        # a token that the template writes behind each turn; others that end turns, as GLM's ``<|user|>``, begin the next message
        closes = ids[:1] == encode_continued(self.tokenizer, text_without)[:1]
        has_ended = ids[0] == last or (closes and {ids[0], last} <= set(end_ids))
        return ids[has_ended:]

    def between_turns(
        self, messages: Sequence[Any], options: ChatOptions = NO_OPTIONS, calls: Sequence[Message] = ()
    ) -> tuple[str, str]:
        """Return what the template writes between two texts of the assistant, with ``messages`` in between and without them.

        Raises DataError, also if the template leaves the messages out.
        """
        between = [normalise_message(message, number) for number, message in enumerate(messages)]
        probe: list[Message] = [{"role": "user", "content": "?"}, {"role": "assistant", "content": PROBE}]
        try:
            text = self.apply_template([*probe, *between], options=options).partition(PROBE)[2]
            text_without = self.apply_template(probe, options=options).partition(PROBE)[2]
        except DataError:
            if between[0]["role"] == "tool":
                with suppress(DataError):
                    return self._behind_calls(between, options, calls)
            raise
        if text == text_without:
            roles = ", ".join(sorted({repr(message["role"]) for message in between}))
            raise RowError(f"the chat template leaves out messages of the role {roles}")
        return text, text_without

    def _behind_calls(self, between: Sequence[Message], options: ChatOptions, calls: Sequence[Message]) -> tuple[str, str]:
        """Return the text from the token that ends the assistant's calls on, with messages behind them and without.

        It is for templates that refuse results without calls. The messages begin with results of tools, whose functions ``calls``
        name. Raises DataError if the template refuses the calls too, or if no added token ends them.
        """
        results = [*takewhile(lambda message: message["role"] == "tool", between)]
        names = {call.get("id"): call["function"]["name"] for call in calls}
        ids = [f"call{number:05}" for number in range(len(results))]  # Mistral's templates want nine letters and digits
        functions = [
            {"name": result.get("name") or names.get(result.get("tool_call_id"), "tool"), "arguments": {PROBE: PROBE}}
            for result in results
        ]
        stand_ins = [{"id": name, "type": "function", "function": call} for name, call in zip(ids, functions, strict=True)]
        probe: list[Message] = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": stand_ins}]
        answers = [{**result, "tool_call_id": name} for result, name in zip(results, ids, strict=True)]
        text_without = self.apply_template(probe, False, options).rpartition(PROBE)[2].rstrip()
        text = self.apply_template([*probe, *answers, *between[len(results) :]], options=options).rpartition(PROBE)[2]
        added = [token.content for token in self.tokenizer.added_tokens_decoder.values() if token.content.strip()]
        ending = max((token for token in added if text_without.endswith(token)), key=len, default="")
        if not ending or not text.startswith(text_without):
            raise RowError("the end of the assistant's calls cannot be told")
        return text[len(text_without) - len(ending) :], ending

    def source(self, options: ChatOptions) -> str:
        """Return the template for a row's tools, with ``template_date`` in it. Raises DataError if there is none."""
        if self.template is None and not getattr(self.tokenizer, "chat_template", None):
            remedy = "give LLM.chat its chat_template, send text to /v1/completions"
            remedy = f"set {self.key} to a Jinja file" if "." in self.key else remedy
            raise RowError(
                f"the prompt needs a chat template, and tokenizer '{self.tokenizer.name_or_path}' has none; "
                f"put {TEMPLATE_FILE} beside it, {remedy}, or use text prompts"
            )
        try:
            template = str(self.tokenizer.get_chat_template(self.template, options.tools))
        except ValueError as error:  # several templates, none of them the default
            raise RowError(f"{first_line(error)}; set {self.key}") from error
        if self.config.template_date is None:
            return template
        day = date.fromisoformat(self.config.template_date)
        return NOW.sub(lambda call: json.dumps(day.strftime(call[1] or call[2] or "")), template)

    def apply_template(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        options: ChatOptions = NO_OPTIONS,
        continues: bool = False,
    ) -> str:
        """Return the rendered text. Raises DataError.

        ``add_generation_prompt``: the text ends where an answer begins. ``continues``: it ends where the last message
        ends, without what closes its turn.
        """
        ends = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continues}

        def rendered(messages: list[Message], template: str, variables: dict[str, Any]) -> tuple[str, list[CharSpan]]:
            arguments = {"tokenize": False, "chat_template": template, **ends, **variables}
            return str(self.tokenizer.apply_chat_template(messages, options.tools, **arguments)), []

        return self._rendered(messages, options, rendered)[0]

    def marked_parts(self, messages: Sequence[Message], options: ChatOptions) -> tuple[str, list[CharSpan]]:
        """Return the rendered text, and what ``{% generation %}`` marks in it. Raises DataError."""
        from transformers.utils.chat_template_utils import render_jinja_template

        def rendered(messages: list[Message], template: str, variables: dict[str, Any]) -> tuple[str, list[CharSpan]]:
            arguments = {"chat_template": template, "return_assistant_tokens_mask": True, **self.tokenizer.special_tokens_map}
            (text,), (marks,) = cast(Any, render_jinja_template)([messages], options.tools, **arguments, **variables)
            return text, marks

        return self._rendered(messages, options, rendered)

    def _rendered(
        self,
        messages: Sequence[Message],
        options: ChatOptions,
        render: Callable[[list[Message], str, dict[str, Any]], tuple[str, list[CharSpan]]],
    ) -> tuple[str, list[CharSpan]]:
        """Return what ``render`` returns. Arguments of calls are objects, or text if the template cannot encode them."""
        from jinja2 import TemplateError, TemplateSyntaxError

        template = self.source(options)
        arguments = all_arguments(messages)
        variables = self._variables(options)
        if options.tools and "tools" not in template:
            raise RowError(f"the chat template does not tell the model of tools; {self._remedy}")
        if arguments and "tool_calls" not in template:
            raise RowError(f"the chat template does not write 'tool_calls'; {self._remedy}")
        plain = [{key: value for key, value in message.items() if key != "weight"} for message in messages]
        other_roles = [message["role"] for message in plain if message["role"] not in ROLES and message["content"].strip()]
        refusal: Exception | None = None
        for form in (plain, with_arguments(plain, argument_text)) if arguments else (plain,):
            try:
                text, marks = render(form, template, variables)
            except TemplateSyntaxError as error:
                tokenizer_template = f"the chat template of tokenizer '{self.tokenizer.name_or_path}'"
                owner = self.key if self.template else tokenizer_template
                raise DataError(f"{owner}, line {error.lineno}: not valid Jinja: {error.message}") from error
            except (TemplateError, *REFUSALS) as error:
                refusal = refusal or error
                continue
            if form is plain and any(value and repr(dict(value)) in text for value in arguments):
                probed = render(with_arguments(plain, lambda _: ARGUMENTS_PROBE), template, variables)
                if repr(ARGUMENTS_PROBE) in probed[0]:  # otherwise another message has that text
                    continue
            if other_roles:  # templates may pass over roles that they do not know
                probes = [{**message, "content": ROLE_PROBE} if message["role"] in other_roles else message for message in form]
                if render(probes, template, variables)[0].count(ROLE_PROBE) < len(other_roles):
                    roles = ", ".join(map(repr, dict.fromkeys(other_roles)))
                    raise RowError(f"the chat template leaves out messages of the role {roles}")
            return text, marks
        assert refusal is not None, "arguments as text are returned as they are written"
        raise RowError(f"the chat template refuses these messages: {first_line(refusal)}") from refusal


def check_ids(ids: Any, vocab_size: int | None, key: str) -> list[int]:
    """Return token ids from the data: a non-empty list of integers in [0, vocab_size). Raises DataError."""
    if not isinstance(ids, list) or not ids or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise RowError(f"'{key}' must be a non-empty list of token ids")
    if min(ids) < 0 or (vocab_size is not None and max(ids) >= vocab_size):
        wrong = min(ids) if min(ids) < 0 else max(ids)
        limit = "at least 0" if wrong < 0 else f"less than the vocabulary size {vocab_size}"
        raise RowError(f"token id {wrong} in '{key}' must be {limit}")
    return ids


def read_template(setting: str | None, key: str) -> str | None:
    """Return the Jinja text that ``key`` gives directly or as a file. Raises DataError."""
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
