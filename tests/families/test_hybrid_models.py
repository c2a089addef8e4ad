"""Claims about hybrid models: layers with a state beside attention decode as ``generate`` does."""

from __future__ import annotations

import random
from copy import copy
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from engine.test_conversation import further, question
from helpers import (
    AMOUNT,
    HYBRIDS,
    TEXT,
    WORDS,
    answered,
    backbone,
    backbone_of_copy,
    few,
    hf_greedy,
    input_for,
    left_padded,
    llama,
    noisy,
    qwen35,
    text_input,
    timed_frames_input,
    truth,
)

import saccade
from saccade.bench.hardware.pair_fit import examine
from saccade.core.errors import ModelError
from saccade.core.sampling import Sampling
from saccade.engine.request import Request
from saccade.engine.requests_per_round import RoundTimes
from saccade.engine.scheduler import Scheduler
from saccade.inputs.footprint import footprint
from saccade.methods import resolve
from saccade.model import memory, prefix_cache
from saccade.model.capture_choice import is_capturing_worthwhile
from saccade.model.prefix_cache import PrefixCache
from saccade.model.session import Session

pytestmark = pytest.mark.usefixtures("unchecked")

COUNT = 13  # tokens of an answer in a conversation
SERIAL = (
    "ar",
    "sd",
    "sd-tree",
    "specvlm",
    "specvlm-self",
    "std",
    "sage",
    "layerskip",
    "tabed",
    "lookup",
    "fresh",
    "pages",
    "streaming",
)
PARALLEL = ("pearl", "hippo")


def _models(family: str, amount: float = AMOUNT) -> dict[str, Any]:
    make = HYBRIDS[family]
    return {"target": backbone(make(0)), "draft": backbone(noisy(make, 0, amount))}


@cache
def _fresh_answer(family: str, ids: tuple[int, ...], count: int) -> tuple[int, ...]:
    """What generate answers to a family's input that goes on with these tokens."""
    inputs = input_for(family)
    return tuple(hf_greedy(HYBRIDS[family](0), further(inputs, ids), count))


# -- one answer --------------------------------------------------------------------------------


@pytest.mark.representatives(1)
@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize("method", few(SERIAL, 4))
def test_a_hybrid_answers_as_generate_does(method, family):
    """Claim: 40 greedy tokens are those of generate and of the cache-free oracle, by every method,
    and the draft has tokens accepted and others refused."""
    result = answered(family, method)
    assert result.ids == truth(family)
    assert result.fallback_reason is None
    if method in ("sd", "sd-tree", "specvlm"):
        accepted = sum(len(each.accepted) for each in result.rounds)
        assert 0 < accepted < sum(len(each.tokens) for each in result.rounds)


@pytest.mark.slow
@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize("method", PARALLEL)
def test_a_hybrid_answers_as_generate_does_beside_its_draft(method, family):
    """The claim above, with the draft in a process of its own."""
    result = answered(family, method)
    torch.set_num_threads(1)
    assert result.ids == truth(family)
    assert result.fallback_reason is None


# -- conversations -----------------------------------------------------------------------------


def _talk(family: str, method: Any, cut_back: int, turns: int, **settings: Any) -> None:
    """A conversation whose template cuts the last tokens of each answer away, as templates do
    that leave out a thought."""
    ids: list[int] = []
    models = _models(family)
    with saccade.Conversation(
        models["target"],
        draft=models["draft"],
        method=method,
        max_new_tokens=COUNT,
        do_sample=False,
        **WORDS,
        **settings,
    ) as conversation:
        for turn in range(turns):
            result = conversation.run(further(input_for(family), ids))
            assert result.fallback_reason is None
            assert result.ids == _fresh_answer(family, tuple(ids), COUNT)
            assert (result.reused_tokens > 0) == (turn > 0)
            ids = [*ids, *result.ids]
            ids = [*ids[: max(0, len(ids) - cut_back)], *question(turn)]


@pytest.mark.representatives(1)
@pytest.mark.parametrize(
    ("method", "cut_back"),
    [
        *zip(("sd", "sd-tree", "specvlm-self"), (0, 5, 13), strict=True),
        *(
            pytest.param(method, cut_back, marks=pytest.mark.slow)
            for method in SERIAL
            for cut_back in (0, 1, 5, 13)
        ),
    ],
)
@pytest.mark.parametrize("family", HYBRIDS)
def test_every_turn_of_a_hybrid_answers_as_a_fresh_start(family, method, cut_back):
    """Claim: three turns' answers are those of generate on the whole text, where the next turn's
    text leaves out none, some or all of the last answer.

    Fails if the states are of another length than the text that is left.
    """
    _talk(family, method, cut_back, 3)


