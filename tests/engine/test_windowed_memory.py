"""Claims about layers with a window that evict the keys behind it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import zoo
from helpers import AMOUNT, WINDOW, WINDOWED_KINDS, gemma3, hf_greedy, llama, noisy, text_input

import saccade
from saccade.bench.hardware.pair_fit import examine
from saccade.core.errors import OptionError
from saccade.core.sampling import Sampling
from saccade.core.tree import Tree, chain
from saccade.engine.request import Request
from saccade.inputs.footprint import footprint
from saccade.methods import resolve
from saccade.model import cache, memory, prefix_cache
from saccade.model.backbone import Backbone
from saccade.model.cache import Cache, HeadShape
from saccade.model.prefix_cache import PrefixCache
from saccade.model.session import Session, forward_rows
from saccade.model.window_rule import KeyWindow

pytestmark = pytest.mark.usefixtures("unchecked")

CHUNK = 16


@pytest.fixture(autouse=True)
def little_room(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forwards of few rows, and few rows to cut back, so that keys are evicted all the time."""
    monkeypatch.setattr(cache, "ROWS_TO_CUT_BACK", 4)
    monkeypatch.setattr("saccade.model.session.PREFILL_CHUNK_TOKENS", CHUNK)
    monkeypatch.setattr(Session.__init__, "__kwdefaults__", {**KEYWORDS, "chunk": CHUNK})
    yield


KEYWORDS = dict(Session.__init__.__kwdefaults__ or {})


def window_rows(kv_cache: Cache) -> list[int]:
    return [
        kv_cache.keys[layer].shape[1]
        for layer, kind in enumerate(WINDOWED_KINDS)
        if "sliding" in kind
    ]


# -- answers -----------------------------------------------------------------------------------


@pytest.mark.representatives(1)
@pytest.mark.parametrize("method", ["sd", "ar", "sd-tree", "std", "lookup", "auto"])
@pytest.mark.parametrize("length", [90, 5])
def test_answers_are_those_of_generate_where_keys_are_let_go(method, length):
    """Claim: a prompt and an answer of many windows have generate's ids, where each layer with a
    window holds the last keys alone. Fails if a key is evicted that a later row sees."""
    model, inputs = gemma3(), text_input(1, length)
    draft = noisy(gemma3, 0, AMOUNT)
    result = saccade.run(model, inputs, draft=draft, method=method, max_new_tokens=80)
    assert list(result.ids) == hf_greedy(model, inputs, 80)
    assert result.fallback_reason is None


