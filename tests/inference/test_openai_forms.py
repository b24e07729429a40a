"""What OpenAI's answers say of tokens."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import pytest

from rlhf_spmd.data.tokenizer import byte_alphabet, token_bytes
from rlhf_spmd.inference.openai_forms import TextDelta, TextOffsets, choice_of, read_request
from rlhf_spmd.inference.sampling_params import Logprob


def tokenizer_of(pieces: list[str], decoder: Any = None) -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token=pieces[0]))
    if decoder is not None:
        inner.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def test_the_bytes_of_a_token_are_those_of_the_vocabulary() -> None:
    from tokenizers import decoders, pre_tokenizers

    assert byte_alphabet().keys() == set(pre_tokenizers.ByteLevel.alphabet())
    written = {byte: character for character, byte in byte_alphabet().items()}
    whole, half = " \u00e9".encode(), "x\u20ac".encode()[:2]
    pieces = ["".join(written[byte] for byte in each) for each in (whole, half)]
    tokenizer = tokenizer_of(pieces, decoders.ByteLevel())
    texts = [tokenizer.decode([token]) for token in (0, 1)]
    assert texts == [" \u00e9", "x\ufffd"]
    assert [token_bytes(tokenizer, token, text) for token, text in enumerate(texts)] == [list(whole), list(half)]


def test_the_bytes_of_sentencepiece_and_of_what_does_not_tell_them() -> None:
    tokenizer = tokenizer_of(["<0xE2>", "\u4e2d\ufffd"])
    assert [token_bytes(tokenizer, token, "\ufffd") for token in (0, 1)] == [[0xE2], None]


def test_offsets_are_those_of_characters_however_the_tokens_come() -> None:
    pieces = [b"a", "\u20ac".encode()[:1], "\u20ac".encode()[1:], b" bc", b"", b"d"]

    def decode(ids: Any) -> str:
        return b"".join(pieces[i] for i in ids).decode(errors="replace")

    whole = TextOffsets(decode).add(range(6))
    assert whole == [0, 1, 1, 2, 5, 5]
    for cut in range(6):
        bit_by_bit = TextOffsets(decode, 7)  # after a text
        assert [*bit_by_bit.add(range(cut)), *bit_by_bit.add(range(cut, 6))] == [7 + at for at in whole]
    assert TextOffsets(decode).add([2] * 9) == [0, 0, 0, 0, 8, 8, 8, 8, 16]  # never a character: a mark for each byte


def test_log_probs_in_openai_s_form() -> None:
    drawn = {5: Logprob(-2.0, None, "x"), 6: Logprob(-0.5, 1, "y"), 7: Logprob(-inf, 2, "z")}
    its = TextDelta("ax", [{4: Logprob(nan, None, "a")}, drawn], [0, 1], "length")
    told = choice_of(3, its, False, lambda token, text: [*text.encode()])
    assert told == {"index": 3, "text": "ax", "finish_reason": "length", "stop_reason": None, "logprobs": told["logprobs"]}
    assert told["logprobs"] == {
        "tokens": ["a", "x"],
        "token_logprobs": [None, -2.0],
        "top_logprobs": [None, {"x": -2.0, "y": -0.5, "z": -9999.0}],
        "text_offset": [0, 1],
    }
    same = {
        5: Logprob(-2.0, None, "y"),
        6: Logprob(-0.5, 1, "y"),
    }  # two tokens with one text: it is seen that 5 was not the likeliest
    assert choice_of(0, TextDelta("y", [same], [0]), False, lambda *_: None)["logprobs"]["top_logprobs"] == [{"y": -0.5}]
    (of_chat,) = choice_of(0, TextDelta("x", [drawn]), True, lambda token, text: [token], "later")["logprobs"]["content"]
    assert of_chat.pop("top_logprobs") == [
        {"token": "y", "logprob": -0.5, "bytes": [6]},
        {"token": "z", "logprob": -9999.0, "bytes": [7]},
    ]
    assert of_chat == {"token": "x", "logprob": -2.0, "bytes": [5]}


@pytest.mark.parametrize(
    ("body", "chat", "said"),
    [
        ({"tools": [{}]}, True, "tools are not supported yet"),
        ({"tool_choice": "required"}, True, "tool_choice is not supported yet"),
        ({"response_format": {"type": "json_object"}}, True, "response_format is not supported yet"),
        ({"suffix": "b"}, False, "suffix is not supported yet"),
        ({"best_of": 2}, False, "best_of is not supported yet"),
        ({"logits_processors": []}, False, "unknown key 'logits_processors'"),
        ({"stream": "yes"}, False, "stream='yes' must be true or false"),
        ({"chat_template_kwargs": 5}, True, "chat_template_kwargs=5 must be a mapping"),
    ],
)
def test_what_is_not_there_is_refused_by_its_name(body: dict[str, Any], chat: bool, said: str) -> None:
    with pytest.raises(ValueError, match="^" + said.replace("(", "\\(")):
        read_request(body, chat)


def test_what_a_request_asks_for() -> None:
    nothing = {"tools": [], "tool_choice": "auto", "suffix": None, "best_of": 1, "response_format": {"type": "text"}}
    assert read_request(nothing, True) == read_request({}, True) and read_request({}, True)[1].max_tokens is None
    form, params = read_request({"echo": True, "max_tokens": 0, "logprobs": 3}, False)
    assert form.echo and (params.max_tokens, params.logprobs, params.prompt_logprobs) == (0, 3, 3)
    form, params = read_request({"logprobs": True, "stream": True, "chat_template_kwargs": {"enable_thinking": False}}, True)
    assert (params.logprobs, params.prompt_logprobs, form.chat_template_kwargs) == (0, None, {"enable_thinking": False})
