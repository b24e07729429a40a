"""SFT on conversations: what is learnt is what transformers' return_assistant_tokens_mask says, or what rendering prefixes says."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import tasks
from places import ROOT
from ranks import run_ranks
from rlhf_spmd.data.conversations import Conversation, ConversationEncoder
from rlhf_spmd.data.encoding import EncodingConfig, PromptEncoder
from rlhf_spmd.data.files import DataError, Row
from rlhf_spmd.data.sft import PromptResponseConfig, SftConfig, encode_pairs

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA = (  # a start token, headers, and nothing between a turn's end and the next header
    "{{ '<s>' }}{% for m in messages %}{{ '[' + m.role + ']\\n\\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content | trim + '<|eot|>' }}{% endgeneration %}"
    "{% else %}{{ m.content | trim + '<|eot|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]\\n\\n' }}{% endif %}"
)
PLAIN = (  # no mark ends a turn
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ 'A:' }}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ 'Q:' + m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'A:' }}{% endif %}"
)
FORGETFUL = (  # as templates do that drop what an earlier turn thought
    "{% for m in messages %}{{ m.role + ':' + (m.content if loop.last else m.content[:2]) }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
TEMPLATES = {"chatml": CHATML, "llama": LLAMA, "plain": PLAIN}
WORDS = ("sun", "moon ", " 12", "\n", "héllo", "the the", "!", "assistant", "<|im_end|>")


def unmarked(template: str) -> str:
    return re.sub(r"\{% (end)?generation %\}", "", template)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    bpe.train_from_iterator(["user assistant system the sun moon hello Q: A: sun moon the assistant"] * 9, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>")


def conversation(rng: random.Random) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = [{"role": "system", "content": "be kind"}] if rng.random() < 0.3 else []
    for _ in range(rng.randint(1, 4)):
        for role in ("user", "assistant"):
            turns.append({"role": role, "content": "".join(rng.choices(WORDS[:-1], k=rng.randint(1, 6)))})
    return turns[:-1] if len(turns) > 3 and rng.random() < 0.2 else turns


@pytest.mark.parametrize("name", TEMPLATES)
def test_masks_are_those_of_transformers(tokenizer: Any, name: str) -> None:
    """Of the template with marks, and of the same template without, where they follow from rendering prefixes."""
    rng = random.Random(4)
    for _ in range(60):
        messages = conversation(rng)
        options = {"return_dict": True, "return_assistant_tokens_mask": True}
        expected = tokenizer.apply_chat_template(messages, chat_template=TEMPLATES[name], tokenize=True, **options)
        for template in (TEMPLATES[name], unmarked(TEMPLATES[name])):
            encoder = ConversationEncoder(PromptEncoder(tokenizer, EncodingConfig(chat_template=template)))
            ids, mask = encoder.encode(Conversation(messages))
            assert ids == expected["input_ids"]
            assert mask == [bool(mark) for mark in expected["assistant_masks"]], messages


def learnt(tmp_path: Path, tokenizer: Any, *rows: dict[str, Any], **options: Any) -> list[tuple[str, str, str]]:
    """Of each row the prompt, the response, and what of it is learnt with '~' for the rest."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = SftConfig(path=str(path), **options)
    data = config.encode_all(config.read(), tokenizer)
    batch = data.batch(range(len(data)), range(len(data)))
    masks = batch["response_mask"].rows() if "response_mask" in batch else [None] * len(batch)
    texts = []
    for prompt, response, mask in zip(batch["prompt_ids"].rows(), batch["response_ids"].rows(), masks, strict=True):
        marked = "".join(
            tokenizer.decode([token]) if mask is None or mask[i] else "~" for i, token in enumerate(response.tolist())
        )
        texts.append((tokenizer.decode(prompt), tokenizer.decode(response), re.sub("~+", "~", marked)))
    return texts


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


TALK = [turn("user", "hi"), turn("assistant", "sun"), turn("user", "and"), turn("assistant", "moon")]


@pytest.mark.parametrize("mark", [True, False], ids=["marked", "derived"])
def test_the_columns_of_trl(tmp_path: Path, tokenizer: Any, mark: bool) -> None:
    template = CHATML if mark else unmarked(CHATML)
    start, user = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", "\n<|im_start|>user\nand<|im_end|>\n<|im_start|>"
    both = (start, f"sun<|im_end|>{user}assistant\nmoon<|im_end|>", "sun<|im_end|>~moon<|im_end|>")
    last = (f"{start}sun<|im_end|>{user}assistant\n", "moon<|im_end|>", "moon<|im_end|>")
    pairs = ({"prompt": TALK[:3], "completion": TALK[3:]}, {"prompt": "Q", "completion": "A"})
    rows = ({"messages": TALK}, {"prompt": TALK}, *pairs, {"messages": [*TALK, turn("user", "?")]})
    texts = learnt(tmp_path, tokenizer, *rows, chat_template=template)
    assert texts == [both, both, last, ("Q", "A</s>", "A</s>"), both]
    assert learnt(tmp_path, tokenizer, *pairs, chat_template=template) == texts[2:4]
    # a text prompt that goes through the template is a message as well
    text = {"prompt": "hi", "completion": TALK[1:]}
    assert learnt(tmp_path, tokenizer, text, chat_template=template, apply_chat_template=True) == [both]
    with_system = learnt(tmp_path, tokenizer, pairs[0], chat_template=template, system_prompt="S")[0]
    assert with_system == (f"<|im_start|>system\nS<|im_end|>\n{last[0]}", *last[1:])
    # an end is learnt where the template has none
    for append, end in ((True, "</s>"), (False, "")):
        texts = learnt(tmp_path, tokenizer, {"messages": TALK}, chat_template=PLAIN, append_eos=append)
        assert texts[0][2] == f"sun~moon{end}"


