"""Completions to vLLM's outputs: their text, the log-probs of their tokens and what stopped them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

from torch import Tensor

from rlhf_spmd.data.tokenizer import decode
from rlhf_spmd.generation import Completion, Generator, StopStrings
from rlhf_spmd.generation.stopping import special_stops
from rlhf_spmd.inference.inference_engine import Entries
from rlhf_spmd.inference.requests import PromptRequest
from rlhf_spmd.inference.sampling_params import CompletionOutput, Logprob, RequestOutput
from rlhf_spmd.inference.structured_outputs import GrammarMask

# log-probs of responses: at temperature 1, or at the temperature at which they were drawn; vLLM's names
LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]


class OutputBuilder:
    """Builds outputs of the completions of ``generator``. Without ``tokenizer`` all texts are empty."""

    def __init__(self, generator: Generator, tokenizer: Any, logprobs_mode: LogprobsMode = "raw_logprobs") -> None:
        self.generator = generator
        self.tokenizer = tokenizer
        self.logprobs_mode = logprobs_mode
        self._token_texts: dict[int, str] = {}

    def record(self, request: PromptRequest, completion: Completion) -> dict[str, Any]:
        """Return a completion as JSON, which the replica sends to the other ranks."""
        log_probs = completion.log_probs, completion.log_probs_t1
        record: dict[str, Any] = {
            "token_ids": completion.token_ids,
            "cumulative_logprob": float(completion.log_probs_t1.double().sum()),
            "logprobs": None,
        }
        if request.params.logprobs is not None:
            record["logprobs"] = self.response_entries(request, completion.token_ids, *log_probs, completion.top_log_probs)
        finish_reason: str = completion.finish_reason
        text, stop_reason = self.text_and_stop(request, completion.token_ids, finish_reason == "stop")
        if finish_reason == "stop":
            processors = request.rows[completion.row_id - request.rows[0].row_id].processors
            if not all(mask.allows(completion.token_ids) for mask in processors if isinstance(mask, GrammarMask)):
                finish_reason, stop_reason = "error", None
        return {**record, "text": text, "finish_reason": finish_reason, "stop_reason": stop_reason}

    def output(
        self, request: PromptRequest, records: Sequence[dict[str, Any]], prompt_entries: Entries | None = None
    ) -> RequestOutput:
        """Return vLLM's output from the records of all responses. ``prompt_entries``: of the prompt's tokens but the first."""
        outputs = [
            CompletionOutput(index, **record | {"logprobs": record["logprobs"] and self.logprobs(record["logprobs"])})
            for index, record in enumerate(records)
        ]
        prompt_logprobs = None if prompt_entries is None else [None, *self.logprobs(prompt_entries)]
        return RequestOutput(str(request.rows[0].row_id), request.prompt, request.prompt_ids, prompt_logprobs, outputs)

    def text_and_stop(
        self, request: PromptRequest, ids: Sequence[int], stopped: bool, shows_special: bool = False
    ) -> tuple[str, int | str | None]:
        """Return the text of a response or of its beginning, and what stopped it: a stop string, a token id, or None.

        ``shows_special``: special tokens are in the text, whatever the request says.
        """
        params = request.params
        stops = request.sampling.stop
        keeps_stop = params.include_stop_str_in_output
        token = ids[-1] if stopped and ids[-1] in request.stop.token_ids else None
        stop_token = None if token in self.generator.eos_ids and not params.ignore_eos else token
        decoding = self.generator.decoding
        if decoding is None:
            return "", stop_token
        decode_shown = partial(self.decode, skip_special=params.skip_special_tokens and not shows_special)
        if stopped and token is None:
            text, _ = StopStrings(stops, decode_shown).cut(ids)
            _, stop = StopStrings(stops, decoding).cut(ids)
            return text + stop * keeps_stop, stop
        text = decode_shown(ids if keeps_stop or token is None else ids[:-1])
        special = {token: stop for stop, token in special_stops(stops, decoding.special_ids, "").items()}
        return text, None if stop_token is None else special.get(stop_token, stop_token)

    def decode(self, ids: Sequence[int], skip_special: bool) -> str:
        """Return the text of token ids, "" without a tokenizer. ``skip_special``: without special tokens."""
        return "" if self.tokenizer is None else decode(self.tokenizer, [ids], skip_special)[0]

    def logprobs(self, entries: Entries) -> list[dict[int, Logprob]]:
        """Return ``entries`` in vLLM's form, with the rank and the text of each token."""
        texts = self._token_texts
        for token in {token for entry in entries for token, _ in entry}.difference(texts):
            texts[token] = self.decode([token], skip_special=False)
        logprobs = []
        for entry in entries:
            ranks = {token: rank for rank, (token, _) in enumerate(entry[1:], 1)}
            logprobs.append({token: Logprob(value, ranks.get(token), texts[token]) for token, value in entry})
        return logprobs

    def response_entries(
        self,
        request: PromptRequest,
        token_ids: Sequence[int],
        log_probs: Tensor,
        log_probs_t1: Tensor,
        likeliest: Sequence[Tensor] | None,
    ) -> Entries:
        """Return the entries of a response's tokens, by ``logprobs_mode``.

        ``log_probs``, ``log_probs_t1`` [tokens]: at the sampling temperature, and at 1; ``likeliest``: ids and log-probs at
        temperature 1 of the likeliest tokens, [tokens, number] each.
        """
        drawn = log_probs_t1.double()
        temperature = request.params.temperature or 1.0  # of greedy decoding
        if self.logprobs_mode == "processed_logprobs" and temperature != 1.0:
            if likeliest is not None:
                offsets = log_probs.double() - drawn / temperature  # by the normalisers, which all tokens of a place share
                likeliest = likeliest[0], likeliest[1].double() / temperature + offsets[:, None]
            drawn = log_probs.double()
        entries: Entries = [[pair] for pair in zip(token_ids, drawn.tolist(), strict=True)]
        for entry, *ids_and_values in zip(entries, *(part.tolist() for part in likeliest or ()), strict=True):
            entry += zip(*ids_and_values, strict=True)
        return entries
