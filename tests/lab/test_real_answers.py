"""What is measured on models that others trained, and the pages of it. Without SmolLM2 all but its
weights is tested; with it (``saccade real make``), answers about a text of our own."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import saccade
from lab import checkpoints
from lab.__main__ import app
from lab.real import answers, attention_sets, long_documents, pair
from lab.real.results_page import ForwardSizes, make_page
from saccade.bench import peers
from saccade.core.errors import OptionError
from saccade.inputs import load, real_weights
from saccade.methods import resolve
from saccade.model.prefix_cache import PrefixCache

# The user's, looked up before the tests have a cache folder of their own.
CHECKPOINT = real_weights.checkpoint_folder()
PACKAGE = Path(saccade.__file__).parent
RESULTS = PACKAGE.parents[1] / "docs" / "results"
LENGTH = 256  # tokens of the documents that they are asked about
SLACK = 24  # rows that a window may hold beside its share until it slides
needs_weights = pytest.mark.skipif(
    not (CHECKPOINT / "config.json").is_file(),
    reason=f"{real_weights.SMOLLM2.name} is not here: run `saccade real make`",
)


# -- documents and looks -----------------------------------------------------------------------


def test_documents_are_long_texts_in_turn(tmp_path):
    """Claim: every file that is long enough, in order, with the next task and length each."""
    for name, size in (("a.md", 6000), ("b.py", 9000), ("c.bin", 9000), ("d.txt", 100)):
        (tmp_path / name).write_text("x" * size)
    texts = list(long_documents.find_documents([tmp_path]))
    assert [(each.name, each.tokens) for each in texts] == [("a.md", 1800), ("b.py", 2500)]
    assert texts[0].task != texts[1].task
    with pytest.raises(OptionError, match="neither"):
        list(long_documents.find_documents([tmp_path / "nowhere"]))


def test_without_paths_the_measured_texts_are_asked_about():
    """Claim: who names no text asks about those of docs/results/real.md, the same questions about
    the same words in the same order. Fails when a text in notebook/texts is moved or changed."""
    stored = json.loads((RESULTS / "real.json").read_text())["measured"]
    stored_keys = dict.fromkeys((row["document"], row["digest"], row["task"]) for row in stored)
    keys = [(each.name, each.digest, each.task) for each in long_documents.find_documents([])]
    assert keys == [*stored_keys] and len(keys) == 23


def test_an_oracle_holds_most_and_every_choice_its_count():
    """Claim: of all sets as large the oracle's holds the most mass of the moment, at every share;
    each set has the size that was asked for."""
    generator = torch.Generator().manual_seed(1)
    first, before, now = (torch.rand(3, 2, 40, generator=generator).softmax(-1) for _ in range(3))
    for count in (4, 10, 20):
        masses = {}
        for name, choose in ((n, way) for n, own in attention_sets.CHOICES.items() for way in own):
            kept = choose(first, before, now, count)
            assert kept.shape == now.shape and bool((kept.sum(-1) == count).all())
            masses[name] = float((now * kept).sum(-1).mean())
        drawn = [choose(first, before, now, count) for choose in attention_sets.CHOICES["random"]]
        assert len({str(kept.tolist()) for kept in drawn}) == attention_sets.RANDOM_DRAWS > 1
        best = next(name for name in masses if name.startswith("oracle"))
        assert all(masses[best] >= other for other in masses.values())


def test_over_the_whole_document_the_target_goes_on_as_it_does(tmp_path):
    """Claim: over sets that hold all of a document every token stays the same, each set holds all
    of the mass, and without the document's first tokens it is still all; over a few of its tokens
    an answer of random weights goes elsewhere. Fails where a set's cache begins at another place
    than the prompt's end, or lags behind the answer."""
    folder = checkpoints.make("llama", tmp_path / "target")
    model = load(str(folder), device="cpu")
    document = long_documents.Document("a", "some words of a text, " * 30, "Go on.", 100)
    answer_ids = [11 * number % 250 for number in range(30)]
    looks = attention_sets.measure_attention_sets(
        model, document, answer_ids, PrefixCache(answers.PROMPT_CACHE_BYTES), shares=(0.02, 1.0)
    )
    assert len(looks) == 2 * (len(attention_sets.CHOICES) + 1)
    for look in looks:
        if look.keep == 1.0:
            assert look.mass == pytest.approx(1) and look.agrees in (1.0, None)
    assert any(look.agrees is not None and look.agrees < 1 for look in looks)


