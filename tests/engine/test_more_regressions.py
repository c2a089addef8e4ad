"""More bugs of other libraries, each a named claim, and the count of them all (see
``test_regressions.py``; B10, B15 and B17 stand beside the sessions and the families)."""

from __future__ import annotations

import copy
import itertools
import json
import re
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from helpers import (
    TEXT,
    Letters,
    answered,
    backbone,
    hf_greedy,
    input_for,
    left_padded,
    noisy,
    qwen25,
    randomize,
    stubbed,
    text_input,
    truth,
    video_input,
)
from hypothesis import given
from hypothesis import strategies as st
from rich.control import strip_control_codes
from ties import along, parting
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import saccade
from saccade.bench.terminal_output import UNFINISHED, IncrementalDecoder
from saccade.core import verify as verify_module
from saccade.core.errors import ModelError
from saccade.core.result import RoundRecord
from saccade.core.tree import Tree, chain
from saccade.inputs import load
from saccade.inputs.checkpoints import EMBEDDED
from saccade.model import families, trial

pytestmark = pytest.mark.usefixtures("unchecked")

INPUTS = input_for("qwen2_5_vl")
LENGTH = INPUTS["input_ids"].shape[1]


# -- grammars ------------------------------------------------------------------------------

DIGITS, LETTERS = "0123456789", "abcdefgh"


def continues(text: str) -> str:
    """The characters that may follow within a JSON object of short strings and numbers."""
    if not text:
        return "{"
    if text[-1] == "}" and text.count('"') % 2 == 0:
        return "\n"  # the end
    quotes, last = text.count('"'), text[-1]
    if quotes % 2:  # inside a string
        inside = text[text.rindex('"') + 1 :]
        return '"' if len(inside) >= 3 else LETTERS + ('"' if inside else "")
    key = text[max(text.rfind("{"), text.rfind(",")) :].count(":") == 0
    if last in "{,":
        return '"'
    if key:  # a key has just ended
        return ":"
    if last == ":":
        return '"' + DIGITS[1:]
    number = re.search(r"\d+$", text)
    return ",}" + (DIGITS if number and len(number[0]) < 3 else "")


def json_only(batch: int, ids: torch.Tensor) -> list[int]:
    """``continues`` as a function of ids, for ``prefix_allowed_tokens_fn``."""
    text = "".join(map(chr, ids[LENGTH:].tolist()))
    return [ord(letter) for letter in continues(text)]


def wild(round: int) -> Tree:
    """Drafts that break the grammar or keep it, as chance has it."""
    generator = torch.Generator().manual_seed(round)
    letters = '{}",:123abc\n'
    picks = torch.randint(len(letters), (5,), generator=generator).tolist()
    return chain([ord(letters[pick]) for pick in picks])


GRAMMAR = dict(prefix_allowed_tokens_fn=json_only, eos_token_id=ord("\n"), max_new_tokens=60)


@pytest.mark.parametrize(
    "method", ["ar", *(f"sd/shape=chain-{size}" for size in (1, 2, 4, 8)), "sd-tree", "specvlm"]
)
def test_a_grammar_gives_generates_answer_at_every_block_size(method):
    """Claim: an automaton that reads the text so far (JSON) allows the same tokens in a block as
    one by one: the answer is generate's, and parses if it ended.

    Fails if the mask of one node is used at another, or the path is not part of what it reads.
    """
    with torch.no_grad():
        expected = qwen25().generate(**INPUTS, do_sample=False, **GRAMMAR)[0, LENGTH:].tolist()
    result = saccade.run(
        qwen25(), INPUTS, draft=noisy(qwen25, 0, 0.05), method=method, do_sample=False, **GRAMMAR
    )
    assert list(result.ids) == expected and result.fallback_reason is None
    assert len(set(expected)) > 5


def test_no_draft_gets_past_a_grammar():
    """Claim: wild drafts and sampled answers alike: every prefix is one the automaton allows, and
    what ended is JSON. Fails if one token of a block is judged without the mask.
    """
    ended = 0
    draft = noisy(qwen25, 0, 0.05)
    wilds = stubbed(lambda request, text, round: wild(round))
    for seed, method in itertools.product(range(5), (wilds, "sd", "sd-tree")):
        result = saccade.run(
            qwen25(), INPUTS, draft=draft, method=method, seed=seed,
            do_sample=True, temperature=2.0, **GRAMMAR,
        )  # fmt: skip
        text = "".join(map(chr, result.ids))
        for end, letter in enumerate(text):
            assert letter in continues(text[:end])
        if result.finish_reason == "stop":
            json.loads(text)
            ended += 1
    assert ended >= 5


