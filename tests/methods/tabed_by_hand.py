"""TABED by hand: the prompts of its views, its laws, weights and blocks, by plain loops.

The prompts are rebuilt from the processor's output, their laws come from uncached forwards of
Hugging Face's modules, and weights and blocks from the equations of Algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import product
from typing import Any

import pytest
import torch
from helpers import (
    Letters,
    backbone,
    frames_input,
    hf_greedy,
    left_padded,
    noisy,
    onevision,
    qwen25,
    video_input,
)
from torch import Tensor

from saccade.core.noise import uniform
from saccade.core.prompt import Prefill, Prompt
from saccade.core.result import Result, Round
from saccade.drafting.ensemble import Ensemble, EnsembleDrafter, MixtureScores, Weighting
from saccade.drafting.recipe import Recipe
from saccade.drafting.setup import Setup
from saccade.drafting.views.basic import Several
from saccade.engine.generate import stream
from saccade.methods import resolve

GAMMA, STEPS, COUNT = 5, 10, 28


def captions(inputs: Mapping[str, Any]) -> list[str]:
    """A caption a request, told from its prompt's last id."""
    return [f"clip {int(ids[-1])}" for ids in inputs["input_ids"]]


# -- the views, by hand ----------------------------------------------------------------------------


@dataclass
class Read:
    """A prompt as a language model reads it."""

    embeds: Tensor  # [len, dim]
    positions: Tensor  # [axes, len]
    following: int  # the position of the text's first token


class _Seen(Exception):
    pass


@torch.no_grad()
def read(model: Any, inputs: Mapping[str, Tensor]) -> Read:
    """What the model's own forward hands to its language model."""
    given: dict[str, Any] = {}

    def hook(module: Any, args: Any, kwargs: Any) -> None:
        given.update(kwargs)
        raise _Seen

    handle = model.get_decoder().register_forward_pre_hook(hook, with_kwargs=True)
    try:
        model.base_model(**inputs, use_cache=False)
    except _Seen:
        embeds, positions = given.get("inputs_embeds"), given.get("position_ids")
    finally:
        handle.remove()
    if embeds is None:  # text alone
        embeds = model.get_input_embeddings()(inputs["input_ids"])
    axes = 3 if "mrope_section" in model.get_decoder().config.rope_parameters else 1
    if positions is None:
        positions = torch.arange(embeds.shape[1])
    positions = positions.reshape(-1, embeds.shape[1]).expand(axes, -1)
    return Read(embeds[0], positions, int(positions[:, -1].max()) + 1)


def placeholders(model: Any) -> list[int]:
    """Ids that stand for pixels."""
    config = model.config.to_dict()
    names = ("image_token_id", "video_token_id", "image_token_index", "video_token_index")
    return sorted({config[name] for name in names if isinstance(config.get(name), int)})


Cells = dict[tuple[int, int, int], int]
"""(frame, row, column) of a video's or an image's cell -> where its token stands in the prompt."""


@dataclass
class Medium:
    """A video or an image: its cells, and where its tokens begin and end in the prompt."""

    cells: Cells
    start: int
    stop: int


def media(model: Any, inputs: Mapping[str, Tensor]) -> list[Medium]:
    """Each video and image: by its grid, or as OneVision writes a video: its frames, a newline."""
    ids = inputs["input_ids"][0].tolist()
    visual = placeholders(model)
    sizes = {
        "image": inputs.get("image_grid_thw", torch.zeros(0, 3)).tolist(),
        "video": inputs.get("video_grid_thw", torch.zeros(0, 3)).tolist(),
    }
    all_media: list[Medium] = []
    at = 0
    while at < len(ids):
        if ids[at] not in visual:
            at += 1
            continue
        kind = "image" if ids[at] == model.config.to_dict().get("image_token_id") else "video"
        start, ending = at, 0
        if sizes[kind]:
            frames, height, width = sizes[kind].pop(0)
            merged = model.config.vision_config.spatial_merge_size  # patches to a token
            height, width = height // merged, width // merged
        else:  # 16 pixels are 4 x 4 patches, pooled to half a side
            assert kind == "video"
            frames, height, width, ending = inputs["pixel_values_videos"].shape[1], 2, 2, 1
        cells: Cells = {}
        for t in range(frames):
            for h in range(height):
                for w in range(width):
                    cells[t, h, w] = at
                    at += 1
        at += ending
        assert all(token in visual for token in ids[start:at])
        all_media.append(Medium(cells, start, at))
    return all_media