SEVERAL = r"one message of the assistant, not messages of: assistant, user, assistant; give"


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"messages": TALK}, {"chat_template": FORGETFUL}, "the messages before message 1 otherwise than inside the whole"),
        ({"messages": TALK[:1]}, {"chat_template": PLAIN}, "no message is the assistant's, or none of its tokens"),
        ({"messages": TALK}, {"apply_chat_template": False}, "chat messages, but data.apply_chat_template=false"),
        ({"messages": TALK}, {}, "needs a chat template"),
        (
            {"prompt": TALK[:1], "chosen": "a", "rejected": "b"},
            {},
            "no key 'response' .*; this row has: prompt, chosen, rejected",
        ),
        ({"prompt": [*TALK, TALK[0]], "chosen": "a"}, {"chat_template": PLAIN}, "no key 'response' .* has: prompt, chosen"),
        ({"prompt": "hi", "completion": TALK[1:]}, {}, SEVERAL),
        ({"prompt": "hi", "completion": [turn("user", "more")]}, {}, "not messages of: user; give"),
    ],
)
def test_what_cannot_be_told_is_refused(
    tmp_path: Path, tokenizer: Any, row: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=rf"rows\.jsonl:1: .*{message}"):
        learnt(tmp_path, tokenizer, row, **options)


def test_no_message_of_a_completion_is_lost_where_pairs_are_scored(tokenizer: Any) -> None:
    for prompt in ("hi", TALK[:1]):
        with pytest.raises(DataError, match=SEVERAL):
            encode_pairs([Row({"prompt": prompt, "completion": TALK[1:]}, "row 1")], PromptResponseConfig(), tokenizer, None)


# -- in a run, with the one-character tokens of tests/helpers/tasks.py

TEMPLATE = (
    "{% for m in messages %}{{ ('u' if m.role == 'user' else 'a') + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)


def write_talks(path: Path) -> list[str]:
    """Rows of two turns each in characters that are tokens; their texts with what is learnt in capitals."""
    rng, texts = random.Random(1), []
    with path.open("w") as file:
        for _ in range(16):
            parts = ["".join(rng.choices("bcdefgh", k=rng.randint(1, 4))) for _ in range(4)]
            roles = ("user", "assistant") * 2
            file.write(json.dumps({"messages": [turn(*pair) for pair in zip(roles, parts, strict=True)]}) + "\n")
            texts.append("".join(r[0] + (p if r == "user" else p.upper()) for r, p in zip(roles, parts, strict=True)))
    return texts


def settings(path: Path, run_dir: Path, *more: str) -> list[str]:
    keys = (
        f"data.path={path}",
        f"data.val_path={path}",
        f"data.chat_template={json.dumps(TEMPLATE)}",
        "data.train_batch_size=8",
    )
    model = (f"models.actor.path={tasks.task() / 'actor'}", "models.actor.dtype=float64", "models.actor.random_init=false")
    optimizer = ("models.actor.optim.lr=1e-3", "models.actor.optim.eps=1e-3")
    off = ("val_prompts=null", "reward.function=null", "algorithm.stop_at_reward=null", "run.test_freq=1", "run.save_freq=0")
    return tasks.settings(run_dir, 2, "algorithm.name=sft", *keys, *model, *optimizer, *off, *more)


def test_a_run_learns_the_assistants_tokens_and_no_others(tmp_path: Path) -> None:
    """The loss is that of transformers' logits on those tokens only, and the run is the same in another layout."""
    from transformers import AutoModelForCausalLM

    texts = write_talks(tmp_path / "talks.jsonl")
    config = str(ROOT / "configs" / "quickstart_sft.yaml")
    runs = []
    for ranks, more in ((1, ()), (2, ("models.actor.layout.pp=2",))):
        run_dir = tmp_path / str(ranks)
        run_ranks(ranks, tasks.train_here, config, settings(tmp_path / "talks.jsonl", run_dir, *more))
        runs.append(tasks.read_run(run_dir))
    assert tasks.worst_metric(*runs, floor=1e-2)[0] < 1e-10 and tasks.worst_tensor(*runs)[0] < 1e-10

    model = AutoModelForCausalLM.from_pretrained(tasks.task() / "actor", dtype=torch.float64).eval()
    total, count = 0.0, 0
    for text in texts:
        ids = torch.tensor([[*(tasks.VOCABULARY.index(c) for c in text.lower()), tasks.EOS]])
        learns = torch.tensor([*(c.isupper() for c in text), True])[1:]
        with torch.no_grad():
            log_probs = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        total, count = total - float(log_probs[learns].sum()), count + int(learns.sum())
    assert runs[0].metrics[0]["val/loss"] == pytest.approx(total / count, abs=1e-6)  # whose norms are in float32
    assert runs[0].metrics[-1]["val/loss"] < runs[0].metrics[0]["val/loss"]
