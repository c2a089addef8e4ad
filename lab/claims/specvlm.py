"""SpecVLM's claims, and how each is judged on the embedded pair.

SpecVLM shows the draft a tenth of the video: the tokens with the most attention of the text (stage
I, up to the share lambda of the text's attention on the video) and an even sample of the others
(stage II). Its names for what it is compared with: SD-Tree drafts the same tree from the whole
video, SD-Rand from a random tenth, and in self-SD the target drafts for itself. ``lab.claims``
makes its page from ``CLAIMS``, and ``lab.claims.draft_model`` judges some of these claims again
with another draft.
"""

from __future__ import annotations

from statistics import mean

from lab.claims.claim import (
    ACCEPTED,
    ACCEPTED_RATIO,
    BLOCK_EFFICIENCY,
    CLIPS,
    DECODING_SPEED,
    TAU_DIFFERENCE,
    Claim,
    Pair,
    StoredResults,
)
from lab.claims.rule import (
    HIGHER_RATIO,
    MIN_ITEMS,
    MORE,
    MOST,
    SAME,
    SMALL_SHARE,
    Finding,
    Unit,
    alone,
    not_testable,
    of_intervals,
    paired,
    printed,
)
from lab.claims.rule import judge as judge_by_rule
from lab.studies.specvlm import CALIBRATED, LAMBDA
from lab.studies.step_timing import REPEATS
from saccade.bench import measures
from saccade.bench.comparison import BASELINE
from saccade.bench.measures import Interval
from saccade.bench.records import Answer

RUN, LONG_RUN = "specvlm-2k", "specvlm-8k"
TREE = CALIBRATED  # SpecVLM itself, at its best lambda for this pair; SD-Tree is "sd-tree".
FIRST_ROUNDS_COUNT = 10  # The rounds that the claim calls an answer's first ones.
REPACKED = f"{TREE}/positions=repacked"
EAGLE = f"{TREE}/shape=eagle-2"
SELF_DRAFTED = f"specvlm-self/lambda={LAMBDA}"
RANDOM = "sd-tree/view=random/keep=0.1"
KEEPS = ("0.50", "0.30", "0.20", "0.10", "0.05", "0.02")  # Kept shares, as in the figure's keys.
# The share of the attention on a video that its most attended tenth gets. The first unit compares
# two kinds of queries by it, and the second compares it with a number.
SHARE_OF_ATTENTION = Unit("share of attention on the top tenth", "difference")
MASS = Unit("share of attention on the top tenth", "value")
SHARE_OF_TOKENS = Unit("share of tokens that the draft wrote", "value")
SHARE_OF_SECONDS = Unit("share of an answer's seconds", "value", is_time=True, digits=4)
STEP_SECONDS = Unit("seconds of a draft's step, ratio", "ratio", is_time=True)
REMAINING = Unit("accepted tokens, ratio to the whole video's", "ratio")
PREDICTED = Unit("predicted over measured speedup", "ratio", is_time=True)
GAIN = Unit("gain over SD-Tree at 8,192 tokens over that at 2,048", "ratio", is_time=True)
FIRST_ROUNDS = Unit("accepted tokens a forward, ratio to all rounds'", "ratio")


def judge_text_attention(results: StoredResults) -> Finding:
    tenth = results.figure("specvlm-boundary")["tenth"]
    suites = results.figure_suites("specvlm-boundary", SHARE_OF_ATTENTION, [CLIPS])
    return judge_by_rule(
        suites,
        SHARE_OF_ATTENTION,
        MORE,
        [
            of_intervals(
                "text less visual queries",
                CLIPS,
                SHARE_OF_ATTENTION,
                tenth["text queries"],
                tenth["visual queries"],
                suites.items,
            )
        ],
    )


def judge_standard_speedup(results: StoredResults) -> Finding:
    return results.compare(RUN, DECODING_SPEED, [("SpecVLM", TREE, BASELINE)], printed(2.00))


def judge_self_speedup(results: StoredResults) -> Finding:
    return results.compare(
        RUN,
        DECODING_SPEED,
        [("self-SD", SELF_DRAFTED, BASELINE)],
        printed(1.24),
    )


