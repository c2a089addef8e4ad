"""The families of 2025 and 2026: which work, with which prompts and methods, and which do not yet.

Three tables say it all. ``zoo.NEWER_KINDS`` has what each family reads, ``EXPECTED_REFUSALS`` the
sentence with which a family is refused today, and ``KNOWN_CRASHES`` what fails without a sentence.
Whoever makes a family work removes its line there, and the comparisons below take it up.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers as hf
import zoo

import saccade
from lab import checkpoints
from lab.checkpoints.newer_families import EXTRA_PACKAGES, NEWER_FAMILIES
from saccade.core.errors import ModelError
from saccade.inputs import questions

COUNT = 64  # Tokens of an answer.
METHODS = ("ar", "sd", "sd-tree", "specvlm", "sage", "auto", "lookup")
DRAFTING = ("sd", "sd-tree", "specvlm", "sage")  # These draft whatever the text is.

KINDS = zoo.NEWER_KINDS

EXPECTED_REFUSALS: dict[str, str] = {
    "minimax-m3-vl": "has layers of the kind minimax_m3_sparse",
}
"""The sentence with which a family is refused, when it is loaded or at its first prompt."""

KNOWN_CRASHES: dict[str, str] = {}
"""Why a family fails without a sentence."""

pytestmark = [pytest.mark.usefixtures("unchecked"), pytest.mark.filterwarnings("ignore")]


def needs_package(family: str) -> Any:
    """Returns the mark that skips a family whose own package is not installed."""
    package = EXTRA_PACKAGES.get(family)
    missing = package is not None and importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"transformers needs {package} for {family}")


def comparisons() -> Iterator[Any]:
    """Yields every family, kind and method that works; one of a family is in the default run.

    Neighbouring families have different methods and kinds there.
    """
    working = [name for name in KINDS if name not in {**EXPECTED_REFUSALS, **KNOWN_CRASHES}]
    for number, family in enumerate(working):
        kinds = KINDS[family]
        usual = kinds[(number + 1) % len(kinds)], METHODS[1 + number % (len(METHODS) - 1)]
        for kind in kinds:
            for method in METHODS:
                marks = [needs_package(family)]
                if (kind, method) != usual:
                    marks.append(pytest.mark.slow)
                yield pytest.param(family, kind, method, marks=marks)


def each_family(names: Any) -> list[Any]:
    return [pytest.param(name, marks=needs_package(name)) for name in names]


def processor_outputs() -> Iterator[Any]:
    """Yields every family that works, with every kind of prompt that it reads."""
    for family in checkpoints.FAMILIES:
        if family not in {**EXPECTED_REFUSALS, **KNOWN_CRASHES}:
            for kind in zoo.kinds(family):
                yield pytest.param(family, kind, marks=needs_package(family))


@pytest.mark.representatives(6)
@pytest.mark.parametrize(("family", "kind"), [*processor_outputs()])
def test_whatever_a_processor_returns_can_come_through_transformers(family: str, kind: str) -> None:
    """Claim: ``model.generate(**inputs, custom_generate=saccade.generate)`` takes a processor's
    output as it is. Fails if an input is refused because its name is not known here."""
    target = zoo.member(family)
    inputs, expected = zoo.case(target, kind, count=8)
    output = target.backbone.model.generate(
        **inputs, custom_generate=saccade.generate, max_new_tokens=8, do_sample=False
    )
    assert output[0, inputs["input_ids"].shape[1] :].tolist() == expected


@pytest.mark.representatives(3)
@pytest.mark.parametrize(("family", "kind", "method"), [*comparisons()])
def test_ids_are_those_of_generate(family: str, kind: str, method: str) -> None:
    """Claim: 64 greedy ids are those of transformers' own ``generate`` for every kind of prompt a
    family reads, and the methods that always draft had drafts accepted. Fails if a family's cache,
    positions, deepstack rows, experts or views disturb one token."""
    target, draft = zoo.member(family), zoo.draft_of(family)
    inputs, expected = zoo.case(target, kind, count=COUNT)
    result = zoo.run(target, draft, inputs, method, COUNT)
    assert list(result.ids) == expected
    assert result.fallback_reason is None
    if method in DRAFTING:
        assert zoo.tally(result)["accepted"]


@pytest.mark.parametrize("family", each_family(EXPECTED_REFUSALS))
def test_what_is_refused_is_refused_in_one_sentence(family: str) -> None:
    """Claim: a family that Saccade cannot follow is refused with its reason, when it is loaded or
    before its first token. Fails if it answers, which means that its line must go."""
    with pytest.raises(ModelError, match=EXPECTED_REFUSALS[family]) as caught:
        target = zoo.member(family)
        inputs = zoo.make_inputs(target, KINDS[family][0])
        saccade.run(target.backbone, inputs, method="ar", max_new_tokens=4, do_sample=False)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=pytest.mark.xfail(strict=True, reason=reason))
        for name, reason in KNOWN_CRASHES.items()
    ],
)
def test_known_crashes(family: str) -> None:
    """Claim: these families answer as ``generate`` does. They do not today; fails, as it should,
    once one of them works, so that its line goes."""
    target = zoo.member(family)
    inputs, expected = zoo.case(target, "text", count=8)
    assert list(zoo.run(target, target, inputs, "ar", 8).ids) == expected


def readings() -> Iterator[Any]:
    """Yields every family and kind; the last kind of each is in the default run."""
    for family, kinds in KINDS.items():
        for kind in kinds:
            marks = [needs_package(family)]
            if kind != kinds[-1]:
                marks.append(pytest.mark.slow)
            yield pytest.param(family, kind, marks=marks)


@pytest.mark.representatives(1)
@pytest.mark.parametrize(("family", "kind"), [*readings()])
def test_transformers_itself_reads_every_kind(family: str, kind: str) -> None:
    """Claim: each checkpoint loads from its folder through the Auto classes with every weight, its
    processor reads every kind listed, and the model writes byte tokens. Fails if a refusal above
    is the fault of a malformed checkpoint or prompt."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(checkpoints.make(family, f"{folder}/{family}"))
        model, info = hf.AutoModelForMultimodalLM.from_pretrained(path, output_loading_info=True)
        processor = hf.AutoProcessor.from_pretrained(path)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    model = vars(model)["_modules"].get("thinker", model).eval()
    media = zoo.draw(kind, 0)
    inputs = questions.question_inputs(
        family, processor, media.question, media.clips, media.images, ()
    )
    inputs = questions.cast_pixels(inputs, torch.float32)
    ids = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    answer = ids[0, inputs["input_ids"].shape[1] :]
    assert len(answer) == 8 and bool((answer < 256).all())


def test_every_newer_family_has_its_kinds() -> None:
    """Claim: the tables above name every newer family, and no family that does not exist. Fails if
    a checkpoint is added and never compared."""
    assert set(NEWER_FAMILIES) <= set(KINDS) <= set(checkpoints.FAMILIES)
    assert set(EXPECTED_REFUSALS) <= set(KINDS)
    assert set(KNOWN_CRASHES) <= set(KINDS)
    assert not set(EXPECTED_REFUSALS) & set(KNOWN_CRASHES)
