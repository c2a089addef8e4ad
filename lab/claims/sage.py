"""SAGE's claims, its theory included, and how each is judged on the embedded pair."""

from __future__ import annotations

from itertools import product
from statistics import mean

from lab.claims import theory
from lab.claims.claim import (
    Claim,
    Finding,
    StoredResults,
    accepted_tokens,
    decoding_speed,
    grade,
    grade_each,
    grade_ordering,
    interval_text,
    mean_difference,
    tau_of,
)
from lab.claims.specvlm import RUN, TREE
from lab.studies.experiment import DRAFTS, TAU
from lab.studies.sage import CALIBRATED_SAGE as SAGE
from lab.studies.sage import SPEED

CAPTIONS = RUN, "shapes-caption-2k"
SHORT = "papers-256"
FORMAL = f"{SAGE}/rule=formal"


def judge_acceptance(results: StoredResults) -> Finding:
    gains = {
        suite: results.gain(run, suite, SAGE, TREE, tau_of)
        for run, suite in (CAPTIONS, *((SHORT, suite) for suite in results.suites(SHORT)))
    }
    words = ", ".join(f"{interval_text(gain)} ({suite})" for suite, gain in gains.items())
    return Finding(grade_ordering(list(gains.values())), f"tau of SAGE less SpecVLM's: {words}")


def judge_speed(results: StoredResults) -> Finding:
    others = (TREE, "sd-tree", "sd")
    gains = {other: results.gain(*CAPTIONS, SAGE, other, decoding_speed) for other in others}
    speeds = results.speeds(*CAPTIONS, (SAGE, FORMAL, *gains))
    return Finding(grade_ordering(list(gains.values())), speeds)


def judge_fixed_shapes(results: StoredResults) -> Finding:
    fitted = f"{TREE}/shape=fit"
    gain = results.gain(*CAPTIONS, SAGE, fitted, decoding_speed)
    own, fitted_speed = (results.speed(*CAPTIONS, name) for name in (SAGE, fitted))
    return Finding(
        grade_ordering([gain]),
        f"SAGE {interval_text(own)}x, a fixed shape fitted to the costs "
        f"{interval_text(fitted_speed)}x",
    )


def judge_overhead(results: StoredResults) -> Finding:
    answers = results.answers(*CAPTIONS, SAGE)
    whole = mean(answer.total for answer in answers)
    rest_seconds = mean(answer.rest for answer in answers)
    verdict = grade(rest_seconds / whole < 0.01, rest_seconds / whole < 0.05)
    return Finding(
        verdict,
        f"{rest_seconds / whole:.2%} of the answer goes to everything but forwards in decoding: "
        "planning the next tree, verdicts, committing",
    )


def judge_entropy_correlation(results: StoredResults) -> Finding:
    """Judges whether the interval of the autocorrelation lies above white noise at each lag."""
    is_above_noise = []
    words = []
    for panel, lines in results.figure("sage-entropy")["panels"].items():
        noise = lines["white noise, 97.5 %"]
        for what in DRAFTS:
            line = lines[f"a draft that {what}"]
            above = [value[1] > most for value, most in zip(line, noise, strict=True)]
            is_above_noise += above
            words.append(
                f"{' '.join(panel.split())}, {what}: lag 1 {interval_text(line[0])}, above noise "
                f"at {sum(above)} of {len(above)} lags"
            )
    return Finding(grade_each(is_above_noise), "; ".join(words))


def judge_answer_length(results: StoredResults) -> Finding:
    data = results.figure("sage-length")
    taus = data["panels"][TAU]
    gaps = [
        accepted_tokens(own[0]) / accepted_tokens(other[0]) - 1
        for own, other in zip(taus["sage"], taus["specvlm"], strict=True)
    ]
    rises = all(taus[name][-1][0] > taus[name][0][0] for name in ("sage", "specvlm"))
    widens = gaps[-1] > gaps[0]
    verdict = grade(rises and widens, rises or widens)
    words = ", ".join(f"{gap:+.0%} at {at}" for gap, at in zip(gaps, data["at"], strict=True))
    return Finding(verdict, f"accepted tokens of SAGE over SpecVLM's: {words} tokens")


def judge_pruning(results: StoredResults) -> Finding:
    data = results.figure("sage-pruning")
    name = f"a draft that {next(iter(DRAFTS))}"
    taus = [accepted_tokens(value[0]) for value in data["panels"][TAU][name]]
    speeds = [value[0] for value in data["panels"][SPEED][name]]
    keeps = data["at"]
    is_flat = taus[keeps.index(0.1)] > 0.97 * taus[keeps.index(1.0)]
    best = keeps[speeds.index(max(speeds))]
    parts_hold = [is_flat, best in (0.1, 0.2)]
    verdict = grade_each(parts_hold)
    words = ", ".join(
        f"{k:g}: {t:.2f}, {s:.2f}x" for k, t, s in zip(keeps, taus, speeds, strict=True)
    )
    return Finding(verdict, f"accepted tokens and speed by the share kept ({name}): {words}")