def test_memory_stays_flat_over_a_long_answer():
    """Claim: over a prompt of 100 tokens and 300 committed ones a layer with a window has no more
    rows than window, forward and those to cut back, and the logits are those of a cache that keeps
    all keys, trees included. Fails if its tensors grow, or if a row is lost on the way."""
    model = Backbone.of(gemma3())
    bounded, full = (Session(model, [Sampling()], chunk=CHUNK) for _ in range(2))
    prompts = model.prompts(text_input(3, 100))
    bounded.prefill(prompts, keeps_all_keys=False)
    full.prefill(prompts)
    most = cache.rows_of_window(KeyWindow(WINDOW), CHUNK + CHUNK // 4)
    assert window_rows(bounded.requests[0].cache) == [most, most]
    first_bytes = bounded.requests[0].cache.bytes
    torch.manual_seed(0)
    for step in range(100):
        tokens = torch.randint(0, 250, (6,)).tolist()
        tree = chain(tokens) if step % 2 else Tree(tuple(tokens), (-1, -1, 0, 2, 1, 3))
        path = tokens[:3] if step % 2 else [tokens[0], tokens[2], tokens[3]]
        ours, theirs = bounded.score({0: tree})[0], full.score({0: tree})[0]
        for mine, other in zip(ours.rows, theirs.rows, strict=True):
            assert torch.allclose(mine, other, atol=1e-5)
        for session in (bounded, full):
            session.commit({0: path})
    kv_cache, everything = bounded.requests[0].cache, full.requests[0].cache
    assert kv_cache.length == everything.length > 390
    assert window_rows(kv_cache) == [most, most] and min(window_rows(everything)) > 390
    full_layer = kv_cache.keys[1].numel() * 2 * 4
    assert kv_cache.bytes - full_layer <= first_bytes
    assert kv_cache.starts[1] == 0 and kv_cache.starts[0] > 300


def test_a_view_that_picks_among_all_keys_keeps_them():
    """Claim: methods whose draft starts from the target's own keys keep all of them, and others do
    not. Fails if a fork reads keys that were evicted."""
    keeping = {"specvlm-self", "layerskip", "sd", "ar", "sd-tree", "lookup", "auto", "std"}
    names = {name for name in keeping if resolve(name).needs_all_keys}
    assert names == {"specvlm-self", "layerskip", "std"}


def test_a_mask_with_holes_is_refused():
    """Claim: hidden tokens between others, which transformers counts in a window and we leave out,
    are refused in one sentence, for models with windows alone; padding before and after a prompt is
    not."""
    ids = text_input(1, 12)["input_ids"]
    model = gemma3()
    for hidden, is_refused in ((slice(4, 6), True), (slice(0, 3), False), (slice(9, 12), False)):
        mask = torch.ones_like(ids)
        mask[0, hidden] = 0
        inputs = {"input_ids": ids, "attention_mask": mask}
        if is_refused:
            with pytest.raises(OptionError, match="hides tokens between others"):
                Backbone.of(model).prompts(inputs)
        else:
            Backbone.of(model).prompts(inputs)
        Backbone.of(llama()).prompts(inputs)


# -- conversations -----------------------------------------------------------------------------


@pytest.mark.representatives(1)
@pytest.mark.parametrize("cut_back", [0, 3, 30, 55])
@pytest.mark.parametrize("method", ["ar", "sd"])
def test_every_turn_answers_as_a_fresh_start(method, cut_back):
    """Claim: turns that cut the text back by nothing, by a little, and by more than the keys that
    are held, answer as generate does on the whole text. Fails if a row reads the place of keys that
    were evicted."""
    model, draft = gemma3(), noisy(gemma3, 0, AMOUNT)
    ids = text_input(2, 40)["input_ids"][0].tolist()
    with saccade.Conversation(
        model, draft=draft, method=method, max_new_tokens=50, do_sample=False
    ) as conversation:
        for turn in range(3):
            inputs = {"input_ids": torch.tensor([ids])}
            result = conversation.run(inputs)
            assert list(result.ids) == hf_greedy(model, inputs, 50), turn
            assert result.fallback_reason is None
            ids = [*ids, *result.ids]
            ids = [*ids[: len(ids) - cut_back], *range(5 + turn, 17 + turn)]


# -- shared prefixes ---------------------------------------------------------------------------


def test_shared_prefixes_are_reused_where_their_keys_are_known(monkeypatch):
    """Claim: prompts that begin as a stored one reuse its rows up to a length at which the keys in
    every window are there, and answer as generate does. Fails if a prefix is reused beyond that."""
    monkeypatch.setattr(prefix_cache, "MIN_NEW_ROWS", 1)
    model = Backbone.of(gemma3()).with_prefix_cache(PrefixCache(1 << 30))
    base = text_input(4, 80)["input_ids"][0].tolist()
    reused = []
    for shared in (80, 80, 78, 60, 20, 79):
        ids = torch.tensor([[*base[:shared], *range(30, 42)]])
        result = saccade.run(model, {"input_ids": ids}, method="ar", max_new_tokens=6)
        assert list(result.ids) == hf_greedy(model.model, {"input_ids": ids}, 6)
        reused.append(result.reused_tokens)
    assert reused[0] == 0 and reused[1] >= 60  # near the end of the first prompt
    assert reused[5] >= 50


@pytest.mark.extra
@pytest.mark.parametrize(
    ("family", "kind"),
    [("gemma3", "images"), pytest.param("gemma4", "video", marks=pytest.mark.extra)],
)
def test_pictures_whose_keys_are_let_go(family, kind, monkeypatch):
    """Claim: pictures that are read in both directions, and other questions about them, have
    generate's ids where layers evict the keys behind their windows; the second
    question reuses the pictures. Fails if a text is cut back into a picture, or reads its place."""
    monkeypatch.setattr(prefix_cache, "MIN_NEW_ROWS", 1)
    loaded, media = zoo.member(family), zoo.draw(kind, 1)
    model = loaded.backbone.with_prefix_cache(PrefixCache(1 << 30))
    reused = []
    for question in ("what moves in all of these places, and why?", "how many?"):
        inputs = zoo.read(loaded, replace(media, question=question))
        result = saccade.run(model, inputs, method="lookup", max_new_tokens=40, do_sample=False)
        assert list(result.ids) == zoo.hf_greedy(loaded, inputs, 40)
        reused.append(result.reused_tokens)
    prompt = model.prompts(inputs)[0]
    assert reused[0] == 0 and reused[1] >= int(prompt.visual.nonzero().max()) + 1


@pytest.mark.extra
@pytest.mark.parametrize("family", ["gemma3"])
def test_a_turn_with_another_picture_goes_on_from_what_is_known(family):
    """Claim: a turn with one more picture reads on from the rows that layers with a window still
    know, and answers as generate does; so do further ones. Fails if it begins where keys were
    evicted, if a cache that evicts keys makes room for all of the text at once, or if the saved
    windows grow with every turn."""
    loaded, media = zoo.member(family), zoo.draw("images", 2)
    most = cache.rows_of_window(KeyWindow(16), forward_rows(4 * CHUNK))
    question = "what moves in all of these places, and why is that so?"
    with saccade.Conversation(
        loaded.backbone, method="lookup", max_new_tokens=40, do_sample=False
    ) as conversation:
        for count in range(1, 6):
            images = (media.images * 3)[:count]
            inputs = zoo.read(loaded, replace(media, images=images, question=question))
            result = conversation.run(inputs)
            assert list(result.ids) == zoo.hf_greedy(loaded, inputs, 40)
            assert (result.reused_tokens > 0) == (count > 1)
            question += " and before?"
            batch = conversation._last_batch
            assert batch is not None
            kv_cache = batch.session.requests[0].cache
            assert len(kv_cache._saved_windows) <= cache.MAX_SAVED_WINDOWS
            assert kv_cache.evicts_keys and min(keys.shape[1] for keys in kv_cache.keys) <= most


# -- one cache ---------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [KeyWindow(1), KeyWindow(5), KeyWindow(6, chunked=True)])
def test_the_keys_that_a_row_sees_are_held(window):
    """Claim: however a text grows and is cut back, each layer holds the keys that the next row
    sees, in their places. Fails if one is evicted a row too early."""
    kv_cache = Cache([HeadShape(1, 1, 1)] * 2, 40, windows=[window, None], forward_rows=3)
    generator = torch.Generator().manual_seed(0)
    text: list[int] = []

    def expected(first: int) -> list[int]:
        return text[first:]

    for step in range(300):
        new = [
            1000 + step * 3 + n for n in range(int(torch.randint(1, 4, (1,), generator=generator)))
        ]
        kv_cache.reserve(len(text) + len(new))
        rows = torch.tensor(new, dtype=torch.float32)[None, :, None]
        for layer in range(2):
            kv_cache.write(layer, len(text), rows, -rows)
        kv_cache.advance(len(new))
        text += new
        if step % 50 == 20:
            kv_cache.save_windows([len(text)])
        if step % 7 == 3:
            wanted = len(text) - int(torch.randint(0, 30, (1,), generator=generator))
            length = kv_cache.nearest_length(max(0, wanted))
            assert length <= max(0, wanted)
            assert length == wanted or wanted < len(text) - cache.ROWS_TO_CUT_BACK
            kv_cache.truncate(length)
            del text[length:]
        first_seen = len(text) // window.size * window.size
        if not window.chunked:
            first_seen = max(0, len(text) - window.size + 1)
        for layer, first in ((0, first_seen), (1, 0)):
            keys, values = kv_cache.read(layer, len(text), first)
            assert keys[0, :, 0].tolist() == expected(first)
            assert values[0, :, 0].tolist() == [-each for each in expected(first)]
    assert kv_cache.keys[0].shape[1] <= cache.rows_of_window(window, 3)


def test_a_choice_among_rows_needs_all_keys():
    """Claim: rows cannot be picked from a cache that evicts keys, and a text cannot be cut back to
    where they are gone. Fails if either reads other rows."""
    kv_cache = Cache([HeadShape(1, 1, 1)], 400, windows=[KeyWindow(2)], forward_rows=2)
    for _ in range(60):
        kv_cache.reserve(kv_cache.length + 1)
        kv_cache.write(0, kv_cache.length, torch.ones(1, 1, 1), torch.ones(1, 1, 1))
        kv_cache.advance(1)
    with pytest.raises(ValueError, match="keeps all keys"):
        kv_cache.select(torch.arange(3), 0)
    with pytest.raises(ValueError, match="evicted"):
        kv_cache.truncate(20)


# -- memory ------------------------------------------------------------------------------------


def test_a_long_prompt_fits_where_its_windows_fit(monkeypatch):
    """Claim: memory is planned with the rows that layers with a window hold, so that a long prompt
    fits that would not with all keys; a method that needs all keys is refused. Fails if the plan
    counts keys that are evicted, or leaves out those that are held."""
    model = Backbone.of(gemma3())
    request = Request.of(model, text_input(1, 4000), max_new_tokens=3)
    tokens = request.reserved_tokens()
    row = 2 * 2 * 16 * 4  # bytes of keys and values of a token in one layer
    assert model.token_bytes == 3 * row and model.unbounded_token_bytes == row
    window_bytes = model.window_bytes(tokens, forward_rows())
    assert 2 * (WINDOW + 2048) * row < window_bytes < 2 * 2700 * row
    most = tokens * row + window_bytes
    free = most / (1 - memory.SPARE_SHARE) + 1
    monkeypatch.setattr(memory, "available_bytes", lambda device: int(free))
    assert request.fits(model, keeps_all_keys=False) and not request.fits(model)
    monkeypatch.setattr(memory, "available_bytes", lambda device: int(free * 0.9))
    assert not request.fits(model, keeps_all_keys=False)


def test_doctor_counts_windows():
    """Claim: the footprint of a config counts the rows that layers with a window hold, as a loaded
    model does, and ``doctor`` says so in one line. Fails if it counts all keys."""
    model = Backbone.of(gemma3())
    config = model.model.config
    for tokens in (10, 5000):
        windows = model.window_bytes(tokens, forward_rows())
        expected = tokens * model.unbounded_token_bytes + windows
        assert footprint(config).cache_bytes(tokens, model.dtype.itemsize) == expected
    diagnosis = examine(("it", config), None, tokens=5000, free_bytes=1 << 30)
    (note,) = (note for note in diagnosis.notes if "of it's 3 layers" in note)
    assert "2 of it's 3 layers" in note and f"{WINDOW} tokens" in note
