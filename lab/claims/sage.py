"""SAGE's claims, its theory included, and how each is judged on the embedded pair.

SAGE grows a deep, narrow tree where the draft is confident, and a wide, shallow one where it is
not. Its confidence alpha is 1 minus the normalised entropy of the draft's ten likeliest tokens. Its
theorems are judged on examples (``lab.claims.theory``), and its other claims on stored answers.
"""

from __future__ import annotations

import math
from itertools import product

from lab.claims import theory
from lab.claims.claim import (
    ACCEPTED,
    BLOCK_EFFICIENCY,
    CLIPS,
    DECODING_SPEED,
    Claim,
    StoredResults,
)
from lab.claims.rule import (
    ARITHMETIC,
    HIGHER_RATIO,
    MORE,
    SAME,
    Claimed,
    Comparison,
    Finding,
    Unit,
    alone,
    computed,
    exact,
    not_testable,
    of_intervals,
    paired,
    printed,
    worst_case,
)
from lab.claims.rule import judge as judge_by_rule
from lab.claims.specvlm import EAGLE, TREE
from lab.studies.experiment import DRAFTS, TAU
from lab.studies.sage import BINS, BY_ALPHA, BY_DEPTH
from lab.studies.sage import CALIBRATED_SAGE as SAGE
from lab.studies.specvlm import LAMBDA
from saccade.bench.records import Answer

# The method of Algorithm 1, which plans the whole next tree from one law.
TO_THE_LETTER = f"sage-paper/lambda={LAMBDA}"
RUN = "sage-2k"
AUTOCORRELATION = Unit("autocorrelation less white noise's 97.5 %", "difference")
KEPT_RATIO = Unit("accepted tokens, ratio to no pruning", "ratio")
GAP = Unit("SAGE over SpecVLM in accepted tokens, ratio", "ratio")
GROWTH = Unit("SAGE's lead at the longest answers, ratio to that at the shortest", "ratio")
PLANNING = Unit("planning's share of an answer's seconds", "value", is_time=True, digits=4)
RISE = Unit("accepted share of places, more than one fifth of alpha below", "difference")
WHOLE_PATHS = Unit("share of confident paths accepted whole", "value")
ALL = Claimed(1 - 1e-9, math.inf, "value")  # All of something: a share of 1, up to rounding.
PROBABILITY = Unit("p_1 less its bound", "difference")
AGREEMENT = Unit("whether the arg-maxes agree", "value", digits=0)
EXPECTATION = Unit("formula less the distribution's mean", "value", digits=0)
DEPTH = Unit("formula less true optimum, levels", "value", digits=0)
WIDTH_GROWTH = Unit("growth of the best width with q_1, exponent over the formula's", "ratio")
WIDTH_BENEFIT = Unit("S(10)/S(1) at q_1 .2 less at .8", "difference")
DEPTH_CASES = ((0.5, 10), (0.8, 5), (0.8, 10), (0.9, 10), (0.9, 30))  # (p, c_t / c_d)
WIDTH_CASES = tuple(product((0.02, 0.05, 0.1), (0.25, 0.5, 0.75)))  # (c_d, beta), c_t is 1.
LOW, HIGH = 0.2, 0.8  # Of q_1, the first candidate's chance.


def judge_acceptance(results: StoredResults) -> Finding:
    return results.compare(RUN, ACCEPTED, [("SAGE less SpecVLM", SAGE, TREE)], MORE)


def judge_speed(results: StoredResults) -> Finding:
    pairs = [(f"SAGE over {other}", SAGE, other) for other in (TREE, "sd-tree", "sd")]
    return results.compare(RUN, DECODING_SPEED, pairs, HIGHER_RATIO)


def judge_static_rivals(results: StoredResults) -> Finding:
    """Judges SAGE beside shapes that stay fixed: SpecVLM's tree and chains of five."""
    rivals = (TREE, f"{TREE}/shape=chain-5", "sd")
    pairs = [(f"SAGE over {other}", SAGE, other) for other in rivals]
    return results.compare(RUN, DECODING_SPEED, pairs, HIGHER_RATIO)


