"""Positions: those ``generate`` uses, those a pruned prompt keeps, and whose request they are.

A Qwen model keeps the M-RoPE offset of the last prompt it saw on itself (``rope_deltas``), and a
video's tokens take fewer positions than rows, so an answer's positions do not follow from lengths.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import zoo
from helpers import dealt
from torch import Tensor

import saccade
from lab import reference
from saccade.core.prompt import Inputs, Media, Prompt
from saccade.core.result import Result, RoundRecord
from saccade.core.sampling import Sampling
from saccade.core.tree import ROOT, Tree, add
from saccade.inputs import Loaded
from saccade.model.backbone import Backbone
from saccade.model.generate_check import check_against_generate

COUNT, SHORT = 24, 12  # tokens: where answers are to part, and where positions are compared
SAME = 1e-5

pytestmark = pytest.mark.usefixtures("unchecked")

# -- 3: the positions generate uses ------------------------------------------------------------


@cache
def positions_of_generate(family: str, kind: str) -> tuple[Inputs, Tensor, list[int]]:
    """A prompt, what reached the rotary embedding in Hugging Face's generate, all axes, and the
    answer."""
    loaded = zoo.member(family)
    inputs = zoo.make_inputs(loaded, kind)
    seen: list[Tensor] = []

    def note(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
        rows = given.reshape(-1, given.shape[-1])  # axes (or one batch row) by tokens
        seen.append(rows.expand(loaded.backbone.axes, -1).clone())

    hook = loaded.backbone.text.rotary_emb.register_forward_pre_hook(note, with_kwargs=True)
    try:
        ids = zoo.hf_greedy(loaded, inputs, SHORT)
    finally:
        hook.remove()
    return inputs, torch.cat(seen, 1), ids


@contextmanager
def recorded(model: Backbone) -> Iterator[list[tuple[list[int] | None, Tensor]]]:
    """Every forward of the target: the ids it embedded (None for a prompt) and their positions."""
    forwards: list[tuple[list[int] | None, Tensor]] = []
    embed, forward = model.embed, model.forward
    last: list[list[int] | None] = [None]

    def embedding(ids: Sequence[int] | Tensor) -> Tensor:
        last[0] = torch.as_tensor(ids).flatten().tolist()
        return embed(ids)

    def running(embeds: Tensor, positions: Any, *rest: Any, **named: Any) -> Tensor:
        ids = last[0] if last[0] is not None and len(last[0]) == len(embeds) else None
        # a list: text, at one position on every axis
        forwards.append((ids, torch.as_tensor(positions).expand(model.axes, -1).clone()))
        last[0] = None
        return forward(embeds, positions, *rest, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "embed", embedding)
        patch.setattr(model, "forward", running)
        yield forwards


def verified(result: Result, forwards: list[tuple[list[int] | None, Tensor]]) -> Tensor:
    """The positions at which each token of the answer was read, in its order."""
    columns: list[Tensor] = []
    own: int | None = result.ids[0]
    for round, (ids, positions) in zip(result.forwards, forwards, strict=True):
        waiting = [] if own is None else [own]
        assert ids == [*waiting, *round.tokens], "not the rows this round is made of"
        path = [len(waiting) + node for node in accepted_path(round)]
        columns.append(positions[:, [*range(len(waiting)), *path]])
        own = round.own
    return torch.cat(columns, 1)


def accepted_path(round: RoundRecord) -> list[int]:
    """Nodes of the accepted tokens, from the root down."""
    nodes: list[int] = []
    parent = ROOT
    for token in round.accepted:
        parent = next(
            node
            for node, (above, drafted) in enumerate(zip(round.parents, round.tokens, strict=True))
            if above == parent and drafted == token
        )
        nodes.append(parent)
    return nodes


@pytest.mark.representatives(1)
@pytest.mark.parametrize(  # a chain, and a tree on a pruned prompt
    ("family", "method"), dealt(zoo.FAMILIES, ["sd", "specvlm"])
)
def test_tokens_are_verified_where_generate_reads_them(family: str, method: str) -> None:
    """Claim: prompt rows and every token of the answer stand, on all axes, where ``generate`` puts
    them. Fails if the offset after a video, or a node's depth in a tree, is off by one."""
    target, draft = zoo.member(family), zoo.draft_of(family)
    for kind in zoo.kinds(family):
        inputs, theirs, ids = positions_of_generate(family, kind)
        check_against_generate(target.backbone)  # whose forwards are not the answer's
        with recorded(target.backbone) as forwards:
            result = saccade.run(
                target.backbone,
                inputs,
                draft=draft.backbone,
                method=method,
                max_new_tokens=SHORT,
                do_sample=False,
            )
        assert list(result.ids) == ids
        length = inputs["input_ids"].shape[1]
        (_, prompt), *rounds = forwards
        assert torch.equal(prompt, theirs[:, :length])
        mine = verified(result, rounds)
        read = min(mine.shape[1], theirs.shape[1] - length)  # a last token is read by neither
        assert read >= SHORT - 2
        assert torch.equal(mine[:, :read], theirs[:, length : length + read])