@pytest.mark.slow
@pytest.mark.parametrize("cut_back", [0, 6])
@pytest.mark.parametrize("method", PARALLEL)
@pytest.mark.parametrize("family", HYBRIDS)
def test_every_turn_beside_a_draft_answers_as_a_fresh_start(family, method, cut_back):
    """The claim above, with the draft in a process of its own."""
    _talk(family, method, cut_back, 3)
    torch.set_num_threads(1)


@pytest.mark.representatives(1)
@pytest.mark.parametrize(
    "method", few(["sd/shape=chain-9", "specvlm-self", "sd-tree", "std", "layerskip", "fresh"], 2)
)
@pytest.mark.parametrize("family", HYBRIDS)
def test_a_hybrids_answer_that_stopped_inside_an_accepted_run_goes_on(family, method):
    """Claim: what was drafted beyond the end of an answer leaves nothing behind in the states, at
    whatever place of the first rounds the end falls."""
    answer = truth(family)
    models = _models(family, 0.01)
    for end in (2, 4):
        first = answer[: answer.index(answer[end]) + 1]
        ids = [*first, *question(end)]
        with saccade.Conversation(
            models["target"],
            draft=models["draft"],
            method=method,
            max_new_tokens=COUNT,
            do_sample=False,
            **WORDS,
        ) as conversation:
            result = conversation.run(input_for(family), eos_token_id=answer[end])
            assert result.ids == first and result.finish_reason == "stop"
            result = conversation.run(further(input_for(family), ids))
            assert result.ids == _fresh_answer(family, tuple(ids), COUNT)


@pytest.mark.representatives(1)
@pytest.mark.parametrize("family", HYBRIDS)
def test_a_draft_that_is_the_hybrid_itself_is_never_refused(family):
    """Claim: the draft's states too are those of the text: a copy of the target is accepted to the
    end of each round, in turns 1, 2 and 3. The oracle cannot see a draft that reads nonsense."""
    models = _models(family, 0.0)
    for method in ("sd", "specvlm-self/keep=1/shape=chain-5"):
        ids: list[int] = []
        with saccade.Conversation(
            models["target"],
            draft=models["draft"],
            method=method,
            max_new_tokens=COUNT,
            do_sample=False,
            **WORDS,
        ) as conversation:
            for turn in range(3):
                result = conversation.run(further(input_for(family), ids))
                assert [len(each.accepted) for each in result.rounds] == [0, 5, 5]
                ids = [*ids, *result.ids, *question(turn)]


# -- shared prefixes ---------------------------------------------------------------------------


@pytest.mark.representatives(1)
@pytest.mark.parametrize("method", few(["sd", "specvlm-self", "specvlm", "sage", "std"], 2))
def test_another_question_about_a_picture_reuses_its_rows(method, monkeypatch):
    """Claim: a second question about the same video begins with the states at the video's end, and
    a third one that continues the first begins further on; each answer is that of generate.

    Fails if nothing is reused, or if states of the first question go along with the video's rows.
    """
    monkeypatch.setattr(prefix_cache, "MIN_NEW_ROWS", 1)
    models = _models("qwen3_5")
    kept = PrefixCache(1 << 30)
    target, draft = (models[name].with_prefix_cache(kept) for name in ("target", "draft"))
    video = timed_frames_input(0, after=0)
    first, second = ({**further(video, question(seed, 9))} for seed in (0, 1))
    pictures_end = int(video["input_ids"].shape[1]) - 1  # END follows the last picture's row
    reused = []
    third = further(first, question(2, 40))
    for inputs in (first, second, third, first, further(third, question(3, 3))):
        result = saccade.run(
            target,
            inputs,
            draft=draft,
            method=method,
            max_new_tokens=COUNT,
            do_sample=False,
            **WORDS,
        )
        assert result.ids == tuple(hf_greedy(qwen35(0), inputs, COUNT))
        reused.append(result.reused_tokens)
    assert reused[0] == 0
    assert reused[1] == pictures_end
    assert min(reused[1:]) >= pictures_end