def rewritten(model: Any, inputs: Mapping[str, Tensor], words: Sequence[int]) -> Read:
    """T and C: the ids with ``words`` for each video, read by the model as any other text."""
    ids: list[int] = inputs["input_ids"][0].tolist()
    for medium in reversed(media(model, inputs)):
        ids[medium.start : medium.stop] = words
    text = torch.tensor([ids])
    return read(model, {"input_ids": text, "attention_mask": torch.ones_like(text)})


@torch.no_grad()
def pooled(model: Any, inputs: Mapping[str, Tensor]) -> Read:
    """P: frames pooled before OneVision's projector, counted from 0; after Qwen's merger."""
    whole = read(model, inputs)
    if "pixel_values_videos" not in inputs or "video_grid_thw" in inputs:
        return pooled_after(model, inputs)
    base, (medium,) = model.base_model, media(model, inputs)
    looked = base.vision_tower(inputs["pixel_values_videos"][0], output_hidden_states=True)
    patches = looked.hidden_states[-1].unflatten(1, (4, 4))  # [frame, row, column, dim]
    blocks = torch.stack([patches[:, i::2, j::2] for i in (0, 1) for j in (0, 1)]).mean(0)
    projected = base.multi_modal_projector(blocks.flatten(1, 2))
    frames = projected.mean(1)  # the model's own halving, 2 x 2 to one
    last = whole.embeds[medium.stop - 1 :]  # the newline, the text
    embeds = torch.cat([whole.embeds[: medium.start], frames, last])
    return Read(embeds, torch.arange(len(embeds))[None], len(embeds))


def pooled_after(model: Any, inputs: Mapping[str, Tensor]) -> Read:
    """In each frame, 2 x 2 cells become their mean, where their first one stood."""
    whole = read(model, inputs)
    embeds, dropped = whole.embeds.clone(), set()
    for cells in (medium.cells for medium in media(model, inputs)):
        for t, h, w in cells:
            if h % 2 or w % 2:
                dropped.add(cells[t, h, w])
                continue
            block = [(t, h, w), (t, h, w + 1), (t, h + 1, w), (t, h + 1, w + 1)]
            members = [cells[cell] for cell in block if cell in cells]
            total = torch.zeros_like(embeds[0])
            for member in members:
                total += whole.embeds[member]
            embeds[cells[t, h, w]] = total / len(members)
    left = [row for row in range(len(embeds)) if row not in dropped]
    return Read(embeds[left], whole.positions[:, left], whole.following)


def views_by_hand(
    model: Any, inputs: Mapping[str, Tensor], names: Sequence[str], tokenizer: Any = None
) -> list[Read]:
    encode = (tokenizer or Letters()).encode
    views = []
    for name in names:
        if name == "full":
            views.append(read(model, inputs))
        elif name == "text":
            newline = encode("\n", add_special_tokens=False)
            assert len(newline) == 1
            views.append(rewritten(model, inputs, newline))
        elif name == "caption":
            (caption,) = captions(inputs)
            words = encode("image: " + caption, add_special_tokens=False)
            views.append(rewritten(model, inputs, words))
        else:
            own = {"pooled": pooled, "pooled-after": pooled_after}[name]
            views.append(own(model, inputs))
    return views


