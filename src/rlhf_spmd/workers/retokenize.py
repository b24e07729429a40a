"""Rows for a reward model or judge with its own tokenizer: decoded, rendered through its template, tokenised again."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from rlhf_spmd.data.batch import Batch, decode_json, ragged
from rlhf_spmd.data.conversations import build_conversation
from rlhf_spmd.data.encoding import EncodingConfig, PromptEncoder
from rlhf_spmd.data.files import named_row
from rlhf_spmd.data.messages import check_messages
from rlhf_spmd.data.reasoning import strip_reasoning
from rlhf_spmd.data.tokenizer import Decoding, decode, end_token_ids, load_tokenizer
from rlhf_spmd.rewards.config import RewardConfig
from rlhf_spmd.rewards.row_values import chat_messages


class Retokenizer:
    """Turns rows of the actor's tokens into tokens of another model.

    - tokenizer: the tokenizer of that model
    - actor: the tokenizer of the responses
    - limit: the most tokens of a row that the model can read
    - vocab_size: the size of the model's vocabulary
    - where: the key of the reward's configuration, for messages
    - encoding: how the actor's prompts were rendered
    """

    def __init__(
        self,
        tokenizer: Any,
        actor: Any,
        config: RewardConfig,
        limit: int,
        vocab_size: int,
        where: str,
        encoding: EncodingConfig | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.actor = actor
        self.limit = limit
        self.vocab_size = vocab_size
        self.where = where
        rendering = EncodingConfig(config.apply_chat_template, config.chat_template, config.chat_template_kwargs)
        if encoding is not None:
            rendering = replace(rendering, template_date=encoding.template_date)
        rendering.check(where)
        self.encoder = PromptEncoder(tokenizer, rendering, where)
        self.tags = config.reasoning_tags if config.strip_reasoning else None
        actor_encoder = PromptEncoder(actor, encoding or EncodingConfig())
        self.opening = actor_encoder.frame.opening
        self.actor_ends = end_token_ids(actor, actor_encoder.template)

    def encode(self, row: Mapping[str, Any], response: str, ended: bool) -> list[int]:
        """Return the tokens of a row's prompt and ``response``.

        Chat messages, of which the response is the last, go through the template, which writes the special tokens. Text does not: the
        tokenizer adds its start, and its end token follows a response that ``ended``. The last token is the one at which the model has
        learnt to give its value: the one that closes a turn, without anything after it.

        Raises DataError if there is no template, or it refuses the messages.
        """
        applies = self.encoder.config.apply_chat_template
        prompt = None if applies is False else chat_messages(row, row["prompt"])
        if prompt is None and applies is True:
            prompt = row["prompt"]
        if prompt is not None:
            with named_row(f"{self.where}.model, row {row.get('id')}"):
                chat = build_conversation(prompt, response.removeprefix(self.opening)).messages
                text = self.encoder.apply_template(chat, add_generation_prompt=False)
            return next(self.encoder.tokenize([text.removesuffix(self.encoder.frame.after_closing)], special_tokens=False))
        ids = next(self.encoder.tokenize([row["prompt"] + response], special_tokens=True))
        end = self.tokenizer.eos_token_id
        return [*ids, end] if ended and end is not None and ids[-1:] != [end] else ids

    def __call__(self, batch: Batch) -> tuple[Batch, dict[int, str]]:
        """Return ``batch`` with the model's ``prompt_ids`` and ``response_ids`` (the last token), and refusals as :meth:`read` does."""
        if not len(batch):
            return batch, {}
        sequences, unreadable_rows = self.read(batch)
        prompts = ragged([ids[:-1] for ids in sequences], torch.int64)
        responses = ragged([ids[-1:] for ids in sequences], torch.int64)
        return batch.with_fields(prompt_ids=prompts, response_ids=responses), unreadable_rows

    def read(self, batch: Batch) -> tuple[list[list[int]], dict[int, str]]:
        """Return the model's tokens of each row, and position of a row -> why the model cannot read it. The same on all ranks.

        One token stands in place of a row that it cannot read.
        """
        responses = [ids.tolist() for ids in batch["response_ids"].rows()]
        sequences = []
        unreadable_rows = {}
        texts = decode(self.actor, responses)
        if self.tags is not None:
            prompts = [ids.tolist() for ids in batch["prompt_ids"].rows()]
            pairs = zip(prompts, responses, strict=True)
            texts = [strip_reasoning(self.actor, *pair, self.tags) or "" for pair in pairs]
        rows = zip(decode_json(batch["row"]), responses, texts, strict=True)
        for index, (row, response_ids, text) in enumerate(rows):
            ids = self.encode(row, text, bool(response_ids) and response_ids[-1] in self.actor_ends)
            reason = self.refusal(ids)
            if reason is not None:
                unreadable_rows[index] = reason
            sequences.append(ids if reason is None else [0])
        return sequences, unreadable_rows

    def refusal(self, ids: Sequence[int]) -> str | None:
        """Return why the model cannot read these tokens; None if it can."""
        if not ids:
            return "the reward model's tokenizer makes no token of the row"
        if len(ids) > self.limit:
            return f"the row has {len(ids)} tokens of the reward model, which reads at most {self.limit}"
        if max(ids) >= self.vocab_size:
            return f"the reward model's tokenizer makes token {max(ids)}, and the model has a vocabulary of {self.vocab_size}"
        return None


