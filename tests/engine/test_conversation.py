"""Claims about conversations: a later turn reads only what is new and answers as a fresh start."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from helpers import (
    AMOUNT,
    FAMILIES,
    TEXT,
    WORDS,
    MadeBy,
    StubDraft,
    backbone,
    backbone_of_copy,
    dealt,
    hf_greedy,
    input_for,
    left_padded,
    noisy,
    prompt_of,
    qwen25,
    stubbed,
    video_input,
)
from torch import Tensor

import saccade
from lab import reference
from saccade.core import sampling
from saccade.core.errors import OptionError, SaccadeError
from saccade.core.prompt import Inputs
from saccade.core.result import Result
from saccade.core.sampling import Sampling
from saccade.core.tree import Tree, chain
from saccade.drafting.drafters import ModelDrafter
from saccade.drafting.parallel import drafter as beside
from saccade.drafting.schedule import serial
from saccade.methods import SYSTEMS, resolve
from saccade.model.backbone import Backbone
from saccade.model.session import RequestState, Session

pytestmark = pytest.mark.usefixtures("unchecked")

FAMILY = ("qwen2_5_vl", "llava_onevision", "llama")
METHODS = [  # all serial ones but TABED's variants, which share its code
    name
    for name, recipe in SYSTEMS.items()
    if recipe.schedule is serial and name not in ("tabed-mt", "tabed-mtcp")
]
SELF = ("specvlm-self", "std", "streaming", "layerskip")
COUNT = 13  # no multiple of any chain's length + 1: the limit cuts rounds
PER_TOKEN = {"input_ids": None, "attention_mask": 1, "mm_token_type_ids": 0}


def further(inputs: Inputs, ids: Sequence[int]) -> dict[str, Any]:
    """The inputs with more text behind them, as a processor gives a longer conversation."""
    found = dict(inputs)
    for name, filling in PER_TOKEN.items():
        if name in found:
            old: Tensor = found[name]
            more = list(ids) if filling is None else [filling] * len(ids)
            found[name] = torch.cat([old, torch.tensor([more], dtype=old.dtype)], 1)
    return found


def cut(inputs: Inputs, length: int) -> dict[str, Any]:
    """The inputs with their first ``length`` tokens only."""
    return {n: v[:, :length] if n in PER_TOKEN else v for n, v in inputs.items()}


def ids_of(inputs: Inputs) -> list[int]:
    return inputs["input_ids"][0].tolist()


def question(seed: int, count: int = 5) -> list[int]:
    rng = random.Random(f"question {seed}")
    return [rng.randrange(TEXT) for _ in range(count)]


def oracle(family: str, inputs: Inputs, count: int = COUNT, seed: int = 0) -> tuple[int, ...]:
    """The answer of a start afresh, without a cache."""
    model = FAMILIES[family](seed)
    return tuple(reference.decode_greedily(model, prompt_of(model, inputs), count))


def is_oracles(family: str, inputs: Inputs, ids: Sequence[int], count: int) -> bool:
    """Whether this is the oracle's answer of ``count`` tokens: one uncached forward tells."""
    model = FAMILIES[family](0)
    expected = reference.teacher_forced_argmax(model, prompt_of(model, inputs), list(ids))
    return len(ids) == count and expected == list(ids)


@cache
def script(family: str) -> tuple[tuple[dict[str, Any], tuple[int, ...]], ...]:
    """Three turns: inputs and answers, on which the oracle and transformers agree."""
    inputs = input_for(family)
    turns = []
    for turn in range(3):
        answer = oracle(family, inputs)
        assert list(answer) == hf_greedy(FAMILIES[family](0), inputs, COUNT)
        turns.append((inputs, answer))
        inputs = further(inputs, [*answer, *question(turn)])
    return tuple(turns)


def talking(family: str, method: Any = "sd", amount: float = AMOUNT, **always: Any) -> Any:
    """A conversation with a family's target and a noisy copy of it as the draft."""
    draft = backbone(noisy(FAMILIES[family], 0, amount))
    settings = {"method": method, "max_new_tokens": COUNT, "do_sample": False, **WORDS, **always}
    return saccade.Conversation(backbone(FAMILIES[family](0)), draft=draft, **settings)


