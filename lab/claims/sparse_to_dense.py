"""Lists Sparse-to-Dense's claims, and judges each on the embedded pair.

Sparse-to-Dense (STD, ``saccade/methods/std.py``) drafts with the target itself, whose heads attend
to only K keys each, and verifies with all keys. K may be given as a share of the visual tokens,
``keep``, and gamma is the number of tokens of a draft. A verdict follows the rule of all claims
(``lab.claims.rule``): a claim names a range, and means with their intervals lie in it or do not.
"""

from __future__ import annotations

from statistics import mean

from lab.claims.claim import (
    ACCEPTANCE_RATE,
    CLIPS,
    DECODING_SPEED,
    SEEDS,
    Claim,
    StoredResults,
)
from lab.claims.rule import (
    HIGHER_RATIO,
    MORE,
    SAME,
    Finding,
    Premise,
    Unit,
    alone,
    of_intervals,
    paired,
    printed,
)
from lab.claims.rule import judge as judge_by_rule
from saccade.bench import measures
from saccade.bench.comparison import BASELINE
from saccade.bench.records import Answer
from saccade.core.errors import OptionError

RUN, BATCHES = "std-2k", "std-batch-2k"
EIGHTH = "std/keep=0.125"
OTHERS = ("streaming", "layerskip")
AGREEMENT = Unit("share of next tokens that stay", "value")
KEYS = Unit("alpha less what Sec. 3.3 needs", "difference")
FIVE_TOKENS = Unit("share of five tokens accepted, over the first's to the fifth", "ratio")
RATE = Unit("accepted share of drafted tokens", "value")
TOKENS_IN_A_ROW = 5
SPEED_BY_SETTING = Unit("speed of decoding, ratio to the best setting", "ratio", is_time=True)
SECONDS_BY_KEYS = Unit("seconds over keys read, ratio", "ratio", is_time=True)
BATCH_SPEED = Unit("speed of decoding in a batch of 8, ratio", "ratio", is_time=True)


def judge_agreement(results: StoredResults) -> Finding:
    data = results.figure("std-agreement")
    (lines,) = data["panels"].values()  # The figure has one panel.
    suites = results.figure_suites("std-agreement", AGREEMENT, [CLIPS])
    comparisons = [
        of_intervals(f"K {keys}", CLIPS, AGREEMENT, line, other=0.0, items=suites.items)
        for keys, line in zip(data["at"], lines["std"], strict=True)
    ]
    # The paper's 95 % are for one K that it does not name, so no run here can test them.
    premise = Premise("a K, which the paper does not name", is_met=False)
    return judge_by_rule(suites, AGREEMENT, printed(0.95, 1.01, "value"), comparisons, premise)


def judge_five_tokens(results: StoredResults) -> Finding:
    """Judges whether five tokens in a row are accepted as often as independent ones would be.

    That is the acceptance rate of one token, to the fifth power.
    """
    suites = results.every_suite(RUN, FIVE_TOKENS, [EIGHTH])
    comparisons = [
        alone(
            label,
            suite,
            FIVE_TOKENS,
            [*results.values(RUN, suite, method, five_token_ratio, "all").values()],
        )
        for label, method in (("1,024 keys", "std"), ("an eighth", EIGHTH))
        for suite in suites.names
    ]
    return judge_by_rule(suites, FIVE_TOKENS, SAME, comparisons)


def five_token_ratio(answer: Answer) -> float | None:
    """Returns the share of rounds that accept five tokens, over the per-token share ** 5.

    It is about 1 where the acceptance of a token does not depend on the tokens before it. Only
    rounds that drafted five tokens or more count. None where there are no such rounds, or none of
    their tokens was accepted. The per-token share is over the drafted tokens that were judged:
    those up to and with the first refusal. A round in which the answer ended before its draft did
    counts as if the next token had been refused.
    """
    rounds = [
        (accepted, drafted)
        for accepted, drafted in zip(answer.accepted, answer.drafted, strict=True)
        if drafted >= TOKENS_IN_A_ROW
    ]
    if not any(accepted for accepted, _ in rounds):
        return None
    judged = sum(min(accepted + 1, drafted) for accepted, drafted in rounds)
    token_share = sum(accepted for accepted, _ in rounds) / judged
    five_share = sum(accepted >= TOKENS_IN_A_ROW for accepted, _ in rounds) / len(rounds)
    return five_share / token_share**TOKENS_IN_A_ROW


def judge_gamma_peak(results: StoredResults) -> Finding:
    return _judge_peak(results, "std-gamma")


def judge_key_peak(results: StoredResults) -> Finding:
    return _judge_peak(results, "std-k")