class JudgePrompts(Retokenizer):
    """The question to a judge about a row: the judge template's text, as a user's message if the judge has a chat template.

    ``apply_chat_template`` decides otherwise. ``limit``: the most tokens of question and verdict together.
    """

    def __init__(self, tokenizer: Any, actor: Any, config: RewardConfig, limit: int, vocab_size: int, where: str) -> None:
        assert config.judge is not None
        verdict_tokens = config.judge.max_response_length
        if verdict_tokens >= limit:
            raise ValueError(
                f"{where}.judge.max_response_length={verdict_tokens} leaves no room in the {limit} tokens that the judge can hold"
            )
        super().__init__(tokenizer, actor, config, limit - verdict_tokens, vocab_size, where)
        self.judge = config.judge
        has_template = self.encoder.template or getattr(tokenizer, "chat_template", None)
        self.chats = bool(has_template) if config.apply_chat_template == "auto" else bool(config.apply_chat_template)
        self._special_names = re.compile("|".join(map(re.escape, Decoding(tokenizer).special_ids)) or r"\Z(?!\Z)")

    def encode(self, row: Mapping[str, Any], response: str, ended: bool) -> list[int]:
        """Return the question's tokens. Raises DataError if there is no chat template, or it refuses a user's message."""
        where = f"{self.where}.judge, row {row.get('id')}"
        with named_row(where):
            messages = None if (chat := chat_messages(row, row["prompt"])) is None else check_messages(chat)
        prompt = row["prompt"] if messages is None else messages[0]["content"]
        if messages is not None and len(messages) > 1:
            prompt = "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)
        values = {"prompt": prompt, "response": response, "answer": str(row.get("answer"))}
        text = self.judge.render({name: self._without_special_names(value) for name, value in values.items()})
        if self.chats:
            with named_row(where):
                text = self.encoder.apply_template([{"role": "user", "content": text}])
        return next(self.encoder.tokenize([text], special_tokens=not self.chats))

    def _without_special_names(self, text: str) -> str:
        """Return ``text`` without the names of the judge's special tokens, with which a policy could end its message."""
        while (shorter := self._special_names.sub("", text)) != text:
            text = shorter
        return text


def build_retokenizer(
    config: RewardConfig,
    path: str,
    actor: Any,
    limit: int,
    vocab_size: int,
    where: str,
    encoding: EncodingConfig | None = None,
) -> Retokenizer | None:
    """Return the retokenizer of the model in ``path``; None if the model reads the actor's tokens as they are.

    That is so if it has no tokenizer, or with ``retokenize=auto`` if it has the actor's vocabulary and reads whole responses. Local:
    reads files. Raises DataError and ValueError, each of one line.
    """
    if config.judge is not None:
        return JudgePrompts(load_tokenizer(path), actor, config, limit, vocab_size, where)
    reads_text = config.retokenize is True or config.strip_reasoning
    tokenizer = None if config.retokenize is False else load_tokenizer(path, required=reads_text)
    if tokenizer is None or (not reads_text and tokenizer.get_vocab() == actor.get_vocab()):
        return None
    return Retokenizer(tokenizer, actor, config, limit, vocab_size, where, encoding)