def talk_of(conversation: Any) -> Any:
    return conversation._last.call


def fresh(family: str, method: Any, inputs: Inputs, **settings: Any) -> Result:
    settings = {"max_new_tokens": COUNT, "do_sample": False, **WORDS, **settings}
    draft = backbone(noisy(FAMILIES[family], 0, AMOUNT))
    return saccade.run(
        backbone(FAMILIES[family](0)), inputs, draft=draft, method=method, **settings
    )


# -- the same answers --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "family"),
    [
        *((method, "qwen2_5_vl") for method in METHODS),
        # every method walks through every family further below
        *((method, "llava_onevision") for method in ("sd", "std", "tabed")),
        *((method, "llama") for method in ("sd-tree", "layerskip", "lookup")),
    ],
)
def test_every_turn_answers_as_a_fresh_start(method, family):
    """Claim: three turns' answers are the cache-free oracle's, transformers' and a fresh run's on
    the whole conversation, and all that an earlier turn held is counted as reused.

    Fails if one key, position or law of an earlier turn is lost, doubled or stale.
    """
    read = 0
    with talking(family, method) as conversation:
        for inputs, answer in script(family):
            result = conversation.run(inputs)
            assert result.ids == answer
            assert result.fallback_reason is None and result.finish_reason == "length"
            assert result.reused_tokens == read
            assert result.prompt_tokens == len(ids_of(inputs))
            read = len(ids_of(inputs)) + len(answer)
    if family == "qwen2_5_vl":
        again = fresh(family, method, script(family)[-1][0])
        assert again.ids == script(family)[-1][1] and again.reused_tokens == 0


def test_hippo_goes_on_in_its_own_process(monkeypatch):
    """Claim: the draft's process keeps its cache too: three turns, each the oracle's answer."""
    monkeypatch.setattr(beside, "TOKEN_PATIENCE_SECONDS", 60.0)
    read = 0
    with talking("qwen2_5_vl", "hippo") as conversation:
        for inputs, answer in script("qwen2_5_vl"):
            result = conversation.run(inputs)
            assert result.ids == answer and result.fallback_reason is None
            assert result.reused_tokens == read
            read = len(ids_of(inputs)) + len(answer)
        process = talk_of(conversation).drafter._drafter._worker.process
        assert process.poll() is None
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("method", "family"),
    dealt(
        ["sd", "sd-tree", "specvlm-self/keep=1/shape=chain-5", "std/view=full/shape=chain-5"],
        FAMILY,
    ),
)
def test_a_draft_that_is_the_target_is_never_refused_in_any_turn(method, family):
    """Claim: the *draft's* cache too holds what the conversation says: a copy of the target, or
    the target over all its own keys, is accepted to the end of each round, in turns 1, 2 and 3.

    The oracle cannot see a draft that reads nonsense; this can.
    """
    count, inputs = 13, input_for(family)
    with talking(family, method, amount=0.0, max_new_tokens=count) as conversation:
        for turn in range(3):
            result = conversation.run(inputs)
            assert [len(r.emitted) for r in result.rounds] == [1, 6, 6]
            assert [len(r.accepted) for r in result.rounds] == [0, 5, 5]
            inputs = further(inputs, [*result.ids, *question(turn)])


@pytest.mark.parametrize("method", ["sd/shape=chain-9", "sd-tree", "specvlm-self", "std", "lookup"])
def test_an_answer_that_ended_inside_an_accepted_run_goes_on(method):
    """Claim: what was drafted beyond the end of an answer leaves nothing behind.

    The end falls on several places of the first rounds.
    """
    (inputs, answer), *_ = script("qwen2_5_vl")
    for end in (1, 2, 4, 6):
        first = answer[: answer.index(answer[end]) + 1]
        with talking("qwen2_5_vl", method, amount=0.01) as conversation:
            result = conversation.run(inputs, eos_token_id=answer[end])
            assert result.ids == first and result.finish_reason == "stop"
            more = further(inputs, [*first, *question(end)])
            result = conversation.run(more, max_new_tokens=6)
            assert is_oracles("qwen2_5_vl", more, result.ids, 6)


