"""TABED (Lee et al., 2025): every round of real runs, again by plain loops over Algorithm 1.

The prompts of the views are rebuilt from the processor's output, their laws come from uncached
forwards of Hugging Face's modules, and weights and blocks from the equations. Departures from the
paper are variants of our classes that run for real and that the same checks must refuse.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import END as VISION_END
from helpers import (
    IMAGE,
    PATCH,
    TEXT,
    VIDEO,
    Letters,
    answered,
    backbone,
    frames_input,
    hf_greedy,
    left_padded,
    llama,
    no_seconds,
    noisy,
    onevision,
    qwen2,
    qwen25,
    text_input,
    video_input,
)
from helpers import START as VISION_START
from torch import Tensor

import saccade
from saccade.core.errors import MethodError, OptionError
from saccade.core.prompt import Prefill, Prompt
from saccade.core.protocols import State
from saccade.core.result import Result, Round
from saccade.core.sampling import Scores, uniform
from saccade.drafting.ensemble import Ensemble, EnsembleDrafter, Mixed, Mixture, Weighting
from saccade.drafting.recipe import Recipe
from saccade.drafting.setup import Setup
from saccade.drafting.views.basic import FULL, Several, Worded, worded
from saccade.engine.generate import stream
from saccade.methods import resolve
from saccade.methods.tabed import Equal, Grid, Inverse

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
    found: list[Medium] = []
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
        found.append(Medium(cells, start, at))
    return found


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
    found = []
    for name in names:
        if name == "full":
            found.append(read(model, inputs))
        elif name == "text":
            newline = encode("\n", add_special_tokens=False)
            assert len(newline) == 1
            found.append(rewritten(model, inputs, newline))
        elif name == "caption":
            (caption,) = captions(inputs)
            words = encode("image: " + caption, add_special_tokens=False)
            found.append(rewritten(model, inputs, words))
        else:
            own = {"pooled": pooled, "pooled-after": pooled_after}[name]
            found.append(own(model, inputs))
    return found


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
    found = model.get_output_embeddings()(out.last_hidden_state[0, len(prompt.embeds) - 1 :])
    found[:, list(banned)] = float("-inf")
    return found


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
        found: list[Block] = []
        for round, record in zip(self.rounds, self.result.forwards, strict=True):
            drafted, start = list(round.tree.tokens), len(text)
            tokens = [*text, *drafted]
            p = logits(self.target, whole, tokens, banned)[start:]
            q = [logits(self.draft, seen, tokens, banned)[start:] for seen in self.by_hand]
            accepted = len(round.verdict.accepted)
            found.append(Block([*text], drafted, accepted, p, torch.stack(q), record.note))
            text += round.tokens
        assert text == list(self.result.ids)
        return found

    @cached_property
    def recorded(self) -> list[Block]:
        """The same with the laws the engine had."""
        found = []
        for round, block in zip(self.rounds, self.blocks, strict=True):
            assert isinstance(round.q, Mixed)
            p = torch.stack(list(round.p.rows))
            p[:, placeholders(self.target)] = float("-inf")
            q = torch.stack([torch.stack(list(part.rows)) for part in round.q.parts])
            found.append(replace(block, p=p, q=q))
        return found

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
    found = [round for round in rounds if not round.opening]
    views = tuple(view.name for view in recipe.view.views)
    answers = []
    for request, (one, result) in enumerate(zip(inputs, rounds.results, strict=True)):
        assert result.fallback_reason is None
        prompts = watched.prompts[request * len(views) : (request + 1) * len(views)]
        mine = [round for round in found if round.request == request]
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
    (found,) = ensembled(
        recipe,
        model(0),
        noisy(model, 0, noise if amount is None else amount),
        [inputs(0)],
        weighting=weighting,
        make=make,
        count=count,
        **rules,
    )
    return found


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
    found = []
    for block in blocks:
        views = len(block.q)
        seen = errors if rule.window is None else errors[-rule.window :]
        if not seen or rule.kind == "equal":
            found.append([1 / views] * views)
        else:
            sums = [
                [sum(column) for column in zip(*(at[j] for at in seen), strict=True)]
                for j in range(len(seen[0]))
            ]
            if rule.kind == "grid":
                j = min(range(len(sums)), key=lambda j: sums[j])
                found.append([*tenths(views)[j]])
            else:
                law = {"softmax": softmax, "inverse": proportional}[rule.kind]
                found.append(law([1 / max(e[0], 1e-11) for e in sums]))
        if rule.kind == "equal":
            continue
        for row in judged(rule, block):
            p = softmax(block.p[row].tolist())
            laws = [softmax(view[row].tolist()) for view in block.q]
            errors.append([distance(rule.distance, p, q) for q in candidates(rule, laws)])
    return found


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
        assert count == GAMMA or block.drafted[-1] in round.q.rules.ends
        assert list(round.tree.parents) == list(range(-1, count - 1))
        for row, token in enumerate(block.drafted):
            law, q = mixture(block, row), round.tree.q[row]
            held = torch.softmax(round.q.rows[row].double(), -1)
            assert torch.allclose(held, law, rtol=0, atol=1e-5)
            if not sample:
                assert q is None and token == int(law.argmax())
                continue
            law = sharpened(law, answer.rules)
            assert q is not None and torch.allclose(q.double(), law, rtol=0, atol=1e-5)
            place = len(answer.prompts[0].context) + len(block.text) + row
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
        for found, by_hand in zip(answer.weights, expected, strict=True):
            assert found == pytest.approx(by_hand, abs=off)


CHECKS = {
    "prompts": check_prompts,
    "laws": check_laws,
    "blocks": check_blocks,
    "weights": check_weights,
}


@cache
def failing(answer: Answer, rule: Rule) -> set[str]:
    """The checks an answer does not pass."""
    found = set()
    for name, check in CHECKS.items():
        try:
            check(answer, rule)
        except AssertionError:
            found.add(name)
    return found


# -- every round of real runs ----------------------------------------------------------------------

RUNS = [
    *(("qwen2_5_vl", method) for method in METHODS),
    *(
        ("llava_onevision", method)
        for method in (
            "tabed/weights=kl",
            "tabed/weights=kl-1",
            "tabed/weights=tvd-4",
            "tabed/weights=matches",
            "tabed-mtcp",
            "tabed-mtcp/weights=inverse-4",
        )
    ),
]


ONCE = {  # each distance, each kind of window, each way from distances to weights
    *("tabed-mt", "tabed/weights=kl", "tabed/weights=kl-4", "tabed/weights=tvd-1", "tabed-mtcp"),
    *("tabed/weights=matches-16", "tabed/view=full+text+pooled", "tabed-mtcp/weights=softmax-4"),
    *("tabed-mtcp/weights=inverse-4", "tabed-mtcp/weights=inverse-tvd"),
}


@pytest.mark.parametrize(
    ("family", "method"),
    [pytest.param(*run, marks=() if run[1] in ONCE else pytest.mark.slow) for run in RUNS],
)
def test_every_round_is_algorithm_1(family, method):
    """Claim: in every round the views' prompts and laws, the drafted block and its weights are the
    paper's: equal weights first, then line 3 over all past positions or the last h of them.

    Fails if one prompt row, one law, one drafted token or one weight of a run differs.
    """
    found = answer(family, method)
    for check in CHECKS.values():
        check(found, METHODS[method])
    assert list(found.result.ids) == truth(family)
    accepted = {block.accepted for block in found.blocks}
    assert len(found.blocks) > 6 and len(accepted) > 2
    varied = len(set(found.weights))
    assert varied == 1 if method == "tabed-mt" else varied > 2


@cache
def truth(family: str, count: int = COUNT) -> list[int]:
    make, inputs, _ = FAMILIES[family]
    return hf_greedy(make(0), inputs(0), count)


def test_the_names_are_the_papers_methods():
    """Claim: ``tabed`` is MT* by KL over all positions, ``tabed-mtcp`` MTCP*, ``tabed-mt`` MT.

    Fails if a name stands for other views, another rule or another gamma.
    """
    names = {name: resolve(name) for name in ("tabed", "tabed-mt", "tabed-mtcp")}
    views = {name: recipe.view.name for name, recipe in names.items()}
    assert views["tabed"] == views["tabed-mt"] == "full+text"
    assert views["tabed-mtcp"] == "full+text+caption+pooled"
    for name, same in (("tabed", "tabed/weights=kl"), ("tabed-mtcp", "tabed-mtcp/weights=inverse")):
        assert names[name].drafter == resolve(same).drafter
        assert names[name].shape == resolve(same).shape


@pytest.mark.parametrize("positions", ["accepted", "drafted", "own too"])
def test_control_other_positions_give_other_weights(positions):
    """Control: which positions count shows in the trajectories.

    Leaving out the refused token's, counting what hangs on it, or asking the views about the
    target's own token after a block that was accepted to its end: each fails on a real run.
    """
    for method in ("tabed/weights=kl", "tabed/weights=kl-4", "tabed-mtcp/weights=inverse-4"):
        found, rule = answer("qwen2_5_vl", method), METHODS[method]
        assert max(block.accepted for block in found.blocks[:-1]) == GAMMA
        wrong = weights_by_hand(replace(rule, positions=positions), found.blocks)
        off = torch.tensor(found.weights) - torch.tensor(wrong)
        assert off.abs().max() > 1e-2


# -- the prompts -----------------------------------------------------------------------------------


def two_videos_and_an_image() -> dict[str, Tensor]:
    """A Qwen prompt with ragged grids and videos that touch."""
    grids = [(2, 4, 6), (1, 6, 6), (1, 4, 4)]
    kinds = [VIDEO, IMAGE, VIDEO]
    generator = torch.Generator().manual_seed(5)
    ids = [7, 8, 9]
    for number, (grid, kind) in enumerate(zip(grids, kinds, strict=True)):
        t, h, w = grid
        ids += [VISION_START, *[kind] * (t * (h // 2) * (w // 2)), VISION_END]
        ids += [20 + number] * (number % 2)
    ids += [30, 31, 32]
    row = torch.tensor([ids])

    def pixels(kind: int) -> Tensor:
        patches = sum(math.prod(g) for g, k in zip(grids, kinds, strict=True) if k == kind)
        return torch.randn(patches, 6 * PATCH**2, generator=generator)

    return {
        "input_ids": row,
        "attention_mask": torch.ones_like(row),
        "mm_token_type_ids": (row == IMAGE).int() + (row == VIDEO).int() * 2,
        "pixel_values_videos": pixels(VIDEO),
        "video_grid_thw": torch.tensor([grids[0], grids[2]]),
        "second_per_grid_ts": torch.tensor([1.0, 0.5]),
        "pixel_values": pixels(IMAGE),
        "image_grid_thw": torch.tensor([grids[1]]),
    }


PROMPTS: dict[str, tuple[Callable[..., Any], Callable[[], Any]]] = {
    "several media": (qwen25, two_videos_and_an_image),
    "seconds": (qwen25, lambda: video_input(2, grid=(3, 6, 10), seconds=2.0)),
    "qwen2_vl": (qwen2, lambda: no_seconds(video_input(1, grid=(3, 6, 8)))),
    "frames and a newline": (onevision, lambda: frames_input(3, frames=3)),
    "no video": (llama, lambda: text_input(2)),
}


@pytest.mark.parametrize("case", list(PROMPTS))
def test_the_prompts_of_the_views(case):
    """Claim: M is the whole prompt; T has one newline for each video or image, C the caption with
    its prefix, at the positions of a plain text; P has the mean of each 2 x 2 cells of a frame.

    By hand: T and C are ids the model reads by its own forward, P a loop over cells. Fails on a
    row too many, a medium forgotten, frames or media pooled together, or a position off.
    """
    make, inputs = PROMPTS[case]
    target, draft = make(0), noisy(make, 0, 0.1)
    (found,) = ensembled("tabed-mtcp", target, draft, [inputs()], count=3)
    check_prompts(found, METHODS["tabed-mtcp"])
    check_laws(found, METHODS["tabed-mtcp"])
    whole, text, caption, small = found.prompts
    seen = len(media(target, inputs()))
    assert (text.seen, caption.seen) == (0, 0)
    if seen:
        assert len(text) < len(small) < len(whole) and len(text) < len(caption)
        assert found.result.draft_visual_tokens == whole.seen


@pytest.mark.parametrize("case", ["frames and a newline", "several media"])
def test_what_is_pooled_after_the_projector_is_another_view(case):
    """Claim: ``pooled-after`` is the mean of the language model's rows where their first one stood.
    Control: where the projector takes rows one by one, it fails what the paper's view passes, by
    rows and by positions; where patches merge there, both views are one."""
    make, inputs = PROMPTS[case]
    method = "tabed-mtcp/view=full+text+caption+{}"
    ours, papers = (
        ensembled(method.format(view), make(0), noisy(make, 0, 0.1), [inputs()], count=3)[0]
        for view in ("pooled-after", "pooled")
    )
    for found in (ours, papers):
        check_prompts(found, METHODS["tabed-mtcp"])
    one, other = ours.prompts[-1], papers.prompts[-1]
    assert one.embeds.shape == other.embeds.shape and one.seen == other.seen
    merges = case == "several media"
    assert torch.equal(one.embeds, other.embeds) == merges
    assert torch.equal(one.positions, other.positions) == merges
    apart = (one.embeds - other.embeds).abs().amax(-1) > 1e-2
    assert int(apart.sum()) == (0 if merges else one.seen)


def test_media_that_touch_are_each_a_newline():
    """Claim: two videos side by side are two newlines, on a family without grids too.

    Fails if a run of placeholders passes for one video.
    """
    one, other = frames_input(0, frames=2), frames_input(1, frames=2)
    ids = torch.cat([one["input_ids"][:, :13], other["input_ids"][:, 4:]], 1)
    pixels = torch.cat([one["pixel_values_videos"], other["pixel_values_videos"]])
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values_videos": pixels,
    }
    words = int((ids < TEXT).sum())
    assert int((ids == VIDEO).sum()) == 18 and words == 11
    (found,) = ensembled("tabed", onevision(0), noisy(onevision, 0, 0.1), [inputs], count=3)
    assert len(found.prompts[1]) == words + 2


class Marked(Letters):
    """Writes a mark before every text, as Llama's tokenizer does."""

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [1, *super().encode(text)]


