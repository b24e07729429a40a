"""A small model whose tokenizer has the parts of calls as tokens, so that a request can force it to write a call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from generate_runs import CONFIG
from rlhf_spmd.models.weights import write_random_model

FIRST = 98  # behind the characters
PIECES = [
    "<tool_call>",
    '{"name": "add", "arguments": {"a": 2, ',
    '"b": "3"}}',
    "</tool_call>",
    "Let me see. ",
    "So: 5.",
    "<think>",
    "</think>",
]
OPEN, HEAD, TAIL, CLOSE, TEXT, ANSWER, THINK, THOUGHT = range(FIRST, FIRST + len(PIECES))
CALL = (OPEN, HEAD, TAIL, CLOSE)
END = 2
TEMPLATE = (
    "{% if tools %}<|tools|>{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
    },
}


def write_tool_model(path: Path, special: bool = False) -> None:
    """``special``: the marks of calls are special tokens, which text does not show."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    write_random_model(path, CONFIG | {"max_position_embeddings": 1024}, seed=3)
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": END, **{chr(c): c - 29 for c in range(32, 127)}}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", unk_token="<unk>", chat_template=TEMPLATE)
    tokenizer.add_tokens([AddedToken(piece, special=special and piece.endswith("tool_call>")) for piece in PIECES])
    tokenizer.save_pretrained(path)


def forced(*tokens: int) -> dict[str, Any]:
    """Fields of a request whose answer is these different tokens, if it may be as long."""
    bias = {str(token): 100.0 - 5 * number for number, token in enumerate(tokens)}
    return {"temperature": 0, "logit_bias": bias, "presence_penalty": 500.0}
