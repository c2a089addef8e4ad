"""Text that a view may prune: what counts as a document, what is kept, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from beside import Inside, hired
from helpers import backbone, hf_greedy, left_padded, llama, qwen25, text_input, video_input

import saccade
from saccade.core.errors import OptionError
from saccade.core.prompt import DOCUMENT_FRAME_TOKENS, DOCUMENT_MASK
from saccade.engine.request import Request

LONG = 160
SPAN = (10, 150)
METHODS = [
    "std",
    "fresh",
    "std/keep=0.25",
    "streaming",
    "specvlm-self",
    "std/view=random/drafter=self",
    "std/view=fastvid",
    "std/view=frames",
    "sd/view=dycoke",
    "std/view=holistic",
    "std/view=scattered",
    "std/view=attention",
    "lookup",
    "auto",
    "specvlm",
    "sage",
    "tabed",
    "sd/view=text",
]


def document(seed: int = 0, length: int = LONG) -> dict[str, Any]:
    return text_input(seed, length)


def prompt_of(inputs: Any, **options: Any) -> Any:
    target = backbone(llama())
    (prompt,) = target.prompts(Request.of(target, inputs, **options).inputs)
    return prompt


def test_a_span_counts_as_a_medium_of_its_own():
    """Claim: the rows of a span, and no others, may be dropped; two spans are two media, of frames
    of ``DOCUMENT_FRAME_TOKENS`` tokens; rows, positions and ids stay those of the prompt."""
    plain = prompt_of(document())
    prompt = prompt_of(document(), context=[(3, 80), (90, 100)])
    assert prompt.visual.nonzero().squeeze(-1).tolist() == [*range(3, 80), *range(90, 100)]
    assert prompt.grid[:, 0].tolist() == [0] * 77 + [1] * 10
    assert prompt.grid[:77, 1].tolist() == [i // DOCUMENT_FRAME_TOKENS for i in range(77)]
    assert torch.equal(prompt.embeds, plain.embeds) and torch.equal(prompt.places, plain.places)
    assert torch.equal(prompt.positions, plain.positions) and not plain.visual_tokens


def test_a_video_and_a_document_are_pruned_together():
    """Claim: beside a video a document is the next medium; placeholders in its span stay its."""
    inputs = video_input(1, grid=(2, 8, 10))
    target = backbone(qwen25())
    (plain,) = target.prompts(inputs)
    length = len(plain)
    request = Request.of(target, inputs, context=(0, length - 2))
    (prompt,) = target.prompts(request.inputs)
    assert int(prompt.visual.sum()) == length - 2
    assert torch.equal(prompt.grid[plain.visual[: length - 2]], plain.grid)
    assert set(prompt.grid[:, 0].tolist()) >= {0, 1}


@pytest.mark.representatives(2)
@pytest.mark.parametrize("method", METHODS)
def test_the_answer_is_the_targets(method):
    """Claim: with a document marked every method answers as generate() does, and those that prune
    draft on less of it than there is."""
    model, draft = llama(), llama(1)
    inputs = document()
    result = saccade.run(
        model,
        inputs,
        draft=draft,
        method=method,
        context=SPAN,
        max_new_tokens=24,
        tokenizer=Letters() if "tabed" in method or "text" in method else None,
    )
    assert list(result.ids) == hf_greedy(model, inputs, 24)
    assert result.fallback_reason is None and not result.warnings
    assert result.visual_tokens == SPAN[1] - SPAN[0]
    if method not in ("lookup", "auto", "tabed", "sage"):
        assert result.draft_visual_tokens is not None
        assert result.draft_visual_tokens < result.visual_tokens


@pytest.mark.representatives(1)
@pytest.mark.parametrize("method", ["std/refresh=1", "hippo", "pearl"])
def test_a_document_alone_and_beside_a_video(method):
    """Claim: the view that follows by its axis, and drafts beside the target, answer about
    a document, and about a video with a document, as generate() does."""
    video = video_input(1, grid=(2, 8, 10), after=40)
    span = (video["input_ids"].shape[1] - 38, video["input_ids"].shape[1] - 4)
    for make, inputs, context in ((llama, document(), SPAN), (qwen25, video, span)):
        model = make()
        settings = dict(draft=make(1), method=method, context=context, max_new_tokens=16)
        with hired(Inside()):  # in this process: another may not draft in time
            result = saccade.run(model, inputs, **settings)
        assert list(result.ids) == hf_greedy(model, inputs, 16)
        assert result.fallback_reason is None and any(round.tokens for round in result.rounds)


def test_a_conversation_goes_on_about_a_document():
    """Claim: with a span told once each turn is answered as generate() answers, the second over
    what the first has read, and the draft sees of the document what it saw."""
    model, first = llama(), document()
    with saccade.Conversation(model, method="std", context=SPAN, max_new_tokens=12) as talk:
        one = talk.run(first)
        ids = [*first["input_ids"][0].tolist(), *one.ids, 5, 6, 7]
        longer = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids))}
        two = talk.run(longer)
    assert list(two.ids) == hf_greedy(model, longer, 12) and two.reused_tokens >= LONG
    for result in (one, two):
        assert result.visual_tokens == SPAN[1] - SPAN[0] > (result.draft_visual_tokens or 0)


def test_transformers_hands_the_span_on():
    """Claim: ``generate(custom_generate=..., context=...)`` prunes the document: a span that is
    none is refused there too. Fails if the argument is dropped on the way."""
    model, inputs = llama(), document()
    own: dict[str, Any] = dict(custom_generate=saccade.generate, method="std", max_new_tokens=12)
    ids = model.generate(**inputs, **own, context=SPAN)
    assert ids[0, LONG:].tolist() == hf_greedy(model, inputs, 12)
    with pytest.raises(OptionError, match="not within"):
        model.generate(**inputs, **own, context=(10, 999))


class Letters:
    """As much of a tokenizer as a view of words asks for."""

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [ord(letter) % 200 for letter in text]

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return " ".join(map(str, ids))


def test_spans_of_a_padded_batch_count_from_each_prompts_own_beginning():
    """Claim: in a batch padded on the left each request's span is that of its own tokens, and each
    answer the one it gets alone."""
    many = [document(1, 60), document(2, 90)]
    spans = [(5, 50), (8, 80)]
    target = backbone(llama())
    batch = left_padded(many)
    prompts = target.prompts(Request.of(target, batch, context=spans).inputs)
    for prompt, (start, stop) in zip(prompts, spans, strict=True):
        assert prompt.visual.nonzero().squeeze(-1).tolist() == list(range(start, stop))
    together = saccade.generate(
        llama(), batch, method="fresh", context=spans, max_new_tokens=16, do_sample=False
    )
    assert [row[-16:].tolist() for row in together] == [hf_greedy(llama(), one, 16) for one in many]


@pytest.mark.parametrize(
    "context", [(10, 161), (-1, 5), (7, 7), "all", 5, [(1, 2), 3], [], (1,), (1.5, 2)]
)
def test_what_is_no_span_is_reported(context):
    """Claim: one sentence, before any work."""
    with pytest.raises(OptionError, match="context="):
        prompt_of(document(), context=context)


def test_a_list_too_short_for_the_batch_is_reported():
    """Claim: of several requests each needs its entry."""
    target = backbone(llama())
    with pytest.raises(OptionError, match="an entry for each"):
        Request.of(target, left_padded([document(1), document(2)]), context=[(1, 2)])


def test_a_request_of_a_batch_may_have_no_document():
    """Claim: an empty entry stands for a request without a document; the others keep theirs."""
    target = backbone(llama())
    inputs = left_padded([document(1), document(2)])
    marked = Request.of(target, inputs, context=[[], (3, 80)]).inputs[DOCUMENT_MASK]
    assert marked.sum(1).tolist() == [0, 77]


def test_a_draft_of_other_ids_needs_its_own_mark():
    """Claim: context= with draft_inputs= is refused, naming what would work."""
    with pytest.raises(OptionError, match=DOCUMENT_MASK):
        prompt_of(document(), context=SPAN, draft_inputs=document(3))


def test_a_draft_on_nothing_pruned_says_so():
    """Claim: without a document a self-draft over text warns; with one, or where nothing was to be
    pruned, it does not."""
    warnings = [
        saccade.run(llama(), document(), method=method, max_new_tokens=4, **more).warnings
        for method, more in (
            ("std", {}),
            ("std", {"context": SPAN}),
            ("sd/drafter=self", {}),
            ("specvlm-self", {}),
        )
    ]
    assert [bool(each) for each in warnings] == [True, False, False, True]
