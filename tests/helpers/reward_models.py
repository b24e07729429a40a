"""A reward model in a directory of its own, with its tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

from rlhf_spmd.models.weights import write_random_model

TEMPLATE = "<s>{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}{% endfor %}</s>"

TOKENS = ("<s>", "</s>", "[", "]", *"zyxwvutsrqponmlkjihgfedcba9876543210", "?")


def write_reward_model(
    directory: Path,
    context: int = 64,
    template: str | None = TEMPLATE,
    vocab: int = len(TOKENS),
    architecture: str = "LlamaForSequenceClassification",
) -> Path:
    """Other ids for the same characters; text begins with <s>."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    config = {
        "model_type": "llama",
        "architectures": [architecture],
        "vocab_size": vocab,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": context,
        "rope_theta": 1000.0,
        "eos_token_id": 1,
        "initializer_range": 0.2,
    }
    write_random_model(directory, config, 11)
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(TOKENS)}, unk_token="?"))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(directory / "tokenizer.json"))
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "clean_up_tokenization_spaces": False}
    (directory / "tokenizer_config.json").write_text(json.dumps(said | ({"chat_template": template} if template else {})))
    return directory