def test_a_newline_is_one_token_whatever_the_tokenizer_marks():
    """Claim: a video becomes one token, so that T's prompt is as long as the unexpanded one.

    Fails if what a tokenizer puts before a text on its own lands in the middle of the prompt.
    """
    inputs = video_input(0)
    target, draft = qwen25(0), noisy(qwen25, 0, 0.1)
    (found,) = ensembled("tabed", target, draft, [inputs], count=3, tokenizer=Marked())
    assert len(found.prompts[1]) == int((inputs["input_ids"] != VIDEO).sum()) + 1


# -- departures that must show ---------------------------------------------------------------------


class Certain(Grid):
    """All weight on the first view to begin with."""

    def weights(self, state: Any) -> tuple[float, ...]:
        return super().weights(state) if state.positions else (1.0, 0.0)


class Backward(Grid):
    """D(q || p)."""

    def fold(self, state: Any, p: Any, q: Any) -> Any:
        shares = [j / STEPS for j in range(STEPS + 1)]
        mixed = torch.stack([((1 - s) * q[0].exp() + s * q[1].exp()).log() for s in shares])
        terms = (mixed.exp() * (mixed - p)).nan_to_num(0.0)
        return state.add(terms.sum(-1).T[..., None], self.window)


class Tempered(Grid):
    """Distances between the laws that were sampled from."""

    def fold(self, state: Any, p: Any, q: Any) -> Any:
        temperature = SAMPLED["temperature"]
        p, q = (p / temperature).log_softmax(-1), (q / temperature).log_softmax(-1)
        return super().fold(state, p, q)


