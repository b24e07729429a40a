"""Chat templates of models that think and call tools: the text of each kind of row, and what of it is learnt."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from chat_styles import DEEPSEEK, GLM, GPT_OSS, MARKS, QWEN3, STRICT_OSS, jinja
from rlhf_spmd.data.conversations import Conversation, ConversationEncoder
from rlhf_spmd.data.dataset import TokenDataset
from rlhf_spmd.data.encoding import EncodingConfig, PromptEncoder
from rlhf_spmd.data.files import DataError, Row
from rlhf_spmd.data.messages import check_messages
from rlhf_spmd.data.preferences import PreferencesConfig, UnpairedConfig
from rlhf_spmd.data.prompts import DataConfig
from rlhf_spmd.data.sft import PromptResponseConfig, SftConfig, encode_pairs
from rlhf_spmd.rewards.config import RewardConfig
from rlhf_spmd.workers.retokenize import Retokenizer

FIRST_CALL = QWEN3.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")
MARKED_CALL = FIRST_CALL.replace("{{ said }}", "{% generation %}{{ said }}{% endgeneration %}")
KNOWN = QWEN3.replace("{{ m.content }}", "{{ m.content if m.role in ('system', 'user', 'tool') }}")
WITH_IDS = STRICT_OSS.replace("not messages[loop.index0 - 1].tool_calls", "(m.tool_call_id or '') | length != 9")
TOOL = {"type": "function", "function": {"name": "look"}}
TOOLS = '[{"type": "function", "function": {"name": "look"}}]'
CALL = {"type": "function", "function": {"name": "look", "arguments": '{"city":"Ulm"}'}}
ASKED = [{"role": "user", "content": "Sun?"}]
THOUGHT = [{"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}]
INLINE = [{"role": "assistant", "content": "<think>Hm.</think>Yes."}]
CALLS = [{"role": "assistant", "content": None, "tool_calls": [CALL]}]
OLDER_CALLS = [{"role": "assistant", "content": None, "function_call": CALL["function"]}]
LOOP = [*ASKED, *CALLS, {"role": "tool", "content": "sun"}, {"role": "assistant", "content": "Yes."}]


def call(arguments: Any, name: str | None = "f") -> list[Any]:
    return [{**CALLS[0], "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """One token per byte, and the marks of all templates."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {name: i for i, name in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Tokenizer(models.BPE(letters, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    inner.add_special_tokens(MARKS.split())
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|endoftext|>")


def shown(tokenizer: Any, data: TokenDataset, entry: int = 0) -> str:
    """The text of a row's entry; what is learnt of it stands in [[ and ]]."""
    batch = data.batch([0], [0])
    text = str(tokenizer.decode(batch["prompt_ids"].rows()[entry].tolist()))
    if "response_ids" not in batch:
        return text
    ids = batch["response_ids"].rows()[entry].tolist()
    mask = batch["response_mask"].rows()[entry].tolist() if "response_mask" in batch else [True] * len(ids)
    begins = [i for i in range(len(ids)) if i == 0 or mask[i] != mask[i - 1]]
    for begin, end in zip(begins, [*begins[1:], len(ids)], strict=True):
        part = tokenizer.decode(ids[begin:end])
        text += f"[[{part}]]" if mask[begin] else part
    return text


def row_texts(tokenizer: Any, response: list[Any], asked: list[Any] = ASKED, more: Any = None, **settings: Any) -> set[str]:
    """What SFT, pairs (of DPO and reward models) and KTO make of one response."""
    other = {"role": "assistant", "content": "</think>No." if "</think>" in str(response) else "No."}
    rows = {
        SftConfig: [{"prompt": asked, "completion": response}, {"messages": [*asked, *response]}][
            : 1 if asked[-1]["role"] == "assistant" else 2
        ],
        PreferencesConfig: [{"prompt": asked, "chosen": response, "rejected": [other]}],
    }
    its = {"path": "x", "template_date": "2026-01-31", **settings}
    texts = {
        shown(tokenizer, kind(**its).encode_all([Row({**row, **(more or {})}, "x:1")], tokenizer))
        for kind, given in rows.items()
        for row in given
    }
    further = {"prompt": [{"role": "user", "content": "2?"}], "completion": [other], "label": False}
    both = [
        Row({**row, **(more or {})}, f"x:{i}")
        for i, row in enumerate([{"prompt": asked, "completion": response, "label": True}, further])
    ]
    return texts | {shown(tokenizer, UnpairedConfig(**its).encode_all(both, tokenizer))}