def _judge_peak(results: StoredResults, figure: str) -> Finding:
    """Judges whether the fastest setting is neither the smallest nor the largest that was measured.

    The setting between them with the highest median speed has to be faster than both.
    """
    data = results.figure(figure)
    speeds = data["panels"]["times as fast as ar (decoding)"]["std"]
    suites = results.figure_suites(figure, SPEED_BY_SETTING, [CLIPS])
    best = max(speeds[1:-1])
    comparisons = [
        of_intervals(
            f"best over {data['at'][end]}",
            CLIPS,
            SPEED_BY_SETTING,
            best,
            speeds[end],
            suites.items,
        )
        for end in (0, -1)
    ]
    return judge_by_rule(suites, SPEED_BY_SETTING, HIGHER_RATIO, comparisons)


def judge_fewer_keys(results: StoredResults) -> Finding:
    """Judges Sec. 3.3's condition for reading fewer keys than plain decoding.

    It is alpha > (K + m_t) / (m_v + m_t) + 1 / gamma: alpha is the acceptance rate, and m_v and m_t
    are the visual and the text tokens of the prompt. Gamma is an answer's mean number of drafted
    tokens in a round, which is below the setting where drafts end early.
    """

    def margin(answer: Answer) -> float:
        gamma = sum(answer.drafted) / answer.rounds
        text_tokens = answer.prompt_tokens - answer.visual_tokens
        draft_tokens = text_tokens + (answer.draft_visual_tokens or 0)
        share_of_keys = draft_tokens / answer.prompt_tokens
        return (measures.acceptance_rate([answer]) or 0.0) - share_of_keys - 1 / gamma

    methods = {"1,024 keys": ("std", margin), "an eighth": (EIGHTH, margin)}
    return results.measure(RUN, KEYS, methods, MORE)


def judge_time_by_keys(results: StoredResults) -> Finding:
    data = results.figure("std-io")
    (lines,) = data["panels"].values()
    suites = results.figure_suites("std-io", SECONDS_BY_KEYS, [CLIPS])
    comparisons = [
        of_intervals(f"K {keys}", CLIPS, SECONDS_BY_KEYS, own, read, suites.items)
        for keys, own, read in zip(
            data["at"], lines["seconds (measured)"], lines["keys read (predicted)"], strict=True
        )
    ]
    return judge_by_rule(suites, SECONDS_BY_KEYS, SAME, comparisons)


def judge_speedup(results: StoredResults) -> Finding:
    data = results.figure("std-batch")
    speed = data["rows"]["std"]["speed"]
    turns = len(data["turns"]["std"])
    # The one batch is decoded several times, in turns with other methods. A turn gives one speed,
    # so the items of this comparison are turns, not clips.
    suites = results.figure_suites("std-batch", BATCH_SPEED, [CLIPS])
    comparison = of_intervals("std", CLIPS, BATCH_SPEED, speed, other=1.0, items=turns)
    return judge_by_rule(suites, BATCH_SPEED, printed(1.59), [comparison])


def judge_batches(results: StoredResults) -> Finding:
    """Judges the speed of decoding with an eighth of the keys, eight questions at once.

    It is compared with plain decoding of the same batch. The questions of a batch share its
    seconds, so a batch is one item.
    """
    suites = results.every_suite(BATCHES, DECODING_SPEED.unit, [EIGHTH])
    comparisons = [
        paired(
            "STD",
            suite,
            DECODING_SPEED.unit,
            *(_batch(results, suite, method) for method in (EIGHTH, BASELINE)),
        )
        for suite in suites.names
    ]
    return judge_by_rule(suites, DECODING_SPEED.unit, printed(1.59), comparisons)


def _batch(results: StoredResults, suite: str, method: str) -> dict[str, float]:
    """Returns the mean speed of decoding over a suite's questions, which are one batch.

    It is the value of the one item that the suite then has.
    """
    speeds = results.values(BATCHES, suite, method, DECODING_SPEED.measure, "all")
    return {"one batch": mean(speeds.values())}


def judge_fastest(results: StoredResults) -> Finding:
    pairs = [(f"STD over {other}", "std", other) for other in OTHERS]
    return results.compare(RUN, DECODING_SPEED, pairs, HIGHER_RATIO)


def judge_acceptance(results: StoredResults) -> Finding:
    pairs = [(f"STD less {other}", "std", other) for other in OTHERS]
    return results.compare(RUN, ACCEPTANCE_RATE, pairs, MORE)


def judge_acceptance_at_an_eighth(results: StoredResults) -> Finding:
    pairs = [("STD less streaming", EIGHTH, "streaming/keep=0.125")]
    return results.compare(RUN, ACCEPTANCE_RATE, pairs, MORE)