class Unended(EnsembleDrafter):
    """Learns from what was drafted, refused or not."""

    def fold(self, state: State, round: Round) -> State:
        everything = replace(round.verdict, path=tuple(range(len(round.tree))))
        return super().fold(state, replace(round, verdict=everything))


class Geometric(Mixture):
    """A weighted mean of logits."""

    def _mix(self, request: int, parts: tuple[Scores, ...]) -> Scores:
        mixed = super()._mix(request, parts)
        weights = self.weights[request]
        rows = [
            sum(w * row.log_softmax(-1) for w, row in zip(weights, each, strict=True) if w)
            for each in zip(*(part.rows for part in parts), strict=True)
        ]
        return replace(mixed, rows=rows)


class OneForAll(Mixture):
    """The first view's rows in every view's place."""

    def _mix(self, request: int, parts: tuple[Scores, ...]) -> Scores:
        return super()._mix(request, (parts[0],) * len(parts))


class Averaged(EnsembleDrafter):
    """Mixes in another way."""

    mixture: type[Mixture] = Geometric

    def __init__(self, team: Setup, weighting: Weighting) -> None:
        super().__init__(team, weighting)
        self._mixture = self.mixture(self.session, len(self._views))


class Shared(Averaged):
    """Reads the first view alone."""

    mixture = OneForAll