SYSTEM = "<|start|>system<|message|>2026-01-31<|end|>"
QWEN_CALL = '<tool_call>{"name": "look", "arguments": {"city": "Ulm"}}</tool_call>'
GLM_CALL = "<tool_call>look\n<arg_key>city</arg_key>\n<arg_value>Ulm</arg_value>\n</tool_call>"
TABLE = {  # prompt with tools; a turn that thinks; one that calls; both turns about a call
    "qwen3": (
        QWEN3,
        f"<|im_start|>system\n{TOOLS}<|im_end|>\n<|im_start|>user\nSun?<|im_end|>\n<|im_start|>assistant\n",
        "<|im_start|>user\nSun?<|im_end|>\n<|im_start|>assistant\n[[<think>\nHm.\n</think>\n\nYes.<|im_end|>]]",
        f"<|im_start|>user\nSun?<|im_end|>\n<|im_start|>assistant\n[[<think>\n\n</think>\n\n{QWEN_CALL}<|im_end|>]]",
        f"<|im_start|>user\nSun?<|im_end|>\n<|im_start|>assistant\n[[{QWEN_CALL}<|im_end|>]]\n<|im_start|>user\nsun<|im_end|>\n"
        "<|im_start|>assistant\n[[<think>\n\n</think>\n\nYes.<|im_end|>]]",
    ),
    "glm": (  # the mark of the next turn ends one, and the tokenizer's end token the last
        GLM,
        f"<|system|>{TOOLS}<|user|>\nSun?<|assistant|>",
        "<|user|>\nSun?<|assistant|>[[\n<think>Hm.</think>\nYes.<|endoftext|>]]",
        f"<|user|>\nSun?<|assistant|>[[\n<think></think>\n{GLM_CALL}<|endoftext|>]]",
        f"<|user|>\nSun?<|assistant|>[[\n<think></think>\n{GLM_CALL}<|observation|>]]\nsun<|assistant|>[[\n<think></think>\nYes.<|endoftext|>]]",
    ),
    "gpt-oss": (
        GPT_OSS,
        f"{SYSTEM}<|start|>developer<|message|>{TOOLS}<|end|><|start|>user<|message|>Sun?<|end|><|start|>assistant",
        f"{SYSTEM}<|start|>user<|message|>Sun?<|end|><|start|>assistant[[<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
        "<|channel|>final<|message|>Yes.<|return|>]]",
        f'{SYSTEM}<|start|>user<|message|>Sun?<|end|><|start|>assistant[[ to=look<|message|>{{"city": "Ulm"}}<|call|>]]',
        f'{SYSTEM}<|start|>user<|message|>Sun?<|end|><|start|>assistant[[ to=look<|message|>{{"city": "Ulm"}}<|call|>]]'
        "<|start|>tool<|message|>sun<|end|><|start|>assistant[[<|channel|>final<|message|>Yes.<|return|>]]",
    ),
    "deepseek": (  # writes arguments as text, as the data have it
        DEEPSEEK,
        f"{TOOLS}<|User|>Sun?<|Assistant|></think>",
        "<|User|>Sun?<|Assistant|><think>[[Hm.</think>Yes.<|eos|>]]",
        '<|User|>Sun?<|Assistant|></think>[[<call>look<sep>{"city":"Ulm"}</call><|eos|>]]',
        '<|User|>Sun?<|Assistant|></think>[[<call>look<sep>{"city":"Ulm"}</call><|eos|>]]<output>sun</output>[[Yes.<|eos|>]]',
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_every_kind_of_row_is_written_as_its_template_writes_it(tokenizer: Any, name: str) -> None:
    template, prompt, thinks, calls, loop = TABLE[name]
    said = {"chat_template": template}
    dated = {**said, "path": "x", "template_date": "2026-01-31"}
    nothing = DataConfig(**dated).encode_all([Row({"prompt": ASKED, "tools": ""}, "x:1")], tokenizer)
    assert TOOLS not in shown(tokenizer, nothing)
    for tools in ([TOOL], json.dumps([TOOL]), [json.dumps(TOOL)]):
        data = DataConfig(**dated).encode_all([Row({"prompt": ASKED, "tools": tools}, "x:1")], tokenizer)
        assert shown(tokenizer, data) == prompt
    with_tools = SftConfig(**dated).encode_all([Row({"messages": [*ASKED, *CALLS], "tools": [TOOL]}, "x:1")], tokenizer)
    assert shown(tokenizer, with_tools).startswith(prompt)
    thoughts = {"more": {"chat_template_kwargs": '{"thinking": true}'}} if name == "deepseek" else {}
    assert row_texts(tokenizer, INLINE if name == "deepseek" else THOUGHT, **said, **thoughts) == {thinks}
    assert row_texts(tokenizer, CALLS, **said) == row_texts(tokenizer, OLDER_CALLS, **said) == {calls}
    assert shown(tokenizer, SftConfig(**dated).encode_all([Row({"messages": LOOP}, "x:1")], tokenizer)) == loop
    ((_, scored),) = encode_pairs(
        [Row({"prompt": ASKED, "response": CALLS}, "x")], PromptResponseConfig(**dated), tokenizer, None
    )
    learnt = calls.partition("[[")[2].removesuffix("]]").removesuffix("<|endoftext|>")
    assert tokenizer.decode(scored) == learnt.removesuffix("<|im_end|>").removesuffix("<|eos|>")  # without what closes the turn


@pytest.mark.parametrize(
    ("template", "response", "settings", "message"),
    [
        (QWEN3, THOUGHT, {"chat_template_kwargs": {"enable_thinking": False}}, "closes the thoughts, and message 1 has some"),
        (QWEN3, INLINE, {"chat_template_kwargs": {"enable_thinking": False}}, "closes the thoughts, and message 1 has some"),
        (DEEPSEEK, THOUGHT, {}, "closes the thoughts, and message 1 has some"),
        (DEEPSEEK, INLINE, {}, "closes the thoughts, and message 1 has some"),
        (GPT_OSS.replace("m.thinking", "none"), THOUGHT, {}, "leaves out the thoughts of message 1, 'Hm.'"),
        (DEEPSEEK, THOUGHT, {"chat_template_kwargs": {"thinking": True}}, "the response has no </think>"),
        ("{{ messages[-1].content }}", CALLS, {}, "the chat template does not write 'tool_calls'"),
        (QWEN3, call('{"x": '), {}, "the arguments of 'f' is not valid JSON"),
        (QWEN3, call("[1]"), {}, "must be an object or its JSON"),
        (GPT_OSS, [{**CALLS[0], "content": "Let me look."}], {}, "leaves out the content of message 1, beside its calls"),
        (FIRST_CALL, [{**CALLS[0], "tool_calls": [CALL, CALL]}], {}, "leaves out call 1 of message 1"),
        (MARKED_CALL, [{**CALLS[0], "tool_calls": [CALL, CALL]}], {}, "leaves out call 1 of"),
        (QWEN3, [{**CALLS[0], **OLDER_CALLS[0]}], {}, "'function_call' of message 0: the message has 'tool_calls', too"),
        (QWEN3, [{**OLDER_CALLS[0], "function_call": "look"}], {}, "'function_call' of message 0 is not valid JSON"),
        (QWEN3, call({}, name=None), {}, "a call must be an object with a function's 'name'"),
        (QWEN3, [{"role": "assistant", "content": "x", "weight": 2}], {}, "the weight of message 0 must be 0 or 1, not 2"),
        (
            QWEN3,
            [{"role": "assistant", "content": [{"type": "image"}]}],
            {},
            "a part of the type 'image'; only text is supported",
        ),
    ],
)
def test_what_a_template_cannot_say_is_refused(
    tokenizer: Any, template: str, response: list[Any], settings: dict[str, Any], message: str
) -> None:
    config = SftConfig(path="x", chat_template=template, **settings)
    with pytest.raises(DataError, match=r"^x:1: .*" + message):
        config.encode_all([Row({"prompt": ASKED, "completion": response}, "x:1")], tokenizer)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"tools": "look"}, "'tools' is not valid JSON"),
        ({"tools": ["look"]}, "'tools' is not valid JSON"),
        ({"tools": [1]}, "'tools' must be a list of schemas"),
        ({"chat_template_kwargs": [1]}, "'chat_template_kwargs' must be an object"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize is no variable"),
        ({"prompt": [{"role": "developer", "content": "Sun?"}, *ASKED]}, "leaves out messages of the role 'developer'"),
        ({"prompt": [*ASKED, *CALLS]}, "the prompt ends with the assistant's calls"),
    ],
)
def test_what_a_row_cannot_ask_for_is_refused(tokenizer: Any, row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=rf"^x:1: .*{message}"):
        DataConfig(path="x", chat_template=KNOWN).encode_all([Row({"prompt": ASKED, **row}, "x:1")], tokenizer)