# -- caches that cannot be cut ------------------------------------------------------------

WINDOW = 8


def mistral() -> Any:
    config = hf.MistralConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, sliding_window=WINDOW, bos_token_id=None,
        eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    return randomize(hf.MistralForCausalLM(config), 0)


@pytest.mark.parametrize("method", ["ar", "sd", "std"])
def test_a_cache_that_slides_is_refused_before_any_work(method):
    """Claim: a model whose cache forgets on its own is refused in one sentence, as a target, and
    costs speed alone as a draft. Fails if it runs past its window and answers something."""
    with pytest.raises(ModelError, match="sliding-window") as caught:
        saccade.run(mistral(), text_input(0, 20), draft=mistral(), method=method)
    assert "\n" not in str(caught.value)


def test_control_past_its_window_it_would_answer_wrongly(monkeypatch):
    """Control: with the refusal taken out, tokens beyond the window differ from generate's, so
    there is something to refuse; within the window they do not."""
    monkeypatch.setattr(families, "refuse", lambda whole, text: None)
    monkeypatch.setattr(trial, "check", lambda target: None)  # which would notice it too
    model = mistral()
    for length, same in ((3, True), (20, False)):
        inputs, count = text_input(1, length), 4
        found = saccade.run(model, inputs, method="ar", max_new_tokens=count).ids
        assert (list(found) == hf_greedy(model, inputs, count)) == same


# -- rows of a batch ----------------------------------------------------------------------


@pytest.mark.parametrize("method", ["sd", "sd-tree", "specvlm-self", "lookup"])
def test_a_batch_of_mixed_lengths_and_acceptance_is_generates(method):
    """Claim: prompts of 9 to 60 tokens, with drafts right to different degrees, in one batch give
    what generate gives for each prompt alone: no offset of one row is another's.
    """
    many = [
        video_input(3, (1, 2, 2), before=1, after=6),
        video_input(4, (3, 4, 6)),
        video_input(5, (5, 4, 8), before=9, after=9),
        video_input(6, (2, 2, 4), before=3, after=30),
    ]
    out = saccade.generate(
        backbone(qwen25()),
        left_padded(many),
        draft=backbone(noisy(qwen25, 0, 0.05)),
        method=method,
        max_new_tokens=20,
    )
    assert len({one["input_ids"].shape[1] for one in many}) == len(many)
    for row, inputs in zip(out, many, strict=True):
        assert row[-20:].tolist() == hf_greedy(qwen25(), inputs, 20)


# -- text as it streams -------------------------------------------------------------------

SPOKEN = "Ein Café 🙂 mit 👩‍👩‍👧 und 数学, naïve\n漢字かな交じり文 – done 🏳️‍🌈"


@cache
def by_bytes() -> PreTrainedTokenizerFast:
    """A token a byte, as GPT's and Qwen's fall back to: an emoji takes four."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@cache
def by_fallback() -> PreTrainedTokenizerFast:
    """Letters it knows, and bytes as ``<0x..>`` for those it does not, as Llama's has them."""
    known = sorted(
        {letter for letter in SPOKEN if letter.isascii()} | {"\N{LOWER ONE EIGHTH BLOCK}"}
    )
    vocab = {letter: i for i, letter in enumerate(["<unk>", *known])}
    vocab |= {f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\N{LOWER ONE EIGHTH BLOCK}", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


TOKENIZERS = {"bytes": by_bytes, "byte fallback": by_fallback}


def typed(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int], block: int) -> list[str]:
    """The pieces a person sees of tokens that come ``block`` at a time, the rest last."""
    typist = IncrementalDecoder(lambda part: tokenizer.decode(list(part), skip_special_tokens=True))
    pieces = []
    for start in range(0, len(ids), block):
        part = tuple(ids[start : start + block])
        record = RoundRecord(part, (), part[:-1], part[-1], "bonus", 0.0, 0.0)
        pieces.append(typist.type(record).plain)
    return [*pieces, typist.rest()]