def judge_entropy_correlation(results: StoredResults) -> Finding:
    """Judges whether the interval of the autocorrelation lies above white noise at each lag."""
    data = results.figure("sage-entropy")
    panels = {" ".join(panel.split()): lines for panel, lines in data["panels"].items()}
    suites = results.figure_suites("sage-entropy", AUTOCORRELATION, tuple(panels))
    comparisons = [
        of_intervals(
            f"{what}, lag {lag}",
            panel,
            AUTOCORRELATION,
            lines[f"a draft that {what}"][at],
            lines["white noise, 97.5 %"][at],
            suites.items,
        )
        for what in DRAFTS
        for at, lag in enumerate(data["at"])
        for panel, lines in panels.items()
    ]
    return judge_by_rule(suites, AUTOCORRELATION, MORE, comparisons)


def _lead(results: StoredResults, at: int) -> Comparison:
    """Returns SAGE's accepted tokens over SpecVLM's at one length of the answer.

    ``at`` is the place of that length among the figure's lengths. The figure stores means with
    intervals and no values of clips, so the two are not compared clip by clip.
    """
    data = results.figure("sage-length")
    taus = data["panels"][TAU]
    # Tau counts the target's own token too, which is one in each forward.
    own, other = ([tau - 1 for tau in taus[name][at]] for name in ("sage", "specvlm"))
    label = f"at {data['at'][at]} tokens"
    return of_intervals(label, CLIPS, GAP, own, other, data["clips"])


def judge_answer_length(results: StoredResults) -> Finding:
    suites = results.figure_suites("sage-length", GAP, [CLIPS], ["sage"])
    return judge_by_rule(suites, GAP, HIGHER_RATIO, [_lead(results, -1)])


def judge_growing_lead(results: StoredResults) -> Finding:
    """Judges the ratio of two leads: that at the longest length over that at the shortest."""
    suites = results.figure_suites("sage-length", GROWTH, [CLIPS], ["sage"])
    longest, shortest = (_lead(results, at).interval for at in (-1, 0))
    growth = of_intervals("longest over shortest", CLIPS, GROWTH, longest, shortest, suites.items)
    return judge_by_rule(suites, GROWTH, HIGHER_RATIO, [growth])


def judge_pruning(results: StoredResults) -> Finding:
    """Judges the ratio of two stored means, which are not compared clip by clip."""
    data = results.figure("sage-pruning")
    panels = data["panels"][TAU]
    suites = results.figure_suites("sage-pruning", KEPT_RATIO, tuple(panels), ["sage"])
    tenth = data["at"].index(0.1)
    whole = data["at"].index(1.0)
    comparisons = [
        of_intervals(
            "a tenth kept",
            draft,
            KEPT_RATIO,
            # Tau counts the target's own token too, which is one in each forward.
            [tau - 1 for tau in line[tenth]],
            [tau - 1 for tau in line[whole]],
            suites.items,
        )
        for draft, line in panels.items()
    ]
    return judge_by_rule(suites, KEPT_RATIO, SAME, comparisons)


def judge_planning_ahead(results: StoredResults) -> Finding:
    pairs = [
        (rule, f"{SAGE}/rule={rule}", f"{SAGE}/shape=sage-live/rule={rule}")
        for rule in ("prose", "formal")
    ]
    return results.compare_clips("sage-plan", BLOCK_EFFICIENCY.unit, pairs, SAME)


def judge_overhead(results: StoredResults) -> Finding:
    """Judges the share of an answer's seconds in which the next tree is decided and built."""
    return results.measure(
        RUN,
        PLANNING,
        {"SAGE": (SAGE, _planning_share), "Algorithm 1": (TO_THE_LETTER, _planning_share)},
        printed(0, 0.0039, "value"),
    )


def _planning_share(answer: Answer) -> float:
    return answer.planning / answer.total


def judge_mixtures(results: StoredResults) -> Finding:
    return not_testable("missing: a mixture of experts with trained weights.", ACCEPTED.unit)


def judge_text_alone(results: StoredResults) -> Finding:
    return not_testable(
        "missing: a pair that was trained on text. The last column has one.", ACCEPTED.unit
    )


