"""Pairs of different kinds: a draft that reads text only, tokenizers, inputs of the draft's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import zoo
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as kinds
from transformers import PreTrainedTokenizerFast

from saccade import inputs as models
from saccade.core.errors import ModelError
from saccade.inputs import Loaded, pair_check

COUNT = 24

pytestmark = pytest.mark.usefixtures("unchecked")


def run(target: Loaded, draft: Loaded, inputs: Any, method: str, **more: Any) -> Any:
    return zoo.run(target, draft, inputs, method, COUNT, **more)


# -- a draft without eyes ----------------------------------------------------------------------


@pytest.mark.representatives(1)
@pytest.mark.parametrize("method", ["sd", "sage", "lookup", "hippo"])
def test_a_text_only_draft_for_a_target_that_sees(method: str) -> None:
    """Claim: a llama whose tokens are a prefix of LLaVA-1.5's drafts for it without the pictures,
    and the answer is plain decoding's. Fails if it stumbles over placeholders or pixels."""
    target, draft = zoo.member("llava-1.5"), zoo.member("llama", seed=1)
    pair_check.check_pair(target, draft)
    for seed, kind in enumerate(("image", "images", "image")):
        inputs, theirs = zoo.case(target, kind, seed)
        expected = theirs[:COUNT]
        assert zoo.varied(expected)
        result = run(target, draft, inputs, method)
        assert list(result.ids) == expected
        assert result.fallback_reason is None
        if method in ("sd", "sage"):
            assert any(round.tokens for round in result.rounds), "nothing was drafted"
        if method == "sd":
            assert result.draft_visual_tokens == 0 and result.visual_tokens


def test_it_reads_the_words_and_nothing_else() -> None:
    """Claim: what a text-only draft reads is the prompt without its placeholders, in order.
    Fails if a placeholder or a hole is among what it embeds."""
    from saccade.core.sampling import Sampling
    from saccade.drafting.setup import Setup
    from saccade.drafting.shapes.policies import Chain
    from saccade.drafting.views.basic import FULL

    target, draft = zoo.member("llava-1.5"), zoo.member("llama", seed=1)
    inputs = zoo.make_inputs(target, "images")
    team = Setup(target.backbone, draft.backbone, FULL, Chain(4), [Sampling()], 8)
    (prompt,) = draft.backbone.prompts(team.draft_inputs(inputs))
    ids = inputs["input_ids"][0].tolist()
    words = [token for token in ids if token not in target.backbone.placeholders]
    assert len(words) < len(ids)
    assert prompt.full_ids.tolist() == words and not prompt.visual.any()
    assert torch.equal(prompt.positions[0], torch.arange(len(words)))
    assert torch.equal(prompt.embeds, draft.backbone.embed(words))


# -- tokenizers --------------------------------------------------------------------------------