@torch.no_grad()
def logits(model: Any, prompt: Read, tokens: Sequence[int], banned: Sequence[int]) -> Tensor:
    """Raw logits after the prompt and after each token, uncached; what nobody may say is out."""
    new = torch.tensor(list(tokens), dtype=torch.long)
    later = prompt.following + torch.arange(len(new))
    positions = torch.cat([prompt.positions, later.expand(len(prompt.positions), -1)], 1)
    out = model.get_decoder()(
        inputs_embeds=torch.cat([prompt.embeds, model.get_input_embeddings()(new)])[None],
        position_ids=positions[:, None] if len(positions) > 1 else positions,
        attention_mask=torch.ones_like(positions[:1]),  # else gaps would read as packed texts
        use_cache=False,
    )
    new_logits = model.get_output_embeddings()(out.last_hidden_state[0, len(prompt.embeds) - 1 :])
    new_logits[:, list(banned)] = float("-inf")
    return new_logits


# -- real runs -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Watched(Ensemble):
    """An ensemble that remembers the prompts its draft read; ``make`` may be a wrong one."""

    make: Callable[[Setup, Weighting], EnsembleDrafter] = EnsembleDrafter
    prompts: list[Prompt] = field(default_factory=list)
    drafts: list[EnsembleDrafter] = field(default_factory=list)

    def __call__(self, team: Setup) -> EnsembleDrafter:
        draft = self.make(team, self.weighting)
        prefill = draft.session.prefill

        def watched(prompts: Sequence[Prompt], **more: Any) -> list[Prefill]:
            self.prompts.extend(prompts)
            return prefill(prompts, **more)

        draft.session.prefill = watched
        self.drafts.append(draft)
        return draft


@dataclass
class Block:
    """A round by hand. Rows of laws: after the text so far, then after each drafted token."""

    text: list[int]
    drafted: list[int]
    accepted: int
    p: Tensor  # [row, vocab], raw logits
    q: Tensor  # [view, row, vocab]
    weights: tuple[float, ...]  # as recorded


@dataclass(eq=False)
class Answer:
    """A request's answer as the engine gave it, with everything needed to compute it again."""

    target: Any
    draft: Any
    inputs: Mapping[str, Tensor]
    views: tuple[str, ...]
    prompts: list[Prompt]  # what the draft read
    rounds: list[Round]
    result: Result
    rules: Mapping[str, Any]
    drafter: EnsembleDrafter
    tokenizer: Any = None

    @cached_property
    def by_hand(self) -> list[Read]:
        return views_by_hand(self.draft, self.inputs, self.views, self.tokenizer)

    @cached_property
    def blocks(self) -> list[Block]:
        banned = placeholders(self.target)
        whole = read(self.target, self.inputs)
        text = [self.result.ids[0]]
        new_blocks: list[Block] = []
        for round, record in zip(self.rounds, self.result.forwards, strict=True):
            drafted, start = list(round.tree.tokens), len(text)
            tokens = [*text, *drafted]
            p = logits(self.target, whole, tokens, banned)[start:]
            q = [logits(self.draft, seen, tokens, banned)[start:] for seen in self.by_hand]
            accepted = len(round.verdict.accepted)
            new_blocks.append(Block([*text], drafted, accepted, p, torch.stack(q), record.note))
            text += round.emitted
        assert text == list(self.result.ids)
        return new_blocks

    @cached_property
    def recorded(self) -> list[Block]:
        """The same with the laws the engine had."""
        new_blocks = []
        for round, block in zip(self.rounds, self.blocks, strict=True):
            assert isinstance(round.q, MixtureScores)
            p = torch.stack(list(round.p.rows))
            p[:, placeholders(self.target)] = float("-inf")
            q = torch.stack([torch.stack(list(part.rows)) for part in round.q.parts])
            new_blocks.append(replace(block, p=p, q=q))
        return new_blocks

    @property
    def weights(self) -> list[tuple[float, ...]]:
        return [record.note for record in self.result.forwards]