@pytest.mark.parametrize("method", ["sd", "specvlm-self", "layerskip"])
def test_a_later_answer_may_be_longer_than_the_first_made_room_for(method):
    """Claim: caches grow in a later turn. Turn 1 makes room for 3 tokens and 64 more."""
    inputs = input_for("llama")
    with talking("llama", method) as conversation:
        result = conversation.run(inputs, max_new_tokens=3)
        more = further(inputs, [*result.ids, *question(0, 30)])
        assert is_oracles("llama", more, conversation.run(more, max_new_tokens=60).ids, 60)


# -- only what is new --------------------------------------------------------------------------


@contextmanager
def forwards(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Session, int]]]:
    """(session, rows) of every forward of decoding, as they happen."""
    seen: list[tuple[Session, int]] = []
    working: list[Session] = []
    run, forward = Session._forward, Backbone.forward

    def watched(self: Session, *args: Any, **told: Any) -> Tensor:
        working.append(self)
        laws = run(self, *args, **told)
        working.pop()
        return laws

    def counted(self: Backbone, embeds: Tensor, *args: Any) -> Tensor:
        if working:
            seen.append((working[-1], len(embeds)))
        else:
            seen.append((None, len(embeds)))  # type: ignore[arg-type]
        return forward(self, embeds, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Session, "_forward", watched)
        patch.setattr(Backbone, "forward", counted)
        yield seen


@contextmanager
def pixels_read(*models: Any) -> Iterator[list[Any]]:
    """Calls of any convolution of the models: in these families only vision towers have one."""
    calls: list[Any] = []
    hooks = [
        module.register_forward_pre_hook(lambda module, args: calls.append(module))
        for model in models
        for module in model.modules()
        if isinstance(module, torch.nn.Conv2d | torch.nn.Conv3d)
    ]
    assert hooks
    yield calls
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("method", [method for method in METHODS if method != "ar"])
def test_a_later_turn_reads_only_new_tokens(method, monkeypatch):
    """Claim: in turn 2 the target's first forward holds the new question's rows, and at most the
    one token of the answer that no forward had read yet; the draft's holds at most the two it
    lacked. Nothing is prefilled again.

    Fails if any cached token is computed again. The control is turn 1, which reads the prompt.
    """
    (inputs, first), (more, second), _ = script("qwen2_5_vl")
    new = len(question(0))
    with talking("qwen2_5_vl", method) as conversation, forwards(monkeypatch) as seen:
        conversation.run(inputs)
        assert len(ids_of(inputs)) in [rows for _, rows in seen]
        del seen[:]
        assert conversation.run(more).ids == second
        target = talk_of(conversation).session
        assert all(session is not None for session, _ in seen), "a prefill"
        by_target = [rows for session, rows in seen if session is target]
        by_draft = [rows for session, rows in seen if session is not target]
        assert seen[0] == (target, by_target[0]) and new <= by_target[0] <= new + 1
        trees = [len(round.tokens) for round in conversation._last.results[0].rounds]
        assert by_target[1:] == [n + (i > 0) for i, n in enumerate(trees) if n or i]
        views = 2 if method == "tabed" else 1
        if by_draft:
            # auto's also what was decoded without it
            lacked = 2 + (len(first) if method == "auto" else 0)
            assert by_draft[0] <= (new + lacked) * views
            assert max(by_draft[1:], default=0) <= 64  # the largest tree


@pytest.mark.parametrize("method", ["ar", "sd", "specvlm", "tabed", "specvlm-self"])
def test_no_vision_tower_runs_again(method):
    """Claim: after turn 1 neither model looks at the video, not even a draft whose tower is its
    own. Control: in turn 1 both towers are seen running.
    """
    target, draft = backbone_of_copy(qwen25()), backbone_of_copy(qwen25(9, layers=1))
    (inputs, _), (more, second), _ = script("qwen2_5_vl")
    settings = dict(method=method, max_new_tokens=COUNT, **WORDS)
    with (
        saccade.Conversation(target, draft=draft, **settings) as conversation,
        pixels_read(target.model) as by_target,
        pixels_read(draft.model) as by_draft,
    ):
        conversation.run(inputs)
        assert len(by_target) == 1
        assert len(by_draft) == (method not in ("ar", "specvlm-self"))
        del by_target[:], by_draft[:]
        result = conversation.run(more)
        assert result.ids == second and result.fallback_reason is None
        assert not by_target and not by_draft


