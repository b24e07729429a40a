"""What OpenAI's answers say of tokens."""

from __future__ import annotations

from typing import Any

from rlhf_spmd.data.tokenizer import byte_alphabet, token_bytes


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