def ensembled(
    method: str | Recipe,
    target: Any,
    draft: Any,
    inputs: Sequence[Mapping[str, Tensor]],
    *,
    weighting: Weighting | None = None,
    make: Callable[[Setup, Weighting], EnsembleDrafter] = EnsembleDrafter,
    count: int = COUNT,
    tokenizer: Any = None,
    **rules: Any,
) -> list[Answer]:
    """Answers by the engine itself, one a request."""
    recipe = resolve(method) if isinstance(method, str) else method
    assert isinstance(recipe.drafter, Ensemble) and isinstance(recipe.view, Several)
    watched = Watched(weighting or recipe.drafter.weighting, make)
    (batch,) = inputs if len(inputs) == 1 else (left_padded(inputs),)
    rounds = stream(
        backbone(target),
        batch,
        draft=backbone(draft),
        method=replace(recipe, drafter=watched),
        tokenizer=tokenizer or Letters(),
        captioner=captions,
        max_new_tokens=count,
        **rules,
    )
    later_rounds = [round for round in rounds if not round.opening]
    views = tuple(view.name for view in recipe.view.views)
    answers = []
    for request, (one, result) in enumerate(zip(inputs, rounds.results, strict=True)):
        assert result.fallback_reason is None
        prompts = watched.prompts[request * len(views) : (request + 1) * len(views)]
        mine = [round for round in later_rounds if round.request == request]
        (drafter,) = watched.drafts
        answers.append(
            Answer(target, draft, one, views, prompts, mine, result, rules, drafter, tokenizer)
        )
    return answers


# short videos between longer texts: neither view is right all the time
FAMILIES: dict[str, tuple[Callable[..., Any], Callable[[int], Any], float]] = {
    "qwen2_5_vl": (
        qwen25,
        lambda seed: video_input(seed, grid=(2, 4, 6), before=10 + seed, after=24),
        0.15,
    ),
    "llava_onevision": (
        onevision,
        lambda seed: frames_input(seed, frames=2, before=10 + seed, after=24),
        0.1,
    ),
}

EACH = pytest.mark.parametrize("family", list(FAMILIES))


@cache
def answer(
    family: str,
    method: str,
    *,
    weighting: Weighting | None = None,
    make: Callable[[Setup, Weighting], EnsembleDrafter] = EnsembleDrafter,
    view: Several | None = None,
    amount: float | None = None,
    count: int = COUNT,
    **rules: Any,
) -> Answer:
    model, inputs, noise = FAMILIES[family]
    recipe = resolve(method)
    if view is not None:
        recipe = replace(recipe, view=view)
    (only_answer,) = ensembled(
        recipe,
        model(0),
        noisy(model, 0, noise if amount is None else amount),
        [inputs(0)],
        weighting=weighting,
        make=make,
        count=count,
        **rules,
    )
    return only_answer


# -- the weights, by hand --------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """How the weights of a block come about, and ways to misread which positions count."""

    kind: str
    distance: str = "kl"
    window: int | None = None
    positions: str = "judged"


METHODS = {
    "tabed-mt": Rule("equal"),
    **{
        f"tabed/weights={distance}" + (f"-{window}" if window else ""): Rule(
            "grid", distance, window
        )
        for distance in ("kl", "tvd", "matches")
        for window in (1, 4, 16, None)
    },
    "tabed/view=full+text+pooled": Rule("grid"),
    "tabed-mtcp/weights=matches-4": Rule("grid", "matches", 4),
    "tabed-mtcp": Rule("inverse"),
    "tabed-mtcp/weights=inverse-1": Rule("inverse", "kl", 1),
    "tabed-mtcp/weights=inverse-4": Rule("inverse", "kl", 4),
    "tabed-mtcp/weights=inverse-16": Rule("inverse", "kl", 16),
    "tabed-mtcp/weights=inverse-tvd": Rule("inverse", "tvd"),
    "tabed-mtcp/weights=inverse-tvd-4": Rule("inverse", "tvd", 4),
    "tabed/weights=inverse-4": Rule("inverse", "kl", 4),
    "tabed-mtcp/weights=softmax": Rule("softmax"),
    "tabed-mtcp/weights=softmax-4": Rule("softmax", "kl", 4),
}


