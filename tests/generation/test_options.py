"""Stop strings, and sampling options in the program ``generate``: what it draws, writes and refuses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from generate_runs import ROWS, arguments, read_output, run_program_on_rank, write_rows
from generate_runs import model as model  # a fixture
from generators import SMALL, alone, load
from ranks import run_ranks
from rlhf_spmd import generate as program
from rlhf_spmd.generation import Generator, Request, SamplingConfig, StopStrings

EOS = 2


def byte_tokenizer() -> Any:
    """256 bytes and some merges, so that characters come in pieces and stop strings cross token borders."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("ab", "a"), ("\u0120", "a"), ("b", "\u0120a")]
    vocabulary = {token: i for i, token in enumerate([*letters, *map("".join, merges), "</s>"])}
    inner = Tokenizer(models.BPE(vocabulary, merges))
    inner.add_special_tokens(["</s>"])
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")


TOKENIZER = byte_tokenizer()
PIECES = [TOKENIZER.convert_tokens_to_ids(t) for t in ("a", "b", "ab", "aba", "\u0120a", "b\u0120a", "\u0120", "c", "</s>")]
PIECES += TOKENIZER.convert_tokens_to_ids(["\u00c3", "\u00a9"])  # the two bytes of é


def decode_bytes(ids: Sequence[int]) -> str:
    return str(TOKENIZER.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


@settings(max_examples=300, deadline=None)
@given(
    ids=st.lists(st.sampled_from(PIECES), max_size=40),
    stops=st.lists(st.sampled_from(["ba a", "é", "aé", "cc", " ", "b a b a", "éc"]), min_size=1, max_size=2),
    ignored=st.integers(0, 10),
)
def test_stop_strings_are_found_at_the_token_that_completes_them(ids: list[int], stops: list[str], ignored: int) -> None:
    def new_match(n: int) -> int | None:
        """Where in the first n tokens' text the first stop string begins that the first n - 1 tokens do not hold whole."""
        before, text = decode_bytes(ids[: n - 1]).rstrip("\ufffd"), decode_bytes(ids[:n])
        starts = [i for s in stops for i in range(len(text)) if text.startswith(s, i) and i + len(s) > len(before)]
        return min(starts, default=None)

    watch = StopStrings(stops, decode_bytes)
    for n in range(ignored + 1, len(ids) + 1):
        start = new_match(n)
        assert watch.completed_by_last(ids[:n]) == (start is not None)
        assert watch.cut(ids[:n])[0] == decode_bytes(ids[:n])[:start]


def test_a_stop_string_is_found_across_tokens_without_text() -> None:
    b, nothing, a = TOKENIZER.convert_tokens_to_ids(["b", "</s>", "a"])
    watch = StopStrings(["ba"], decode_bytes)
    assert watch.completed_by_last([b, *[nothing] * 40, a]) and not watch.completed_by_last([a, *[nothing] * 40, a])


def test_the_program_stops_at_strings_and_writes_the_likeliest(model: Path, tmp_path: Path) -> None:
    """Also at a special token, and through stages that draw several tokens at once."""
    limits = [{"min_response_length": i, "max_response_length": max(i, 5) if i % 3 == 0 else 40} for i in range(24)]
    rows = write_rows(tmp_path / "in.jsonl", [row | limit for row, limit in zip(ROWS[:3] * 8, limits, strict=True)])
    common = [
        "sampling.max_response_length=40",
        "sampling.logprobs=2",
        "sampling.ignore_eos=true",
        f"sampling.allowed_token_ids={[0, EOS, *range(68, 94)]}",  # <unk>, </s>, a to z
    ]
    program.main(arguments(model, rows, tmp_path / "plain.jsonl", *common))
    plain = read_output(tmp_path / "plain.jsonl")
    letters = plain[1]["text"][2:4]  # two tokens here
    stops = [letters, "e", "<unk>"]
    common.append(f"sampling.stop=[{letters!r},'e','<unk>']")
    program.main(arguments(model, rows, tmp_path / "cut.jsonl", *common, "generation.steps_per_sync=4"))
    common.append("sampling.include_stop_str_in_output=true")
    run_ranks(2, run_program_on_rank, arguments(model, rows, tmp_path / "whole.jsonl", *common, "layout.pp=2"))
    cut, whole = (read_output(tmp_path / f"{name}.jsonl") for name in ("cut", "whole"))
    endings = set()
    for i, (row, full, long) in enumerate(zip(cut, whole, plain, strict=True)):
        assert long["response_ids"][: len(row["response_ids"])] == row["response_ids"] == full["response_ids"]
        assert [len(pairs) for pairs in row["top_log_probs"]] == [2] * len(row["response_ids"])
        assert "e" not in full["text"][i:-1] and 0 not in row["response_ids"][i:-1]
        if row["finish_reason"] == "stop":
            ending = full["text"].removeprefix(row["text"])
            assert len(row["response_ids"]) >= i and ending in stops
            endings.add(ending)
        else:
            assert len(row["response_ids"]) == limits[i]["max_response_length"]
    assert endings == set(stops) and any(EOS in row["response_ids"] for row in cut)


def test_a_rows_own_minimum_leaves_tokens_to_draw(model: Path, tmp_path: Path) -> None:
    """Otherwise a token that is not allowed would be drawn."""
    rows = write_rows(tmp_path / "in.jsonl", [{"prompt_ids": [4]}, {"prompt_ids": [4], "min_response_length": 2}])
    with pytest.raises(ValueError, match="leave no token to draw"):
        program.prepare(None, arguments(model, rows, tmp_path / "o", "sampling.allowed_token_ids=[2]"), alone()[0].launch)
    mesh, only_end = alone()[1], SamplingConfig(allowed_token_ids=[EOS])
    generator, row = Generator(load(str(model), mesh), mesh, SMALL, [EOS]), Request(0, 0, [4], 3)
    assert generator.generate([row], only_end, 0, 0)[0].token_ids == [EOS]
    with pytest.raises(ValueError, match="leave no token to draw"):
        generator.generate([row, Request(1, 1, [4], 3, min_new_tokens=1)], only_end, 0, 0)
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        generator.generate([row], SamplingConfig(stop=["x"]), 0, 0)


def test_bad_options_are_named(model: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "in.jsonl", [{"prompt_ids": [4]}])
    for override, message in (
        ("repetition_penalty=1e-39", r"sampling\.repetition_penalty=1e-39: must be at least 1e-06 and at most 1000000"),
        ("frequency_penalty=-1e39", r"sampling\.frequency_penalty=-1e\+39: must be at least -1000000000"),
        ("presence_penalty=.inf", r"sampling\.presence_penalty=inf"),
        ("logit_bias={5: 0, 3: 1e39}", r"sampling\.logit_bias=\{3: 1e\+39\}: must be between -1000000000"),
        ("logit_bias={300: 1}", r"sampling\.logit_bias: token id 300 must lie in 0 \.\. 199"),
        ("stop_token_ids=[-1]", r"sampling\.stop_token_ids: token id -1"),
        ("stop=['x</s>']", r"sampling\.stop: 'x</s>' contains the special token '</s>'.*its id 2 in sampling\.stop_token_ids"),
        ("stop=['']", "a stop string must not be empty"),
        ("logprobs=-1", r"sampling\.logprobs=-1"),
        ("allowed_token_ids=[]", "leave no token to draw"),
        ("min_response_length=3", r"min_response_length=3: .* at most sampling\.max_response_length=2"),
    ):
        argv = arguments(model, rows, tmp_path / "out.jsonl", "sampling.max_response_length=2", f"sampling.{override}")
        with pytest.raises(ValueError, match=message):
            program.prepare(None, argv, alone()[0].launch)
    with pytest.raises(ValueError, match=r"val_sampling\.logprobs=11: must be between 0 and 10, the model's vocabulary"):
        SamplingConfig(logprobs=11).check_ids(10, [], False, "val_sampling")
    with pytest.raises(ValueError, match="leave no token to draw"):
        SamplingConfig(allowed_token_ids=[EOS], min_response_length=1).check_ids(10, [EOS], False, "sampling")