def tokenizer(words: Sequence[str], special: Sequence[str] = ()) -> Any:
    raw = Tokenizer(kinds.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(list(special))
    return PreTrainedTokenizerFast(tokenizer_object=raw)


@pytest.mark.parametrize("swap", [False, True])
def test_special_tokens_beyond_the_others_end_are_accepted(swap: bool) -> None:
    """Claim: one tokenizer may go on in special tokens where the other ends, either way round.
    Fails if <image> after a language model's own vocabulary parts a pair."""
    pair = [tokenizer("abc", ["<s>"]), tokenizer("abc", ["<s>", "<image>", "<video>"])]
    one, other = reversed(pair) if swap else pair
    pair_check.check_tokenizers("target", one, "draft", other)


CHANGED: list[tuple[str, Any, Any, int]] = [
    ("a letter", tokenizer("abc", ["<s>"]), tokenizer("abd", ["<s>"]), 2),
    ("a special one", tokenizer("abc", ["<s>", "</s>"]), tokenizer("abc", ["<s>", "<e>"]), 4),
    ("the order", tokenizer("abc"), tokenizer("bac"), 0),
    ("special against plain", tokenizer("abc", ["<s>", "<t>"]), tokenizer("abcd", ["<t>"]), 3),
    ("plain ones beyond the end", tokenizer("abc"), tokenizer("abcde"), 3),
]


@pytest.mark.parametrize(("one", "other", "first"), [c[1:] for c in CHANGED], ids=lambda c: "")
@pytest.mark.parametrize("swap", [False, True])
def test_a_difference_inside_is_refused(one: Any, other: Any, first: int, swap: bool) -> None:
    """Claim: any other difference is refused in a sentence naming the first id, both tokens and
    both models. Fails if a shifted vocabulary passes, or a later difference is named."""
    one, other = (other, one) if swap else (one, other)
    with pytest.raises(ModelError, match=rf"their tokenizers differ at id {first} \(") as caught:
        pair_check.check_tokenizers("big", one, "small", other)
    message = str(caught.value)
    assert "small cannot draft for big" in message and "\n" not in message
    for each in (one, other):
        token = {i: t for t, i in each.get_vocab().items()}.get(first)
        assert repr(token) in message


# -- inputs of the draft's own -----------------------------------------------------------------

ALIKE = [("qwen2.5-vl", "qwen2.5-vl"), ("llava-1.5", "llava-1.5"), ("llava-next", "llava-next")]
APART = [("qwen2.5-vl", "qwen2-vl"), ("llava-next", "llava-1.5")]


@pytest.mark.representatives(2)
@pytest.mark.parametrize(("target", "draft"), ALIKE)
def test_equal_processors_need_no_inputs_of_the_drafts_own(target: str, draft: str) -> None:
    """Claim: where both prepare pixels and text alike, the target's inputs serve the draft.
    Fails if every pair prepares its pictures twice."""
    media = zoo.draw("image", 0)
    mine, theirs = zoo.member(target), zoo.member(draft, seed=1)
    assert models.ask_draft(mine, theirs, media.question, images=media.images) is None


def test_a_text_only_draft_has_none_either() -> None:
    """Claim: a draft with a tokenizer alone reads the target's ids. Fails if it is asked for
    a prompt with pictures, which it refuses."""
    media = zoo.draw("image", 0)
    mine, theirs = zoo.member("llava-1.5"), zoo.member("llama")
    assert models.ask_draft(mine, theirs, media.question, images=media.images) is None


@pytest.mark.representatives(1)
@pytest.mark.parametrize(("target", "draft"), APART)
def test_other_processors_have_inputs_of_their_own(target: str, draft: str) -> None:
    """Claim: where processors differ, the draft's inputs are what its own makes, it drafts to the
    end with them, and the answer is plain decoding's.
    Fails if the target's are handed on, or the draft's come to nothing."""
    media = zoo.draw("image", 0)
    mine, theirs = zoo.member(target), zoo.member(draft, seed=1)
    inputs = zoo.read(mine, media)
    draft_inputs = models.ask_draft(mine, theirs, media.question, images=media.images)
    own = zoo.read(theirs, media)
    assert draft_inputs is not None and draft_inputs.keys() == own.keys()
    for name, value in own.items():
        assert torch.equal(draft_inputs[name], value), name
    expected = zoo.hf_greedy(mine, inputs, COUNT)
    for method in ("sd", "specvlm"):
        result = run(mine, theirs, inputs, method, draft_inputs=draft_inputs)
        assert result.fallback_reason is None and list(result.ids) == expected
        assert any(round.tokens for round in result.rounds)


def test_control_the_targets_inputs_do_not_serve_such_a_draft() -> None:
    """Claim: without inputs of its own, LLaVA-1.5 cannot draft for LLaVA-NeXT: its tiles are not
    its pictures. Fails if the inputs above were not needed."""
    mine, theirs = zoo.member("llava-next"), zoo.member("llava-1.5", seed=1)
    inputs = zoo.make_inputs(mine, "image")
    result = run(mine, theirs, inputs, "sd")
    assert result.fallback_reason is not None
    assert list(result.ids) == zoo.hf_greedy(mine, inputs, COUNT)
