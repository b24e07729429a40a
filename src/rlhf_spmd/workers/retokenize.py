"""Rows for a reward model with a tokenizer of its own: decoded, rendered through its chat template, tokenised again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rlhf_spmd.data.batch import Batch, decode_json, ragged
from rlhf_spmd.data.encoding import EncodingConfig, PromptEncoder
from rlhf_spmd.data.tokenizer import decode, load_tokenizer
from rlhf_spmd.rewards.binding import chat_messages
from rlhf_spmd.rewards.config import RewardConfig


class Retokenizer:
    """``own``: the reward model's tokenizer, ``actor``: that of the responses. ``limit``: tokens of a row that the model can read;
    ``vocab_size``: the model's. ``where``: key of the reward's configuration, for messages."""

    def __init__(self, own: Any, actor: Any, config: RewardConfig, limit: int, vocab_size: int, where: str) -> None:
        self.own, self.actor, self.limit, self.vocab_size, self.where = own, actor, limit, vocab_size, where
        self.encoder = PromptEncoder(own, EncodingConfig(config.apply_chat_template, config.chat_template), where)

    def encode(self, row: Mapping[str, Any], response: str, ended: bool) -> list[int]:
        """Tokens of a row's prompt and ``response``. Chat messages, which the response is the last of, go through the template, which
        writes the special tokens. Text does not: the tokenizer begins it, and its end token follows a response that ``ended``.

        Raises DataError where there is no template, or it refuses the messages.
        """
        applies = self.encoder.config.apply_chat_template
        messages = None if applies is False else chat_messages(row)
        if messages is None and applies is True:
            messages = [{"role": "user", "content": row["prompt"]}]
        if messages is not None:
            chat = [*messages, {"role": "assistant", "content": response}]
            text = self.encoder.apply_template(chat, f"{self.where}.model, row {row.get('id')}", add_generation_prompt=False)
            return next(self.encoder.tokenize([text], special_tokens=False))
        ids = next(self.encoder.tokenize([row["prompt"] + response], special_tokens=True))
        end = self.own.eos_token_id
        return [*ids, end] if ended and end is not None and ids[-1:] != [end] else ids

    def __call__(self, batch: Batch) -> tuple[Batch, dict[int, str]]:
        """``batch`` with the model's ``prompt_ids`` and ``response_ids`` (the row's last token), and for rows that the model cannot
        read, which are cut or replaced, why not. The same on every rank that has the rows."""
        if not len(batch):
            return batch, {}
        responses = [ids.tolist() for ids in batch["response_ids"].rows()]
        whole, refused = [], {}
        rows = zip(decode_json(batch["row"]), responses, decode(self.actor, responses), strict=True)
        for index, (row, response_ids, text) in enumerate(rows):
            ids = self.encode(row, text, response_ids[-1:] == [self.actor.eos_token_id])
            why = self.refusal(ids)
            if why is not None:
                refused[index], ids = why, [0]
            whole.append(ids)
        first, last = [ids[:-1] for ids in whole], [ids[-1:] for ids in whole]
        return batch.with_fields(prompt_ids=ragged(first, torch.int64), response_ids=ragged(last, torch.int64)), refused

    def refusal(self, ids: Sequence[int]) -> str | None:
        """Why the model cannot read these tokens, None if it can."""
        if not ids:
            return "the reward model's tokenizer makes no token of the row"
        if len(ids) > self.limit:
            return f"the row has {len(ids)} tokens of the reward model, which reads at most {self.limit}"
        if max(ids) >= self.vocab_size:
            return f"the reward model's tokenizer makes token {max(ids)}, and the model has a vocabulary of {self.vocab_size}"
        return None


def build_retokenizer(
    config: RewardConfig, path: str, actor: Any, limit: int, vocab_size: int, where: str
) -> Retokenizer | None:
    """None if the model in ``path`` reads the actor's tokens as they are: it has no tokenizer, or with ``retokenize=auto`` the
    actor's vocabulary. Local: reads files. Raises DataError, one line."""
    own = None if config.retokenize is False else load_tokenizer(path, required=config.retokenize is True)
    if own is None or (config.retokenize == "auto" and own.get_vocab() == actor.get_vocab()):
        return None
    return Retokenizer(own, actor, config, limit, vocab_size, where)