def judge_planning_ahead(results: StoredResults) -> Finding:
    taus = results.figure("sage-plan")["clips_tau"]
    shapes = {"depth and width of the last round": "", "all of it": "/shape=sage-ahead"}
    gains = {
        (rule, words): [
            mean_difference(
                taus[what][f"{SAGE}{shape}/rule={rule}"],
                taus[what][f"{SAGE}/shape=sage-live/rule={rule}"],
            )
            for what in DRAFTS
        ]
        for rule in ("prose", "formal")
        for words, shape in shapes.items()
    }
    planned = [own for (_, words), own in gains.items() if words in tuple(shapes)[:1]]
    gain_words = "; ".join(
        f"{words}, {rule} {', '.join(map(interval_text, own))}"
        for (rule, words), own in gains.items()
    )
    return Finding(
        grade(all(each[2] >= 0 for own in planned for each in own)),
        "tau less the all-live tree's, a draft that never saw pruning and one that did: "
        f"{gain_words}",
    )


def judge_lemma(results: StoredResults) -> Finding:
    alpha = theory.confidence((0.5, 0.5), 10)
    bound = theory.lemma_bound(alpha, 10)
    verdict = grade(bound <= 0.5)
    return Finding(
        verdict, f"p = (.5, .5, 0, ...), k = 10: alpha {alpha:.3f}, p_1 = .5 < {bound:.3f}"
    )


def judge_guarantee(results: StoredResults) -> Finding:
    draft, target = (0.52, 0.48), (0.47, 0.53)
    alpha, needed = theory.confidence(draft, 10), theory.acceptance_threshold(10, 0.05)
    agrees = max(draft) == draft[0] and max(target) == target[0]
    verdict = grade(alpha <= needed or agrees)
    return Finding(
        verdict,
        f"draft {draft}, target {target}: total variation {abs(draft[0] - target[0]):.2f}, "
        f"alpha {alpha:.2f} > {needed:.2f}, and the arg-maxes differ",
    )


def judge_expectation(results: StoredResults) -> Finding:
    worst = max(
        abs(theory.expected_accepted(p, decay, depth) - theory.simulated_accepted(p, decay, depth))
        for p, decay, depth in product((0.3, 0.6, 0.9, 1), (0.7, 0.9, 1), (1, 3, 8))
    )
    return Finding(grade(worst < 1e-9), f"largest difference on a grid {worst:.0e}")


def judge_depth_formula(results: StoredResults) -> Finding:
    words = []
    is_optimal = []
    for p, ratio in ((0.5, 10), (0.8, 5), (0.8, 10), (0.9, 10), (0.9, 30)):
        formula = theory.depth_formula(p, ratio)
        optimum = theory.best_argument(lambda d, p=p, ratio=ratio: theory.chain_speed(p, ratio, d))
        is_optimal.append(formula == optimum)
        words.append(f"{formula} for {optimum} (p {p}, c_t/c_d {ratio})")
    return Finding(
        grade_each(is_optimal), "formula for true optimum of Eq. 33: " + ", ".join(words)
    )


def judge_width_formula(results: StoredResults) -> Finding:
    first_acceptances = (0.2, 0.4, 0.6, 0.8)
    formula = [theory.width_formula(q, 0.05, 0.5) for q in first_acceptances]
    optima = [
        theory.best_argument(lambda w, q=q: theory.width_speed(q, 0.05, 0.5, w), 200)
        for q in first_acceptances
    ]
    is_rising = all(a <= b for a, b in zip(optima, optima[1:], strict=False))
    return Finding(
        grade(is_rising),
        f"q_1 {first_acceptances}, c_d .05, beta .5: the formula says "
        f"{', '.join(f'{value:.1f}' for value in formula)}, the best of Eq. 37 is "
        f"{', '.join(map(str, optima))}",
    )


def judge_mixtures(results: StoredResults) -> Finding:
    return Finding("not measured", "")


def judge_text_alone(results: StoredResults) -> Finding:
    return Finding("not measured", "")


