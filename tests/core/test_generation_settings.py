"""Claims about options: GenerationConfig's names are honoured or refused, and stops cut exactly."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import llama
from transformers import GenerationConfig, LogitsProcessorList, MaxLengthCriteria
from transformers.generation import logits_process as hf

from saccade.core import generation_settings
from saccade.core.errors import OptionError
from saccade.core.stopping import StopConditions, Stops

# One value of each setting that `generate` would compute differently.
REFUSED = dict(
    num_beams=2,
    num_beam_groups=2,
    penalty_alpha=0.6,
    dola_layers="high",
    guidance_scale=1.5,
    constraints=[object()],
    force_words_ids=[[1]],
    watermarking_config={"greenlist_ratio": 0.5},
    token_healing=True,
    prompt_lookup_num_tokens=3,
    return_dict_in_generate=True,
    output_scores=True,
    output_logits=True,
    output_attentions=True,
    output_hidden_states=True,
    cache_implementation="static",
)


def _settle(**settings):
    return generation_settings.merge_settings(llama(), None, settings)


@pytest.mark.parametrize("name", REFUSED)
def test_a_setting_that_would_change_the_answer_is_refused_by_name(name):
    """Claim: what this engine does not compute is an OptionError with the name in it."""
    with pytest.raises(OptionError, match=f"{name}=.* is not supported"):
        _settle(**{name: REFUSED[name]})


def test_every_refused_setting_is_tested():
    """Claim: the table above covers ``UNSUPPORTED_SETTINGS``.

    Fails when a name is in one of them only.
    """
    assert set(REFUSED) | {"num_return_sequences"} == set(generation_settings.UNSUPPORTED_SETTINGS)
    sampled = dict(do_sample=True, num_return_sequences=3)
    with pytest.raises(OptionError, match="num_return_sequences=3"):
        _settle(**sampled)


def test_an_unknown_name_is_refused_and_a_known_one_is_not():
    """Claim: a misspelt argument is an error; its right spelling is taken (control)."""
    with pytest.raises(
        OptionError, match="argument max_tokens .did you mean max_new_tokens.., temprature"
    ):
        _settle(max_tokens=3, temprature=0.5)
    assert (
        _settle(max_new_tokens=3, num_beams=1, do_sample=True, temperature=0.5).max_new_tokens == 3
    )


BAD = [
    dict(max_new_tokens=0),
    dict(num_return_sequences=2),
    dict(do_sample=True, temperature=-1.0),
    dict(do_sample=True, top_k=-5),
    dict(repetition_penalty=-1.0),
]


@pytest.mark.parametrize("settings", BAD, ids=lambda settings: list(settings)[-1])
def test_a_value_that_cannot_be_used_is_an_option_error(settings):
    """Claim: values transformers refuses are errors for people too, before any work."""
    with pytest.raises(OptionError):
        generation_settings.sampling_rules(llama(), _settle(**settings), [torch.tensor([1, 2, 3])])


def test_the_callers_and_the_models_configs_are_not_written_to():
    """Claim: settings live in a copy. Fails if one call's settings leak into the next."""
    given = GenerationConfig(max_new_tokens=7)
    settled = generation_settings.merge_settings(
        llama(), given, {"max_new_tokens": 9, "eos_token_id": 3}
    )
    assert (settled.max_new_tokens, given.max_new_tokens, given.eos_token_id) == (9, 7, None)
    _settle(max_new_tokens=9)
    assert llama().generation_config.max_new_tokens is None


def test_none_means_not_given():
    """Claim: an argument that is None leaves the config's value. Fails if it erases it."""
    given = GenerationConfig(max_new_tokens=7)
    assert (
        generation_settings.merge_settings(llama(), given, {"max_new_tokens": None}).max_new_tokens
        == 7
    )