def judge_random_speedup(results: StoredResults) -> Finding:
    return results.compare(
        RUN,
        DECODING_SPEED,
        [("SD-Rand over SD-Tree", RANDOM, "sd-tree")],
        HIGHER_RATIO,
    )


def judge_pruning_speedup(results: StoredResults) -> Finding:
    return results.compare(
        RUN,
        DECODING_SPEED,
        [("SpecVLM over SD-Tree", TREE, "sd-tree"), ("over SD-Rand", TREE, RANDOM)],
        HIGHER_RATIO,
    )


def judge_gain_over_random(results: StoredResults) -> Finding:
    return results.compare(RUN, ACCEPTED, [("SpecVLM less SD-Rand", TREE, RANDOM)], MORE)


def judge_accuracy_kept(results: StoredResults) -> Finding:
    return results.compare(
        RUN,
        ACCEPTED_RATIO,
        [("SpecVLM over SD-Tree", TREE, "sd-tree")],
        printed(0.9),
    )


def _judge_random_pruning(results: StoredResults, pruned: float) -> Finding:
    """Judges what pruning this share of the video at random leaves of the accepted tokens.

    Up to a half pruned the paper claims that they stay the same (``SAME``), and beyond it that they
    fall, which is to below that range. The suites are the figure's drafts.
    """
    data = results.figure("specvlm-sensitivity")
    (lines,) = data["panels"].values()
    at = data["at"].index(pruned)
    whole = data["at"].index(0.0)
    suites = results.figure_suites("specvlm-sensitivity", REMAINING, tuple(lines))
    comparisons = [
        of_intervals(
            f"{pruned:.0%} pruned",
            name,
            REMAINING,
            # Tau counts the target's own token too, which is one in each forward.
            [tau - 1 for tau in line[at]],
            [tau - 1 for tau in line[whole]],
            suites.items,
        )
        for name, line in lines.items()
    ]
    claimed = SAME if pruned <= 0.5 else printed(0, SAME.low)
    return judge_by_rule(suites, REMAINING, claimed, comparisons)


def judge_little_pruning(results: StoredResults) -> Finding:
    return _judge_random_pruning(results, 0.5)


def judge_much_pruning(results: StoredResults) -> Finding:
    return _judge_random_pruning(results, 0.9)


def judge_no_video(results: StoredResults) -> Finding:
    return _judge_random_pruning(results, 1.0)


def judge_long_tail(results: StoredResults) -> Finding:
    data = results.figure("specvlm-tail")
    suites = results.figure_suites("specvlm-tail", MASS, [CLIPS])
    comparison = alone("the top tenth", CLIPS, MASS, data["clips_tenth"])
    return judge_by_rule(suites, MASS, printed(0.5, compared_by="value"), [comparison])


def judge_every_ratio(results: StoredResults) -> Finding:
    pairs: list[Pair] = [
        (f"{keep} kept", f"{CALIBRATED}/keep={keep}", f"random/keep={keep}") for keep in KEEPS
    ]
    return results.compare_clips("specvlm-criteria", TAU_DIFFERENCE, pairs, MORE)


def judge_windows(results: StoredResults) -> Finding:
    return _judge_choices(
        results, "specvlm-windows", ("attention",), ("window-front", "window-middle", "window-end")
    )


def judge_temporal_redundancy(results: StoredResults) -> Finding:
    return _judge_choices(
        results, "specvlm-redundancy", ("uniform", "random"), ("frames", "fastvid", "dycoke")
    )


def judge_both_stages(results: StoredResults) -> Finding:
    whole = f"{CALIBRATED}/keep=0.1"
    pairs = [
        ("without stage I", whole, "uniform/keep=0.1"),
        ("without stage II", whole, "attention/keep=0.1"),
    ]
    return results.compare_clips("specvlm-stages", TAU_DIFFERENCE, pairs, MORE)