def test_what_is_said_to_be_timed_is():
    """Claim: a later turn reports no vision, and phases begin with its prefill."""
    (inputs, _), (more, _), _ = script("qwen2_5_vl")
    phases: list[str] = []
    with talking("qwen2_5_vl", on_phase=phases.append) as conversation:
        assert conversation.run(inputs).timings.vision > 0
        assert phases == ["vision", "prefill", "guide", "decode"]
        del phases[:]
        assert conversation.run(more).timings.vision == 0
        assert phases == ["prefill", "guide", "decode"]


# -- what caches hold --------------------------------------------------------------------------


def held(request: RequestState) -> list[Tensor]:
    """Committed keys and values, [kv_head, row, head_dim], layer by layer."""
    found = []
    for layer in range(len(request.cache.keys)):
        found += [side.clone() for side in request.cache.read(layer, request.cache.length)]
    return found


def prefilled(model: Backbone, inputs: Inputs, adopt: Backbone | None = None) -> list[Tensor]:
    """The same of a session that has read these inputs in one go."""
    prompts = (adopt or model).prompts(inputs)
    session = Session(model, [Sampling()])
    session.prefill([model.adopt(p) for p in prompts] if adopt is not None else prompts)
    return held(session.requests[0])


def assert_held(request: RequestState, expected: list[Tensor], rows: Tensor | None = None) -> None:
    mine = held(request)
    expected = expected[: len(mine)]
    if rows is not None:
        expected = [tensor[:, rows] for tensor in expected]
    for one, other in zip(mine, expected, strict=True):
        assert one.shape[1] <= other.shape[1] <= one.shape[1] + 3, "but for the last few tokens"
        torch.testing.assert_close(one, other[:, : one.shape[1]], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("method", "family"), dealt(["sd", "layerskip", "specvlm-self/view=uniform"], FAMILY)
)
def test_caches_hold_what_a_fresh_prefill_holds(method, family):
    """Claim: after every turn, and after a question that replaces another, the keys and values of
    target and draft are those of a prefill of the whole text, row for row, to 1e-4.

    The control compares with a text that differs in one token of turn 1 and must fail.
    """
    target, draft = backbone(FAMILIES[family](0)), backbone(noisy(FAMILIES[family], 0, AMOUNT))
    (inputs, first), (more, second), (most, third) = script(family)
    other = further(inputs, [*first[:4], *question(7)])
    prompt = target.prompts(inputs)[0]
    with talking(family, method) as conversation:
        for asked, answer in ((inputs, first), (more, second), (most, third), (other, None)):
            result = conversation.run(asked)
            assert answer is None or result.ids == answer
            whole = further(asked, result.ids)
            talk = talk_of(conversation)
            mine = talk.session.requests[0]
            assert mine.context == ids_of(whole)
            assert_held(mine, prefilled(target, whole))
            drafting = talk.drafter._drafter.session.requests[0]
            assert drafting.context == ids_of(whole)
            if method.startswith("sd"):
                assert_held(drafting, prefilled(draft, whole, adopt=target))
            else:
                view = resolve(method).view
                kept = view(None, prompt).index  # type: ignore[arg-type]
                later = torch.arange(len(prompt), len(ids_of(whole)))
                assert_held(drafting, prefilled(target, whole), torch.cat([kept, later]))
        wrong = list(ids_of(whole))
        wrong[len(ids_of(inputs))] = (wrong[len(ids_of(inputs))] + 1) % TEXT
        with pytest.raises(AssertionError):
            altered = further(inputs, wrong[len(ids_of(inputs)) :])
            assert_held(mine, prefilled(target, altered))


# -- other ways to go on -----------------------------------------------------------------------


def _text_begins(family: str, inputs: Inputs) -> int:
    """The first token that another question may change: after the last visual one."""
    ids = ids_of(inputs)
    last = max((i for i, token in enumerate(ids) if token >= TEXT), default=-1)
    return last + 1


