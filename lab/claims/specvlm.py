"""SpecVLM's claims, and how each is judged on the embedded pair."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from lab.claims.claim import (
    Claim,
    Finding,
    StoredResults,
    Verdict,
    accepted_tokens,
    decoding_speed,
    grade,
    grade_each,
    grade_ordering,
    interval_text,
    mean_difference,
    tau_of,
)
from lab.studies.experiment import DRAFTS
from lab.studies.specvlm import CALIBRATED, LAMBDA

RUN, TREE, SELF_DRAFTED = "papers-2k", CALIBRATED, f"specvlm-self/lambda={LAMBDA}"
SELF_RUN = "papers-self"  # In this run the draft is the target's own checkpoint, loaded again.
OFFICIAL = "specvlm/view=specvlm-official/positions=repacked"
CAPTIONS = RUN, "shapes-caption-2k"
KEEPS = ("0.50", "0.30", "0.20", "0.10", "0.05", "0.02")
NAIVE, ADAPTED = DRAFTS


def judge_examples(results: StoredResults) -> Finding:
    cases = results.figure("specvlm-cases")["cases"]
    shares = [mean(drafted for _, drafted in case["words"]) for case in cases]
    accepted_words = "; ".join(
        ", ".join(f"{value:.2f} from {what}" for what, value in case["accepted"].items())
        for case in cases
    )
    words = " and ".join(f"{share:.0%}" for share in shares)
    return Finding(
        grade_each([share > 0.5 for share in shares]),
        f"{words} of the tokens are the draft's; accepted a round: {accepted_words}",
    )


def judge_standard_speedup(results: StoredResults) -> Finding:
    speedup = results.speed(*CAPTIONS, TREE)
    fitted = results.speed(*CAPTIONS, f"{TREE}/shape=fit")
    verdict = grade(speedup[1] >= 2, speedup[1] > 1)
    official = results.speed(*CAPTIONS, OFFICIAL)
    return Finding(
        verdict,
        f"{interval_text(speedup)}x with the 25-node tree, {interval_text(fitted)}x with a shape "
        f"fitted here; the tree by the published code's choices {interval_text(official)}x",
    )


def judge_self_speedup(results: StoredResults) -> Finding:
    speedup = results.speed(*CAPTIONS, SELF_DRAFTED)
    verdict = grade(speedup[1] > 1, speedup[2] > 1)
    run_and_suite = SELF_RUN, CAPTIONS[1]
    official_gain = results.gain(*run_and_suite, OFFICIAL, SELF_DRAFTED, tau_of)
    return Finding(
        verdict,
        f"{interval_text(speedup)}x; the published code's way (a second prefill over the pruned "
        f"prompt, its choices) has a tau of {interval_text(official_gain)} beside ours",
    )


def judge_pruning_speedup(results: StoredResults) -> Finding:
    pruned = {"SD-Rand": "sd-tree/view=random/keep=0.1", "SpecVLM": TREE}
    gains = [results.gain(*CAPTIONS, name, "sd-tree", decoding_speed) for name in pruned.values()]
    method_by_name = {"SD-Tree": "sd-tree", **pruned}.items()
    words = ", ".join(
        f"{name} {interval_text(results.speed(*CAPTIONS, way))}x" for name, way in method_by_name
    )
    gain_words = " and ".join(interval_text(gain, 0) for gain in gains)
    return Finding(
        grade_ordering(gains), f"{words}; {gain_words} tokens/s above SD-Tree, same clips"
    )


def judge_gain_over_random(results: StoredResults) -> Finding:
    gain = results.gain(*CAPTIONS, TREE, "sd-tree/view=random/keep=0.1", tau_of)
    official_gain = results.gain(*CAPTIONS, TREE, OFFICIAL, tau_of)
    return Finding(
        grade_ordering([gain]),
        f"tau {interval_text(gain)} above random, same clips; {interval_text(official_gain)} above "
        "the published code's choices (lambda .4, rounded down, positions counted anew)",
    )


def judge_random_pruning(results: StoredResults) -> Finding:
    data = results.figure("specvlm-sensitivity")
    (lines,), shares = data["panels"].values(), data["at"]

    def shares_left(pruned: float) -> list[float]:
        at, whole = shares.index(pruned), shares.index(0.0)
        return [
            accepted_tokens(line[at][0]) / accepted_tokens(line[whole][0])
            for line in lines.values()
        ]

    words = "; ".join(
        f"{pruned:.0%} pruned: {', '.join(f'{share:.0%}' for share in shares_left(pruned))}"
        for pruned in (0.5, 0.9, 0.95, 1.0)
    )
    verdict = grade_random_pruning(shares_left(0.5), shares_left(0.9))
    return Finding(
        verdict,
        f"of the accepted tokens of the whole video remain ({', '.join(lines)}): {words}",
    )


def grade_random_pruning(half: Sequence[float], tenth: Sequence[float]) -> Verdict:
    """Returns the verdict on pruning at random: it costs little up to a half, and then much more.

    ``half`` and ``tenth`` are the shares of acceptance that are left with so much of the video.
    """
    falls_further = (
        rest < 0.9 and own - rest > 1 - own for own, rest in zip(half, tenth, strict=True)
    )
    return grade_each([min(half) > 0.9, all(falls_further)])


def judge_long_tail(results: StoredResults) -> Finding:
    data = results.figure("specvlm-tail")
    mass = data["panels"]["share of the most\nattended, together"]["attention"]
    tenth = max(i for i, rank in enumerate(data["at"]) if rank <= data["size"] / 10)
    verdict = grade(mass[tenth] > 0.4, mass[tenth] > 0.2)
    return Finding(verdict, f"the most attended tenth gets {mass[tenth]:.0%} of the attention")


def judge_every_ratio(results: StoredResults) -> Finding:
    all_gains = []
    words = []
    for what in DRAFTS:
        taus = results.figure("specvlm-criteria")["clips_tau"][what]
        gains = [
            mean_difference(taus[f"{CALIBRATED}/keep={k}"], taus[f"random/keep={k}"]) for k in KEEPS
        ]
        all_gains += gains
        words.append(
            f"a draft that {what}: "
            + ", ".join(f"{gain[0]:+.2f}" for gain in gains)
            + f" at {', '.join(KEEPS)} kept"
        )
    return Finding(grade_ordering(all_gains), "tau of SpecVLM less random: " + "; ".join(words))


def judge_windows(results: StoredResults) -> Finding:
    return _compare_choices(
        results, "specvlm-windows", "attention", ("front", "middle", "end"), "window-{}"
    )


def judge_temporal_redundancy(results: StoredResults) -> Finding:
    all_gains = []
    words = []
    for what in DRAFTS:
        taus = results.figure("specvlm-redundancy")["clips_tau"][what]
        for name in ("frames", "fastvid", "dycoke"):
            for other in ("uniform", "random"):
                gain = mean_difference(taus[f"{other}/keep=0.1"], taus[f"{name}/keep=0.1"])
                all_gains.append(gain)
                words.append(f"{other} over {name} {gain[0]:+.2f}")
    half = len(words) // 2
    return Finding(
        grade_ordering(all_gains),
        f"tau, a draft that {NAIVE}: {', '.join(words[:half])}; one {ADAPTED}: "
        + ", ".join(words[half:]),
    )


def _compare_choices(
    results: StoredResults, figure: str, own: str, others: tuple[str, ...], name: str
) -> Finding:
    all_gains = []
    words = []
    for what in DRAFTS:
        taus = results.figure(figure)["clips_tau"][what]
        gains = [
            mean_difference(taus[f"{own}/keep=0.1"], taus[f"{name.format(o)}/keep=0.1"])
            for o in others
        ]
        all_gains += gains
        words.append(
            f"a draft that {what}: "
            + ", ".join(
                f"{interval_text(gain)} over {o}" for gain, o in zip(gains, others, strict=True)
            )
        )
    return Finding(grade_ordering(all_gains), f"tau of {own} less: " + "; ".join(words))


def judge_both_stages(results: StoredResults) -> Finding:
    all_gains = []
    words = []
    for what in DRAFTS:
        taus = results.figure("specvlm-stages")["clips_tau"][what]
        whole = taus[f"{CALIBRATED}/keep=0.1"]
        gains = [
            mean_difference(whole, taus[f"{part}/keep=0.1"]) for part in ("uniform", "attention")
        ]
        all_gains += gains
        words.append(
            f"a draft that {what}: {interval_text(gains[0])} over none of stage I, "
            f"{interval_text(gains[1])} over none of stage II"
        )
    return Finding(grade_ordering(all_gains), "tau of SpecVLM: " + "; ".join(words))


def judge_steady_acceptance(results: StoredResults) -> Finding:
    answers = results.answers(*CAPTIONS, TREE)
    by_round = [mean(a.accepted[at] for a in answers if len(a.accepted) > at) for at in range(10)]
    first_ten = mean(n for answer in answers for n in answer.accepted[:10])
    all_rounds = mean(n for answer in answers for n in answer.accepted)
    verdict = grade_each([0.8 <= first_ten / all_rounds <= 1.25, by_round[0] == max(by_round)])
    return Finding(
        verdict,
        f"{first_ten:.2f} accepted tokens in the first ten rounds, {all_rounds:.2f} in all; first "
        f"round {by_round[0]:.2f}, the nine after it {min(by_round[1:]):.2f} to "
        f"{max(by_round[1:]):.2f}",
    )


def judge_trees(results: StoredResults) -> Finding:
    gains = [
        results.gain(*CAPTIONS, "sd-tree", "sd", tau_of),
        results.gain(*CAPTIONS, TREE, f"{TREE}/shape=chain-5", tau_of),
    ]
    return Finding(
        grade_ordering(gains),
        f"tau of the tree less the chain's: {interval_text(gains[0])} (whole video), "
        f"{interval_text(gains[1])} (a tenth)",
    )


def judge_pruning_cost(results: StoredResults) -> Finding:
    answers = results.answers(*CAPTIONS, TREE)
    whole = mean(answer.total for answer in answers)
    guide = mean(answer.guide for answer in answers) / whole
    prefill = mean(answer.draft_prefill for answer in answers) / whole
    longer = results.gain(*CAPTIONS, TREE, "ar", lambda answer: answer.prefill)
    recording = [100 * seconds / whole for seconds in longer]
    verdict = grade(guide + prefill + recording[2] / 100 < 0.03, guide + prefill < 0.03)
    return Finding(
        verdict,
        f"choosing takes {guide:.2%} of the answer, the draft's prefill {prefill:.2%}, writing "
        f"down what the text attends to {interval_text(recording, 1)}% (the target's prefill is "
        "that much longer than plain decoding's)",
    )


def judge_step_growth(results: StoredResults) -> Finding:
    data = results.figure("specvlm-latency")
    (lines,) = data["panels"].values()
    small = lines["draft"][data["at"].index(1024)][0]
    large = lines["draft"][data["at"].index(32768)][0]
    verdict = grade(large > 2 * small, large > small)
    parts = results.figure("specvlm-layers")
    (lines_by_part,) = parts["panels"].values()
    ends = [parts["at"].index(keys) for keys in (1024, 32768)]
    words = ", ".join(
        f"{name} {lines_by_part[name][ends[0]][0]:.2f} and {lines_by_part[name][ends[1]][0]:.2f}"
        for name in ("attention", "FFN", "one layer")
    )
    return Finding(
        verdict,
        f"{small:.2f} ms over 1,024 keys, {large:.2f} ms over 32,768; by the modules: {words}",
    )


def judge_text_attention(results: StoredResults) -> Finding:
    data = results.figure("specvlm-boundary")
    text, visual = data["tenth"]["text queries"], data["tenth"]["visual queries"]
    words = ", ".join(f"{interval_text(own)} ({name})" for name, own in data["tenth"].items())
    return Finding(
        grade(text[1] > visual[2], text[0] > visual[0]),
        f"share of a row's attention on the video that its most attended tenth gets: {words}",
    )


CLAIMS = (
    Claim(
        "Fig. 4",
        "Text attends to few visual tokens, where these attend to each other densely.",
        "a map",
        "figure specvlm-boundary",
        judge_text_attention,
        "does not hold",
        "It is the other way round: rows of the video attend to their neighbours, and text to "
        "everything.",
    ),
    Claim(
        "Table 1",
        "With a smaller draft (std-SD) decoding is 2.0x to 2.68x as fast.",
        "2.00x to 2.68x plain decoding, decoding alone",
        RUN,
        judge_standard_speedup,
        "partly",
        "Each of the 26 rows to verify costs time on a CPU, which keeps the tree below the "
        "paper's range. The same draft and view reach it in a shape fitted to this machine's "
        "costs.",
    ),
    Claim(
        "Tables 1-2",
        "The target drafting for itself over a tenth of its keys (self-SD) is 1.24x to 1.59x as "
        "fast.",
        "1.24x to 1.59x plain decoding, decoding alone",
        f"{RUN}, {SELF_RUN}",
        judge_self_speedup,
        "does not hold",
        "A self-draft's step reads all the target's weights, and beside them 2,048 keys are "
        "little, so pruning keys saves next to nothing. A gain takes a GPU and a long context.",
    ),
    Claim(
        "Tables 1-2",
        "Pruning makes the tree faster: SD-Rand and SpecVLM beat SD-Tree.",
        "SD-Tree 2.08x, SD-Rand 2.50x, SpecVLM 2.68x; 1.40x, 2.03x, 2.05x, decoding alone",
        RUN,
        judge_pruning_speedup,
        "partly",
        "SD-Rand is faster beyond the interval of the difference on the same clip, and SpecVLM "
        "only within it. Two threads read 2,048 keys of so small a draft nearly as fast as a "
        "tenth of them.",
    ),
    Claim(
        "Tables 1-2",
        "SpecVLM accepts more than random pruning.",
        "3.48 of SD-Tree's 3.68 accepted tokens, SD-Rand 3.19: 40 % of its loss",
        RUN,
        judge_gain_over_random,
        "does not hold",
        "This pair's attention is spread widely (Fig. 5 here), so what it picks is no better "
        "than chance. At the paper's lambda of .5 tau is lower by .66 for the draft that never saw "
        "pruning and by .23 for the other (figure specvlm-lambda).",
    ),
    Claim(
        "Fig. 2b",
        "Pruning at random costs little acceptance up to 50 %, and considerably more beyond.",
        "accepted tokens, in a plot",
        "figure specvlm-sensitivity",
        judge_random_pruning,
        "partly",
        "Pruning up to a half costs little, as claimed, but pruning up to nine tenths costs "
        "hardly more. One frame in ten shows nearly all there is to say, and the drop comes after "
        "that.",
    ),
    Claim(
        "Fig. 5",
        "Attention on the video is long-tailed: few tokens get most of it.",
        "over 50 % of the attention on 10 % of the tokens",
        "figure specvlm-tail",
        judge_long_tail,
        "does not hold",
        "So small a model attends almost evenly. Fully even attention would give that tenth 10 %.",
    ),
    Claim(
        "Fig. 6",
        "SpecVLM accepts more than random pruning at every ratio, and the gap widens.",
        "accepted tokens, in a plot",
        "figure specvlm-criteria",
        judge_every_ratio,
        "does not hold",
        "SpecVLM is as good as random, at a lambda calibrated on other clips. At the paper's .5 "
        "stage I would take the whole budget here, and fewer tokens would be accepted (figure "
        "specvlm-lambda).",
    ),
    Claim(
        "Fig. 7a",
        "Attention chooses better than windows of the video.",
        "accepted tokens, in a plot",
        "figure specvlm-windows",
        judge_windows,
        "partly",
        "It does for the draft that was trained on pruned video, and it is better than the "
        "video's end for both drafts. For the other draft the front and the middle do as well, "
        "because a window has whole frames and in this world one frame shows every shape.",
    ),
    Claim(
        "Fig. 7b",
        "Choosing by temporal redundancy is worse than an even sample and even a random one.",
        "accepted tokens, in a plot",
        "figure specvlm-redundancy",
        judge_temporal_redundancy,
        "partly",
        "For one draft an even sample is ahead of dropping frames, and slightly ahead of DyCoke, "
        "by a tenth of a token at most. Shapes stay through a clip, so dropping frames loses "
        "little, and all choices lie within .1 of each other.",
    ),
    Claim(
        "Fig. 8",
        "Both stages help.",
        "accepted tokens less the whole's, in a plot",
        "figure specvlm-stages",
        judge_both_stages,
        "partly",
        "Stage II does the work. At the calibrated lambda of .02 (figure specvlm-lambda) stage I "
        "takes one token in fourteen, which helps neither draft and costs the one that never saw "
        "pruning a little. At the paper's .5 stage I would fill the budget, because this "
        "attention is so even.",
    ),
    Claim(
        "Table 3",
        "Acceptance does not fade with the decoding step, and the first step accepts most.",
        "3.39 accepted tokens in the first ten, 3.48 in all; 4.3 in the first",
        RUN,
        judge_steady_acceptance,
        "partly",
        "Acceptance does not change along an answer, because the same kinds of clauses return. "
        "The first round is no better than those after it, one of which is accepted whole on "
        "every clip. The draft is almost never wrong about how an answer begins, nor about what "
        "follows.",
    ),
    Claim(
        "Table 4",
        "Trees accept more than chains.",
        "3.68 against 3.12 and 3.48 against 2.79 accepted tokens",
        RUN,
        judge_trees,
        "holds",
        "Where the first candidate is rejected, the second is often right.",
    ),
    Claim(
        "Table 5",
        "Choosing and the draft's prefill cost next to nothing (0.06 and 0.82 of 57 s).",
        "0.1 % and 1.4 % of the whole answer's seconds",
        RUN,
        judge_pruning_cost,
        "holds",
        "The draft reads a tenth of the video. Recording the attention, which the paper counts in "
        "the target's prefill (24.01 s in both of its columns), takes less than prefills differ "
        "by from run to run. Measured in turns it takes 2 to 3 % of a prefill (`lab prefill "
        "--turns`).",
    ),
    Claim(
        "Fig. 2a, Table 6",
        "A draft's step grows several times slower over a long input, however small the draft.",
        "one layer: 1.0 ms over 1k keys, 3.29 over 32k",
        "figure specvlm-latency, figure specvlm-layers",
        judge_step_growth,
        "holds",
        "Keys are read at every step. Below some thousand of them, the weights take most of the "
        "time.",
    ),
    Claim(
        "Fig. 10, 11",
        "Shown a tenth of the video, the draft still writes most of the answer.",
        "two examples, in colour",
        "figure specvlm-cases",
        judge_examples,
        "holds",
        "It misses a colour, a place or how a clause begins, as it does with all of the video.",
    ),
)