def _judge_choices(
    results: StoredResults, figure: str, better: tuple[str, ...], worse: tuple[str, ...]
) -> Finding:
    """Judges whether the ways to choose a tenth in ``better`` accept more than those in ``worse``.

    Each of the first is compared with each of the second, clip by clip.
    """
    pairs = [
        (f"{own} less {other}", f"{own}/keep=0.1", f"{other}/keep=0.1")
        for own in better
        for other in worse
    ]
    return results.compare_clips(figure, TAU_DIFFERENCE, pairs, MORE)


def first_rounds_ratio(accepted: tuple[int, ...]) -> float | None:
    """Returns accepted tokens per round in the first ten rounds, over those in all rounds.

    None for an answer of ten rounds or fewer, whose ratio would be 1 whatever it accepts, and for
    one that accepts nothing.
    """
    if len(accepted) <= FIRST_ROUNDS_COUNT or not any(accepted):
        return None
    return mean(accepted[:FIRST_ROUNDS_COUNT]) / mean(accepted)


def first_round_gain(accepted: tuple[int, ...]) -> float:
    """Returns how many tokens more the first round accepts than the mean of the nine after it.

    An answer may have fewer than nine after it, but needs one.
    """
    return accepted[0] - mean(accepted[1:10])


def judge_steady_acceptance(results: StoredResults) -> Finding:
    """Judges whether the first ten rounds of an answer accept as many tokens as all of its rounds.

    This can be tested only where every suite has answers of more than ten rounds.
    """

    def ratio(answer: Answer) -> float | None:
        return first_rounds_ratio(answer.accepted)

    counts = [len(results.values(RUN, suite, TREE, ratio, "all")) for suite in results.suites(RUN)]
    if min(counts) < MIN_ITEMS:
        return not_testable("answers of more than ten rounds in every suite", FIRST_ROUNDS)
    return results.measure(RUN, FIRST_ROUNDS, {"first ten rounds": (TREE, ratio)}, SAME)


def judge_first_round(results: StoredResults) -> Finding:
    return results.measure(
        RUN,
        TAU_DIFFERENCE,
        {
            "first round less the next nine": (
                TREE,
                lambda answer: first_round_gain(answer.accepted) if answer.rounds > 1 else None,
            )
        },
        MORE,
    )


def judge_trees(results: StoredResults) -> Finding:
    pairs = [("whole video", "sd-tree", "sd"), ("a tenth", TREE, f"{TREE}/shape=chain-5")]
    return results.compare(RUN, ACCEPTED, pairs, MORE)


def judge_pruning_cost(results: StoredResults) -> Finding:
    def share(answer: Answer) -> float:
        return (answer.guide + answer.draft_prefill) / answer.total

    return results.measure(
        RUN,
        SHARE_OF_SECONDS,
        {"choosing and draft prefill": (TREE, share)},
        SMALL_SHARE,
    )


def judge_step_growth(results: StoredResults) -> Finding:
    """Judges the growth of one layer of a draft's step, from 1,024 to 32,768 keys."""
    data = results.figure("specvlm-layers")
    (lines,) = data["panels"].values()
    line = lines["one layer"]
    suites = results.figure_suites(
        "specvlm-layers", STEP_SECONDS, [CLIPS], prompt="1,024 to 32,768 keys", items=REPEATS
    )
    comparison = of_intervals(
        "32,768 over 1,024 keys",
        CLIPS,
        STEP_SECONDS,
        line[data["at"].index(32768)],
        line[data["at"].index(1024)],
        suites.items,
    )
    return judge_by_rule(suites, STEP_SECONDS, printed(3.29), [comparison])


def judge_growth_with_length(results: StoredResults) -> Finding:
    """Judges whether pruning gains more over SD-Tree at 8,192 visual tokens than at 2,048.

    The two lengths have different clips, so their means are compared, not pairs. A run's gain is a
    ratio of speeds of decoding.
    """
    suites = results.every_suite(LONG_RUN, GAIN, [TREE, RANDOM, "sd-tree"])
    comparisons = [
        of_intervals(
            label,
            suite,
            GAIN,
            _gain(results, LONG_RUN, suite, method),
            _gain(results, RUN, suite.replace("-8k", "-2k"), method),
            suites.items,
        )
        for label, method in (("SpecVLM", TREE), ("SD-Rand", RANDOM))
        for suite in ([] if suites.outdated else suites.names)
    ]
    return judge_by_rule(suites, GAIN, HIGHER_RATIO, comparisons)


