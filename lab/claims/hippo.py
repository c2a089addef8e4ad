"""HIPPO's claims, and how each is judged on the embedded pair.

Its paper counts its own accepted tokens from refusal to refusal and those of its rivals by the
round, and compares whole answers with speedups that SpecVLM printed for decoding alone. Here both
sides of a comparison have the same unit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lab.claims.claim import (
    ACCEPTED,
    ACCEPTED_UNTIL_REFUSAL,
    CLIPS,
    TAU_DIFFERENCE,
    WHOLE_SPEED,
    Claim,
    Pair,
    StoredResults,
)
from lab.claims.rule import (
    ARITHMETIC,
    HIGHER_RATIO,
    LARGE_SHARE,
    MORE,
    SMALL_SHARE,
    Finding,
    Premise,
    Unit,
    computed,
    not_testable,
    of_intervals,
    paired,
)
from lab.claims.rule import judge as judge_by_rule
from lab.claims.specvlm import KEEPS, TREE
from lab.studies.specvlm import LAMBDA
from saccade.bench.records import Answer

RUN, TO_THE_LETTER = "hippo-2k", "hippo-paper"
WAITING, EARLY = "hippo/early=wait", ("hippo/early=superset", "hippo/early=all")
SERIAL = f"{WAITING}/schedule=serial"
BASELINES = {"vanilla SD": "sd", "SD-tree": "sd-tree", "SpecVLM": TREE}
PEARLS: list[Pair] = [
    ("HIPPO over PEARL", WAITING, "pearl"),
    *((f"{own} over PEARL Syn-Prefill", own, "pearl-syn") for own in EARLY),
]
PEARL_SPECVLM = f"pearl-specvlm/lambda={LAMBDA}"  # At the lambda that SpecVLM has here.
EDGES, EVEN_SHARE = ("top tenth", "bottom tenth"), 0.1
EDGE_SHARE = Unit("share of kept tokens at an edge, less an even tenth", "difference")
RIGHT = Unit("share of questions answered right", "difference")
DRAFTING = Unit("drafting's share of a round's seconds", "value", is_time=True)
WAITING_SHARE = Unit("share of decoding spent waiting for the draft", "value", is_time=True)
SAVED = Unit("seconds of a whole answer, ratio", "ratio", is_time=True)
CHOOSING = Unit("choosing's share of an answer's seconds", "value", is_time=True, digits=4)
COPIED = Unit("SpecVLM's own speedup less the one HIPPO prints for it", "difference")
# SpecVLM's speedups of LLaVA-OneVision 72B/7B in HIPPO's Table 1 (of whole answers, as its text
# says) and in SpecVLM's own Table 1, where they are of decoding alone.
PRINTED_TWICE = {
    "VideoDetailCaption": (2.68, 2.68),
    "MVBench": (2.35, 2.35),
    "MLVU": (2.00, 2.00),
    "LongVideoBench": (2.37, 2.56),
}


def judge_edge_bias(results: StoredResults) -> Finding:
    rows = results.figure("hippo-edges")["rows"]["attention"]
    suites = results.figure_suites("hippo-edges", EDGE_SHARE, [CLIPS])
    comparisons = [
        of_intervals(edge, CLIPS, EDGE_SHARE, rows[edge], EVEN_SHARE, suites.items)
        for edge in EDGES
    ]
    return judge_by_rule(suites, EDGE_SHARE, MORE, comparisons)


def judge_holistic_balance(results: StoredResults) -> Finding:
    rows = results.figure("hippo-edges")["rows"]
    suites = results.figure_suites("hippo-edges", EDGE_SHARE, [CLIPS])
    comparisons = [
        of_intervals(
            f"attention less holistic, {edge}",
            CLIPS,
            EDGE_SHARE,
            rows["attention"][edge],
            rows["holistic"][edge],
            suites.items,
        )
        for edge in EDGES
    ]
    is_biased = judge_edge_bias(results).verdict == "holds"
    premise = Premise("the bias of Fig. 2", is_biased)
    return judge_by_rule(suites, EDGE_SHARE, MORE, comparisons, premise)


def judge_draft_accuracy(results: StoredResults) -> Finding:
    (rows,) = results.figure("hippo-accuracy")["panels"].values()
    drafts = tuple(rows["the whole video"])
    suites = results.figure_suites("hippo-accuracy", RIGHT, drafts)
    comparisons = [
        of_intervals(
            f"everything less {row}",
            draft,
            RIGHT,
            rows["the whole video"][draft],
            rows[row][draft],
            suites.items,
        )
        for row in ("attention", "random")
        for draft in drafts
    ]
    return judge_by_rule(suites, RIGHT, MORE, comparisons)


def judge_components(results: StoredResults) -> Finding:
    pairs = [
        (f"without {part}", "holistic/keep=0.1", f"holistic-no-{part}/keep=0.1")
        for part in ("attn", "temp", "spa")
    ]
    return results.compare_clips("hippo-ablation", TAU_DIFFERENCE, pairs, MORE)


def judge_criteria(results: StoredResults) -> Finding:
    pairs = [
        (f"less {other}, {keep} kept", f"holistic/keep={keep}", f"{other}/keep={keep}")
        for other in ("random", "frames", "fastvid", "dycoke")
        for keep in KEEPS
    ]
    return results.compare_clips("hippo-pruning", TAU_DIFFERENCE, pairs, MORE)


def judge_drafting_share(results: StoredResults) -> Finding:
    def share(answer: Answer) -> float:
        return answer.draft / (answer.draft + answer.verify)

    return results.measure(RUN, DRAFTING, {"vanilla SD": ("sd", share)}, LARGE_SHARE)


def _against_baselines(word: str) -> list[Pair]:
    """Returns HIPPO, as it is by default and to the letter, beside each of its rivals."""
    return [
        (f"{own} {word} {label}", name, rival)
        for own, name in (("HIPPO", WAITING), ("to the letter", TO_THE_LETTER))
        for label, rival in BASELINES.items()
    ]


def judge_fastest(results: StoredResults) -> Finding:
    return results.compare(RUN, WHOLE_SPEED, _against_baselines("over"), HIGHER_RATIO)


def judge_units_of_table(results: StoredResults) -> Finding:
    """Judges from what the two papers print whether HIPPO measured SpecVLM in its own unit."""
    comparisons = [
        computed(name, COPIED, own - there) for name, (there, own) in PRINTED_TWICE.items()
    ]
    return judge_by_rule(ARITHMETIC, COPIED, MORE, comparisons)


def judge_acceptance(results: StoredResults) -> Finding:
    return results.compare(RUN, ACCEPTED, _against_baselines("less"), MORE)


def judge_acceptance_until_refusal(results: StoredResults) -> Finding:
    return results.compare(RUN, ACCEPTED_UNTIL_REFUSAL, _against_baselines("less"), MORE)


def judge_parallel_schedule(results: StoredResults) -> Finding:
    pairs = [("beside over in turns", WAITING, SERIAL)]
    return results.compare(RUN, WHOLE_SPEED, pairs, HIGHER_RATIO)


def judge_gain_over_pearl(results: StoredResults) -> Finding:
    pairs = [*PEARLS, ("HIPPO over PEARL-SpecVLM", WAITING, PEARL_SPECVLM)]
    return results.compare(RUN, WHOLE_SPEED, pairs, HIGHER_RATIO)


def _totals(answers: Sequence[Mapping[str, float]]) -> dict[int, float]:
    """Returns the seconds of whole answers, by clip."""
    return {clip: answer["total"] for clip, answer in enumerate(answers)}


def judge_early_prefill(results: StoredResults) -> Finding:
    answers = results.figure("hippo-early")["answers"]
    suites = results.figure_suites("hippo-early", SAVED, tuple(answers))
    comparisons = [
        paired(
            f"{late} over {early}",
            size,
            SAVED,
            _totals(own[late]),
            _totals(own[early]),
        )
        for late, early in (("pearl", "pearl-syn"), *((WAITING, own) for own in EARLY))
        for size, own in answers.items()
    ]
    return judge_by_rule(suites, SAVED, HIGHER_RATIO, comparisons)


def judge_overlap(results: StoredResults) -> Finding:
    def waiting(answer: Answer) -> float:
        return answer.draft / answer.decode

    return results.measure(RUN, WAITING_SHARE, {"HIPPO": (WAITING, waiting)}, SMALL_SHARE)


def judge_pruning_cost(results: StoredResults) -> Finding:
    def share(answer: Answer) -> float:
        return (answer.guide + answer.beside_guide) / answer.total

    return results.measure(RUN, CHOOSING, {"HIPPO": (WAITING, share)}, SMALL_SHARE)


def judge_families(results: StoredResults) -> Finding:
    return not_testable(
        "missing: trained pairs of four families. The embedded pair is one.", WHOLE_SPEED.unit
    )


CLAIMS = (
    Claim(
        "Fig. 2",
        "Attention keeps too much at the top and bottom edges of frames.",
        "a plot",
        "lab figure hippo-edges",
        judge_edge_bias,
        "not shown",
        "This target looks where the shapes are.",
    ),
    Claim(
        "Fig. 8",
        "The holistic score removes the bias.",
        "a plot",
        "lab figure hippo-edges",
        judge_holistic_balance,
        "not testable here",
    ),
    Claim(
        "Fig. 3",
        "The draft answers worse on a tenth, by attention or at random.",
        "a plot",
        "lab figure hippo-accuracy",
        judge_draft_accuracy,
        "partly",
        "By attention, for one draft. At random the other loses 2 of 50 questions.",
    ),
    Claim(
        "Fig. 6",
        "Each of the three scores helps.",
        "speed, in a plot",
        "lab figure hippo-ablation",
        judge_components,
        "partly",
        "Only attention does, for one draft.",
    ),
    Claim(
        "Fig. 7",
        "Choices without the target's attention are worse at every ratio.",
        "a plot",
        "lab figure hippo-pruning",
        judge_criteria,
        "not shown",
        "Keeping a little of every frame does better.",
    ),
    Claim(
        "Fig. 4",
        "Drafting takes a substantial share of a round.",
        "a plot",
        f"lab run {RUN}",
        judge_drafting_share,
        "holds",
    ),
    Claim(
        "Table 1",
        "HIPPO accepts far more tokens, counted by the round.",
        "12.42 of 4.00 (MLVU), in two units",
        f"lab run {RUN}",
        judge_acceptance,
        "not shown",
        "By default it accepts fewer than each rival in every suite. To the letter no suite "
        "shows more.",
        "In one unit HIPPO, by default here, accepts fewer tokens than each of its three rivals, "
        "in every suite, by the round and from refusal to refusal. As its paper has it no suite "
        "shows more. The paper compares two units.",
    ),
    Claim(
        "Table 1",
        "The same, counted from refusal to refusal.",
        "12.42 of 4.00 (MLVU), in two units",
        f"lab run {RUN}",
        judge_acceptance_until_refusal,
        "not shown",
        "The same.",
    ),
    Claim(
        "Table 1",
        "SpecVLM's speedups there are of whole answers, as HIPPO's are.",
        "LLaVA-OneVision, four sets",
        "",
        judge_units_of_table,
        "partly",
        "Three are those of SpecVLM's Table 1.",
        "SpecVLM's 2.68x is of decoding alone. HIPPO's Table 1 prints it, and two more of "
        "SpecVLM's own figures, beside HIPPO's speedups of whole answers.",
    ),
    Claim(
        "Table 1",
        "HIPPO is the fastest.",
        "3.51x of 2.35x, 2.02x, 1.82x (MVBench)",
        f"lab run {RUN}",
        judge_fastest,
        "partly",
        "Faster than SD-tree and SpecVLM in descriptions. Vanilla SD is faster in all suites "
        "but one, and to the letter HIPPO is slower than its rivals in 17 of 18 cases.",
    ),
    Claim(
        "Fig. 6",
        "Working in parallel helps.",
        "a plot",
        f"lab run {RUN}",
        judge_parallel_schedule,
        "does not hold",
        "Draft and target share two cores here.",
    ),
    Claim(
        "Table 3",
        "HIPPO beats PEARL, its early prefill and SpecVLM's view.",
        "2.89x of 2.45x, 2.64x, 2.69x at most",
        f"lab run {RUN}",
        judge_gain_over_pearl,
        "not shown",
        "All four are within a few percent.",
    ),
    Claim(
        "Table 3",
        "Drafts that read while the target does make answers faster.",
        "2.64x of 2.45x at most",
        "lab figure hippo-early",
        judge_early_prefill,
        "not shown",
        "At 2,048 tokens and more they make answers slower here. At 256 nothing is shown.",
    ),
    Claim(
        "Table 2",
        "The draft's work is hidden behind the target's.",
        "26.7 of 58.8 s",
        f"lab run {RUN}",
        judge_overlap,
        "does not hold",
        "6 to 10 % of decoding is spent waiting for the draft, just above 5 %.",
    ),
    Claim(
        "Table 2",
        "Choosing costs next to nothing.",
        "0.11 of 58.8 s",
        f"lab run {RUN}",
        judge_pruning_cost,
        "holds",
    ),
    Claim(
        "Fig. 9-20",
        "All of it repeats in four families.",
        "plots",
        "",
        judge_families,
        "not testable here",
    ),
)