@pytest.mark.parametrize("block", [1, 2, 3, 4, 5, 7, 16, 1000])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_pieces_of_streamed_text_are_the_whole_text(name, block):
    """Claim: emoji, CJK and accents spelt by several tokens: at every block size, and cut at every
    place, the pieces put together are the decoded text, and no piece holds half a character.

    Byte fallback decodes a run of bytes that ends inside a character as no character at all, even
    those before it: there the pieces are the text up to the cut, which is more than the decoded.
    """
    tokenizer = TOKENIZERS[name]()
    ids = tokenizer.encode(SPOKEN, add_special_tokens=False)
    assert len(ids) > len(SPOKEN) and tokenizer.decode(ids) == SPOKEN
    *pieces, rest = typed(tokenizer, ids, block)
    assert "".join(pieces) == SPOKEN and rest == ""
    for end in range(1, len(ids)):
        *pieces, rest = typed(tokenizer, ids[:end], block)
        whole, text = tokenizer.decode(ids[:end]), "".join(pieces)
        assert SPOKEN.startswith(text) and UNFINISHED not in text
        if name == "bytes" or UNFINISHED not in whole:
            assert text + rest == whole


@given(st.lists(st.integers(0, 255), max_size=24), st.integers(1, 6))
def test_bytes_that_are_no_text_are_neither_lost_nor_doubled(ids, block):
    """Claim: any bytes at all: the pieces and the rest put together are the decoded text, less
    what would ring or move the cursor of a terminal."""
    tokenizer = by_bytes()
    *pieces, rest = typed(tokenizer, ids, block)
    assert "".join([*pieces, strip_control_codes(rest)]) == strip_control_codes(
        tokenizer.decode(ids)
    )


def test_control_decoding_each_round_by_itself_loses_characters():
    """Control: the usual shortcut, each round's tokens decoded alone, must not give the text."""
    tokenizer = by_bytes()
    ids = tokenizer.encode(SPOKEN)
    parts = [tokenizer.decode(ids[at : at + 5]) for at in range(0, len(ids), 5)]
    assert "".join(parts) != SPOKEN and UNFINISHED in "".join(parts)


# -- near-tie or bug ----------------------------------------------------------------------

PROMPTS = 16


@cache
def low(dtype: torch.dtype, seed: int = 0, amount: float = 0.0) -> Any:
    model = noisy(qwen25, seed, amount) if amount else qwen25(seed)
    return backbone(copy.deepcopy(model).to(dtype))


def partings(dtype: torch.dtype, draft: Any, count: int = 32) -> list[Any]:
    """How each of several drafted answers in low precision parts from the plain one."""
    target = low(dtype)
    found = []
    for seed in range(PROMPTS):
        inputs = video_input(seed, (2, 4, 4))
        inputs["pixel_values_videos"] = inputs["pixel_values_videos"].to(dtype)
        settings = dict(max_new_tokens=count, do_sample=False)
        plain = saccade.run(target, inputs, method="ar", **settings).ids
        drafted = saccade.run(target, inputs, draft=draft, method="sd", **settings).ids
        found.append(parting(target, inputs, plain, drafted))
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_divergence_in_low_precision_is_a_near_tie(dtype):
    """Claim: teacher-forced, each first difference of a drafted answer stands where the target's
    two best tokens are closer than its own rounding. Fails on a wrong token of any other kind.
    """
    found = [one for one in partings(dtype, low(dtype, 0, 0.05)) if one is not None]
    assert dtype != torch.bfloat16 or found, "nothing parted: the oracle was not asked"
    assert all(one.near_tie for one in found)


def test_control_a_bug_is_no_near_tie(monkeypatch):
    """Control: with tokens of an unrelated draft let through unverified, the oracle must call at
    least nine in ten of the differences a bug (a wrong token may happen to be a runner-up).
    """
    honest, counter = verify_module.prob, itertools.count()

    def gullible(law: Any, token: int) -> float:
        return 1.0 if next(counter) % 3 == 0 else honest(law, token)

    monkeypatch.setattr(verify_module, "prob", gullible)
    found = [one for one in partings(torch.bfloat16, low(torch.bfloat16, 9), 8) if one]
    assert len(found) > PROMPTS // 2
    assert sum(not one.near_tie for one in found) >= 0.9 * len(found)