@pytest.mark.parametrize("family", zoo.QWEN)
def test_control_counting_rows_gives_other_positions(family: str) -> None:
    """Claim: after a video these positions are not the row numbers, and laws notice one step.
    Fails if the comparison above could not tell an offset from none."""
    loaded = zoo.member(family)
    inputs = zoo.make_inputs(loaded, "video")
    prompt = zoo.prompt_of(loaded, inputs)
    assert prompt.next_position != len(prompt)
    token = Tree((5,), (ROOT,), (None,))
    laws = []
    for number in (prompt.next_position, prompt.next_position + 1, len(prompt)):
        session, _ = zoo.session(loaded, replace(prompt, next_position=number))
        laws.append(session.score({0: token})[0].logits(0))
    assert zoo.apart(laws[1], laws[0]) > 10 * SAME
    assert zoo.apart(laws[2], laws[0]) > 10 * SAME


# -- 4: pruned prompts -------------------------------------------------------------------------


def half(prompt: Prompt, seed: int = 0) -> Prompt:
    """Without a random half of the visual tokens."""
    order = torch.randperm(prompt.visual_tokens, generator=torch.Generator().manual_seed(seed))
    return prompt.select(order[: (prompt.visual_tokens + 1) // 2])


def forked_tree(tokens: Sequence[int]) -> Tree:
    """A chain with another token beside each of its nodes."""
    tree, parent = Tree(), ROOT
    for token in tokens:
        tree = add(tree, parent, token + 1)
        tree = add(tree, parent, token)
        parent = len(tree) - 1
    return tree


@torch.no_grad()
def module_laws(loaded: Loaded, prompt: Prompt, tokens: Sequence[int]) -> Tensor:
    """Logits after the prompt and each token, straight from Hugging Face's language model."""
    model = loaded.backbone.model
    new = torch.tensor(list(tokens))
    embeds = torch.cat([prompt.embeds, model.get_input_embeddings()(new)])[None]
    axes = prompt.positions.shape[0]
    later = prompt.next_position + torch.arange(len(new)).expand(axes, -1)
    positions = torch.cat([prompt.positions, later], 1)
    extra: dict[str, Any] = {}
    if prompt.media.deepstack:
        mask = torch.cat([prompt.visual, torch.zeros(len(new), dtype=torch.bool)])
        extra = dict(
            visual_pos_masks=mask[None], deepstack_visual_embeds=list(prompt.media.deepstack)
        )
    hidden = model.get_decoder()(
        inputs_embeds=embeds,
        position_ids=positions[:, None] if axes > 1 else positions,
        attention_mask=torch.ones(1, embeds.shape[1]),
        use_cache=False,
        **extra,
    ).last_hidden_state[0, len(prompt) - 1 :]
    return model.get_output_embeddings()(hidden)


@torch.no_grad()
def masked_laws(loaded: Loaded, inputs: Inputs, kept: Prompt, tokens: Sequence[int]) -> Tensor:
    """The same from the *whole* prompt, whose dropped rows nobody may look at.

    Nothing is cut here: no row selected, no deepstack row, no position.
    """
    whole = zoo.prompt_of(loaded, inputs)
    model = loaded.backbone.model
    new = torch.tensor(list(tokens))
    embeds = torch.cat([whole.embeds, model.get_input_embeddings()(new)])[None]
    size = embeds.shape[1]
    visible = torch.zeros(size, dtype=torch.bool)
    visible[kept.places] = True
    visible[len(whole) :] = True
    causal = torch.ones(size, size, dtype=torch.bool).tril()
    allowed = causal & (visible[None] | torch.eye(size, dtype=torch.bool))  # a row sees itself
    mask = torch.zeros(size, size).masked_fill(~allowed, torch.finfo(torch.float32).min)
    axes = whole.positions.shape[0]
    later = whole.next_position + torch.arange(len(new)).expand(axes, -1)
    positions = torch.cat([whole.positions, later], 1)
    extra: dict[str, Any] = {}
    if whole.media.deepstack:
        seen = torch.cat([whole.visual, torch.zeros(len(new), dtype=torch.bool)])
        extra = dict(
            visual_pos_masks=seen[None], deepstack_visual_embeds=list(whole.media.deepstack)
        )
    hidden = model.get_decoder()(
        inputs_embeds=embeds,
        position_ids=positions[:, None] if axes > 1 else positions,
        attention_mask=mask[None, None],
        use_cache=False,
        **extra,
    ).last_hidden_state[0, len(whole) - 1 :]
    return model.get_output_embeddings()(hidden)


def session_laws(loaded: Loaded, prompt: Prompt, tokens: Sequence[int]) -> Tensor:
    """The same by our session: half of the tokens committed first, the rest nodes of a tree."""
    session, prefill = zoo.session(loaded, prompt)
    middle = len(tokens) // 2
    rows = [prefill.logits]
    for part in (tokens[:middle], tokens[middle:]):
        tree = forked_tree(part)
        scores = session.score({0: tree})[0]
        rows += [scores.logits(node) for node in range(1, len(tree), 2)]
        session.commit({0: list(part)})
    return torch.stack(rows)


TOKENS = [40, 7, 99, 12, 63, 150]


@pytest.mark.representatives(1)
@pytest.mark.parametrize(("family", "kind"), zoo.PAIRS)
def test_a_pruned_prompt_is_scored_as_the_modules_do(family: str, kind: str) -> None:
    """Claim: with half of the visual tokens gone, laws equal those of the language model on the
    same rows and positions (also by the cache-free oracle), and those of the whole prompt with the
    dropped rows hidden. Fails if pruning renumbers, or gives a token another's deepstack row."""
    loaded = zoo.member(family)
    inputs = zoo.make_inputs(loaded, kind)
    whole = zoo.prompt_of(loaded, inputs)
    pruned = half(whole)
    assert pruned.visual_tokens < whole.visual_tokens or not whole.visual_tokens
    mine = session_laws(loaded, pruned, TOKENS)
    plain = zoo.member(family, fused=False)
    assert zoo.apart(mine, session_laws(plain, pruned, TOKENS)) <= SAME
    assert zoo.apart(mine, module_laws(plain, pruned, TOKENS)) <= SAME
    assert zoo.apart(mine, masked_laws(plain, inputs, pruned, TOKENS)) <= SAME
    oracle = reference.Oracle(plain.backbone.model, [pruned], [Sampling()])
    assert zoo.apart(mine, oracle.logits(0, TOKENS)) <= SAME


@pytest.mark.parametrize("family", ["qwen3-vl", "qwen3-vl-moe"])
def test_control_deepstack_rows_count(family: str) -> None:
    """Claim: the laws change if the deepstack rows are left out, or are those of other tokens.
    Fails if the comparison above would pass with them lost."""
    loaded = zoo.member(family)
    pruned = half(zoo.prompt_of(loaded, zoo.make_inputs(loaded, "video")))
    assert len(pruned.media.deepstack) == 2 and all(
        len(rows) == pruned.visual_tokens for rows in pruned.media.deepstack
    )
    right = session_laws(loaded, pruned, TOKENS)
    rolled = tuple(rows.roll(1, 0) for rows in pruned.media.deepstack)
    for wrong in ((), rolled):
        laws = session_laws(loaded, replace(pruned, media=Media(deepstack=wrong)), TOKENS)
        assert zoo.apart(laws, right) > 10 * SAME


@pytest.mark.representatives(3)
@pytest.mark.parametrize("family", zoo.SEEING)
def test_control_renumbered_rows_score_differently(family: str) -> None:
    """Claim: closing the gaps pruning leaves in the positions changes the laws.
    Fails if the comparison above could not tell original positions from new ones."""
    loaded = zoo.member(family)
    pruned = half(zoo.prompt_of(loaded, zoo.make_inputs(loaded, "image")))
    row = torch.arange(len(pruned)).expand(pruned.positions.shape[0], -1)
    closed = replace(pruned, positions=row, next_position=len(pruned))
    right = session_laws(loaded, pruned, TOKENS)
    assert zoo.apart(session_laws(loaded, closed, TOKENS), right) > 10 * SAME


# -- 5: requests do not disturb each other -----------------------------------------------------


def alone(family: str, inputs: Inputs, method: str) -> list[int]:
    """The answer with nothing else going on."""
    return list(saccade.run(zoo.member(family).backbone, inputs, **how(family, method)).ids)


def how(family: str, method: str) -> dict[str, Any]:
    draft = zoo.draft_of(family).backbone
    return dict(draft=draft, method=method, max_new_tokens=COUNT, do_sample=False)


@pytest.mark.representatives(1)
@pytest.mark.parametrize(
    ("family", "method"),
    [*((name, "specvlm") for name in zoo.FAMILIES), *((name, "std") for name in zoo.QWEN[:3])],
)
def test_two_requests_take_turns(family: str, method: str) -> None:
    """Claim: two streams of one model, advanced in turn while ``generate`` answers a third prompt
    on both models in the first rounds, give what each gives alone. Fails if anything of a request
    is kept on a model (``rope_deltas`` is, by ``generate``)."""
    target, draft = zoo.member(family), zoo.draft_of(family)
    kinds = zoo.kinds(family)
    both = [zoo.make_inputs(target, kinds[-1 - seed % len(kinds)], seed) for seed in range(2)]
    third = zoo.make_inputs(target, kinds[0], 7)
    answers = [alone(family, inputs, method) for inputs in both]
    streams = [saccade.stream(target.backbone, inputs, **how(family, method)) for inputs in both]
    running, turn = list(streams), 0
    while running:
        for stream in list(running):
            if next(stream, None) is None:
                running.remove(stream)
            for model in (target, draft) if turn < 3 else ():  # what it leaves stays there
                zoo.hf_greedy(model, third, 1)
        turn += 1
    assert [list(stream.results[0].ids) for stream in streams] == answers
    assert answers[0] != answers[1]


@pytest.mark.representatives(1)
@pytest.mark.parametrize("family", zoo.QWEN)
def test_control_anothers_offset_is_another_answer(family: str) -> None:
    """Claim: ``generate`` leaves another offset on the model for each of these prompts, and with
    the other's a text goes on otherwise. Fails if the requests above had nothing to mix up."""
    loaded = zoo.member(family)
    first, second = (zoo.make_inputs(loaded, kind) for kind in reversed(zoo.kinds(family)[-2:]))
    offsets = []
    for inputs in (first, second):
        zoo.hf_greedy(loaded, inputs, 2)
        kept = [vars(m).get("rope_deltas") for m in loaded.backbone.model.modules()]
        offsets.append(next(int(each) for each in kept if each is not None))
    assert offsets[0] != offsets[1]
    prompts = [zoo.prompt_of(loaded, inputs) for inputs in (first, second)]
    # ours, without reading the model's state
    assert offsets == [prompt.next_position - len(prompt) for prompt in prompts]
    mixed = replace(prompts[0], next_position=len(prompts[0]) + offsets[1])
    answers = [
        reference.decode_greedily(loaded.backbone.model, prompt, COUNT)
        for prompt in (prompts[0], mixed)
    ]
    assert answers[0] != answers[1]