@pytest.mark.representatives(1)
@pytest.mark.parametrize("family", HYBRIDS)
def test_a_prompt_that_shares_half_of_another_is_right(family, monkeypatch):
    """Claim: prompts that share any part of their text with a stored one get the answer of
    generate: a state is reused only at a length where it is known."""
    monkeypatch.setattr(prefix_cache, "MIN_NEW_ROWS", 1)
    model = backbone(HYBRIDS[family](0)).with_prefix_cache(PrefixCache(1 << 30))
    rng = random.Random(3)
    base = [rng.randrange(TEXT) for _ in range(50)]
    for shared in (50, 25, 49, 17, 18, 3, 50):
        ids = [*base[:shared], *question(shared, 50 - shared)]
        inputs = further(input_for(family), ids)
        result = saccade.run(model, inputs, method="ar", max_new_tokens=6, do_sample=False)
        assert list(result.ids) == hf_greedy(HYBRIDS[family](0), inputs, 6)


# -- batches -----------------------------------------------------------------------------------


def _eight(family: str) -> list[dict[str, torch.Tensor]]:
    if family == "lfm2":
        return [text_input(seed, 2 + 11 * seed) for seed in range(8)]
    grids = [(1 + seed % 3, 4, 4) for seed in range(8)]
    return [timed_frames_input(n, grid, 1 + n, 1 + 6 * n) for n, grid in enumerate(grids)]


@pytest.mark.representatives(1)
@pytest.mark.parametrize("method", few(["sd-tree", "ar", "sd", "specvlm", "sage", "std"], 1))
@pytest.mark.parametrize("family", HYBRIDS)
def test_eight_requests_together_are_each_alone(family, method):
    """Claim: eight requests of different lengths, decoded together, get the answers that generate
    gives each alone. Fails if a request reads another one's state or window."""
    models, many = _models(family), _eight(family)
    out = saccade.generate(
        models["target"],
        left_padded(many),
        draft=models["draft"],
        method=method,
        max_new_tokens=8,
        do_sample=False,
        **WORDS,
    )
    for row, inputs in zip(out, many, strict=True):
        assert row[-8:].tolist() == hf_greedy(HYBRIDS[family](0), inputs, 8)


@pytest.mark.representatives(1)
@pytest.mark.parametrize("method", few(["sd", "ar", "sd-tree", "specvlm-self", "auto"], 1))
@pytest.mark.parametrize("family", HYBRIDS)
def test_a_hybrids_requests_that_come_and_go_answer_as_alone(family, method, monkeypatch):
    """Claim: requests of different lengths that join a scheduler while others decode, after a
    prompt that was read in several pieces, get the answers that generate gives each alone."""
    monkeypatch.setattr(RoundTimes, "requests_per_round", lambda self, live, patience: live)
    models, many = _models(family), _eight(family)[::2]
    scheduler = Scheduler(models["target"], resolve(method), models["draft"])
    results: dict[int, Any] = {}

    def step() -> None:
        for news in scheduler.step():
            if news.error is not None:
                raise news.error
            if news.result is not None:
                results[news.number] = news.result

    for number, inputs in enumerate(many):
        request = Request.of(models["target"], inputs, max_new_tokens=6 + 3 * (number % 2))
        assert scheduler.join(request) == number
        step()
        step()
    while len(scheduler):
        step()
    for number, inputs in enumerate(many):
        count = 6 + 3 * (number % 2)
        assert list(results[number].ids) == hf_greedy(HYBRIDS[family](0), inputs, count)
        assert results[number].fallback_reason is None


# -- what is refused, and what a state costs ---------------------------------------------------


@pytest.mark.parametrize("family", HYBRIDS)
def test_exact_is_refused_by_name(family):
    """Claim: ``exact`` is not promised where it was not made true, in one sentence that says why
    and what would work. Fails if an answer comes back."""
    models = _models(family)
    with pytest.raises(
        ModelError, match=r"exact=True .*recurrent layers.*leave exact out"
    ) as error:
        saccade.run(models["target"], input_for(family), method="ar", exact=True, max_new_tokens=3)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_hybrid_is_captured_where_its_modules_are_the_librarys(family):
    """Claim: on a GPU the steps of a hybrid are captured by themselves, although it has no fused
    decoder; with a hook on a module they are not, because a hook may do anything, and who asks for
    it is told in one sentence. Fails if a capture leaves a hook out."""
    model = backbone_of_copy(HYBRIDS[family](0))
    on_gpu = copy(model)
    on_gpu.device = torch.device("cuda")
    assert model.fused is None and is_capturing_worthwhile(on_gpu)
    with pytest.raises(ModelError, match="the fused decoder does not know"):
        type(model)(model.model, fused=True)
    model.text.layers[0].register_forward_hook(lambda module, args, output: None)
    hooked = type(model)(model.model)
    hooked_on_gpu = copy(hooked)
    hooked_on_gpu.device = torch.device("cuda")
    assert not is_capturing_worthwhile(hooked_on_gpu)
    with pytest.raises(ModelError, match="captured steps do not support this .*unchanged") as error:
        Session(hooked, [Sampling()], cuda_graphs=True)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("family", HYBRIDS)