def test_noise_is_what_the_number_of_rows_changes():
    """Claim: the noise the oracle allows for is rounding: 1e-4 in fp32, over 1e-2 in bf16, and far
    below the spread of the logits in both.
    """
    for dtype, least, most in ((torch.float32, 0.0, 1e-4), (torch.bfloat16, 1e-2, 0.6)):
        inputs = video_input(0)
        inputs["pixel_values_videos"] = inputs["pixel_values_videos"].to(dtype)
        ids = truth("qwen2_5_vl")[:24]
        one = along(low(dtype), inputs, ids, 1)
        noise = float((along(low(dtype), inputs, ids, 8) - one).abs().max())
        assert least <= noise <= most and noise < float(one.std()) / 4


# -- drafts that cannot be had ------------------------------------------------------------


def _missing(folder: Path) -> None:
    shutil.rmtree(folder)


def _empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def _no_json(folder: Path) -> None:
    (folder / "config.json").write_text("{ not json")


def _unknown(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "flubber"}))


def _cut(folder: Path) -> None:
    for weights in folder.glob("*.safetensors"):
        weights.write_bytes(weights.read_bytes()[:5000])


def _garbage(folder: Path) -> None:
    for weights in folder.glob("*.safetensors"):
        weights.write_bytes(b"\x00" * 4096)


def _no_weights(folder: Path) -> None:
    for weights in folder.glob("*.safetensors"):
        weights.unlink()


def _no_tokenizer(folder: Path) -> None:
    for file in folder.glob("*token*.json"):
        file.write_text("[]")


SPOILT: dict[str, Callable[[Path], None]] = {
    "no folder": _missing,
    "an empty folder": _empty,
    "a config that is no JSON": _no_json,
    "an unknown architecture": _unknown,
    "weights cut short": _cut,
    "weights of zeros": _garbage,
    "no weights": _no_weights,
    "no tokenizer": _no_tokenizer,
}


@pytest.mark.parametrize("name", SPOILT)
def test_a_spoilt_draft_folder_is_a_sentence(name, tmp_path):
    """Claim: whatever is wrong with a draft's folder, loading it says so in one sentence that
    names it. Fails on a traceback of another library, or if such a folder loads.
    """
    folder = tmp_path / "draft"
    shutil.copytree(EMBEDDED / "draft", folder)
    SPOILT[name](folder)
    with pytest.raises(ModelError) as caught:
        load(str(folder), device="cpu")
    assert "\n" not in str(caught.value) and "draft" in str(caught.value)


def test_control_the_folder_itself_loads(tmp_path):
    """Control: unspoilt, the same copy loads."""
    folder = tmp_path / "draft"
    shutil.copytree(EMBEDDED / "draft", folder)
    assert load(str(folder), device="cpu").backbone.vocab > 0


@pytest.mark.parametrize("method", ["sd", "sd-tree", "specvlm"])
def test_a_draft_that_breaks_as_it_starts_leaves_plain_decoding(method):
    """Claim: a loaded draft whose weights do not fit together costs speed only, and the result says
    why; nothing is drafted from then on.
    """
    broken = copy.deepcopy(noisy(qwen25, 0, 0.05))
    for layer in broken.get_decoder().layers:
        layer.mlp.down_proj.weight = torch.nn.Parameter(torch.zeros(7, 3))
    result = saccade.run(qwen25(), INPUTS, draft=broken, method=method, max_new_tokens=24)
    assert result.ids == truth("qwen2_5_vl")[:24]
    assert result.fallback_reason is not None and "drafting failed" in result.fallback_reason
    assert not any(round.tokens for round in result.rounds)


# -- all of them -------------------------------------------------------------------------------


def test_every_bug_of_the_list_has_a_test():
    """Claim: B1 to B24 are each a test by that number. Fails when one is renamed away."""
    named = re.compile(r"^def test_b(\d\d)_", re.MULTILINE)
    tests = Path(__file__).parents[1]
    numbers = {int(n) for file in tests.rglob("test_*.py") for n in named.findall(file.read_text())}
    assert numbers == set(range(1, 25))


def test_letters_are_ids():
    """Claim: the automaton's letters are ids of text here, so that it can allow them at all."""
    assert all(ord(letter) < TEXT for letter in '{}",:\n' + DIGITS + LETTERS)
    assert Letters().decode([ord("{")]) == "{"
    assert answered("qwen2_5_vl", "ar", count=1).ids == truth("qwen2_5_vl")[:1]