@dataclass(frozen=True)
class Dropped(Worded):
    """T with nothing in the videos' place."""

    def __call__(self, prefill: Prefill, prompt: Prompt) -> Prompt:
        return worded(prompt, ((),))


@dataclass(frozen=True)
class Repeated(Worded):
    """T with a newline for each visual token."""

    def __call__(self, prefill: Prefill, prompt: Prompt) -> Prompt:
        return worded(prompt, (prefill.words["newline"][0] * prompt.seen,))


@dataclass(frozen=True)
class Standing(Worded):
    """T with what is left at the positions it had beside the video."""

    def __call__(self, prefill: Prefill, prompt: Prompt) -> Prompt:
        text = super().__call__(prefill, prompt)
        where = prompt.positions[:, text.index]
        return replace(text, positions=where, next_position=prompt.next_position)


def beside(text: Worded) -> Several:
    return Several((FULL, text))


KL, KL4 = "tabed/weights=kl", "tabed/weights=kl-4"
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.5, "top_k": 0, "seed": 3}
WRONG: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "weights frozen at equal": (KL, {"weighting": Equal()}, {"weights"}),
    "window ignored": (KL4, {"weighting": Grid()}, {"weights"}),
    "D(q || p)": (KL, {"weighting": Backward()}, {"weights"}),
    "laws after temperature": (KL, {"weighting": Tempered(), **SAMPLED}, {"weights"}),
    "first block not equal": (KL, {"weighting": Certain()}, {"weights"}),
    "past the refusal": (KL, {"make": Unended}, {"weights"}),
    "logits averaged": (KL, {"make": Averaged}, {"blocks"}),
    "one view's row for both": (KL, {"make": Shared}, {"laws", "blocks", "weights"}),
    "no newline": (KL, {"view": beside(Dropped("text", "newline"))}, {"prompts", "laws"}),
    "a newline a token": (KL, {"view": beside(Repeated("text", "newline"))}, {"prompts", "laws"}),
    "positions kept": (KL, {"view": beside(Standing("text", "newline"))}, {"prompts", "laws"}),
}