def test_memory_is_planned_with_the_states_of_each_request(family, monkeypatch):
    """Claim: a request needs memory for its states beside that of its tokens: with room for the
    tokens alone it is refused, in a sentence with a length that would fit; with both it runs.

    Fails if states are left out, or counted by the token.
    """
    model = backbone(HYBRIDS[family](0))
    inputs = input_for(family)
    request = Request.of(model, inputs, max_new_tokens=3)
    tokens = request.reserved_tokens() * model.token_bytes
    assert model.state_bytes > 0

    def free(count: float) -> None:
        monkeypatch.setattr(memory, "available_bytes", lambda device: int(count))

    free((tokens + model.state_bytes / 2) / (1 - memory.SPARE_SHARE))
    assert not request.fits(model)
    with pytest.raises(ModelError, match=r"keys, values and states.*about \d+ would fit"):
        saccade.run(model, inputs, method="ar", max_new_tokens=3)
    free((tokens + model.state_bytes + 100) / (1 - memory.SPARE_SHARE))
    assert request.fits(model) and not request.fits(model, [request])
    # The room that is left is enough for the other request's tokens, but not for its states.
    free((2 * tokens + model.state_bytes * 3 / 2) / (1 - memory.SPARE_SHARE))
    assert not request.fits(model, [request])
    free((2 * tokens + 2 * model.state_bytes + 100) / (1 - memory.SPARE_SHARE))
    assert request.fits(model, [request])
    free((tokens + model.state_bytes + 100) / (1 - memory.SPARE_SHARE))
    assert not Request.of(model, left_padded([inputs, inputs]), max_new_tokens=3).fits(model)


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_config_alone_tells_what_states_cost(family):
    """Claim: a footprint counts keys in the layers that have them alone, and the states of the
    others once a request: both as a loaded model has them. ``doctor`` says so in one line."""
    model = backbone(HYBRIDS[family](0))
    config = model.model.config
    counted = footprint(config)
    size = model.dtype.itemsize
    assert counted.kv_numbers_per_token * size == model.token_bytes
    assert counted.cache_bytes(0, size) == model.state_bytes
    assert counted.cache_bytes(10, size) == model.state_bytes + 10 * model.token_bytes
    assert counted.stateful_layers == len(model.mixers)
    diagnosis = examine(("it", config), None, tokens=10, free_bytes=1 << 30)
    assert diagnosis.parts[0].cache == counted.cache_bytes(10, size)
    (note,) = (note for note in diagnosis.notes if "keep a state instead of keys" in note)
    assert f"{len(model.mixers)} of it's {model.layer_count} layers" in note
    plain = examine(("it", llama().config), None, tokens=10, free_bytes=1 << 30)
    assert not any("state" in note for note in plain.notes)


@pytest.mark.extra
def test_a_self_draft_of_a_hybrids_first_layers_has_their_states():
    """Claim: the first layers of a hybrid are drafted with for each depth, also where none of them
    has keys, and the answer is that of generate."""
    model = backbone(qwen35(0))
    for depth in (1, 2, 3):
        short = model.first_layers(depth)
        assert len(short.mixers) == depth and short.key_layer_count == 0 and short.token_bytes == 0
        assert 0 < short.state_bytes < model.state_bytes or depth == 3
    result = answered("qwen3_5", "layerskip/shape=chain-2")
    assert result.ids == truth("qwen3_5") and result.fallback_reason is None
    assert any(each.tokens for each in result.rounds)


def test_layers_whose_state_is_unknown_are_refused_by_name():
    """Claim: a model with a state that cannot be kept is refused in one sentence that names the
    kind of layer and what is known, by the footprint of its config too."""
    config = transformers.Zamba2Config(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        layers_block_type=["mamba", "mamba"],
    )
    with pytest.raises(ModelError, match="state") as error:
        footprint(config)
    assert "\n" not in str(error.value)