def test_a_page_says_what_was_measured():
    """Claim: tables hold each method's tau and each set's mass, and how many answers were equal."""
    row = dict(
        digest="0",
        task="?",
        repeated=0.01,
        drafted=9.0,
        prompt_tokens=2000,
        tokens=8,
        accepted=0.5,
        kept=200,
        decode_seconds=1.0,
    )
    measured = [
        {**row, "document": name, "method": method, "same": True, "tau": tau}
        for name in "ab"
        for method, tau in (("ar", 1.0), ("fresh", 4.0))
    ]
    looked = [
        {"document": "a", "keep": keep, "chosen": "oracle", "mass": keep, "agrees": 0.5}
        for keep in attention_sets.SHARES
    ]
    text = make_page(
        {
            "measured": measured,
            "looked": looked,
            "model": "M",
            "settings": {"max_new_tokens": 8},
            "together": 1,
            "sizes": {"weights": 1000, "token": 1},
            "costs": {"context": 2048, "rows": [1, 8], "seconds": [0.02, 0.03]},
            "machine": "P",
            "command": "python -m lab real",
        }
    )
    assert "| `fresh` | 4.00 | 4.00 to 4.00 | 0.50 | 10% | 1.00 |" in text
    assert "| oracle | 0.05 | 0.10 | 0.25 | 0.50 | 0.50 | 0.50 | 0.50 | 0.50 |" in text
    assert "T(n)/T(1) of the target over 2,048 keys, by n: 1.00 (1), 1.50 (8)." in text
    assert "| `fresh` | never |" not in text and "| 571 |" in text  # ms a round
    assert "Of 4 answers 4 are" in text


@pytest.fixture(scope="module")
def real_case() -> tuple[Any, Any, Any, Any, Any]:
    """The real model, two texts of the package, the settings, what ``generate()`` says of them, and
    their prompts, read once."""
    model = load(str(CHECKPOINT), device="cpu")
    own = islice(long_documents.find_documents([PACKAGE]), 2)
    short = [replace(document, tokens=LENGTH) for document in own]
    settings = answers.answer_settings(model, 26, answers.REPETITION_PENALTY)
    truths = [answers.generate_reference(model, document, settings) for document in short]
    return model, short, settings, truths, PrefixCache(answers.PROMPT_CACHE_BYTES)


@needs_weights
@pytest.mark.slow
@pytest.mark.parametrize("keep", [0.1, 0.25])
@pytest.mark.parametrize("name", ["std", "fresh", "streaming", "std/view=random"])
def test_real_weights_answer_as_generate_does(real_case, name, keep):
    """Claim: on real weights and documents of our own a self-draft over a part of the document
    answers as ``generate()``; it drafts, and over no more than that part and the text around."""
    model, short, settings, truths, kept = real_case
    recipe = resolve(f"{name}/keep={keep}")
    for answer in answers.answer_documents(model, short, recipe, settings, truths, kept):
        assert answer.same and answer.drafted > 1
        assert 0 < answer.kept <= keep * LENGTH + SLACK


@needs_weights
@pytest.mark.slow
def test_on_real_weights_a_look_ago_holds_more_than_at_prefill(real_case):
    """Claim: of what each head attends to in a document while it is answered about, the tenth of
    one look ago holds more than the tenth at prefill."""
    model, short, _, truths, kept = real_case
    names = (
        attention_sets.TAIL,
        "fresh: each head's top a look ago",
        "std: each head's top at prefill",
    )
    ways = {name: attention_sets.CHOICES[name] for name in names}
    masses = {
        look.chosen: look.mass
        for look in attention_sets.measure_attention_sets(
            model, short[0], truths[0], kept, shares=[0.1], chosen=lambda first: ways
        )
    }
    assert masses[names[1]] > masses[names[2]]