def judge_eagle_baseline(results: StoredResults) -> Finding:
    return results.compare(RUN, ACCEPTED, [("SAGE less EAGLE-2's tree", SAGE, EAGLE)], MORE)


def judge_eagle_speed(results: StoredResults) -> Finding:
    pairs = [("SAGE over EAGLE-2's tree", SAGE, EAGLE)]
    return results.compare(RUN, DECODING_SPEED, pairs, HIGHER_RATIO)


def judge_smooth_acceptance(results: StoredResults) -> Finding:
    """Judges whether tokens in each fifth of alpha are accepted more often than in the fifth below.

    Two neighbouring fifths that no clip has both of are not compared.
    """
    by_draft = results.figure("sage-confidence")["clips_accepted"][BY_ALPHA]
    suites = results.figure_suites("sage-confidence", RISE, tuple(by_draft))
    comparisons = []
    for draft, clips in by_draft.items():
        # Each clip has the accepted share of the tokens in each fifth of alpha, or None where a
        # fifth has no tokens. Only clips that have tokens in both fifths are compared.
        for fifth in range(1, BINS):
            below: dict[int, float] = {}
            above: dict[int, float] = {}
            for clip, shares in enumerate(clips):
                if shares[fifth - 1] is not None and shares[fifth] is not None:
                    below[clip] = shares[fifth - 1]
                    above[clip] = shares[fifth]
            if below:
                label = f"alpha to {(fifth + 1) / BINS:g} less to {fifth / BINS:g}"
                comparisons.append(paired(label, draft, RISE, above, below))
    return judge_by_rule(suites, RISE, MORE, comparisons)


def judge_lemma(results: StoredResults) -> Finding:
    laws = {"p = (.5, .5)": (0.5, 0.5), "p = (1)": (1.0,), "ten equal": (0.1,) * 10}
    at_least = Claimed(-1e-9, math.inf, "difference")
    margins = {
        name: max(law) - theory.lemma_bound(theory.confidence(law, 10), 10)
        for name, law in laws.items()
    }
    worst = worst_case(PROBABILITY, at_least, margins)
    return judge_by_rule(ARITHMETIC, PROBABILITY, at_least, [worst])


def _agreements(levels: int) -> list[float]:
    """Returns 1 at each level of a path where draft and target have the same arg-max, else 0.

    The two laws are as far apart as Assumption 4.2 lets them be, and the draft is more confident
    than Theorem 4.4 asks for.
    """
    draft, target, epsilon = (0.52, 0.48), (0.47, 0.53), 0.05
    assert theory.confidence(draft, 10) > theory.acceptance_threshold(10, epsilon)
    same = float(draft.index(max(draft)) == target.index(max(target)))
    return [same] * levels


def judge_guarantee(results: StoredResults) -> Finding:
    (same,) = _agreements(1)
    return judge_by_rule(
        ARITHMETIC,
        AGREEMENT,
        Claimed(0.5, math.inf, "value"),
        [computed("draft (.52, .48), target (.47, .53)", AGREEMENT, same)],
    )


def judge_path_guarantee(results: StoredResults) -> Finding:
    """Judges Corollary A.2, by which every level of a confident path is accepted."""
    return judge_by_rule(
        ARITHMETIC,
        AGREEMENT,
        Claimed(0.5, math.inf, "value"),
        [
            computed(f"level {level}", AGREEMENT, same)
            for level, same in enumerate(_agreements(3), start=1)
        ],
    )


def judge_confident_paths(results: StoredResults) -> Finding:
    """Judges Corollary A.2 on answers: the share of confident paths that are accepted whole."""
    by_draft = results.figure("sage-confidence")["clips_accepted"][BY_DEPTH]
    suites = results.figure_suites("sage-confidence", WHOLE_PATHS, tuple(by_draft))
    comparisons = [
        alone(
            f"{depth} levels",
            draft,
            WHOLE_PATHS,
            [shares[depth - 1] for shares in clips if shares[depth - 1] is not None],
        )
        for draft, clips in by_draft.items()
        for depth in range(1, BINS + 1)
    ]
    return judge_by_rule(suites, WHOLE_PATHS, ALL, comparisons)


