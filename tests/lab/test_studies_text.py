"""A draft on real weights: its rounding, what is counted of its answers, and the page of them."""

from __future__ import annotations

import json

import pytest
import torch

from lab import checkpoints
from lab.real import answers
from lab.real.long_documents import Document
from lab.studies import text
from saccade.inputs import Loaded, load
from saccade.methods import resolve

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Loaded:
    folder = checkpoints.make("llama", tmp_path_factory.mktemp("llama") / "target")
    return load(str(folder), device="cpu")


def layers(loaded: Loaded) -> dict[str, torch.Tensor]:
    weights = loaded.backbone.model.state_dict()
    return {name: weight for name, weight in weights.items() if "proj" in name}


def test_rounding_leaves_few_levels_and_the_ends(model):
    """Claim: of every group of a row at most 2^bits values are left, its least and its largest
    among them, none moved by more than half a level; embeddings, head and norms are the target's,
    and the target's own weights are left alone. Fails if groups run across rows."""
    before = {name: weight.clone() for name, weight in layers(model).items()}
    draft = text.rounded_draft(model, bits=2, group=8)
    for name, weight in layers(draft).items():
        own, was = weight.view(-1, 8), before[name].view(-1, 8)
        steps = own.sort(dim=1).values.diff(dim=1)
        assert int((steps > 1e-6).sum(1).max()) <= 3
        low, high = was.aminmax(dim=1, keepdim=True)
        assert torch.allclose(own.amin(1, True), low) and torch.allclose(own.amax(1, True), high)
        assert bool(((own - was).abs() <= (high - low) / 6 * 1.001).all())
    others = draft.backbone.model.state_dict().items()
    own = model.backbone.model.state_dict()
    assert all(torch.equal(w, own[name]) for name, w in others if "proj" not in name)
    assert all(torch.equal(weight, before[name]) for name, weight in layers(model).items())
    finer = text.rounded_draft(model, bits=16, group=8)
    assert all(torch.allclose(w, before[n], atol=1e-4) for n, w in layers(finer).items())


def test_accepted_is_counted_by_forwards_and_by_beginnings():
    """Claim: of a question the mean over its forwards, the target's own token left out; of the
    first N tokens, over the forwards that begin in them."""
    rows = [{"document": "a", "method": "sd", "taken": [5, 1, 0]}]
    assert text.accepted_by_document(rows, "sd") == {"a": 2.0}
    assert text.accepted_by_document(rows, "sd", 6) == {"a": 5.0}
    assert text.accepted_by_document(rows, "sd", 7) == {"a": 3.0}


@pytest.mark.extra
def test_a_run_is_reported_in_tables(model, tmp_path, monkeypatch):
    """Claim: with the rounded draft every method answers a question and a document as
    ``generate()`` does; the page has a row a method, of what its rounds accepted, and the draft's
    entropy is there at each token."""
    draft = text.rounded_draft(model)
    tasks = [*text.TASKS[text.SUMS][:1], *text.TASKS[text.CODE][:1]]
    texts = [Document("a text", "a text of words, " * 60, "Go on.", 120)]
    facts = {"model": "M", "settings": {"max_new_tokens": 6}, "together": 2, "command": "C"}
    results = answers.Results(tmp_path / "real-drafts.json", facts)
    settings = answers.answer_settings(model, 6, answers.REPETITION_PENALTY)
    for some, names in ((tasks, ("sd", "sd/shape=sage")), (texts, ("specvlm/keep=0.1", "sage"))):
        recipes = [resolve(name) for name in names]
        answers.run_methods(
            model, some, recipes, settings, results, together=2, draft=draft.backbone
        )
    for each in (*tasks, *texts):
        reference = results.reference(each, lambda: ())
        results.add([text.measure_entropies(model, draft, each, reference)], "looked")
    report = json.loads((tmp_path / "real-drafts.json").read_text())
    assert len(report["measured"]) == 6 and all(row["same"] for row in report["measured"])
    for row in report["measured"]:  # one by the prefill, and one of the target's own a forward
        after = row["tokens"] - 1 - sum(row["taken"])
        assert len(row["taken"]) - 1 <= after <= len(row["taken"])  # the last may be cut short
    assert [len(row["entropies"]) for row in report["looked"]] == [
        len(results.facts["truths"][row["digest"]]) for row in report["looked"]
    ]
    page = text.page(report)
    for name in ("`sd/shape=sage` | SAGE", "`sage` | SAGE over", "`specvlm/keep=0.1` | SpecVLM's"):
        assert page.count(name) == (2 if "sd/" in name else 1)
    assert "Of 6 answers 6 are" in page and "1 sums and 1 functions" in page


def test_the_command_asks_and_writes_the_page(call, model, tmp_path, monkeypatch):
    """Claim: `text` asks questions and documents with its own draft and writes both files; asked
    again it runs nothing; a folder that is not there is told before anything is loaded."""
    monkeypatch.setattr("saccade.inputs.real_weights.require_checkpoint", lambda: model.name)
    monkeypatch.setattr(text, "METHODS_WITHOUT_DOCUMENT", {"sd": "a chain of 5"})
    monkeypatch.setattr(text, "METHODS_OVER_DOCUMENTS", {"specvlm/keep=0.1": "a tenth"})
    monkeypatch.setattr("lab.real.long_documents.LENGTHS", (100,))
    (tmp_path / "page.md").write_text("some words of a text, " * 30)
    page = tmp_path / "told.md"
    words = ("text", tmp_path / "page.md", "--limit", 1, "--max-new-tokens", 5, "--out", page)
    code, _, error = call(*words)
    assert code == 0, error
    report = json.loads(page.with_suffix(".json").read_text())
    assert [row["method"] for row in report["measured"]] == ["sd", "sd", "specvlm/keep=0.1"]
    assert report["settings"]["draft_bits"] == text.BITS and len(report["looked"]) == 3
    assert page.read_text() == text.page(report)
    monkeypatch.setattr(answers, "answer_documents", None)
    assert call(*words)[0] == 0
    code, _, error = call("text", "--out", tmp_path / "no" / "told.md")
    assert code == 2 and "no folder" in error