def softmax(row: Sequence[float]) -> list[float]:
    most = max(row)
    weights = [math.exp(x - most) for x in row]
    total = sum(weights)
    return [w / total for w in weights]


def proportional(row: Sequence[float]) -> list[float]:
    return [x / sum(row) for x in row]


def distance(name: str, p: Sequence[float], q: Sequence[float]) -> tuple[float, ...]:
    """D(p, q); of several numbers the later ones break ties."""
    divergence = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)
    if name == "kl":
        return (divergence,)
    if name == "tvd":
        return (sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2,)
    assert name == "matches"
    return float(p.index(max(p)) != q.index(max(q))), divergence


def tenths(views: int) -> list[tuple[float, ...]]:
    """All weights in steps of a tenth that sum to 1."""
    some = [each for each in product(range(STEPS + 1), repeat=views) if sum(each) == STEPS]
    return [tuple(n / STEPS for n in each) for each in some]


def candidates(rule: Rule, laws: Sequence[Sequence[float]]) -> list[list[float]]:
    """The laws an error is summed for: mixtures of the views in tenths, or each view by itself."""
    if rule.kind != "grid":
        return [list(law) for law in laws]
    mixed = torch.tensor(tenths(len(laws)), dtype=torch.double) @ torch.tensor(laws).double()
    return mixed.tolist()


def judged(rule: Rule, block: Block) -> list[int]:
    """Rows of a block the target has said its word on.

    A row counts if its prefix was emitted and the views gave it a law: the first, and every one
    after an accepted token, as long as a token was drafted there. So the refused token's position
    counts, what hangs on it does not, and after a block accepted to its end the target's own token
    does not either: no view was asked for it.
    """
    rows = list(range(min(block.accepted + 1, len(block.drafted))))
    if rule.positions == "accepted":  # the refused one left out
        return rows[: block.accepted]
    if rule.positions == "drafted":  # whatever became of them
        return list(range(len(block.drafted)))
    if rule.positions == "own too":  # the target's own token after a full acceptance
        return list(range(block.accepted + 1))
    return rows


def weights_by_hand(rule: Rule, blocks: Sequence[Block]) -> list[list[float]]:
    """Algorithm 1, line 3, before each block: a sum over all past positions, or the last h."""
    errors: list[list[tuple[float, ...]]] = []  # per position, per candidate
    weights = []
    for block in blocks:
        views = len(block.q)
        seen = errors if rule.window is None else errors[-rule.window :]
        if not seen or rule.kind == "equal":
            weights.append([1 / views] * views)
        else:
            sums = [
                [sum(column) for column in zip(*(at[j] for at in seen), strict=True)]
                for j in range(len(seen[0]))
            ]
            if rule.kind == "grid":
                j = min(range(len(sums)), key=lambda j: sums[j])
                weights.append([*tenths(views)[j]])
            else:
                law = {"softmax": softmax, "inverse": proportional}[rule.kind]
                weights.append(law([1 / max(e[0], 1e-11) for e in sums]))
        if rule.kind == "equal":
            continue
        for row in judged(rule, block):
            p = softmax(block.p[row].tolist())
            laws = [softmax(view[row].tolist()) for view in block.q]
            errors.append([distance(rule.distance, p, q) for q in candidates(rule, laws)])
    return weights


# -- the checks ------------------------------------------------------------------------------------