@pytest.mark.parametrize(("method", "family"), dealt(METHODS, FAMILY))
def test_any_walk_through_a_conversation_answers_as_a_fresh_start(method, family):
    """Claim: wherever the new text parts from the old one - inside an answer, a later question, the
    first question, at its very beginning, or nowhere at all - and however little follows, the
    answer is the oracle's and ``reused_tokens`` is the length of the common beginning.
    """
    rng = random.Random(f"{method} on {family}")
    start = input_for(family)
    text, least = ids_of(start), _text_begins(family, start)
    with talking(family, method, max_new_tokens=7) as conversation:
        text += conversation.run(start).ids
        for _ in range(4):
            first = min(len(ids_of(start)), len(text))
            keep = rng.choice([least, first, rng.randint(least, len(text)), len(text)])
            few = 1 if keep == least else 0  # prompts that end in a video have their own test
            new = question(rng.randrange(10**6), rng.choice([few, 1, 4]))
            asked = further(cut(start, least), [*text[least:keep], *new])
            same = keep
            while same < min(len(text), len(ids_of(asked))) and text[same] == ids_of(asked)[same]:
                same += 1
            result = conversation.run(asked)
            assert is_oracles(family, asked, result.ids, 7), (keep, new)
            assert result.reused_tokens == same and result.fallback_reason is None
            text = [*ids_of(asked), *result.ids]


@pytest.mark.parametrize(
    ("method", "family"),
    [*((method, "qwen2_5_vl") for method in METHODS), ("std", "llava_onevision"), ("sd", "llama")],
)
def test_the_same_question_may_be_asked_again(method, family):
    """Claim: asking again gives the same answer, from the caches alone, as often as one likes."""
    inputs, answer = script(family)[0]
    with talking(family, method) as conversation:
        conversation.run(inputs)
        for _ in range(2):
            result = conversation.run(inputs)
            assert result.ids == answer and result.fallback_reason is None
            assert result.reused_tokens == len(ids_of(inputs))


@pytest.mark.parametrize("method", ["sd", "tabed", *SELF])
def test_a_later_question_may_be_asked_again(method):
    """Claim: the question of turn 2 asked again, and the text cut back to inside answer 1 with
    nothing new behind it, answer as a fresh start, and drafting goes on.
    """
    (inputs, _), (more, second), _ = script("qwen2_5_vl")
    shorter = cut(more, len(ids_of(inputs)) + 3)
    with talking("qwen2_5_vl", method) as conversation:
        conversation.run(inputs)
        for asked in (more, more, shorter, shorter):
            result = conversation.run(asked)
            assert is_oracles("qwen2_5_vl", asked, result.ids, COUNT)
            assert asked is shorter or result.ids == second
            assert result.fallback_reason is None


def ending_in_a_video(family: str) -> dict[str, Any]:
    inputs = input_for(family)
    return cut(inputs, 1 + max(i for i, t in enumerate(ids_of(inputs)) if t == 250))


@pytest.mark.parametrize(
    ("family", "again"),
    [
        ("qwen2_5_vl", True),
        ("qwen2_5_vl", False),
        ("llava_onevision", True),
        ("llava_onevision", False),
    ],
)
def test_a_prompt_that_ends_in_a_video_can_be_gone_on_from(family, again):
    """Claim: a prompt whose last token is visual is no special case: asked again, or gone on from,
    the answer is the oracle's. Fails if a visual row is read again as if it were a word.
    """
    inputs = ending_in_a_video(family)
    with talking(family, "sd") as conversation:
        first = conversation.run(inputs)
        assert first.ids == oracle(family, inputs)
        more = inputs if again else further(inputs, [*first.ids, *question(0)])
        assert conversation.run(more).ids == oracle(family, more)