@pytest.mark.parametrize("wrong", list(WRONG))
def test_control_a_departure_from_the_paper_is_refused(wrong):
    """Control: each check fails on a real run of what it is there to refuse, and the same run
    without the departure passes. A departure in the weights alone fails by the weights alone.
    """
    method, change, expected = WRONG[wrong]
    rules = {name: value for name, value in change.items() if name in SAMPLED}
    assert failing(answer("qwen2_5_vl", method, **rules), METHODS[method]) == set()
    found = failing(answer("qwen2_5_vl", method, **change), METHODS[method])
    if expected in ({"weights"}, {"blocks"}):
        assert found == expected
    assert expected <= found


# -- sampling --------------------------------------------------------------------------------------


@EACH
@pytest.mark.parametrize(
    "rules",
    [
        {"temperature": 1.0, "top_k": 0},
        {"temperature": 0.6, "top_k": 12},
    ],
    ids=["plain", "ruled"],
)
def test_sampled_blocks_are_drawn_from_the_mixture(family, rules):
    """Claim: q in the tree is the mixture's law with the sampling rules applied to it, once; the
    token is its draw at the request's noise; weights come from the raw laws all the same.

    Fails if rules are applied to each view, or not at all, or if q is not what was drawn from.
    """
    rules = {"do_sample": True, "seed": 4, **rules}
    found = answer(family, KL, **rules)
    assert failing(found, METHODS[KL]) == set()
    assert len({block.weights for block in found.blocks}) > 1
    twice = 0.0
    for round, block in zip(found.rounds, found.blocks, strict=True):
        for row, q in enumerate(round.tree.q):
            each = [sharpened(torch.softmax(view[row], -1), rules) for view in block.q]
            before = sum(w * law for w, law in zip(block.weights, each, strict=True))
            assert q is not None and isinstance(before, Tensor)
            twice = max(twice, float((q - before).abs().max()))
    assert (twice > 1e-2) == (rules["temperature"] != 1), "rules on each view are another law"