def test_a_run_goes_on_where_it_was_cut_short(tmp_path):
    """Claim: rows of a document whose text is the same are there again and its truth is not asked
    for again; of another text, or under other settings, there are none."""
    facts = {"model": "M", "settings": {"max_new_tokens": 8}, "together": 1}
    path, document = tmp_path / "real.json", long_documents.Document("a", "text", "?", 4)
    other = long_documents.Document("a", "changed", "?", 4)
    row = answers.MethodResult(
        "a", document.digest, "?", 9, "fresh", True, 8, 0, 2, 1, 9, 3, 1, [1]
    )
    first = answers.Results(path, facts)
    assert first.reference(document, lambda: [1, 2]) == (1, 2)
    first.add([row], "measured")
    again = answers.Results(path, facts)
    assert again.reference(document, lambda: [9]) == (1, 2)
    assert again.missing(document, ["fresh", "std"]) == ["std"]
    assert again.missing(other, ["fresh"]) == ["fresh"]
    assert again.only([document], ["fresh"])["measured"] == [asdict(row)]
    elsewhere = answers.Results(path, {**facts, "settings": {"max_new_tokens": 9}})
    assert elsewhere.missing(document, ["fresh"]) == ["fresh"]


def test_an_answer_that_is_measured_again_replaces_the_earlier_one(tmp_path):
    """Claim: where a batch is answered again because one of its documents is new, each document has
    one row of a method, the newer. Fails if rows are only added."""
    results = answers.Results(None, {"model": "M", "settings": {}, "together": 2})

    def row(name: str, tokens: int, method: str = "fresh") -> answers.MethodResult:
        return answers.MethodResult(name, "0", "?", 9, method, True, tokens, 0, 2, 1, 9, 3, 1)

    results.replace_answers([row("a", 1), row("a", 2, "std")])
    results.replace_answers([row("a", 3), row("b", 4)])
    rows = [
        (each["document"], each["method"], each["tokens"]) for each in results.facts["measured"]
    ]
    assert rows == [("a", "std", 2), ("a", "fresh", 3), ("b", "fresh", 4)]


def test_a_penalty_spares_the_documents_words():
    """Claim: what stands in the answer counts less, whatever its sign; words of the prompt, of
    the header itself and of nowhere are left as they are. Fails if the prompt counts."""
    rule = answers.AnswerPenalty(2.0, (7, 8))
    scores = torch.tensor([[4.0, -4.0, 4.0, 1.0, 0, 0, 0, 3.0, 3.0]] * 2)
    ids = torch.tensor([[7, 2, 3, 7, 8, 0, 1], [2, 3, 4, 5, 6, 7, 8]])
    new_scores = rule(ids, scores)
    assert new_scores[0].tolist() == [2.0, -8.0, 4.0, 1.0, 0, 0, 0, 3.0, 3.0]
    assert new_scores[1].tolist() == scores[1].tolist()


def test_where_bytes_break_even():
    """Claim: at the context where it begins to pay the speed by bytes is 1, below it less and above
    it more; where each round loses more than it makes, it never pays."""
    sizes = ForwardSizes(1000, 1)
    context = sizes.even(4, 9, 0.1)
    assert sizes.speed(4, 9, 0.1, context) == pytest.approx(1)
    assert sizes.speed(4, 9, 0.1, context / 2) < 1 < sizes.speed(4, 9, 0.1, context * 2)
    assert sizes.even(1.5, 9, 0.1) is None


def test_a_loop_is_distinguished_from_a_text():
    """Claim: of a text that says everything once nothing is repeated, of a loop nearly all."""
    assert long_documents.repeated_share(range(40)) == 0
    assert long_documents.repeated_share([1, 2, 3] * 20) > 0.9
    assert long_documents.repeated_share([1, 2]) == 0


def test_a_few_documents_are_the_shortest():
    """Claim: of all documents so many of the shortest are asked about, as they come."""
    texts = [long_documents.Document(f"{n}", "", "", n) for n in (5, 2, 9, 2, 1)]
    assert [each.tokens for each in long_documents.shortest_documents(texts, 3)] == [2, 2, 1]
    assert long_documents.shortest_documents(texts, None) == texts


# -- a target with its draft -------------------------------------------------------------------