CLAIMS = (
    Claim(
        "Fig. 2",
        "Entropy is correlated along an answer: its autocorrelation stays high over many lags.",
        "autocorrelation, in a plot",
        "figure sage-entropy",
        judge_entropy_correlation,
        "partly",
        "The entropies of neighbouring tokens are a little correlated where the draft that never "
        "saw pruning describes a clip. Tokens further apart are not, and the other draft's are "
        "not either. In short clauses a colour is uncertain and the word after it is not.",
    ),
    Claim(
        "Fig. 3",
        "Acceptance rises with the length of the answer, SAGE's more than SpecVLM's.",
        "accepted tokens, in a plot",
        "figure sage-length",
        judge_answer_length,
        "does not hold",
        "Over the calibrated view SAGE is ahead by a half and more from the shortest answers on, "
        "and its lead does not grow. Past the end of the text (after 154 tokens, ignored here) "
        "drafts and target agree less.",
    ),
    Claim(
        "Table 5",
        "Pruning up to 90 % leaves tau as it is, and is fastest between 80 and 90 %.",
        "5.60 and 2.37x unpruned, 5.74 and 3.36x at 90 %",
        "figure sage-pruning",
        judge_pruning,
        "does not hold",
        "At the calibrated lambda, keeping a fifth of the video costs hardly any acceptance, and "
        "keeping a tenth costs one token in fourteen. So small a draft gains little time by "
        "reading less. It is fastest with six tenths pruned, by less than runs differ.",
    ),
    Claim(
        "Sec. 3.2, 6.3",
        "The last round's entropy is good enough to plan the next tree by.",
        "no number",
        "figure sage-plan",
        judge_planning_ahead,
        "does not hold",
        "Planning depth and width by the last round loses nothing for the draft that was trained "
        "on pruned video. It loses a fifth of a token for the other draft, whose last tree "
        "predicts the next one less well. Our earlier reading, in which the root's distribution "
        "also stood for every level of the next tree, loses .2 to .5.",
    ),
    Claim(
        "Tables 1-3",
        "SAGE accepts more than SpecVLM on every benchmark (up to 72 % more).",
        "7 to 72 % more accepted tokens: 3.51 for 3.27 (LongVideoBench) to 5.94 for 3.45 (MVBench)",
        f"{RUN}, {SHORT}",
        judge_acceptance,
        "holds",
        "It accepts .7 to 2.3 tokens more, because its trees are deeper, and as wide by the rule "
        "in the paper's prose. In our earlier reading, with the whole tree planned from one "
        "distribution and the formal rule, it accepted fewer in lists and as many in short "
        "answers.",
    ),
    Claim(
        "Tables 1-3",
        "SAGE decodes faster than SpecVLM, SD-Tree and SD-Chain (up to 3.44x).",
        "2.22x to 3.44x; SpecVLM 2.15x to 2.96x, SD-Tree 1.96x to 2.26x, SD-Chain 1.76x to 2.25x",
        RUN,
        judge_speed,
        "partly",
        "It is faster than the static trees. A plain chain of 5 verifies fewer rows and is a "
        "little faster. By the formal rule, which makes fewer nodes than the prose's, SAGE is "
        "faster than that chain.",
    ),
    Claim(
        "Sec. 4.2, 5",
        "Adapting consistently outperforms static configurations.",
        "2.22x to 3.44x; static trees and chains 1.76x to 2.96x",
        RUN,
        judge_fixed_shapes,
        "does not hold",
        "SAGE does not use the cost of a row, and on a CPU rows cost time. The fitted shape is "
        "chosen by that cost.",
    ),
    Claim(
        "Table 6",
        "Updating the tree takes 0.39 % of the time.",
        "0.39 % of the whole answer's seconds",
        RUN,
        judge_overhead,
        "holds",
        "A round needs little arithmetic beside its forwards, which take milliseconds.",
    ),
    Claim(
        "Table 3",
        "It also helps a mixture of experts.",
        "4.39 accepted tokens and 1.32x; SpecVLM 3.24 and 1.14x",
        "",
        judge_mixtures,
        "not measured",
        "Mixtures of experts run here with random weights only, which say nothing about "
        "acceptance.",
    ),
    Claim(
        "Table 4",
        "On text alone it accepts more than native speculative decoding.",
        "4.05 and 4.89 accepted tokens; native SD 3.12 and 3.48",
        "",
        judge_text_alone,
        "not measured",
        "The embedded pair was trained on no text but its own world's. The claim is judged in the "
        "last column alone, with a draft of ours ([how](real-drafts.md)).",
    ),
    Claim(
        "Lemma 4.3",
        "p_1 >= 1/k + alpha (k - 1)/k.",
        "a proof",
        "",
        judge_lemma,
        "does not hold",
        "The proof bounds the entropy's curve by its chord. At a given entropy, however, p_1 is "
        "smallest where few tokens share the mass and not all k, so two equal tokens already "
        "break the bound.",
    ),
    Claim(
        "Theorem 4.4",
        "Acceptance is guaranteed above a confidence of 0.56 (k = 10, epsilon = 0.05).",
        "a proof",
        "",
        judge_guarantee,
        "does not hold",
        "It rests on Lemma 4.3. Two nearly equal tokens are confident by Eq. 9 and a small shift "
        "swaps them.",
    ),
    Claim(
        "Theorem 4.6",
        "A chain is accepted for sum_l p^l gamma^(l (l - 1)/2) tokens.",
        "a proof",
        "",
        judge_expectation,
        "holds",
        "By summation by parts it equals the sum over the distribution of the number accepted.",
    ),
    Claim(
        "Theorem 4.7",
        "The best depth is ceil(log(c_t/c_d) / log(1/p) - 1).",
        "a proof",
        "",
        judge_depth_formula,
        "does not hold",
        "The proof weighs one more token against one more draft step. A rate is a ratio, and its "
        "optimum comes earlier. It does grow with p, as the text says.",
    ),
    Claim(
        "Theorem 4.8",
        "The best width grows as (q_1/c_d)^(1/(1 + beta)).",
        "a proof",
        "",
        judge_width_formula,
        "does not hold",
        "The more probable the first candidate is, the less others can gain. So the best width "
        "falls with q_1, as the paper's own text argues, while the formula (by dimensional "
        "analysis) says the opposite.",
    ),
)