def test_a_prompt_may_begin_the_answer(tokenizer: Any) -> None:
    begun = [*ASKED, {"role": "assistant", "content": "Let me see: "}]
    data = DataConfig(path="x", chat_template=QWEN3).encode_all([Row({"prompt": begun}, "x:1")], tokenizer)
    text = "<|im_start|>user\nSun?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nLet me see: "
    assert shown(tokenizer, data) == text
    assert row_texts(tokenizer, [{"role": "assistant", "content": "yes"}], begun, chat_template=QWEN3) == {
        f"{text}[[yes<|im_end|>]]"
    }


def test_a_developer_message_stands_for_a_system_prompt(tokenizer: Any) -> None:
    encoder = PromptEncoder(tokenizer, EncodingConfig(chat_template=QWEN3, system_prompt="Be brief."))
    text, _ = encoder.render([{"role": "developer", "content": "Be long."}, *ASKED])
    assert text.startswith("<|im_start|>developer\nBe long.<|im_end|>") and "brief" not in text


def test_weights_of_messages_and_rows(tokenizer: Any) -> None:
    talk = [
        *ASKED,
        {"role": "assistant", "content": "No.", "weight": 0.0},
        *ASKED,
        {"role": "assistant", "content": "Yes.", "weight": 1},
    ]
    marked = QWEN3.replace("{{ said }}", "{% generation %}{{ said }}{% endgeneration %}")
    for template, learnt in ((GPT_OSS, "<|channel|>final<|message|>Yes.<|return|>"), (marked, "Yes.<|endoftext|>")):
        config = SftConfig(path="x", chat_template=template)
        rows = [Row({"messages": talk}, "x:1"), Row({"messages": LOOP, "weight": 0}, "x:2")]
        data = config.encode_all(rows, tokenizer)
        assert shown(tokenizer, data).partition("[[")[2] == f"{learnt}]]"
        assert "1 left out whose weight is 0 (the first is x:2)" in data.summary()
    row = {"prompt": ASKED, "chosen": LOOP[3:], "rejected": THOUGHT}
    pairs = [Row(row, "x:1"), Row({**row, "weight": 0}, "x:2")]
    assert PreferencesConfig(path="x", chat_template=QWEN3).encode_all(pairs, tokenizer).summary().startswith("1 pairs")
    with pytest.raises(DataError, match=r"x:1: weight=0.5 must be 0, which leaves the row out, or 1"):
        config.encode_all([Row({"messages": talk, "weight": 0.5}, "x:1")], tokenizer)
    with pytest.raises(DataError, match=r"or all have the weight 0; there is nothing to learn from"):
        config.encode_all([Row({"messages": talk[:2]}, "x:1")], tokenizer)


