"""Prompts and responses as tokens: where one ends and the other begins, what ends a response, and the text of what was said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from places import ROOT
from rlhf_spmd.data.conversations import Conversation, ConversationEncoder
from rlhf_spmd.data.encoding import EncodingConfig, PromptEncoder
from rlhf_spmd.data.files import DataError, Row
from rlhf_spmd.data.preferences import PreferencesConfig, UnpairedConfig
from rlhf_spmd.data.prompts import PromptsConfig
from rlhf_spmd.data.sft import PromptResponseConfig, SftConfig, encode_pairs
from rlhf_spmd.data.tokenizer import Decoding, decode, end_token_ids, prompt_texts, turn_frame
from rlhf_spmd.generation.stopping import StopStrings
from rlhf_spmd.rewards.config import RewardConfig
from rlhf_spmd.workers.retokenize import Retokenizer

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
CHATML += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
GEMMA = "<s>{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
GEMMA += "{% if add_generation_prompt %}<start_of_turn>assistant\n{% endif %}"
LLAMA2 = "<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
LLAMA2 += "{% else %} {{ m.content }} </s>{% endif %}{% endfor %}"
PHI = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
PHI += "{% if add_generation_prompt %}<|assistant|>\n{% else %}</s>{% endif %}"
THINKS = "{% for m in messages %}{{ m.role }}:{{ m.content.split('</think>')[-1] }}<|end|>{% endfor %}"
THINKS += "{% if add_generation_prompt %}assistant:<think>{% endif %}"
SWITCHED = "{{ 'fast ' if not slow else '' }}{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"
TALK = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "Two"}]
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<end_of_turn>", "<start_of_turn>", "<|end|>"]


def sentence_piece(appends_eos: bool = False) -> Any:
    """A tokenizer as Llama 2's: a blank is put before every text, and taken from before every text that is decoded."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["▁there", "▁was", "▁a", "▁little", "▁girl", "▁return", "▁▁▁", "▁lit"]
    merges = list(dict.fromkeys((word[:end], word[end]) for word in words for end in range(1, len(word))))
    names = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *map(chr, range(33, 127)), "▁", *map("".join, merges)]
    vocabulary = {name: number for number, name in enumerate(dict.fromkeys(names))}
    inner = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    ends = " </s>" if appends_eos else ""
    inner.post_processor = processors.TemplateProcessing(f"<s> $A{ends}", f"<s> $A $B{ends}", [("<s>", 1), ("</s>", 2)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    assert tokenizer.decode(tokenizer.encode(" little", add_special_tokens=False)[-1:]) == "little"  # the blank is lost
    return tokenizer


@pytest.fixture(scope="module")
def llama() -> Any:
    return sentence_piece()


def pieces(tokenizer: Any, ids: list[int]) -> str:
    return " ".join(tokenizer.convert_ids_to_tokens(ids))


def learnt(config: Any, tokenizer: Any, *rows: dict[str, Any]) -> list[tuple[str, str]]:
    """Prompt and response of every row of a batch, as tokens."""
    data = config.encode_all([Row(row, f"x:{number}") for number, row in enumerate(rows)], tokenizer)
    batch = data.batch(range(len(data)), range(len(data)))
    columns = [batch[name].rows() for name in ("prompt_ids", "response_ids")]
    return [(pieces(tokenizer, a.tolist()), pieces(tokenizer, b.tolist())) for a, b in zip(*columns, strict=True)]


@pytest.mark.parametrize(
    ("template", "opening", "closing", "end"),
    [
        (CHATML, "", "<|im_end|>", "<|im_end|>"),
        (GEMMA, "", "<end_of_turn>", "<end_of_turn>"),
        (LLAMA2, " ", " </s>", "</s>"),
        (PHI, "", "<|end|>", "<|end|>"),  # and not the end of the text behind it
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", "assistant: ", "\n", None),
        ("{{ raise_exception('no') }}", "", "", None),
        (None, "", "", None),
    ],
)
def test_how_a_turn_opens_and_ends(llama: Any, template: str | None, opening: str, closing: str, end: str | None) -> None:
    frame = turn_frame(llama, template)
    assert (frame.opening, frame.closing) == (opening, closing)
    names = {"</s>"} | ({end} if end else set())
    assert end_token_ids(llama, template) == tuple(sorted(map(llama.convert_tokens_to_ids, names)))


@pytest.mark.parametrize("template", [CHATML, GEMMA, LLAMA2, PHI])
def test_every_kind_of_data_ends_a_response_as_the_template_does(llama: Any, template: str) -> None:
    """SFT on messages and on a text response, pairs for DPO and reward models, KTO: the same tokens, one end."""
    said, more = {"chat_template": template, "path": "x"}, {"role": "assistant", "content": "Three"}
    prompt, two, three = TALK[:1], TALK[1:], [more]
    ((before, wanted),) = learnt(SftConfig(**said), llama, {"messages": TALK})
    assert wanted.endswith(turn_frame(llama, template).closing.strip()) and wanted.count("</s>") == (template == LLAMA2)
    assert learnt(SftConfig(**said), llama, {"prompt": prompt, "response": "Two"}) == [(before, wanted)]
    assert learnt(SftConfig(**said, apply_chat_template=True), llama, {"prompt": "one", "response": "Two"}) == [
        (before, wanted)
    ]
    for row in (
        {"prompt": prompt, "chosen": two, "rejected": three},
        {"prompt": prompt, "chosen": "Two", "rejected": "Three"},
        {"chosen": TALK, "rejected": [*prompt, *three]},
    ):
        chosen, rejected = learnt(PreferencesConfig(**said), llama, row)
        assert chosen == (before, wanted) and rejected == (before, wanted.replace("T w o", "T h r e e"))
    asked = PreferencesConfig(**said, apply_chat_template=True)
    assert learnt(asked, llama, {"prompt": "one", "chosen": "Two", "rejected": "Three"})[0] == (before, wanted)
    rows = [{"prompt": prompt, "completion": "Two", "label": True}, {"prompt": two, "completion": "x", "label": False}]
    assert learnt(UnpairedConfig(**said), llama, *rows)[0] == (before, wanted)


def test_a_last_turn_that_the_template_renders_otherwise_follows_the_generation_prompt(llama: Any) -> None:
    """As reasoning templates do, which drop what was thought, and begin an answer with <think>."""
    talk = [TALK[0], {"role": "assistant", "content": "why</think>Two"}]
    for row in ({"messages": talk}, {"prompt": talk[:1], "response": "why</think>Two"}):
        ((before, said),) = learnt(SftConfig(path="x", chat_template=THINKS), llama, row)
        assert before.replace(" ", "").endswith("assistant:<think>") and said == "w h y < / t h i n k > T w o <|end|>"
    with pytest.raises(DataError, match="cannot be told"):
        learnt(SftConfig(path="x", chat_template=THINKS), llama, {"messages": [*talk, *talk]})


@pytest.mark.parametrize("begun", ["<think>", "<think>\n"])
def test_thoughts_that_the_generation_prompt_begins_are_begun_once(llama: Any, begun: str) -> None:
    template = THINKS.replace("assistant:<think>", f"assistant:{begun}")
    config = PreferencesConfig(path="x", chat_template=template)
    row = {"prompt": TALK[:1], "chosen": f"{begun}why</think>Two", "rejected": "no</think>One"}
    chosen, rejected = learnt(config, llama, row)
    assert chosen[0] == rejected[0] and chosen[0].endswith(
        pieces(llama, llama(begun, add_special_tokens=False)["input_ids"][1:])
    )
    assert (chosen[1], rejected[1]) == ("w h y < / t h i n k > T w o <|end|>", "n o < / t h i n k > O n e <|end|>")
    with pytest.raises(DataError, match="the response has no </think>, so all of it would be learnt as thoughts"):
        learnt(config, llama, {**row, "rejected": "One"})


def test_a_token_of_the_header_that_takes_the_blanks_behind_it_is_not_learnt() -> None:
    """As Phi-3's do."""
    from tokenizers import AddedToken

    tokenizer = sentence_piece()
    tokenizer.add_tokens([AddedToken("<|assistant|>", rstrip=True, special=True)])
    rows = [{"prompt": TALK[:1], "response": said} for said in ("Four", " Four", "\nFour")]
    found = learnt(SftConfig(path="x", chat_template=PHI.replace("|>\n", "|>")), tokenizer, *rows)
    assert len({prompt for prompt, _ in found}) == 1 and found[0][0].endswith("<|assistant|>")
    assert all(said.replace("▁ ", "") == "F o u r <|end|>" for _, said in found)


def test_a_conversation_that_the_assistant_begins_does_not_train_its_header(llama: Any) -> None:
    encoder = ConversationEncoder(PromptEncoder(llama, EncodingConfig(chat_template=CHATML)))
    ids, mask = encoder.encode(Conversation([TALK[1], *TALK]))
    shown = [[i for i, is_learnt in zip(ids, mask, strict=True) if is_learnt == wanted] for wanted in (True, False)]
    assert pieces(llama, shown[0]) == "T w o <|im_end|> T w o <|im_end|>"
    assert "a s s i s t a n t" in pieces(llama, shown[1])


@pytest.mark.parametrize(
    ("prompt", "response", "wanted"),
    [
        ("there was a", " little girl", " little girl"),
        ("there was a little", "r", "r"),
        ("2+2=", "4", "4"),
        ("def f():\n", "    return 1", "    return 1"),
        ("a lit", "tle girl", "tle girl"),  # a token lies across
    ],
)
def test_prompt_and_response_are_read_as_one_text(llama: Any, prompt: str, response: str, wanted: str) -> None:
    whole = llama(prompt + response)["input_ids"]
    pairs = encode_pairs(
        [Row({"prompt": prompt, "response": response}, "x")], PromptResponseConfig(path="x"), llama, len(llama)
    )
    assert [*pairs[0][0], *pairs[0][1]] == whole
    assert decode(llama, [pairs[0][1]])[0].endswith(wanted) and len(pairs[0][1]) <= len(llama(response)["input_ids"])
    rows = {"prompt": prompt, "response": response}, {"prompt": prompt, "chosen": response, "rejected": "no"}
    for config, row in zip((SftConfig, PreferencesConfig), rows, strict=True):
        assert learnt(config(path="x"), llama, row)[0] == (pieces(llama, pairs[0][0]), pieces(llama, pairs[0][1]) + " </s>")


def test_nothing_is_left_of_a_prompt_that_is_joined_with_the_response() -> None:
    """Then each is tokenised by itself: a model must have a token to go on from."""
    if not (path := ROOT.parent / "shared/tokenizers/gpt2").is_dir():
        pytest.skip("needs the tokenizer of GPT-2")
    from transformers import AutoTokenizer

    gpt2 = AutoTokenizer.from_pretrained(path)
    pairs = learnt(PreferencesConfig(path="x"), gpt2, {"prompt": "2", "chosen": "2 is even.", "rejected": "1 is odd."})
    assert pairs == [("2", "2 Ġis Ġeven . <|endoftext|>"), ("2", "1 Ġis Ġodd . <|endoftext|>")]
    assert learnt(SftConfig(path="x"), gpt2, {"prompt": "Answer: ", "response": "4"}) == [("Answer :", "Ġ4 <|endoftext|>")]


def test_text_is_the_difference_of_two_decodings(llama: Any) -> None:
    ids = llama.encode("there was a little girl\n    return", add_special_tokens=False)
    at = next(i for i in range(len(ids)) if llama.decode(ids[:i]) == "there was a")
    assert decode(llama, [ids[at:]]) == [" little girl\n    return"]
    assert "".join(decode(llama, [[token] for token in ids])) == " there was a little girl\n    return"
    assert prompt_texts(llama, [[1, *ids[:at]]]) == ["there was a"]  # a prompt begins a text
    euro = llama.encode("€", add_special_tokens=False)[-3:]  # one byte each
    assert decode(llama, [euro, euro[:1], [*euro[1:], *ids[at : at + 1]]])[0] == "€"
    stops = StopStrings([" little"], Decoding(llama))
    ends = [n for n in range(1, len(ids) - at) if stops.completed_by_last(ids[at : at + n])]
    assert ends and stops.cut(ids[at : at + ends[0]]) == ("", " little")


def test_a_tokenizer_that_ends_texts_ends_no_prompt_and_no_text_twice(llama: Any) -> None:
    ending = sentence_piece(appends_eos=True)
    prompts, data = PromptsConfig(path="x"), [Row({"prompt": "there was"}, "x")]
    (ids,) = (data.columns["prompt_ids"].rows() for data in (prompts.encode_all(data, ending),))
    assert ids[0].tolist() == llama("there was")["input_ids"]
    assert prompt_texts(ending, [ids[0].tolist()]) == ["there was"]
    for tokenizer in (llama, ending):
        ((first, rest),) = learnt(SftConfig(path="x", text_key="text"), tokenizer, {"text": "a girl"})
        assert first == "<s>" and rest.count("</s>") == 1 and rest.endswith(" </s>")
        ((_, said),) = learnt(SftConfig(path="x"), tokenizer, {"prompt": "a", "response": " girl"})
        assert said.count("</s>") == 1


def test_a_text_that_begins_with_the_start_token_gets_no_second_one(llama: Any) -> None:
    (data,) = (PromptsConfig(path="x").encode_all([Row({"prompt": text}, text) for text in ("<s>a", "a")], llama),)
    assert [ids.tolist().count(1) for ids in data.columns["prompt_ids"].rows()] == [1, 1]


def test_variables_of_a_template(llama: Any) -> None:
    slow = EncodingConfig(chat_template=SWITCHED, chat_template_kwargs={"slow": True})
    texts = [PromptEncoder(llama, one).render(TALK[:1])[0] for one in (EncodingConfig(chat_template=SWITCHED), slow)]
    assert texts == ["fast one<|end|>", "one<|end|>"]
    rows = learnt(SftConfig(path="x", chat_template=SWITCHED, chat_template_kwargs={"slow": True}), llama, {"messages": TALK})
    assert rows == [("▁ o n e <|end|>", "▁ T w o <|end|>")]
    with pytest.raises(ValueError, match=r"data\.chat_template_kwargs\.tokenize is no variable"):
        EncodingConfig(chat_template_kwargs={"tokenize": True}).check("data")


def test_messages_of_parquet_have_null_keys(tmp_path: Path, llama: Any) -> None:
    """Arrow gives every message the keys of all."""
    empty = {"tool_calls": None, "name": None}
    row = {"chosen": [TALK[0] | empty, TALK[1] | empty], "rejected": [TALK[0], {"role": "assistant", "content": "no"}]}
    (chosen, rejected) = learnt(PreferencesConfig(path="x", chat_template=CHATML), llama, row)
    assert chosen[0] == rejected[0] and chosen[1] == "T w o <|im_end|>"
    given = {"prompt": TALK[:1], "chosen": [TALK[0] | empty, TALK[1] | empty], "rejected": "no"}
    assert learnt(PreferencesConfig(path="x", chat_template=CHATML), llama, given)[0] == chosen


def test_rows_with_a_prompt_and_messages_want_a_key(llama: Any) -> None:
    with pytest.raises(
        DataError, match=r"x:0: it has 'prompt' and 'messages', and no 'response'.*; set data.prompt_key=messages"
    ):
        learnt(SftConfig(path="x"), llama, {"prompt": "one", "messages": TALK})


def test_dialogues_are_cut_at_their_last_turn_and_counted(llama: Any) -> None:
    dialogue = "\n\nHuman: hi\n\nAssistant:"
    rows = [{"chosen": dialogue + " a", "rejected": dialogue + " b"}, {"prompt": "Hi", "chosen": "Hi! a", "rejected": "Hi."}]
    data = PreferencesConfig(path="x").encode_all([Row(row, "x") for row in rows], llama)
    assert data.summary().startswith("2 pairs") and ", 1 cut from whole dialogues at their last turn" in data.summary()
    (chosen, rejected) = learnt(PreferencesConfig(path="x"), llama, rows[0])
    assert chosen[0] == rejected[0] and (chosen[1], rejected[1]) == ("▁a </s>", "▁ b </s>")


def test_a_reward_model_reads_the_token_that_closes_a_turn(llama: Any) -> None:
    config = RewardConfig(chat_template=PHI, retokenize=True)
    reads = Retokenizer(llama, llama, config, 99, len(llama), "reward")
    ((before, response),) = learnt(SftConfig(path="x", chat_template=PHI), llama, {"messages": TALK})
    for ended in (True, False):
        ids = reads.encode({"messages": TALK[:1], "prompt": "", "id": 1}, "Two", ended)
        assert pieces(llama, ids) == f"{before} {response}" and pieces(llama, ids[-1:]) == "<|end|>"