def judge_expectation(results: StoredResults) -> Finding:
    differences = {
        f"p {p}, decay {decay}, depth {depth}": theory.expected_accepted(p, decay, depth)
        - theory.simulated_accepted(p, decay, depth)
        for p, decay, depth in product((0.3, 0.6, 0.9, 1), (0.7, 0.9, 1), (1, 3, 8))
    }
    worst = worst_case(EXPECTATION, exact(), differences)
    return judge_by_rule(ARITHMETIC, EXPECTATION, exact(), [worst])


def judge_depth_formula(results: StoredResults) -> Finding:
    differences = {
        f"p {p}, c_t/c_d {ratio}": float(
            theory.depth_formula(p, ratio)
            - theory.best_argument(lambda d, p=p, ratio=ratio: theory.chain_speed(p, ratio, d))
        )
        for p, ratio in DEPTH_CASES
    }
    worst = worst_case(DEPTH, exact(), differences)
    return judge_by_rule(ARITHMETIC, DEPTH, exact(), [worst])


def judge_width_formula(results: StoredResults) -> Finding:
    """Judges the exponent by which the best width grows with q_1, the first candidate's chance.

    By Theorem 4.8 it is 1 / (1 + beta). The true one is that of the width at which Eq. 36-37 are
    highest, from one value of q_1 to another.
    """
    ratios = {}
    for cost, beta in WIDTH_CASES:
        low, high = (theory.best_width(q, cost, beta) for q in (LOW, HIGH))
        exponent = math.log(high / low) / math.log(HIGH / LOW)
        ratios[f"c_d {cost}, beta {beta}"] = exponent * (1 + beta)  # Over the theorem's.
    worst = worst_case(WIDTH_GROWTH, SAME, ratios)
    return judge_by_rule(ARITHMETIC, WIDTH_GROWTH, SAME, [worst])


def judge_width_insight(results: StoredResults) -> Finding:
    """Judges whether a width of ten gains less over a width of one if q_1 is higher."""
    falls = {}
    for cost, beta in WIDTH_CASES:
        gain_at_low, gain_at_high = (
            theory.width_speed(q, cost, beta, 10) / theory.width_speed(q, cost, beta, 1)
            for q in (LOW, HIGH)
        )
        falls[f"c_d {cost}, beta {beta}"] = gain_at_low - gain_at_high
    worst = worst_case(WIDTH_BENEFIT, MORE, falls)
    return judge_by_rule(ARITHMETIC, WIDTH_BENEFIT, MORE, [worst])