@pytest.mark.parametrize("method", ["sd", "specvlm", "specvlm-self", "tabed"])
def test_another_video_starts_afresh(method, monkeypatch):
    """Claim: other pixels behind the same ids are noticed: nothing is reused, the draft of before
    is closed, and the answer is the new video's. The next turn goes on from there.
    """
    closed: list[Any] = []
    close = ModelDrafter.close
    monkeypatch.setattr(ModelDrafter, "close", lambda self: (closed.append(self), close(self))[1])
    (inputs, answer), *_ = script("qwen2_5_vl")
    other = inputs | {"pixel_values_videos": video_input(5)["pixel_values_videos"]}
    with talking("qwen2_5_vl", method) as conversation:
        conversation.run(inputs)
        before = talk_of(conversation)
        result = conversation.run(other)
        assert result.ids == oracle("qwen2_5_vl", other) != answer
        assert result.reused_tokens == 0 and result.fallback_reason is None
        assert talk_of(conversation) is not before
        assert len(closed) == (method != "specvlm-self")
        more = further(other, [*result.ids, *question(0)])
        result = conversation.run(more)
        assert result.ids == oracle("qwen2_5_vl", more)
        assert result.reused_tokens == len(ids_of(more)) - len(question(0))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda i: video_input(0, (2, 4, 6)), id="another grid"),
        pytest.param(lambda i: i | {"second_per_grid_ts": torch.tensor([3.0])}, id="slower"),
        pytest.param(lambda i: video_input(0, before=2), id="less before the video"),
        pytest.param(
            lambda i: {
                name: v for name, v in video_input(1).items() if name in PER_TOKEN
            } | {name: v for name, v in i.items() if name not in PER_TOKEN},
            id="other words before the video",
        ),
    ],
)  # fmt: skip
def test_a_video_that_stands_or_runs_otherwise_starts_afresh(change):
    """Claim: where video tokens would have to move, or their times change, nothing is reused."""
    inputs = script("qwen2_5_vl")[0][0]
    other = change(inputs)
    with talking("qwen2_5_vl", "sd") as conversation:
        conversation.run(inputs)
        result = conversation.run(other)
        assert result.ids == oracle("qwen2_5_vl", other) and result.reused_tokens == 0


def test_a_question_without_the_video_starts_afresh():
    """Claim: pixels that are gone are other pixels."""
    inputs = script("qwen2_5_vl")[0][0]
    ids = torch.tensor([question(3, 9)])
    text = {"input_ids": ids, "attention_mask": torch.ones_like(ids),
            "mm_token_type_ids": torch.zeros_like(ids).int()}  # fmt: skip
    with talking("qwen2_5_vl", "sd") as conversation:
        conversation.run(inputs)
        result = conversation.run(text)
        assert result.ids == oracle("qwen2_5_vl", text) and result.reused_tokens == 0


# -- sampling ----------------------------------------------------------------------------------

SAMPLED = dict(do_sample=True, temperature=0.9, top_k=20)


@pytest.mark.parametrize(
    ("method", "family"),
    [
        *((method, "qwen2_5_vl") for method in ("ar", "sd", "sd-tree", "tabed", "lookup")),
        ("sd", "llava_onevision"),
        ("sd-tree", "llama"),
    ],
)
def test_a_seed_means_in_turn_two_what_it_means_in_a_fresh_run(method, family):
    """Claim: noise is named by the place in the whole text. Where the draft's laws in turn 2 are a
    fresh run's (its view does not hang on the text, its first law is its own), a sampled second
    answer is that of a fresh run over the same text with that seed.

    Fails if a turn's noise hangs on how the turns before it were drafted, or if the old rules or
    seed go on.
    """
    (inputs, _), (more, greedy), _ = script(family)
    answers = [greedy]
    with talking(family, method) as conversation:
        for seed in (5, 6):
            conversation.run(inputs)  # greedy: the rules change between the turns
            result = conversation.run(more, seed=seed, **SAMPLED)
            assert result.ids == fresh(family, method, more, seed=seed, **SAMPLED).ids
            answers.append(result.ids)
    assert len(set(answers)) == 3