def test_later_turns_that_the_template_writes_otherwise_alone(tokenizer: Any) -> None:
    """As Qwen3, which writes an empty pair of tags before the last answer: a turn ends at its token, or the row is refused."""
    talk = [*ASKED, {"role": "assistant", "content": "No."}, *ASKED, *THOUGHT]
    encoder = ConversationEncoder(PromptEncoder(tokenizer, EncodingConfig(chat_template=QWEN3)))
    ids, mask = encoder.encode(Conversation(check_messages(talk)))
    assert tokenizer.decode([i for i, learnt in zip(ids, mask, strict=True) if learnt]) == (
        "No.<|im_end|><think>\nHm.\n</think>\n\nYes.<|im_end|>"
    )
    oss = ConversationEncoder(PromptEncoder(tokenizer, EncodingConfig(chat_template=GPT_OSS)))
    with pytest.raises(DataError, match="renders the messages before message 1 otherwise"):
        oss.encode(Conversation(check_messages(talk)))


CHATML = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}WRITTEN{{ '<|im_end|>\\n' }}{% endfor %}"
CHATML += "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{{ 'BEGUN' }}{% endif %}"
MARKED = jinja(r"""
{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
  {% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>\n' }}{% endgeneration %}
  {% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think></think>' }}{% endif %}""")