# -- the fold --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rules", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", [KL, "tabed/weights=matches-4", "tabed-mtcp"])
def test_the_weights_replay_from_recorded_rounds_without_a_model(method, rules):
    """Claim: what an ensemble learns is a fold over rounds: replayed it gives every weight again,
    from the rounds and from plain numbers written out and read back.

    Fails if the drafter hides a state, if a fold changes a state in place, or keeps laws.
    """
    found = answer("qwen2_5_vl", method, **rules)
    drafter, weighting = found.drafter, resolve(method).drafter.weighting
    for _ in range(2):
        state, states = drafter.start(), []
        for round in found.rounds:
            states.append(state)
            state = drafter.fold(state, round)
        assert [weighting.weights(learnt) for _, learnt in states] == found.weights
    taped = []
    for block in found.recorded:
        rows = judged(METHODS[method], block)
        p = block.p[rows].double().log_softmax(-1)
        q = block.q[:, rows].double().log_softmax(-1)
        taped.append((p.tolist(), q.tolist()))
    learnt = weighting.start(len(found.views))
    for (p, q), weights in zip(json.loads(json.dumps(taped)), found.weights, strict=True):
        assert weighting.weights(learnt) == pytest.approx(weights, abs=1e-9)
        learnt = weighting.fold(
            learnt,
            torch.tensor(p, dtype=torch.double),
            torch.tensor(q, dtype=torch.double),
        )
        window = weighting.window
        assert len(learnt.recent) <= (window or 0), "sums are carried, never laws"
        assert learnt.total.shape[0] == (STEPS + 1 if isinstance(weighting, Grid) else 4)