def judge_repeats(results: StoredResults) -> Finding:
    """Judges the speed of decoding averaged over three runs of the same questions.

    Greedy answers are the same by every seed, so only seconds differ. Raises OptionError where
    fewer repeats are stored.
    """
    stored = results.repeats(RUN)
    if len(stored) < SEEDS:
        raise OptionError(f"{', '.join(stored)} alone: lab run {RUN} --seed N makes a repeat")
    return results.compare(RUN, DECODING_SPEED, [("STD", "std", BASELINE)], printed(1.59))


def judge_layer_skipping(results: StoredResults) -> Finding:
    return results.measure(
        RUN,
        RATE,
        {"layerskip": ("layerskip", ACCEPTANCE_RATE.measure)},
        printed(0.037, 0.1, "value"),
    )


def judge_layer_skipping_speed(results: StoredResults) -> Finding:
    pairs = [("plain over LayerSkip", BASELINE, "layerskip")]
    return results.compare(RUN, DECODING_SPEED, pairs, HIGHER_RATIO)


CLAIMS = (
    Claim(
        "Sec. 2",
        "With the top K keys 95 % of next tokens stay the same.",
        "> 0.95",
        "lab figure std-agreement",
        judge_agreement,
        "not testable here",
    ),
    Claim(
        "Sec. 2",
        "Five tokens in a row are accepted as often as one to the fifth power.",
        "0.77 of 0.95",
        f"lab run {RUN}",
        judge_five_tokens,
        "partly",
        "No interval lies outside, but most are wider than 5 %.",
    ),
    Claim(
        "Fig. 1a",
        "Speed rises with gamma and falls from 13.",
        "a plot",
        "lab figure std-gamma",
        judge_gamma_peak,
        "partly",
        "It falls towards 15. A chain of one is nearly as fast as the best.",
    ),
    Claim(
        "Fig. 1b",
        "Too small a K is accepted too little, too large a K is slow.",
        "a plot",
        "lab figure std-k",
        judge_key_peak,
        "partly",
        "Too few keys are slow. 1,024 of 2,048 are not slower than fewer.",
    ),
    Claim(
        "Sec. 3.3",
        "Fewer keys are read: alpha > (K + m_t)/(m_v + m_t) + 1/gamma.",
        "> 0",
        f"lab run {RUN}",
        judge_fewer_keys,
        "holds",
    ),
    Claim(
        "Sec. 3.3",
        "Seconds a token follow the keys read.",
        "a formula",
        "lab figure std-io",
        judge_time_by_keys,
        "does not hold",
        "The formula counts keys, and a step reads weights too.",
    ),
    Claim(
        "Table 1",
        "STD decodes 1.59x to 1.94x as fast.",
        "batches of 8, three seeds",
        "lab figure std-batch",
        judge_speedup,
        "not shown",
        "The intervals are of three turns of one batch.",
    ),
    Claim(
        "Table 1",
        "The same with few keys, over every suite.",
        "the same",
        f"lab run {BATCHES}",
        judge_batches,
        "not shown",
        "One batch of eight a suite is one timing. It takes .83 to 1.16 times plain "
        "decoding's speed.",
    ),
    Claim(
        "Table 1",
        "STD is faster than Streaming and LayerSkip.",
        "1.72x of 1.34x and 0.47x (MLVU)",
        f"lab run {RUN}",
        judge_fastest,
        "partly",
        "Everywhere faster than LayerSkip. Beside Streaming the means are above 1 in every "
        "suite, and one of six intervals includes 1. 1,024 of 2,048 keys, as many as the "
        "paper.",
    ),
    Claim(
        "Table 1",
        "STD is accepted most.",
        "47.8 of 34.7 and 10.0 % (MLVU)",
        f"lab run {RUN}",
        judge_acceptance,
        "partly",
        "Everywhere more than LayerSkip. Beside Streaming two of six intervals reach 0. STD keeps "
        "half of the keys here.",
    ),
    Claim(
        "Table 1",
        "The same with few keys, over every suite.",
        "the same",
        f"lab run {RUN}",
        judge_acceptance_at_an_eighth,
        "partly",
        "In three of six suites; in none the other way round.",
    ),
    Claim(
        "Table 1",
        "Averages over three repeats say the same.",
        "1.59x to 1.94x",
        f"lab run {RUN}",
        judge_repeats,
        "does not hold",
        "A draft step costs the target's weights, which no sparse attention saves.",
    ),
    Claim(
        "Table 1",
        "Skipping layers without tuning accepts 3.7 to 10.0 %.",
        "0.037 to 0.1",
        f"lab run {RUN}",
        judge_layer_skipping,
        "does not hold",
        "It accepts more.",
    ),
    Claim(
        "Table 1",
        "It is slower than plain decoding.",
        "0.33x to 0.63x",
        f"lab run {RUN}",
        judge_layer_skipping_speed,
        "holds",
    ),
)