def test_a_pair_is_measured_on_every_kind_by_one_command(tmp_path, monkeypatch):
    """Claim: one command puts questions of every kind to ``generate()`` and to every method that
    has something to draft with, in float32 for identity and in the named precision for speed,
    stores each row, and goes on from them: a second run answers nothing. Longer documents are
    answered by a few methods. Fails if a kind, a method or a precision is left out."""
    folder = checkpoints.make("llama", tmp_path / "target")
    monkeypatch.setattr(real_weights, "require_checkpoint", lambda model: folder)
    texts = [
        long_documents.Document("a.md", "some words of a text, " * 12, "Go on.", 60),
        long_documents.Document("long.md", "other words of a text, " * 16, "Go on.", 80),
    ]
    monkeypatch.setattr(long_documents, "find_documents", lambda paths: iter(texts))
    rows = tmp_path / "pair.json"
    command = ["real-pair", "--limit", "1", "--methods", "ar,auto,std/keep=0.25"]
    command += ["--few-documents", "1"]
    command += ["--max-new-tokens", "6", "--identity-tokens", "4", "--draft-quantize", "int8"]
    command += ["--out", str(rows)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    stored = json.loads(rows.read_text())
    for kind, tokens in (("measured", 6), ("identity", 4)):
        answered = {(pair.kind_of(row["document"]), row["method"]) for row in stored[kind]}
        every = {(name, method) for name in pair.KINDS for method in ("hf", "ar", "auto")}
        assert answered == every | {("document", "std/keep=0.25")}
        long = {row["method"] for row in stored[kind] if row["document"] == "document: long.md"}
        assert long == ({"hf", "ar", "auto"} if kind == "measured" else set())
        assert all(row["tokens"] <= tokens for row in stored[kind])
        assert all(0 < row["decode_seconds"] < row["seconds"] for row in stored[kind])
    assert all(row["same"] for row in stored["identity"])
    monkeypatch.setattr(pair, "answer_documents", lambda *all: pytest.fail("answered again"))
    monkeypatch.setattr(peers, "hf", lambda *all: pytest.fail("generated again"))
    assert CliRunner().invoke(app, command).exit_code == 0


def test_a_pair_s_section_has_a_table_of_each_kind():
    """Claim: a method's tau, its tokens a second and its speed against plain decoding and
    ``generate()`` on the same prompt stand in the table of their kind, by seconds a token, so that
    a shorter answer gains nothing; `auto` is compared with the best fixed method; identity is
    counted over the float32 answers of methods."""
    row = dict(document="code: 1", same=True, tokens=97, accepted=None, tau=1.0)
    facts = {
        "measured": [
            {**row, "method": "hf", "tau": None, "decode_seconds": 24.0, "seconds": 97.0},
            {**row, "method": "ar", "decode_seconds": 12.0, "seconds": 48.5},
            {**row, "method": "sd", "decode_seconds": 4.0, "seconds": 16.5, "tokens": 33}
            | {"tau": 4.5, "accepted": 0.7},
            {**row, "method": "auto", "decode_seconds": 6.0, "seconds": 24.25, "tau": 4.0},
        ],
        "identity": [
            {**row, "method": "hf"},
            {**row, "method": "ar"},
            {**row, "method": "sd", "same": False},
        ],
        "identity_tokens": 24,
        "settings": {"dtype": "bfloat16"},
        "model": "T with D",
        "machine": "P.",
        "command": "python -m lab real-pair",
    }
    text = pair.pair_section(facts)
    assert "### Code: 1 prompt\n" in text and "Prose" not in text
    assert (
        "| `sd` | 4.50 | 0.70 | 1 of 1 | 1.00 | 1.00 to 1.00 | 2.00 | 1.00 | 2.00 | 8.0 |" in text
    )
    assert "`auto` decodes 2.00 times as fast as `ar`, and 2.00 times as fast as" in text
    assert "of 2 answers of 24 tokens 1 are" in text
    *_, auto, best = pair.summary_table(facts)
    assert auto == "| code | `auto` | 4.00 | 2.00 [2.00, 2.00] | 4.00 | 2.00 | 4.00 |"
    assert best.startswith("| code | `ar`, the best fixed one | 1.00 | 1.00 [1.00, 1.00] | 2.00 |")