def steady(views: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Laws at one position, [position vocab] and [view position vocab]: view i is i + 1 off."""
    generator = torch.Generator().manual_seed(seed)
    p = torch.randn(1, 40, generator=generator, dtype=torch.double)
    noise = torch.randn(views, 1, 40, generator=generator, dtype=torch.double)
    scale = 0.4 * (1 + torch.arange(views)[:, None, None])
    return p.log_softmax(-1), (p + scale * noise).log_softmax(-1)


@pytest.mark.parametrize(("literal", "law"), [(False, proportional), (True, softmax)])
def test_weights_drift_by_the_literal_softmax_alone(literal, law):
    """Claim: e sums up. In proportion to 1/e, as the published code weighs, the weights stay put,
    however long the answer; softmax(1/e) as printed goes to equal ones though the views stay as
    different as they were, unless a window is set.

    Position by position against the law of 1/(n d). Fails if e were a mean, or a window a whole.
    """
    p, q = steady(4)
    each = [distance("kl", p[0].exp().tolist(), view[0].exp().tolist())[0] for view in q]
    spreads: dict[int | None, list[float]] = {}
    for window in (None, 4):
        rule = Inverse("kl", window, literal=literal)
        state = rule.start(4)
        spreads[window] = []
        for position in range(1, 121):
            state = rule.fold(state, p, q)
            counted = position if window is None else min(position, window)
            expected = law([1 / (counted * d) for d in each])
            assert rule.weights(state) == pytest.approx(expected, abs=1e-6)
            spreads[window].append(max(expected) - min(expected))
    whole, recent = spreads[None], spreads[4]
    assert whole[0] > 0.5
    if literal:
        assert all(b <= a for a, b in pairwise(whole))
        assert whole[119] < 0.03 < 0.1 < recent[119] == recent[3] == whole[3]
    else:
        assert [*whole, *recent] == pytest.approx([whole[0]] * 240)


def test_real_weights_drift_the_same_way():
    """Claim: the drift is what real runs show: by the literal softmax over the whole history the
    spread of the weights ends near nothing; over four positions, or in proportion to 1/e, it does
    not, on the very same answer.
    """

    def spread(method: str) -> list[float]:
        return [max(w) - min(w) for w in answer("llava_onevision", method, count=64).weights]

    drifting, *others = (
        spread(f"tabed-mtcp{rule}") for rule in ("/weights=softmax", "/weights=softmax-4", "")
    )
    late = slice(len(drifting) // 2, None)
    for other in others:
        assert max(drifting[late]) < min(0.05, max(other[late]) / 3)


# -- batches ---------------------------------------------------------------------------------------


@EACH
@pytest.mark.parametrize("method", ["tabed", "tabed-mtcp/weights=inverse-4"])
def test_requests_of_a_batch_are_weighted_each_by_itself(family, method):
    """Claim: three requests at once are three alone: ids, prompts, and every block's weights.

    Fails if rows of views and requests are mixed up, or if one request learns from another.
    """
    model, inputs, noise = FAMILIES[family]
    target, draft = model(0), noisy(model, 0, noise)
    many = [inputs(seed) for seed in range(3)]
    together = ensembled(method, target, draft, many, count=20)
    for one, found in zip(many, together, strict=True):
        (alone,) = ensembled(method, target, draft, [one], count=20)
        assert found.result.ids == alone.result.ids
        check_prompts(found, METHODS.get(method, METHODS[KL]))
        for ours, theirs in zip(found.weights, alone.weights, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-4 if "inverse" in method else 1e-6)
    trajectories = {tuple(found.weights) for found in together}
    assert len(trajectories) == 3, "requests that learn alike prove little"


# -- a target that drafts for itself ---------------------------------------------------------------


@EACH
def test_the_target_as_its_own_draft(family):
    """Claim: two full views of the target's own are never refused; beside text alone all weight
    goes to the full one, and then nothing is refused either.

    Fails if mixing changes a law, or if the weights follow anything but the laws.
    """
    model, inputs, _ = FAMILIES[family]
    (twins,) = ensembled("tabed/view=full+full", model(0), model(0), [inputs(0)], count=26)
    assert [block.accepted for block in twins.blocks[:-1]] == [GAMMA] * 4
    (found,) = ensembled("tabed", model(0), model(0), [inputs(0)], count=25)
    assert found.weights[0] == (0.5, 0.5) and len(found.weights) > 3
    assert set(found.weights[1:]) == {(1.0, 0.0)}
    assert {block.accepted for block in found.blocks[1:-1]} == {GAMMA}


# -- the trained pair ------------------------------------------------------------------------------


def test_the_trained_pair(pair: Path):
    """Claim: on the pair that comes with the package, with its own tokenizer, every round is
    Algorithm 1 as well. Fails where a trained model's sharp laws or its vocabulary matter.
    """
    from transformers import AutoModelForImageTextToText, AutoProcessor

    target, draft = (
        AutoModelForImageTextToText.from_pretrained(
            pair / name, dtype=torch.float32, local_files_only=True
        ).eval()
        for name in ("target", "draft")
    )
    processor = AutoProcessor.from_pretrained(pair / "target", local_files_only=True)
    asked = [{"type": "video"}, {"type": "text", "text": "Describe the video."}]
    prompt = processor.apply_chat_template(
        [{"role": "user", "content": asked}], add_generation_prompt=True, tokenize=False
    )
    noise = torch.Generator().manual_seed(0)
    frames = torch.randint(0, 255, (4, 3, 112, 112), generator=noise, dtype=torch.uint8)
    inputs = dict(
        processor(text=[prompt], videos=[frames], do_sample_frames=False, return_tensors="pt")
    )
    for method in ("tabed", "tabed-mtcp/weights=inverse-4"):
        rule = Rule("grid") if method == "tabed" else Rule("inverse", "kl", 4)
        (found,) = ensembled(
            method, target, draft, [inputs], count=32, tokenizer=processor.tokenizer
        )
        assert failing(found, rule) == set()
        assert len(set(found.weights)) > 2


# -- what is refused -------------------------------------------------------------------------------

IMPOSSIBLE = {
    "one view": "tabed/view=full",
    "no view but one": "tabed/view=text",
    "weights without an ensemble": "sd/weights=kl",
    "an empty window": "tabed/weights=kl-0",
    "unknown weights": "tabed/weights=hope",
    "an ensemble of one view": "sd/drafter=ensemble",
    "the target's own keys": "tabed/view=full+per-head",
    "two views of the target": "tabed/drafter=self",
    "another process": "tabed/schedule=parallel",
}


def is_a_sentence(message: str) -> bool:
    return len(message) > 20 and "\n" not in message and ". " not in message


@pytest.mark.parametrize("name", list(IMPOSSIBLE))
def test_an_impossible_ensemble_is_refused_in_a_sentence(name):
    """Claim: what cannot be is refused when it is named. Fails if it resolves, or explains badly.

    The control: what can be, resolves.
    """
    with pytest.raises(MethodError) as caught:
        resolve(IMPOSSIBLE[name])
    assert is_a_sentence(str(caught.value))
    for possible in (*METHODS, "sd/view=full+text", "tabed-mt/view=full+text+pooled"):
        assert isinstance(resolve(possible).drafter, Ensemble)


@pytest.mark.parametrize(
    "name", ["tabed/keep=0.1", "tabed/view=specvlm+text/keep=0.5", "tabed-mt/weights=equal-4"]
)
def test_an_override_does_something_or_is_refused(name):
    """Claim: no override is taken and then ignored. Fails if it resolves to the same ensemble."""
    base = "/".join(part for part in name.split("/") if not part.startswith(("keep", "weights")))
    try:
        changed = resolve(name)
    except MethodError:
        return
    plain = resolve(base)
    assert isinstance(changed.view, Several) and isinstance(plain.view, Several)
    assert (changed.view.views, changed.drafter) != (plain.view.views, plain.drafter)


@pytest.mark.parametrize(
    ("method", "given", "asked"),
    [
        ("tabed", {}, "tokenizer"),
        ("tabed-mtcp", {"tokenizer": Letters()}, "captioner"),
        ("tabed-mtcp", {"captioner": captions}, "tokenizer"),
        ("sd/view=text", {}, "tokenizer"),
        ("sd/view=caption", {"tokenizer": Letters()}, "captioner"),
    ],
)
def test_words_that_cannot_be_written_are_asked_for(method, given, asked):
    """Claim: a missing tokenizer or captioner is named before any work, in a sentence.

    Fails if it surfaces later, as a draft that gave up.
    """
    with pytest.raises(OptionError, match=f"{asked}=") as caught:
        answered("qwen2_5_vl", method, count=4, **{"tokenizer": None, "captioner": None, **given})
    assert is_a_sentence(str(caught.value))


def test_a_captioner_that_fails_costs_speed_only():
    """Claim: a captioner that raises, or tells too few captions, ends drafting, not the answer."""

    def silent(inputs: Mapping[str, Any]) -> list[str]:
        return []

    def broken(inputs: Mapping[str, Any]) -> list[str]:
        raise RuntimeError("no caption today")

    inputs = FAMILIES["qwen2_5_vl"][1](0)
    for captioner in (silent, broken):
        found = saccade.run(
            backbone(qwen25(0)),
            inputs,
            draft=backbone(noisy(qwen25, 0, 0.1)),
            method="tabed-mtcp",
            tokenizer=Letters(),
            captioner=captioner,
            max_new_tokens=8,
            do_sample=False,
        )
        assert found.fallback_reason is not None
        assert list(found.ids) == truth("qwen2_5_vl")[:8]