@pytest.mark.parametrize(
    ("written", "begun", "content", "text"),  # what the template writes of an answer, and how its generation prompt ends
    [
        (
            "{{ '<think></think>' if m.role == 'assistant' and not '</think>' in m.content }}{{ m.content }}",
            "<think>\\n",
            "4",
            "<think>\n[[</think>4",
        ),
        ("{{ m.content }}", "<think>\\n", "<think>Two.</think>4", "<think>\n[[Two.</think>4"),
        ("{{ m.content.split('</think>')[-1] }}", "<think>", "<think>Two.</think>4", "<think>[[Two.</think>4"),
        ("{{ m.content }}", "<think>\\n\\n</think>\\n\\n", "4", "<think>\n\n</think>\n\n[[4"),
        ("{{ m.content }}", "<think></think>", "<think>\n</think>\n\n4", "<think></think>[[4"),
    ],
)
def test_thoughts_are_opened_and_closed_once(tokenizer: Any, written: str, begun: str, content: str, text: str) -> None:
    template = CHATML.replace("WRITTEN", written).replace("BEGUN", begun)
    said = [{"role": "assistant", "content": content}]
    (shown_text,) = {each.partition("assistant\n")[2] for each in row_texts(tokenizer, said, chat_template=template)}
    assert shown_text == f"{text}<|im_end|>]]"


def test_what_a_template_marks_is_learnt_up_to_the_end_of_the_turn(tokenizer: Any) -> None:
    """Also where the generation prompt is more than the header."""
    assert row_texts(tokenizer, LOOP[3:], chat_template=MARKED) == {
        "<|im_start|>user\nSun?<|im_end|>\n<|im_start|>assistant\n[[Yes.<|im_end|>]]"
    }
    row = Row({"prompt": [*ASKED, LOOP[3], *ASKED], "completion": LOOP[3:]}, "x:1")
    data = SftConfig(path="x", chat_template=MARKED).encode_all([row], tokenizer)
    assert shown(tokenizer, data).partition("[[")[2] == "Yes.<|im_end|>]]"


def test_pairs_that_differ_in_a_call_are_two_responses(tokenizer: Any) -> None:
    other = call({}, "find")
    config = PreferencesConfig(path="x", chat_template=QWEN3)
    data = config.encode_all([Row({"prompt": ASKED, "chosen": CALLS, "rejected": other}, "x:1")], tokenizer)
    assert '"find", "arguments": {}' in shown(tokenizer, data, 1)
    same = [{**CALLS[0], "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": {"city": "Ulm"}}}]}]
    with pytest.raises(DataError, match="two responses are equal"):
        config.encode_all([Row({"prompt": ASKED, "chosen": CALLS, "rejected": same}, "x:1")], tokenizer)


def test_pairs_that_differ_in_the_text_of_arguments(tokenizer: Any) -> None:
    """Some templates write the text. Also in the prompts of dialogues, and whatever the margin and the marks in a text."""
    dialogues = [[*ASKED, *call(text), *LOOP[2:]] for text in ('{"a":1}', '{"a": 1}')]
    other = {"role": "assistant", "content": "\n\nHuman: No."}
    rows = [
        *({"prompt": ASKED, "chosen": each[1:2], "rejected": [other], "margin": None} for each in dialogues),
        *({"chosen": each, "rejected": [*each[:-1], other]} for each in dialogues),
    ]
    config = PreferencesConfig(path="x", chat_template=DEEPSEEK)
    data = config.encode_all([Row(row, f"x:{i}") for i, row in enumerate(rows)], tokenizer)
    columns = [data.columns[name].rows()[::2] for name in ("prompt_ids", "response_ids")]
    texts = [tokenizer.decode(torch.cat(ids).tolist()) for ids in zip(*columns, strict=True)]
    assert [('{"a":1}' in text, '{"a": 1}' in text) for text in texts] == [(True, False), (False, True)] * 2
    assert data.numbers["margin"].tolist() == [0.0] * 8
    with pytest.raises(DataError, match="'gap' must be a number of at least 0, not None"):
        PreferencesConfig(path="x", margin_key="gap").encode_all([Row({**rows[0], "gap": None}, "x:1")], tokenizer)