def _gain(results: StoredResults, run: str, suite: str, method: str) -> Interval:
    """Returns a method's speed of decoding over SD-Tree's in one suite: the mean and its interval.

    The ratio is taken question by question.
    """
    own, whole = (
        results.values(run, suite, name, DECODING_SPEED.measure, "all")
        for name in (method, "sd-tree")
    )
    return paired(method, suite, DECODING_SPEED.unit, own, whole).interval


def judge_speedup_formula(results: StoredResults) -> Finding:
    """Judges Eq. 1-3, by which the speedup is tau / (gamma T_d / T_t + T_t^gamma / T_t).

    T_d is the seconds of a draft's step, T_t those of a token of plain decoding, and T_t^gamma
    those of a verification. For one answer the equations predict this speedup: its emitted tokens
    times T_t, over its seconds of drafting and verifying. The measured speedup is T_t over the
    answer's seconds a token. T_t cancels in the ratio of predicted to measured speedup, so this
    function does not need it.
    """

    def predicted_over_measured(answer: Answer) -> float:
        emitted = sum(answer.accepted) + answer.own
        return emitted * measures.seconds_per_token(answer) / (answer.draft + answer.verify)

    methods = {"chain": "sd", "tree": "sd-tree", "tree, a random tenth": RANDOM}
    return results.measure(
        RUN,
        PREDICTED,
        {label: (method, predicted_over_measured) for label, method in methods.items()},
        SAME,
    )


def judge_examples(results: StoredResults) -> Finding:
    def share(answer: Answer) -> float:
        return sum(answer.accepted) / (sum(answer.accepted) + answer.own)

    return results.measure(RUN, SHARE_OF_TOKENS, {"a tenth of the video": (TREE, share)}, MOST)


def judge_positions(results: StoredResults) -> Finding:
    """Judges positions alone: the same view, with positions counted anew or kept."""
    pairs = [("counted anew over kept", REPACKED, TREE)]
    return results.compare(RUN, BLOCK_EFFICIENCY, pairs, SAME)


