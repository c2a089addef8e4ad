"""Claims about conversations: every later turn answers as a fresh start would."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from conversations import (
    COUNT,
    FAMILY,
    PER_TOKEN,
    SOME_METHODS,
    cut,
    fresh,
    further,
    ids_of,
    oracle,
    question,
    script,
    talk_of,
    talking,
)
from helpers import (
    FAMILIES,
    TEXT,
    dealt,
    input_for,
    left_padded,
    prompt_of,
    video_input,
)

from lab import reference
from saccade.core import sampling
from saccade.core.errors import OptionError
from saccade.core.prompt import Inputs
from saccade.drafting.drafters import ModelDrafter

pytestmark = pytest.mark.usefixtures("unchecked")

SELF = ("specvlm-self", "std", "streaming", "layerskip")


def is_oracles(family: str, inputs: Inputs, ids: Sequence[int], count: int) -> bool:
    """Whether this is the oracle's answer of ``count`` tokens: one uncached forward tells."""
    model = FAMILIES[family](0)
    expected = reference.teacher_forced_argmax(model, prompt_of(model, inputs), list(ids))
    return len(ids) == count and expected == list(ids)


@pytest.mark.representatives(2)
@pytest.mark.parametrize(
    ("method", "family"),
    [
        *((method, "qwen2_5_vl") for method in SOME_METHODS),
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


def test_hippo_goes_on_in_its_own_process():
    """Claim: the draft's process keeps its cache too: three turns, each the oracle's answer."""
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


@pytest.mark.parametrize("method", ["sage", "tabed", "pearl"])
def test_the_drafts_seconds_are_those_of_each_turn(method):
    """Claim: what a draft needed to plan, or to read its prompt beside the target, is told of the
    turn in which it did so. Fails if a short turn after a long one has the seconds of both."""
    inputs = input_for("qwen2_5_vl")
    with talking("qwen2_5_vl", method) as conversation:
        first = conversation.run(inputs, max_new_tokens=40)
        second = conversation.run(further(inputs, [*first.ids, *question(0)]), max_new_tokens=3)
    torch.set_num_threads(1)
    assert second.reused_tokens and second.fallback_reason is None
    long, short = first.timings, second.timings
    if method == "pearl":
        assert short.beside_prefill == 0 < long.beside_prefill
        assert 0 <= short.beside_draft < long.beside_draft
    else:
        assert 0 < short.planning < long.planning / 2


@pytest.mark.representatives(2)
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


@pytest.mark.representatives(1)
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


@pytest.mark.representatives(2)
@pytest.mark.parametrize("method", ["sd", "specvlm-self", "layerskip"])
def test_a_later_answer_may_be_longer_than_the_first_made_room_for(method):
    """Claim: caches grow in a later turn. Turn 1 makes room for 3 tokens and 64 more."""
    inputs = input_for("llama")
    with talking("llama", method) as conversation:
        result = conversation.run(inputs, max_new_tokens=3)
        more = further(inputs, [*result.ids, *question(0, 30)])
        assert is_oracles("llama", more, conversation.run(more, max_new_tokens=60).ids, 60)


# -- other ways to go on -----------------------------------------------------------------------


def _text_begins(family: str, inputs: Inputs) -> int:
    """The first token that another question may change: after the last visual one."""
    ids = ids_of(inputs)
    last = max((i for i, token in enumerate(ids) if token >= TEXT), default=-1)
    return last + 1


@pytest.mark.representatives(2)
@pytest.mark.parametrize(("method", "family"), dealt(SOME_METHODS, FAMILY))
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
            turn = further(cut(start, least), [*text[least:keep], *new])
            same = keep
            while same < min(len(text), len(ids_of(turn))) and text[same] == ids_of(turn)[same]:
                same += 1
            result = conversation.run(turn)
            assert is_oracles(family, turn, result.ids, 7), (keep, new)
            assert result.reused_tokens == same and result.fallback_reason is None
            text = [*ids_of(turn), *result.ids]


@pytest.mark.representatives(2)
@pytest.mark.parametrize(
    ("method", "family"),
    [
        *((method, "qwen2_5_vl") for method in SOME_METHODS),
        ("std", "llava_onevision"),
        ("sd", "llama"),
    ],
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


@pytest.mark.representatives(1)
@pytest.mark.parametrize("method", ["sd", "tabed", *SELF])
def test_a_later_question_may_be_asked_again(method):
    """Claim: the question of turn 2 asked again, and the text cut back to inside answer 1 with
    nothing new behind it, answer as a fresh start, and drafting goes on.
    """
    (inputs, _), (more, second), _ = script("qwen2_5_vl")
    shorter = cut(more, len(ids_of(inputs)) + 3)
    with talking("qwen2_5_vl", method) as conversation:
        conversation.run(inputs)
        for turn in (more, more, shorter, shorter):
            result = conversation.run(turn)
            assert is_oracles("qwen2_5_vl", turn, result.ids, COUNT)
            assert turn is shorter or result.ids == second
            assert result.fallback_reason is None


def ending_in_a_video(family: str) -> dict[str, Any]:
    inputs = input_for(family)
    return cut(inputs, 1 + max(i for i, t in enumerate(ids_of(inputs)) if t == 250))


@pytest.mark.representatives(2)
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


@pytest.mark.representatives(2)
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


@pytest.mark.representatives(2)
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


@pytest.mark.representatives(1)
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


@pytest.mark.representatives(2)
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


@pytest.mark.representatives(1)
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


@pytest.mark.representatives(2)
@pytest.mark.parametrize("method", SOME_METHODS)
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
            for inputs, result in zip((one, two), stream.results, strict=True):
                assert is_oracles(family, inputs, result.ids, 8)
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


def test_what_a_turn_cannot_change_is_refused_in_a_sentence():
    """Claim: a turn's draft, caches or batch of requests that ``run`` cannot take are refused
    before any work, and the conversation goes on. Fails with a TypeError, or if an answer is
    lost."""
    one = video_input(0)
    with talking("qwen2_5_vl", "ar") as conversation:
        first = conversation.run(one).ids
        for name in ("draft", "keep", "batch"):
            with pytest.raises(OptionError, match=f"{name}= cannot be given for a turn"):
                conversation.run(one, **{name: None})
        with pytest.raises(OptionError, match="answers one request"):
            conversation.run(left_padded([one, video_input(1)]))
        with pytest.raises(OptionError, match="only saccade.generate returns several answers"):
            conversation.run(one, do_sample=True, num_return_sequences=2)
        assert conversation.run(one).ids == first