CLAIMS = (
    Claim(
        "Fig. 2",
        "Entropy is correlated along an answer over many lags.",
        "a plot",
        "lab figure sage-entropy",
        judge_entropy_correlation,
        "not shown",
        "One lag of one draft, which chance may give.",
    ),
    Claim(
        "Fig. 3",
        "SAGE accepts more than SpecVLM in long answers.",
        "25 % at 512, 57 % at 2,048 tokens",
        "lab figure sage-length",
        judge_answer_length,
        "not shown",
        "Eight clips, and answers of 256 tokens that go on after their end.",
    ),
    Claim(
        "Fig. 3",
        "Its lead grows with the length of the answer.",
        "the same",
        "lab figure sage-length",
        judge_growing_lead,
        "does not hold",
        "The lead shrinks along an answer whose end is ignored.",
    ),
    Claim(
        "Table 5",
        "Pruning 90 % leaves tau as it is.",
        "5.74 of 5.60",
        "lab figure sage-pruning",
        judge_pruning,
        "not shown",
        "Means within 7 %, with intervals wider than 5 %.",
    ),
    Claim(
        "Sec. 3.2",
        "The last round plans the next tree as well as the live one.",
        "no number",
        "lab figure sage-plan",
        judge_planning_ahead,
        "partly",
        "The same for one draft, up to 3 % less for the other.",
    ),
    Claim(
        "Tables 1-3",
        "SAGE accepts more than SpecVLM everywhere.",
        "7 to 72 % more",
        f"lab run {RUN}",
        judge_acceptance,
        "partly",
        "In five of six suites. Answers of a few words leave no room.",
    ),
    Claim(
        "Tables 1-3",
        "SAGE decodes faster than SpecVLM, SD-Tree and SD-Chain.",
        "3.44x of 2.96x, 2.26x, 2.25x at most",
        f"lab run {RUN}",
        judge_speed,
        "partly",
        "Faster than both trees where answers are long. A chain of five is as fast, or faster.",
    ),
    Claim(
        "Sec. 4.2, 5",
        "Adapting beats static shapes.",
        "the same",
        f"lab run {RUN}",
        judge_static_rivals,
        "partly",
        "It beats SpecVLM's tree in most suites, and loses to chains of five over the same "
        "view in all.",
    ),
    Claim(
        "Table 6",
        "Updating the tree takes 0.39 % of the time.",
        "0.0039",
        f"lab run {RUN}",
        judge_overhead,
        "partly",
        "It holds for answers of a few words. Elsewhere planning is 1 to 4 % of an answer, "
        "which takes about a second.",
    ),
    Claim(
        "Sec. 6.2",
        "It accepts more than EAGLE-2's dynamic tree.",
        "no number",
        f"lab run {RUN}",
        judge_eagle_baseline,
        "partly",
        "In three of six suites, and in none fewer.",
    ),
    Claim(
        "Sec. 6.2",
        "It is faster than EAGLE-2's dynamic tree.",
        "no number",
        f"lab run {RUN}",
        judge_eagle_speed,
        "holds",
    ),
    Claim(
        "Table 3",
        "It helps a mixture of experts.",
        "4.39 of 3.24",
        "",
        judge_mixtures,
        "not testable here",
    ),
    Claim(
        "Table 4",
        "On text alone it accepts more than native SD.",
        "4.05 of 3.12",
        "",
        judge_text_alone,
        "not testable here",
    ),
    Claim(
        "Lemma 4.3",
        "p_1 >= 1/k + alpha (k - 1)/k.",
        "a proof",
        "",
        judge_lemma,
        "does not hold",
        "Two equal tokens break it.",
    ),
    Claim(
        "Theorem 4.4",
        "Above a confidence of 0.56 acceptance is guaranteed.",
        "a proof",
        "",
        judge_guarantee,
        "does not hold",
        "It rests on Lemma 4.3.",
    ),
    Claim(
        "Remark A.1",
        "Acceptance rises smoothly with alpha.",
        "no number",
        "lab figure sage-confidence",
        judge_smooth_acceptance,
        "partly",
        "It rises by steps: the third and the fourth fifth are alike.",
    ),
    Claim(
        "Corollary A.2",
        "On answers, paths of confident levels are accepted whole.",
        "guaranteed",
        "lab figure sage-confidence",
        judge_confident_paths,
        "does not hold",
        "Nearly all are: .98 of those of one level, .88 to .93 of those of five.",
    ),
    Claim(
        "Corollary A.2",
        "All tokens of a path of confident levels are accepted.",
        "a proof",
        "",
        judge_path_guarantee,
        "does not hold",
        "It rests on Theorem 4.4.",
    ),
    Claim(
        "Theorem 4.6",
        "A chain is accepted for sum_l p^l gamma^(l (l - 1)/2) tokens.",
        "a proof",
        "",
        judge_expectation,
        "holds",
    ),
    Claim(
        "Theorem 4.7",
        "The best depth is ceil(log(c_t/c_d)/log(1/p) - 1).",
        "a proof",
        "",
        judge_depth_formula,
        "does not hold",
        "A rate is a ratio, and its optimum comes earlier.",
    ),
    Claim(
        "Theorem 4.8",
        "The best width scales as (q_1/c_d)^(1/(1 + beta)).",
        "Eq. 36-37 as printed, no cap at 1",
        "",
        judge_width_formula,
        "does not hold",
        "It rises with q_1 as stated, by another exponent.",
        "By Eq. 36-37 as printed, width helps more where the first candidate is likelier. "
        "SAGE's text says less. It would be less with acceptance capped at 1, which the paper "
        "leaves out.",
    ),
    Claim(
        "Sec. 4.2",
        "The relative benefit of width falls with q_1.",
        "text of Theorem 4.8",
        "",
        judge_width_insight,
        "does not hold",
        "By the printed equations it gains more.",
    ),
)