def test_rules_are_hugging_faces_own_for_each_request():
    """Claim: the processors transformers would build, in its order, per prompt length.

    Fails if one is lost, or if min_new_tokens counts from another request's prompt.
    """
    settled = _settle(
        do_sample=True, temperature=0.7, top_k=4, top_p=0.9, repetition_penalty=1.3,
        no_repeat_ngram_size=2, min_new_tokens=3, eos_token_id=5, bad_words_ids=[[7]],
    )  # fmt: skip
    mine = LogitsProcessorList([hf.InfNanRemoveLogitsProcessor()])
    contexts = [torch.arange(4), torch.arange(9)]
    rules = generation_settings.sampling_rules(llama(), settled, contexts, extra=mine, seed=3)
    names = [type(rule).__name__ for rule in rules[0].processors]
    assert names == [
        "RepetitionPenaltyLogitsProcessor", "NoRepeatNGramLogitsProcessor",
        "NoBadWordsLogitsProcessor", "MinNewTokensLengthLogitsProcessor",
        "InfNanRemoveLogitsProcessor", "TemperatureLogitsWarper", "TopKLogitsWarper",
        "TopPLogitsWarper",
    ]  # fmt: skip
    starts = [r.processors[3].prompt_length_to_skip for r in rules]
    assert starts == [4, 9] and all(r.sample and r.seed == 3 for r in rules)
    assert len(mine) == 1, "the caller's list was written to"


def test_an_unseeded_call_gets_a_fresh_seed_shared_by_its_batch():
    """Claim: two calls differ; within one, requests differ by their number, not by the seed."""
    one = generation_settings.sampling_rules(
        llama(), _settle(do_sample=True), [torch.arange(3)] * 2
    )
    two = generation_settings.sampling_rules(llama(), _settle(do_sample=True), [torch.arange(3)])
    assert one[0].seed == one[1].seed != two[0].seed


@pytest.mark.parametrize(
    ("settings", "longest", "limit"),
    [
        (dict(max_new_tokens=5), 9, 5),
        (dict(max_length=12), 9, 3),
        (dict(max_length=12, max_new_tokens=7), 9, 7),
        ({}, 9, generation_settings.MAX_NEW_TOKENS),
    ],
)
def test_the_limit_is_in_new_tokens(settings, longest, limit):
    """Claim: max_new_tokens wins, max_length counts the prompt, else a stated default."""
    assert generation_settings.answer_limits(_settle(**settings), longest).max_new_tokens == limit


def test_a_max_length_below_the_prompt_says_the_numbers():
    """Claim: no room is an error with both numbers in it, not an empty answer."""
    with pytest.raises(OptionError, match="max_length=9 .* prompt of 9 tokens"):
        generation_settings.answer_limits(_settle(max_length=9), 9)


def test_ends_and_stop_strings_come_as_one_or_many():
    """Claim: a single eos or stop string is a list of one; an empty stop string is refused."""
    one = generation_settings.answer_limits(_settle(eos_token_id=4, stop_strings="x"), 3)
    many = generation_settings.answer_limits(
        _settle(eos_token_id=[4, 5], stop_strings=["x", "y"]), 3
    )
    assert (one.eos, one.stop) == ((4,), ("x",))
    assert (many.eos, many.stop) == ((4, 5), ("x", "y"))
    assert generation_settings.answer_limits(_settle(max_time=3.0), 3).criteria
    with pytest.raises(OptionError, match="empty"):
        generation_settings.answer_limits(_settle(stop_strings=["a", ""]), 3)


def _letters(ids):
    return "".join(chr(97 + i) for i in ids)


def _stops(decode=_letters, requests=1, **given) -> Stops:
    return Stops(StopConditions(**given), [torch.tensor([0, 1])] * requests, decode)


def test_the_first_of_several_reasons_cuts():
    """Claim: an end before the limit is "stop", the limit before an end is "length", and an end on
    the last allowed token is "stop". Fails if the limit is looked at first, or late.
    """
    for at in range(6):
        tokens = [1, 2, 3, 4, 5, 6]
        tokens[at] = 9
        count, reason = _stops(max_new_tokens=4, eos=(9,)).append_until_stop(0, tokens)
        assert (count, reason) == ((at + 1, "stop") if at < 4 else (4, "length"))


def test_nothing_after_a_cut_is_counted():
    """Claim: the answer holds what stands and nothing else, over several rounds."""
    stops = _stops(max_new_tokens=9, eos=(7, 8))
    assert stops.append_until_stop(0, [1, 2]) == (2, None)
    assert stops.append_until_stop(0, []) == (0, None)
    assert stops.append_until_stop(0, [3, 8, 7, 1]) == (2, "stop")
    assert stops.answers == [[1, 2, 3, 8]]