def test_a_reward_model_continues_what_the_prompt_began(tokenizer: Any) -> None:
    reads = Retokenizer(tokenizer, tokenizer, RewardConfig(chat_template=GPT_OSS, retokenize=True), 999, 999, "reward")
    begun = {"messages": [*ASKED, {"role": "assistant", "content": "It is: "}], "prompt": "<|user|>Sun?<|assistant|>It is: "}
    other = {"messages": LOOP, "prompt": "Sun?"}  # a column of another use
    texts = [tokenizer.decode(reads.encode(row, "Yes.", True)) for row in (begun, {"messages": LOOP[:3], "prompt": "?"}, other)]
    assert texts[0].endswith("<|channel|>final<|message|>It is: Yes.<|return|>") and texts[0].count("Yes.") == 1
    assert '<|message|>{"city": "Ulm"}<|call|>' in texts[1] and texts[2] == "Sun?Yes.<|endoftext|>"


WRITES_CALLS = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}WRITTEN{% endfor %}{% endfor %}"


@pytest.mark.parametrize("asked", ["Sun?", "Write {'city': 'Ulm'}."])
@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("{{ c.function.arguments }}", '{"city":"Ulm"}'),
        ("{{ c.function.arguments | tojson }}", '{"city": "Ulm"}'),
    ],
)
def test_arguments_are_encoded_once(tokenizer: Any, asked: str, written: str, text: str) -> None:
    """Also if another message has what Python writes of them."""
    encoder = PromptEncoder(tokenizer, EncodingConfig(chat_template=WRITES_CALLS.replace("WRITTEN", written)))
    messages = check_messages([{"role": "user", "content": asked}, *CALLS])
    assert encoder.apply_template(messages, False) == asked + text


@pytest.mark.parametrize("template", [STRICT_OSS, WITH_IDS])
def test_results_of_tools_follow_the_end_of_their_call(tokenizer: Any, template: str) -> None:
    encoder = PromptEncoder(tokenizer, EncodingConfig(chat_template=template))
    result = {"role": "tool", "name": "look", "content": "sun"}
    written, _ = encoder.between_turns([result])
    assert written == "<|call|><|start|>functions.look to=assistant<|message|>sun<|end|><|start|>assistant"


ROLES_END_TURNS = (  # as GLM's, where the next message's role is drawn as a turn's end
    "{% for m in messages %}{{ '<|observation|>' if m.role == 'tool' else '<|' + m.role + '|>' }}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.mark.parametrize(
    ("last", "role", "text"),
    [
        ("<|user|>", "user", "hi<|assistant|>"),
        ("<|observation|>", "tool", "hi<|assistant|>"),
        ("<|endoftext|>", "user", "<|user|>hi<|assistant|>"),
        ("<|user|>", "tool", "<|observation|>hi<|assistant|>"),
        ("<|observation|>", "user", "<|user|>hi<|assistant|>"),
    ],
)
def test_a_message_keeps_its_role_behind_any_end_of_a_turn(tokenizer: Any, last: str, role: str, text: str) -> None:
    encoder = PromptEncoder(tokenizer, EncodingConfig(chat_template=ROLES_END_TURNS))
    end_ids = [tokenizer.convert_tokens_to_ids(token) for token in ("<|user|>", "<|observation|>", "<|endoftext|>")]
    message = {"role": role, "content": "hi"}
    ids = encoder.ids_between_turns(tokenizer.convert_tokens_to_ids(last), [message], end_ids)
    assert tokenizer.decode(ids) == text