@pytest.mark.parametrize("method", ["ar", "sd", "auto", "lookup"])
def test_one_seed_gives_every_turn_noise_of_its_own(method, monkeypatch):
    """Claim: with the same seed in both turns no number is used in both. Fails if each turn counts
    from its own beginning: then the second answer repeats the first one's luck."""
    (inputs, _), (more, _), _ = script("qwen2_5_vl")
    used: list[set[tuple[object, ...]]] = []
    real = sampling.uniform

    def record(*key: Any) -> float:
        used[-1].add(key)
        return real(*key)

    monkeypatch.setattr(sampling, "uniform", record)
    with talking("qwen2_5_vl", method) as conversation:
        for each in (inputs, more):
            used.append(set())
            conversation.run(each, seed=5, **SAMPLED)
    assert all(used) and not used[0] & used[1]


@pytest.mark.parametrize("method", ["specvlm", "specvlm-self", "std", "layerskip"])
def test_seeded_conversations_repeat_themselves(method):
    """Claim: where a fresh run would draft otherwise (another view, or a fork's first law, which
    is the target's), two conversations with the same seeds still agree."""
    (inputs, _), (more, greedy), _ = script("qwen2_5_vl")

    def second() -> tuple[int, ...]:
        with talking("qwen2_5_vl", method) as conversation:
            conversation.run(inputs)
            return conversation.run(more, seed=5, **SAMPLED).ids

    assert second() == second() != greedy


@pytest.mark.parametrize("method", ["sd", "sd-tree", "specvlm-self"])
def test_penalties_read_the_whole_conversation(method):
    """Claim: a rule that reads the text reads all turns, as in a fresh run of plain decoding."""
    (inputs, first), (more, greedy), _ = script("qwen2_5_vl")
    rule = dict(repetition_penalty=1.7)
    with talking("qwen2_5_vl", method) as conversation:
        assert conversation.run(inputs).ids == first
        result = conversation.run(more, **rule)
        assert result.ids == fresh("qwen2_5_vl", "ar", more, **rule).ids != greedy


# -- several at once ---------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_two_conversations_in_a_batch_answer_as_each_alone(method):
    """Claim: a batch of two conversations of different lengths goes on like each alone: answers,
    reused tokens, also where one repeats its question while the other asks a longer one.
    """
    one, two = video_input(0), video_input(1, (2, 4, 4), before=2)
    family = "qwen2_5_vl"
    with talking(family, method, max_new_tokens=8) as conversation:
        for turn in range(3):
            stream = conversation.stream(left_padded([one, two]))
            assert all(0 <= round.request < 2 for round in stream)
            for asked, result in zip((one, two), stream.results, strict=True):
                assert is_oracles(family, asked, result.ids, 8)
                assert result.fallback_reason is None
                assert (result.reused_tokens > 0) == (turn > 0)
            first, second = stream.results
            two = further(two, [*second.ids, *question(turn, 3)])
            if turn != 0:
                one = further(one, [*first.ids, *question(9, 1)])


def test_a_batch_of_another_size_starts_afresh():
    """Claim: one request after two is another conversation."""
    one, two = video_input(0), video_input(1)
    with talking("qwen2_5_vl", "sd") as conversation:
        for _ in conversation.stream(left_padded([one, two])):
            pass
        result = conversation.run(one)
        assert result.ids == oracle("qwen2_5_vl", one) and result.reused_tokens == 0


# -- misuse and failure ------------------------------------------------------------------------


def test_an_unfinished_answer_refuses_the_next_question():
    """Claim: asking while an answer is under way is one sentence, and harms nothing: once it is
    exhausted the conversation goes on.
    """
    (inputs, first), (more, second), _ = script("qwen2_5_vl")
    with talking("qwen2_5_vl", "sd") as conversation:
        stream = conversation.stream(inputs)
        with pytest.raises(OptionError, match="exhaust its stream or close it"):
            conversation.stream(more)
        next(stream)
        with pytest.raises(OptionError, match="under way"):
            conversation.run(more)
        assert len(list(stream)) > 0 and stream.results[0].ids == first
        result = conversation.run(more)
        assert result.ids == second and result.reused_tokens > 0


def test_a_closed_conversation_starts_afresh():
    """Claim: close frees the caches, also after half an answer; the object may be used again."""
    (inputs, first), (more, second), _ = script("qwen2_5_vl")
    conversation = talking("qwen2_5_vl", "sd")
    next(conversation.stream(inputs))
    conversation.close()
    assert conversation.run(inputs).ids == first
    conversation.close()
    result = conversation.run(more)
    assert result.ids == second and result.reused_tokens == 0
    conversation.close()
    conversation.close()