@pytest.mark.parametrize("split", range(1, 6))
def test_a_stop_string_is_found_across_rounds(split):
    """Claim: "def" ends at its last letter wherever a round ends. Fails if rounds are searched
    alone, or if only the newest token's text is.
    """
    stops = _stops(max_new_tokens=20, stop=("def", "zz"))
    tokens = [0, 1, 2, 3, 4, 5, 6, 7]
    count, reason = stops.append_until_stop(0, tokens[:split])
    assert (count, reason) == (split, None)
    count, reason = stops.append_until_stop(0, tokens[split:])
    assert (split + count, reason) == (6, "stop")
    assert stops.stopped_by == {0: "def"}


def test_a_stop_string_of_many_bytes_fits_the_window():
    """Claim: a long stop string behind a long answer is found, byte by byte, late in the answer."""
    string = "é" * 40
    ids = list(string.encode())
    stops = _stops(
        decode=lambda ids: bytes(ids).decode(errors="replace"), max_new_tokens=500, stop=(string,)
    )
    assert stops.append_until_stop(0, [97] * 300) == (300, None)
    assert stops.append_until_stop(0, ids) == (len(ids), "stop")


def test_requests_stop_by_themselves():
    """Claim: one request's text neither stops nor limits another's."""
    stops = _stops(requests=2, max_new_tokens=3, stop=("bc",))
    assert stops.append_until_stop(0, [1]) == (1, None)
    assert stops.append_until_stop(1, [2, 2]) == (2, None)
    assert stops.append_until_stop(0, [2]) == (1, "stop")
    assert stops.append_until_stop(1, [2]) == (1, "length")
    assert stops.answers == [[1, 2], [2, 2, 2]]


def test_criteria_see_prompt_and_answer_token_by_token():
    """Claim: a Hugging Face criterion is asked after every token, over prompt + answer."""
    seen = []

    def spy(ids, scores):
        seen.append(ids[0].tolist())
        return torch.tensor([False])

    longest = MaxLengthCriteria(max_length=5)
    count, reason = _stops(max_new_tokens=9, criteria=(spy, longest)).append_until_stop(
        0, [7, 8, 9, 5]
    )
    assert seen == [[0, 1, 7], [0, 1, 7, 8], [0, 1, 7, 8, 9]]
    assert (count, reason) == (3, "stop")


def test_what_is_not_drawn_by_may_be_zero():
    """Claim: a temperature and top_p of 0 beside greedy decoding are taken as generate takes them;
    where tokens are drawn they are refused. Fails if one rule holds for both."""
    config = _settle(temperature=0.0, top_p=0.0, do_sample=False)
    assert config.do_sample is False
    assert not _settle(temperature=0.0).do_sample
    for name in ("temperature", "top_p"):
        with pytest.raises(OptionError, match=f"{name}=0.0 must be a number above 0"):
            _settle(do_sample=True, **{name: 0.0})
        with pytest.raises(OptionError, match=f"{name}=-1.0 must be a number above 0"):
            _settle(**{name: -1.0})


def test_numbers_of_numpy_and_torch_are_numbers():
    """Claim: counts, rates, switches and ids count the same from whatever library they come, in
    settings and in a generation config."""
    given = dict(
        max_new_tokens=np.int64(5), temperature=np.float32(0.5), do_sample=np.bool_(True),
        top_k=np.uint8(3), eos_token_id=torch.tensor([4, 5]), bad_words_ids=[np.array([1, 2])],
    )  # fmt: skip
    plain = dict(
        max_new_tokens=5, temperature=0.5, do_sample=True, top_k=3, eos_token_id=[4, 5],
        bad_words_ids=[[1, 2]],
    )  # fmt: skip
    written = GenerationConfig()
    for name, value in given.items():
        setattr(written, name, value)
    for config in (_settle(**given), generation_settings.merge_settings(llama(), written, {})):
        numbers = {name: getattr(config, name) for name in plain}
        assert numbers == plain
        assert {type(numbers[name]) for name in ("max_new_tokens", "top_k")} == {int}
    one = generation_settings.answer_limits(_settle(eos_token_id=torch.tensor(4)), 3)
    assert one.eos == (4,)
    for wrong in (np.float64(5.5), np.bool_(True), torch.tensor(1.5)):
        with pytest.raises(OptionError, match="whole number"):
            _settle(max_new_tokens=wrong)


def test_half_a_character_is_no_stop_string():
    """Claim: a lone surrogate is refused in a sentence, not by a codec."""
    for stop in ("a\ud83d", ["b", "\udc00"]):
        with pytest.raises(OptionError, match="lone surrogate"):
            _settle(stop_strings=stop)