CLAIMS = (
    Claim(
        "Fig. 4",
        "Text attends to few visual tokens, where these attend to each other densely.",
        "a map",
        "lab figure specvlm-boundary",
        judge_text_attention,
        "does not hold",
        "Rows of the video attend to their neighbours, and text to everything.",
    ),
    Claim(
        "Fig. 5",
        "A tenth of the tokens gets over half of the attention.",
        "> 0.5",
        "lab figure specvlm-tail",
        judge_long_tail,
        "does not hold",
        "This pair's attention is spread widely.",
    ),
    Claim(
        "Table 1",
        "With a smaller draft decoding is 2.00x to 2.68x as fast.",
        "decoding alone",
        f"lab run {RUN}",
        judge_standard_speedup,
        "not shown",
        "Between 1.80 and 2.11. Two of six means reach 2.",
    ),
    Claim(
        "Tables 1-2",
        "Self-SD is 1.24x to 1.59x as fast.",
        "decoding alone",
        f"lab run {RUN}",
        judge_self_speedup,
        "does not hold",
        "A step of such a draft reads all weights of the target.",
    ),
    Claim(
        "Tables 1-2",
        "Pruning at random makes the tree faster.",
        "2.50x of 2.08x",
        f"lab run {RUN}",
        judge_random_speedup,
        "partly",
        "In descriptions alone.",
    ),
    Claim(
        "Tables 1-2",
        "SpecVLM is faster than SD-Tree and than SD-Rand.",
        "2.68x of 2.08x and 2.50x",
        f"lab run {RUN}",
        judge_pruning_speedup,
        "partly",
        "Over SD-Tree in four suites of six. Over SD-Rand in none.",
    ),
    Claim(
        "Tables 1-2",
        "SpecVLM accepts more than random pruning.",
        "3.48 of 3.19",
        f"lab run {RUN}",
        judge_gain_over_random,
        "not shown",
        "This pair's attention is spread widely.",
    ),
    Claim(
        "Sec. 1",
        "With 90 % pruned, nearly 90 % of the accepted tokens stay.",
        "0.9",
        f"lab run {RUN}",
        judge_accuracy_kept,
        "partly",
        "All but comparing two pictures, where a tenth less is accepted.",
    ),
    Claim(
        "Sec. 2.2",
        "Pruning half at random changes acceptance little.",
        "a plot",
        "lab figure specvlm-sensitivity",
        judge_little_pruning,
        "partly",
        "Eight clips, and pairs are not stored.",
    ),
    Claim(
        "Sec. 2.2",
        "Pruning 90 % at random costs considerably.",
        "a plot",
        "lab figure specvlm-sensitivity",
        judge_much_pruning,
        "not shown",
        "One frame in ten shows nearly all there is to say.",
    ),
    Claim(
        "Sec. 2.2",
        "Without any video acceptance drops.",
        "a plot",
        "lab figure specvlm-sensitivity",
        judge_no_video,
        "holds",
    ),
    Claim(
        "Fig. 6",
        "SpecVLM accepts more than random pruning at every ratio.",
        "a plot",
        "lab figure specvlm-criteria",
        judge_every_ratio,
        "not shown",
        "At a lambda calibrated on other clips.",
    ),
    Claim(
        "Fig. 7a",
        "Attention chooses better than windows of the video.",
        "a plot",
        "lab figure specvlm-windows",
        judge_windows,
        "partly",
        "In this world every frame shows every shape.",
    ),
    Claim(
        "Fig. 7b",
        "Dropping by temporal redundancy is worse than an even or a random sample.",
        "a plot",
        "lab figure specvlm-redundancy",
        judge_temporal_redundancy,
        "partly",
        "Shapes stay through a clip.",
    ),
    Claim(
        "Fig. 8",
        "Both stages help.",
        "a plot",
        "lab figure specvlm-stages",
        judge_both_stages,
        "partly",
        "Stage II does the work.",
    ),
    Claim(
        "Table 3",
        "Acceptance does not fade along an answer.",
        "3.39 of 3.48",
        f"lab run {RUN}",
        judge_steady_acceptance,
        "not testable here",
        "Three of the six suites have no answer of more than ten rounds.",
    ),
    Claim(
        "Table 3",
        "The first step accepts most.",
        "4.3 of 3.48",
        f"lab run {RUN}",
        judge_first_round,
        "partly",
        "Not in descriptions, which are as easy all along.",
    ),
    Claim(
        "Table 4",
        "Trees accept more than chains.",
        "3.68 of 3.12; 3.48 of 2.79",
        f"lab run {RUN}",
        judge_trees,
        "partly",
        "An answer of a few words leaves a tree nothing to add.",
    ),
    Claim(
        "published code",
        "Counting positions anew after pruning changes nothing.",
        "not said; the code does it",
        f"lab run {RUN}",
        judge_positions,
        "partly",
        "It changes the accepted tokens by three hundredths at most.",
    ),
    Claim(
        "Table 5",
        "Choosing and the draft's prefill cost next to nothing.",
        "0.015 of the seconds",
        f"lab run {RUN}",
        judge_pruning_cost,
        "holds",
    ),
    Claim(
        "Fig. 2a, Table 6",
        "A draft's layer takes 3.29 times as long over 32k keys as over 1k.",
        "3.29",
        "lab figure specvlm-layers",
        judge_step_growth,
        "holds",
    ),
    Claim(
        "Sec. 4.1",
        "Gains grow with the length of the video.",
        "not measured there",
        f"lab run {LONG_RUN}",
        judge_growth_with_length,
        "partly",
        "Everywhere but in descriptions and answers of a few words. The pair learnt clips of "
        "up to 2,048 tokens.",
    ),
    Claim(
        "Eq. 1-3",
        "Speed follows from tau and the seconds of drafting and verifying.",
        "a formula",
        f"lab run {RUN}",
        judge_speedup_formula,
        "holds",
    ),
    Claim(
        "Fig. 10-11",
        "Shown a tenth of the video, the draft writes most of the answer.",
        "two examples",
        f"lab run {RUN}",
        judge_examples,
        "holds",
    ),
)