def test_settings_that_are_refused_leave_the_conversation_as_it_was():
    """Claim: an OptionError in between costs nothing: the next turn still reuses."""
    (inputs, _), (more, second), _ = script("qwen2_5_vl")
    with talking("qwen2_5_vl", "sd") as conversation:
        conversation.run(inputs)
        with pytest.raises(OptionError, match="max_tokens"):
            conversation.run(more, max_tokens=3)
        result = conversation.run(more)
        assert result.ids == second and result.reused_tokens > 0


def _failing(when: Callable[[int], bool]) -> Any:
    def propose(request: int, text: list[int], round: int) -> Tree:
        if when(round):
            raise RuntimeError("out of luck")
        return chain([1])

    return stubbed(propose)


def test_drafting_that_failed_stays_plain_until_another_video():
    """Claim: a draft that failed in turn 1 is not asked again (its cache may be anything), the
    answers stay the oracle's, and each result says why. Another video has a new draft.
    """
    (inputs, first), (more, second), _ = script("qwen2_5_vl")
    with talking("qwen2_5_vl", _failing(lambda round: round == 2)) as conversation:
        for asked, answer, drafted in ((inputs, first, [1, 1, 0]), (more, second, [0, 0, 0])):
            result = conversation.run(asked)
            assert result.ids == answer
            assert result.fallback_reason == "drafting failed with RuntimeError: out of luck"
            assert [len(r.tokens) for r in result.forwards[:3]] == drafted
        other = video_input(5)
        result = conversation.run(other, max_new_tokens=3)
        assert result.ids == oracle("qwen2_5_vl", other, 3)
        assert result.fallback_reason is None and len(result.forwards[0].tokens) == 1


def test_a_draft_that_cannot_go_on_costs_speed_only():
    """Claim: an error in the draft's ``turn`` is a fallback like any other."""

    def drafter(team: Any) -> StubDraft:
        draft = StubDraft(lambda request, text, round: chain([1]))

        def turn(*args: Any) -> None:
            raise ValueError("turn is broken")

        draft.turn = turn  # type: ignore[method-assign]
        return draft

    recipe = saccade.Recipe(
        "stub", "", MadeBy(drafter), SYSTEMS["sd"].shape, SYSTEMS["sd"].schedule
    )
    (inputs, first), (more, second), _ = script("qwen2_5_vl")
    with talking("qwen2_5_vl", recipe) as conversation:
        assert conversation.run(inputs).fallback_reason is None
        result = conversation.run(more)
        assert result.ids == second
        assert result.fallback_reason == "drafting failed with ValueError: turn is broken"


@pytest.mark.parametrize("other", ["specvlm-self", "lookup", "ar", "sd/shape=chain-2"])
def test_another_method_in_a_later_turn_is_used_or_refused(other):
    """Claim: a result never names a method that did not draft it."""
    (inputs, _), (more, second), _ = script("qwen2_5_vl")
    with talking("qwen2_5_vl", "sd") as conversation:
        conversation.run(inputs)
        try:
            result = conversation.run(more, method=other)
        except SaccadeError:
            return
        assert result.ids == second
        expected = fresh("qwen2_5_vl", other, more)
        assert result.method == other
        assert [r.tokens for r in result.rounds] == [r.tokens for r in expected.rounds]


def test_a_stream_without_keep_frees_what_it_held():
    """Claim: only ``keep`` leaves a talk behind; without it nothing of the caches stays."""
    inputs = script("qwen2_5_vl")[0][0]
    stream = saccade.stream(backbone(qwen25()), inputs, method="ar", max_new_tokens=4)
    kept = saccade.stream(backbone(qwen25()), inputs, method="ar", max_new_tokens=4, keep=True)
    for rounds in (stream, kept):
        assert len(list(rounds)) == 4
    assert stream.call is None and kept.call is not None
    held_: Mapping[int, RequestState] = kept.call.session.requests
    assert held_[0].cache.length >= len(ids_of(inputs))
