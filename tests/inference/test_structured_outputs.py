"""Responses that follow a grammar: alone, beside others, on two ranks, under preemption; and what cannot be followed."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tasks
from generate_runs import model as model  # a fixture
from generators import alone, load
from ranks import run_ranks
from rlhf_spmd import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from rlhf_spmd.data.tokenizer import decode, decoding, encode, load_tokenizer
from rlhf_spmd.generation import GenerationConfig, GenerationLimits, Generator, Request, SamplingConfig
from rlhf_spmd.inference.structured_outputs import GrammarMask, TokenTable, compile_grammar
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.parallel.mesh import build_mesh
from rlhf_spmd.parallel.world import World

needs_llguidance = pytest.mark.skipif(importlib.util.find_spec("llguidance") is None, reason="llguidance is not installed")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "t": {"enum": ["x", "yy"]},
        "l": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["n", "t", "l"],
    "additionalProperties": False,
}
CHOICES = ["yes", "yes, but", 'a "quoted" \\ one', "no"]
LARK = 'start: item ("," item){0,2}\nitem: /[ab]{1,3}/ "=" NUMBER\nNUMBER: /[1-9]/'
EOS = 2


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    yield LLM(model, seed=4, page_size=8, max_num_seqs=4)
    tasks.leave_world()


def follows_schema(text: str) -> bool:
    """By hand, since the library jsonschema is optional."""
    value = json.loads(text)
    types = [type(value[key]) for key in ("n", "t", "l")]
    items = value["l"]
    return (
        value.keys() == {"n", "t", "l"}
        and types == [int, str, list]
        and 0 <= value["n"] <= 99
        and value["t"] in ("x", "yy")
        and len(items) <= 2
        and all(type(item) is bool for item in items)
    )


def follows(params: dict[str, Any], text: str) -> bool:
    ((form, value),) = params.items()
    if form == "json":
        return follows_schema(text)
    if form == "choice":
        return text in value
    pattern = r"[ab]{1,3}=[1-9](,[ab]{1,3}=[1-9]){0,2}" if form == "grammar" else value
    return re.fullmatch(pattern, text) is not None


FORMS: list[dict[str, Any]] = [
    {"json": SCHEMA},
    {"json": json.dumps(SCHEMA)},
    {"regex": r"(ab|c){2,5}/[0-9]+[x-z]{3}"},
    {"choice": CHOICES},
    {"grammar": LARK},
]


@needs_llguidance
@pytest.mark.parametrize("form", FORMS, ids=lambda form: next(iter(form)))
def test_every_response_follows_its_grammar(llm: LLM, form: dict[str, Any]) -> None:
    params = SamplingParams(n=6, max_tokens=None, seed=1, structured_outputs=StructuredOutputsParams(**form))
    hot = replace(params, temperature=3.0, seed=2)
    greedy = replace(params, n=1, temperature=0)
    outputs = llm.generate(["abc", "abc", "x"], [params, hot, greedy])
    completions = [completion for output in outputs for completion in output.outputs]
    ended = [completion for completion in completions if completion.finish_reason == "stop"]
    assert len(ended) > len(completions) / 2
    for completion in ended:
        assert follows(form, completion.text), completion.text
        assert completion.token_ids[-1] == EOS and completion.stop_reason is None
    if form.keys() & {"json", "choice", "grammar"}:
        assert len(ended) == len(completions)  # these texts are bounded
    assert len({completion.text for completion in completions}) > 2


@needs_llguidance
def test_any_object_is_json_or_was_cut_at_its_limit(llm: LLM) -> None:
    params = SamplingParams(n=12, max_tokens=50, seed=3, structured_outputs=StructuredOutputsParams(json_object=True))
    (output,) = llm.generate("abc", params)
    for completion in output.outputs:
        assert completion.text.startswith("{")
        if completion.finish_reason == "stop":
            assert isinstance(json.loads(completion.text), dict)
        else:
            assert (completion.finish_reason, len(completion.token_ids)) == ("length", 50)


@needs_llguidance
def test_limits_and_stops_beside_a_grammar(llm: LLM) -> None:
    def answer(regex: str, **more: Any) -> tuple[str, str, Any]:
        structured_outputs = StructuredOutputsParams(regex=regex)
        ((completion,),) = (
            o.outputs for o in llm.generate("abc", SamplingParams(structured_outputs=structured_outputs, **more))
        )
        return completion.text, completion.finish_reason, completion.stop_reason

    assert answer("abcdef", max_tokens=3) == ("abc", "length", None)
    assert answer("abcdef", stop=["cd"]) == ("ab", "stop", "cd")
    assert answer("abcdef", stop_token_ids=[ord("d") - 29]) == ("abc", "stop", ord("d") - 29)
    assert answer("abcdef", ignore_eos=True, stop_token_ids=[90], max_tokens=9) == ("abcdef", "stop", 90)
    assert answer("a{0,12}", min_tokens=9, logit_bias={EOS: 100.0}) == ("a" * 9, "stop", None)
    assert answer("ab", min_tokens=9) == ("ab", "stop", None)  # nothing else may follow
    assert answer("a|ab", allowed_token_ids=[ord("a") - 29]) == ("a", "stop", None)


@needs_llguidance
def test_log_probs_are_those_of_the_whole_vocabulary(llm: LLM) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=CHOICES), logprobs=1)
    (output,) = llm.generate("abc", params)
    (completion,) = output.outputs
    ids = [*output.prompt_token_ids, *completion.token_ids]
    (scored,) = llm.generate([ids], SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert scored.prompt_logprobs is not None and completion.logprobs is not None
    entries = scored.prompt_logprobs[len(output.prompt_token_ids) :]
    for token, drawn, entry in zip(completion.token_ids, completion.logprobs, entries, strict=True):
        assert entry is not None and drawn[token].logprob == pytest.approx(entry[token].logprob, abs=1e-4)


@needs_llguidance
def test_rows_without_a_grammar_draw_what_they_draw_alone(llm: LLM) -> None:
    def contents(output: RequestOutput) -> list[Any]:
        return [dataclasses.asdict(completion) for completion in output.outputs]

    plain = SamplingParams(n=3, max_tokens=20, seed=5, logprobs=1)
    guided = replace(plain, structured_outputs=StructuredOutputsParams(regex="[a-z]{12}"))
    together = llm.generate(["abc", "x", "abc", "x"], [plain, guided, guided, plain])
    assert [contents(output) for output in together] == [
        contents(*llm.generate(*pair)) for pair in zip(["abc", "x", "abc", "x"], [plain, guided, guided, plain], strict=True)
    ]


# -- wherever a row's state lies


def generate_on_rank(world: World, path: str, layout: Layout, settings: dict[str, Any], in_pieces: bool) -> Any:
    """Rows of several grammars beside rows without one, by row id; and how many were preempted."""
    mesh = build_mesh(world, list(range(world.size)), layout) if world.size > 1 else alone()[1]
    tokenizer = load_tokenizer(path)
    config = GenerationConfig(page_size=4, max_num_seqs=12, **settings)
    generator = Generator(load(path, mesh), mesh, config, [EOS], decoding(tokenizer))
    num_ids = generator.num_drawable
    grammars = [compile_grammar(StructuredOutputsParams(**form), tokenizer, num_ids) for form in FORMS]
    requests = []
    for row in range(18):
        grammar = grammars[row // 2 % len(grammars)]
        mask = () if row % 3 == 2 else (GrammarMask(grammar, num_ids, [EOS]),)
        requests.append(Request(row, row // 2, encode(tokenizer, "abcdefgh"[: 1 + row // 3]), 50, processors=mask))
    call = (SamplingConfig(), 3, 5)
    if not in_pieces:
        completions = generator.generate(requests, *call)
        return {c.row_id: (c.token_ids, c.finish_reason) for c in completions}, generator.stats.preemptions
    completions = generator.generate_until(requests, *call, GenerationLimits(tokens=20), 1)
    while generator.kept:
        completions += generator.generate_until([], *call, GenerationLimits(tokens=20), 1)
    return {c.row_id: (c.token_ids, c.finish_reason) for c in completions}, 0


@needs_llguidance
def test_tokens_depend_on_neither_layout_nor_preemption_nor_calls(model: Path) -> None:
    world, path = alone()[0], str(model)
    rows, preemptions = generate_on_rank(world, path, Layout(), {}, False)
    assert preemptions == 0
    tokenizer = load_tokenizer(path)
    for row, (tokens, finish_reason) in rows.items():
        if row % 3 != 2 and finish_reason == "stop":
            assert follows(FORMS[row // 2 % len(FORMS)], decode(tokenizer, [tokens])[0])
    tight, preemptions = generate_on_rank(world, path, Layout(), {"num_pages": 40}, False)
    assert preemptions > 0 and tight == rows
    assert generate_on_rank(world, path, Layout(), {"steps_per_sync": 5}, False)[0] == rows
    assert generate_on_rank(world, path, Layout(), {}, True)[0] == rows
    for layout in (Layout(tp=2), Layout(pp=2)):
        both = run_ranks(2, generate_on_rank, path, layout, {"num_pages": 60}, False)
        assert [rows_of_rank for rows_of_rank, _ in both] == [rows, rows], layout


# -- the mask itself


@needs_llguidance
def test_a_mask_depends_on_the_tokens_alone(model: Path) -> None:
    tokenizer = load_tokenizer(model)
    compiled = compile_grammar(StructuredOutputsParams(json=SCHEMA), tokenizer, 98)
    ids = encode(tokenizer, '{"n": 12,"t":"yy","l":[]}')
    logits = torch.randn(200, generator=torch.Generator().manual_seed(1))
    mask = GrammarMask(compiled, 98, [EOS])
    in_order = [mask(ids[:length], logits) for length in range(len(ids) + 1)]
    for length in (9, 3, 0, len(ids), 12, 12):  # a row that goes back, and another row
        assert torch.equal(mask(ids[:length], logits), in_order[length])
        assert torch.equal(GrammarMask(compiled, 98, [EOS])(ids[:length], logits), in_order[length])
    assert in_order[-1].isfinite().nonzero().flatten().tolist() == [EOS]
    for scores, token in zip(in_order, ids, strict=False):
        allowed = scores.isfinite()
        assert allowed[token] and not allowed[98:].any() and torch.equal(scores[allowed], logits[allowed])
    wrong = mask([*ids[:3], EOS], logits)  # the grammar does not allow the last one
    assert wrong.isfinite().nonzero().flatten().tolist() == [EOS]
    assert mask.allows([*ids, EOS]) and mask.allows(ids[:3]) and not mask.allows([*ids[:3], EOS])


@needs_llguidance
def test_tokens_of_parts_of_characters_spell_them() -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<end>": 0, **{character: number for number, character in enumerate(alphabet, 1)}}
    inner = Tokenizer(models.BPE(vocabulary, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    inner.add_special_tokens(["<end>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>")
    table = TokenTable(tokenizer, 257)
    assert sorted(table.tokens[1:257]) == [bytes([byte]) for byte in range(256)] and table.tokens[0] == table.tokens[257] == b""
    compiled = compile_grammar(StructuredOutputsParams(choice=["é€", "é\U0001f600 "]), tokenizer, 257)
    ids, mask = list[int](), GrammarMask(compiled, 257, [0])
    for _ in range(9):
        likeliest = int(mask(ids, torch.arange(257.0)).argmax())
        if likeliest == 0:
            break
        ids.append(likeliest)
    assert decode(tokenizer, [ids]) == ["é\U0001f600 "]


# -- what cannot be


@needs_llguidance
@pytest.mark.parametrize(
    ("form", "more", "message"),
    [
        ({"regex": "(a"}, {}, "structured_outputs: at 1(8): invalid regex"),
        ({"json": "{"}, {}, "structured_outputs: EOF while parsing an object"),
        ({"json": {"type": "strin"}}, {}, "structured_outputs: Invalid type: strin"),
        ({"json": {"uniqueItems": True, "type": "array"}}, {}, 'structured_outputs: Unimplemented keys: ["uniqueItems"]'),
        ({"json": {"$ref": "file:///etc/hostname"}}, {}, "structured_outputs: Resource 'file:///etc/hostname' is not present"),
        ({"json": {"enum": [{1, 2}]}}, {}, "structured_outputs: "),
        ({"grammar": "start: nothing"}, {}, "structured_outputs: "),
        ({"regex": "a" * 70_000}, {}, "structured_outputs: the grammar has 70"),
        ({"regex": "\u00e9|\n"}, {}, "structured_outputs: no token of the model begins such a text"),
        ({"choice": ["yes", "n\u00e9"]}, {}, "structured_outputs.choice: no token of the model has the character 'é'"),
        ({"regex": "a"}, {"ignore_eos": True}, "sampling_params.structured_outputs: no token could end the response"),
    ],
)
def test_a_grammar_that_cannot_be_is_refused_in_one_line(
    llm: LLM, form: dict[str, Any], more: dict[str, Any], message: str
) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**form), **more)
    with pytest.raises(ValueError, match=r"\A[^\n]{1,400}\Z") as refusal:
        llm.generate("abc", params)
    assert str(refusal.value).startswith(message)


@needs_llguidance
@pytest.mark.parametrize("more", [{}, {"min_tokens": 5}, {"stop_token_ids": [95], "n": 2}])
def test_a_response_that_no_token_goes_on_with_ends_as_it_is(llm: LLM, more: dict[str, Any]) -> None:
    """Beside a row that draws what it draws alone."""
    blind = SamplingParams(structured_outputs=StructuredOutputsParams(regex="[ab]{2}(\u00e9|\n)"), **more)
    plain = SamplingParams(max_tokens=20, seed=5, stop_token_ids=more.get("stop_token_ids"))
    ended, beside = llm.generate(["abc", "x"], [blind, plain])
    for completion in ended.outputs:
        assert re.fullmatch("[ab]{2}", completion.text) and len(completion.token_ids) == 3
        assert (completion.finish_reason, completion.stop_reason) == ("error", None)
    assert beside.outputs == llm.generate("x", plain)[0].outputs


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "structured_outputs: give exactly one of json, regex, choice, grammar, json_object; there is none"),
        ({"choice": []}, "structured_outputs: give exactly one of json, regex, choice, grammar, json_object; there is none"),
        ({"regex": "a", "choice": ["b"]}, "structured_outputs: give exactly one of "),
        ({"regexp": "a"}, "unknown key 'structured_outputs.regexp'; did you mean 'structured_outputs.regex'?"),
        ({"choice": "yes"}, "structured_outputs.choice='yes' must be a list"),
        (StructuredOutputsParams(json=5), "structured_outputs.json=5 must be text, or a mapping"),  # type: ignore[arg-type]
    ],
)
def test_parameters_are_checked_where_they_are_made(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=r"^\w") as refusal:
        SamplingParams(structured_outputs=value)
    assert str(refusal.value).startswith(message)


def test_what_is_missing_is_named(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a"]))
    monkeypatch.setattr(llm.processor, "tokenizer", None)
    if importlib.util.find_spec("llguidance") is not None:
        with pytest.raises(ValueError, match=r"\Astructured_outputs need a tokenizer, and this model has none\Z"):
            llm.generate([[5, 6]], params)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"\Astructured_outputs need the package: pip install llguidance\Z"):
        llm.generate([[5, 6]], params)