def check_prompts(answer: Answer, rule: Rule) -> None:
    """What the draft read is what the paper says its views are."""
    for prompt, view in zip(answer.prompts, answer.by_hand, strict=True):
        assert prompt.embeds.shape == view.embeds.shape
        assert torch.equal(prompt.positions, view.positions)
        # numbers of up to ten, which processors round each in its way
        assert torch.allclose(prompt.embeds, view.embeds, rtol=1e-6, atol=1e-5)
        assert prompt.next_position == view.following


def check_laws(answer: Answer, rule: Rule) -> None:
    """Each view's laws at every node are the draft's over its own prompt."""
    for seen, block in zip(answer.recorded, answer.blocks, strict=True):
        rows = seen.q.shape[1]
        assert rows == len(block.drafted), "no view looks past the last drafted token"
        assert torch.allclose(seen.q, block.q[:, :rows], rtol=0, atol=1e-4)
        assert torch.allclose(seen.p, block.p, rtol=0, atol=1e-4)


def mixture(block: Block, row: int) -> Tensor:
    """sum_i w_i softmax(logits_i)"""
    total = torch.zeros_like(block.q[0, row]).double()
    for weight, view in zip(block.weights, block.q, strict=True):
        total += weight * torch.softmax(view[row].double(), -1)
    return total


def check_blocks(answer: Answer, rule: Rule) -> None:
    """gamma tokens a block (fewer if one ends the answer), each the arg-max of the mixture, or
    drawn from it by the rules."""
    sample = bool(answer.rules.get("do_sample"))
    for round, block in zip(answer.rounds, answer.blocks, strict=True):
        assert round.q is not None
        count = len(block.drafted)
        assert count == GAMMA or block.drafted[-1] in round.q.rules.end_ids
        assert list(round.tree.parents) == list(range(-1, count - 1))
        for row, token in enumerate(block.drafted):
            law, q = mixture(block, row), round.tree.q[row]
            engine_law = torch.softmax(round.q.rows[row].double(), -1)
            assert torch.allclose(engine_law, law, rtol=0, atol=1e-5)
            if not sample:
                assert q is None and token == int(law.argmax())
                continue
            law = sharpened(law, answer.rules)
            assert q is not None and torch.allclose(q.double(), law, rtol=0, atol=1e-5)
            place = len(answer.prompts[0].full_ids) + len(block.text) + row
            u = uniform(answer.rules["seed"], 0, "draft", place, 0, began=len(block.text))
            below = float(law[:token].sum())
            assert below - 1e-5 < u < below + float(law[token]) + 1e-5


def sharpened(law: Tensor, rules: Mapping[str, Any]) -> Tensor:
    """Temperature and top-k, on the law itself: p^(1/T), the k likeliest, normalised."""
    powers = law ** (1 / rules.get("temperature", 1.0))
    if top := rules.get("top_k"):
        powers[powers < powers.sort(descending=True).values[top - 1]] = 0
    return powers / powers.sum()


def check_weights(answer: Answer, rule: Rule) -> None:
    """The weights of every block, from the uncached laws and from the recorded ones.

    A grid's are the same numbers; 1/e of a small e makes rounding in an uncached forward visible.
    """
    loose = 1e-6 if rule.kind == "grid" else 1e-4
    for blocks, off in ((answer.blocks, loose), (answer.recorded, 1e-6)):
        expected = weights_by_hand(rule, blocks)
        for weights, by_hand in zip(answer.weights, expected, strict=True):
            assert weights == pytest.approx(by_hand, abs=off)


CHECKS = {
    "prompts": check_prompts,
    "laws": check_laws,
    "blocks": check_blocks,
    "weights": check_weights,
}


@cache
def failing(answer: Answer, rule: Rule) -> set[str]:
    """The checks an answer does not pass."""
    failures = set()
    for name, check in CHECKS.items():
        try:
            check(answer, rule)
        except AssertionError:
            failures.add(name)
    return failures


@cache
def truth(family: str, count: int = COUNT) -> list[int]:
    make, inputs, _ = FAMILIES[family]
    return hf_greedy(make(0), inputs(0), count)
