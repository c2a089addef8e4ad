"""Tiny random models of several families, processor outputs made by hand, stub drafts, statistics.

Random weights are scaled so that greedy text varies: 48 tokens hold about 25 different ids.
"""

from __future__ import annotations

import copy
import os
import random
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any, ClassVar

import pytest
import torch
import transformers
from hypothesis import strategies as st
from torch import Tensor

import saccade
from lab import reference
from saccade.core.capabilities import NO_CAPABILITIES, Capabilities
from saccade.core.prompt import Inputs, Prefill, Prompt
from saccade.core.protocols import Drafter, Learner, Shape, State
from saccade.core.result import Result
from saccade.core.sampling import Sampling, Scores
from saccade.core.tree import ROOT, Tree, add, path
from saccade.drafting.drafters import drive
from saccade.drafting.recipe import Recipe
from saccade.drafting.schedule import serial
from saccade.drafting.setup import Setup
from saccade.drafting.shapes.policies import Chain
from saccade.model.backbone import Backbone

COMPILED = pytest.mark.skipif(
    shutil.which(os.environ.get("CC", "cc")) is None, reason="no C compiler here"
)


def _torch_scales_fp8_rows_on_cpu() -> bool:
    """Whether torch multiplies FP8 with a scale for each row on a CPU, which 2.11 does not."""
    codes, scales = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(16, 1)
    try:
        torch._scaled_mm(codes, codes.t(), scale_a=scales, scale_b=scales.t())
    except RuntimeError:
        return False
    return True


needs_fp8_on_cpu = pytest.mark.skipif(
    not _torch_scales_fp8_rows_on_cpu(), reason="this torch has no such product on a CPU"
)

VOCAB = 256
TEXT = 240  # ids below are text
VIDEO, IMAGE, START, END = 250, 251, 252, 253
PATCH = 4

# -- models ------------------------------------------------------------------------------------


def randomize(model: Any, seed: int, sharp: float = 4.0) -> Any:
    """Weights that mix well, and logits with a standard deviation of about ``sharp``."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim < 2:
                centre = 1.0 if "norm" in name or "ln" in name else 0.0
                weight.normal_(centre, 0.2, generator=generator)
            elif "embed_tokens" in name:
                weight.normal_(0, 1, generator=generator)
            else:
                fan = weight[0].numel()
                weight.normal_(
                    0, (sharp if "lm_head" in name else 1.0) / fan**0.5, generator=generator
                )
        # visual placeholders and other specials are never the likeliest
        model.get_output_embeddings().weight[TEXT:] = 0
    model.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0)
    return model.eval()


def _text(layers: int, vocab: int) -> dict[str, Any]:
    return dict(
        vocab_size=vocab,
        hidden_size=128,
        intermediate_size=160,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


MROPE = dict(rope_type="default", rope_theta=1e4, mrope_section=[4, 6, 6])
IDS = dict(
    image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END
)


@cache
def qwen25(seed: int = 0, layers: int = 2, vocab: int = VOCAB) -> Any:
    """Qwen2.5-VL: M-RoPE, time positions in seconds."""
    config = transformers.Qwen2_5_VLConfig(
        text_config=_text(layers, vocab) | dict(rope_parameters=MROPE),
        vision_config=dict(
            depth=1,
            hidden_size=32,
            intermediate_size=48,
            num_heads=2,
            patch_size=PATCH,
            out_hidden_size=128,
            window_size=16,
            fullatt_block_indexes=[0],
            tokens_per_second=2,
        ),
        tie_word_embeddings=False,
        **IDS,
    )
    return randomize(transformers.Qwen2_5_VLForConditionalGeneration(config), seed)


@cache
def qwen2(seed: int = 0, layers: int = 2) -> Any:
    """Qwen2-VL: M-RoPE, another vision tower."""
    config = transformers.Qwen2VLConfig(
        text_config=_text(layers, VOCAB) | dict(rope_parameters=MROPE),
        vision_config=dict(
            depth=1, embed_dim=32, hidden_size=128, num_heads=2, mlp_ratio=2, patch_size=PATCH
        ),
        tie_word_embeddings=False,
        **IDS,
    )
    return randomize(transformers.Qwen2VLForConditionalGeneration(config), seed)


@cache
def llama(seed: int = 0, layers: int = 2, vocab: int = VOCAB) -> Any:
    """Text only, one position axis."""
    config = transformers.LlamaConfig(**_text(layers, vocab), head_dim=32)
    return randomize(transformers.LlamaForCausalLM(config), seed)


MROPE_3 = MROPE | dict(mrope_interleaved=True)  # as Qwen3-VL and Qwen3.5 lay the axes


@cache
def qwen35(seed: int = 0, layers: int = 4) -> Any:
    """Qwen3.5: Gated DeltaNet in three of four layers, and full attention in the fourth."""
    kinds = ("linear_attention", "linear_attention", "linear_attention", "full_attention")
    config = transformers.Qwen3_5Config(
        text_config=_text(layers, VOCAB)
        | dict(
            hidden_size=64,
            intermediate_size=96,
            head_dim=32,
            rope_parameters=MROPE_3,
            layer_types=[kinds[layer % 4] for layer in range(layers)],
            linear_key_head_dim=8,
            linear_value_head_dim=16,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
        ),
        vision_config=dict(
            depth=1,
            hidden_size=32,
            intermediate_size=48,
            num_heads=2,
            patch_size=PATCH,
            out_hidden_size=64,
            num_position_embeddings=64,
        ),
        tie_word_embeddings=False,
        **IDS,
    )
    model = randomize(transformers.Qwen3_5ForConditionalGeneration(config), seed)
    with torch.no_grad():  # Some heads forget within a token or two, others keep all of a text.
        for name, weight in model.named_parameters():
            if name.endswith("A_log"):
                weight.copy_(torch.linspace(-5.0, 0.5, len(weight)))
    return model


@cache
def lfm2(seed: int = 0, layers: int = 3) -> Any:
    """LFM2, text only: two short convolutions and one layer of full attention."""
    config = transformers.Lfm2Config(
        **_text(layers, VOCAB) | dict(hidden_size=64, intermediate_size=96),
        layer_types=[("conv", "conv", "full_attention")[layer % 3] for layer in range(layers)],
        conv_L_cache=3,
        rope_parameters=dict(rope_type="default", rope_theta=1e4),
    )
    return randomize(transformers.Lfm2ForCausalLM(config), seed)


@cache
def onevision(seed: int = 0, layers: int = 2) -> Any:
    """LLaVA-OneVision: SigLIP frames, pooled, one newline row after the last."""
    config = transformers.LlavaOnevisionConfig(
        vision_config=dict(
            model_type="siglip_vision_model",
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=16,
            patch_size=PATCH,
            vision_use_head=False,
        ),
        text_config=dict(model_type="qwen2", **_text(layers, VOCAB)),
        image_token_index=IMAGE,
        video_token_index=VIDEO,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=False,
    )
    return randomize(transformers.LlavaOnevisionForConditionalGeneration(config), seed)


FAMILIES: dict[str, Callable[..., Any]] = {
    "qwen2_5_vl": qwen25,
    "qwen2_vl": qwen2,
    "llama": llama,
    "llava_onevision": onevision,
}

HYBRIDS: dict[str, Callable[..., Any]] = {"qwen3_5": qwen35, "lfm2": lfm2}
"""Families some of whose layers have a state instead of keys."""


WINDOW = 8  # Of the layers of `gemma3` that have one, in tokens.
WINDOWED_KINDS = ("sliding_attention", "full_attention", "sliding_attention")


@cache
def gemma3(seed: int = 0) -> Any:
    """Gemma 3's language model, in which two of three layers have a window."""
    config = transformers.Gemma3TextConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=3, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, sliding_window=WINDOW,
        layer_types=[*WINDOWED_KINDS], bos_token_id=None, eos_token_id=None, pad_token_id=None,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = randomize(transformers.Gemma3ForCausalLM(config), seed)
    model.generation_config.pad_token_id = None  # So that token 0 is text.
    return model


def model_of(family: str) -> Callable[..., Any]:
    """Returns what makes a family's model, whatever its layers keep."""
    return (FAMILIES | HYBRIDS | {"gemma3": gemma3})[family]


@cache
def noisy(make: Callable[..., Any], seed: int = 0, amount: float = 0.1) -> Any:
    """A copy of a model with noise on its decoder's weights: a draft that is right now and then."""
    model = copy.deepcopy(make(seed))
    generator = torch.Generator().manual_seed(1000 + seed)
    with torch.no_grad():
        for weight in model.get_decoder().parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.add_(amount * weight.std().nan_to_num(0.0) * noise)
    return model


SHARED: list[Backbone] = []
"""The backbones that tests share. A test that hooks, patches or trains one takes a copy."""


@cache
def backbone(model: Any, fused: bool | None = None) -> Backbone:
    """Returns the backbone of a model, which every test of this process shares."""
    shared = backbone_of_copy(model, fused)
    SHARED.append(shared)
    return shared


def backbone_of_copy(model: Any, fused: bool | None = None) -> Backbone:
    """Returns the backbone of a copy of a model, for a test that changes the model."""
    return Backbone(copy.deepcopy(model), fused=fused)


# -- inputs ------------------------------------------------------------------------------------


def text_input(seed: int = 0, length: int = 12) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, TEXT, (1, length), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def video_input(
    seed: int = 0,
    grid: tuple[int, int, int] = (3, 4, 6),
    before: int = 4,
    after: int = 7,
    seconds: float = 1.0,
) -> dict[str, Tensor]:
    """What a Qwen processor returns for text, a video of ``grid`` patches, text."""
    generator = torch.Generator().manual_seed(seed)
    t, h, w = grid
    cells = t * (h // 2) * (w // 2)
    ids = torch.cat(
        [
            torch.randint(0, TEXT, (before,), generator=generator),
            torch.tensor([START, *[VIDEO] * cells, END]),
            torch.randint(0, TEXT, (after,), generator=generator),
        ]
    )[None]
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == VIDEO).int() * 2,
        "pixel_values_videos": torch.randn(t * h * w, 6 * PATCH**2, generator=generator),
        "video_grid_thw": torch.tensor([[t, h, w]]),
        "second_per_grid_ts": torch.tensor([seconds]),
    }


def timed_frames_input(
    seed: int = 0,
    grid: tuple[int, int, int] = (2, 4, 4),
    before: int = 4,
    after: int = 7,
) -> dict[str, Tensor]:
    """What a Qwen3.5 processor returns for a video: each frame follows the text of its time."""
    generator = torch.Generator().manual_seed(seed)
    t, h, w = grid
    frame = [START, *[VIDEO] * ((h // 2) * (w // 2)), END]
    parts = [torch.randint(0, TEXT, (before,), generator=generator)]
    for _ in range(t):
        parts += [torch.randint(0, TEXT, (2,), generator=generator), torch.tensor(frame)]
    ids = torch.cat([*parts, torch.randint(0, TEXT, (after,), generator=generator)])[None]
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == VIDEO).int() * 2,
        "pixel_values_videos": torch.randn(t * h * w, 6 * PATCH**2, generator=generator),
        "video_grid_thw": torch.tensor([[t, h, w]]),
    }


def frames_input(seed: int = 0, frames: int = 3, before: int = 4, after: int = 7) -> Any:
    """What a LLaVA-OneVision processor returns for a video: 4 tokens a frame and a newline."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.cat(
        [
            torch.randint(0, TEXT, (before,), generator=generator),
            torch.tensor([VIDEO] * (4 * frames + 1)),
            torch.randint(0, TEXT, (after,), generator=generator),
        ]
    )[None]
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values_videos": torch.randn(1, frames, 3, 16, 16, generator=generator),
    }


def input_for(family: str, seed: int = 0) -> dict[str, Tensor]:
    if family == "llama":
        return text_input(seed)
    if family == "llava_onevision":
        return frames_input(seed)
    if family == "lfm2":
        return text_input(seed, 30)
    if family == "qwen3_5":
        return timed_frames_input(seed)
    return video_input(seed) if family == "qwen2_5_vl" else no_seconds(video_input(seed))


def no_seconds(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in inputs.items() if name != "second_per_grid_ts"}


def left_padded(many: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Several requests as one batch, padded on the left as generation wants it."""
    longest = max(one["input_ids"].shape[1] for one in many)
    batch: dict[str, Tensor] = {}
    for name in many[0]:
        parts = [one[name] for one in many]
        if name in ("input_ids", "attention_mask", "mm_token_type_ids"):
            parts = [torch.nn.functional.pad(p, (longest - p.shape[1], 0)) for p in parts]
        batch[name] = torch.cat(parts)
    return batch


@torch.no_grad()
def hf_greedy(model: Any, inputs: Mapping[str, Tensor], count: int, **settings: Any) -> list[int]:
    """What transformers' own generate answers."""
    out = model.generate(**inputs, max_new_tokens=count, do_sample=False, **settings)
    return out[0, inputs["input_ids"].shape[1] :].tolist()


def prompt_of(model: Any, inputs: Inputs) -> Prompt:
    return backbone(model, False).prompts(inputs)[0]


# -- answers -----------------------------------------------------------------------------------

AMOUNT = 0.05  # of noise in a draft's weights: it is right about two times in three


@cache
def truth(family: str, seed: int = 0, count: int = 40) -> tuple[int, ...]:
    """The greedy answer, on which the cache-free reference and transformers' generate agree."""
    model, inputs = model_of(family)(seed), input_for(family, seed)
    answer = reference.decode_greedily(model, prompt_of(model, inputs), count)
    assert answer == hf_greedy(model, inputs, count)
    assert len(set(answer)) > count // 6, "an answer that repeats itself proves little"
    return tuple(answer)


def answered(
    family: str,
    method: str | Recipe,
    *,
    seed: int = 0,
    fused: bool | None = None,
    amount: float = AMOUNT,
    count: int = 40,
    **settings: Any,
) -> Result:
    """One answer of a family's random target, with a noisy copy of it as the draft."""
    make = model_of(family)
    target = backbone(make(seed), fused)
    draft = backbone(noisy(make, seed, amount), fused)
    inputs = input_for(family, seed)
    settings = {"max_new_tokens": count, "do_sample": False, **WORDS, **settings}
    return saccade.run(target, inputs, draft=draft, method=method, **settings)


def stubbed(propose: Callable[[int, list[int], int], Any]) -> Recipe:
    """A recipe whose draft is a function."""
    return Recipe("stub", "", MadeBy(lambda setup: StubDraft(propose)), Chain(1), serial)


def drafter_of(
    recipe: Recipe,
    target: Backbone,
    draft: Backbone | None,
    rules: Sequence[Sampling],
    room: int,
) -> Any:
    """A recipe's drafter, as a call makes it."""
    return recipe.drafter(Setup(target, draft, recipe.view, recipe.shape, rules, room))


# -- how much is run when -----------------------------------------------------------------------


def few(values: Iterable[Any], count: int) -> list[Any]:
    """The first ``count`` of a test's values by default, the others in the slow run."""
    return [
        value if place < count else pytest.param(value, marks=pytest.mark.slow)
        for place, value in enumerate(values)
    ]


def dealt(rows: Iterable[Any], columns: Iterable[Any]) -> list[Any]:
    """Every row with one column by default, each in turn; with the others in the slow run."""
    there = list(columns)
    return [
        pytest.param(row, column, marks=() if at == place % len(there) else pytest.mark.slow)
        for place, row in enumerate(rows)
        for at, column in enumerate(there)
    ]


# -- words -------------------------------------------------------------------------------------


class Letters:
    """A tokenizer of one character a token, within the ids that are text."""

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [ord(letter) % TEXT for letter in text]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(number) for number in ids)


def a_caption(inputs: Inputs) -> list[str]:
    return ["a red box"] * len(inputs["input_ids"])


WORDS: dict[str, Any] = dict(tokenizer=Letters(), captioner=a_caption)
"""What methods with views of words ask for."""

# -- stub drafts -------------------------------------------------------------------------------


class StubDraft(Drafter):
    """A draft that is a function: (request, text emitted so far, round) -> tree."""

    def __init__(self, propose: Callable[[int, list[int], int], Any]) -> None:
        self._propose = propose
        self.texts: dict[int, list[int]] = {}
        self.round = 0

    def read_prompts(self, prefills: Sequence[Prefill], earlier: Any = None) -> float:
        self.texts = {request: [] for request in range(len(prefills))}
        return 0.0

    def propose(self, states: Mapping[int, State]) -> dict[int, Tree]:
        trees = {r: self._propose(r, self.texts[r], self.round) for r in states}
        self.round += 1
        return trees

    def commit(self, tokens: Mapping[int, Sequence[int]]) -> None:
        for request, new in tokens.items():
            self.texts[request] += new


@dataclass(frozen=True)
class MadeBy:
    """A function that makes drafters, as a part of a recipe that needs nothing of the others."""

    name: ClassVar[str] = "stub"
    needs: ClassVar[Capabilities] = NO_CAPABILITIES
    offers: ClassVar[Capabilities] = NO_CAPABILITIES

    make: Callable[[Setup], Drafter]

    def __call__(self, setup: Setup) -> Drafter:
        return self.make(setup)


# -- table models ------------------------------------------------------------------------------

Table = Mapping[tuple[int, ...], Tensor]
"""Raw logits after every history of generated tokens, up to some depth."""


def random_table(seed: int, vocab: int, depth: int, sharp: float = 1.5) -> dict[Any, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        history: sharp * torch.randn(vocab, generator=generator)
        for length in range(depth + 1)
        for history in product(range(vocab), repeat=length)
    }


class TableSession:
    """A session whose laws are a table: exact, and nothing to compute."""

    def __init__(self, table: Table, rules: Sequence[Sampling]) -> None:
        self.table = table
        self.rules = rules
        self.texts: list[list[int]] = [[] for _ in rules]
        self._deepest = max(len(history) for history in table)

    def score(self, trees: Mapping[int, Tree]) -> dict[int, Scores]:
        scores = {}
        for request, tree in trees.items():
            text = self.texts[request]
            rows = []
            for node in range(ROOT, len(tree)):
                history = (*text, *(tree.tokens[n] for n in path(tree, node)))
                rows.append(self.table[history[: self._deepest]])
            scores[request] = Scores(tree, rows, self.rules[request], text, len(text), request)
        return scores

    def commit(self, tokens: Mapping[int, Sequence[int]]) -> None:
        for request, new in tokens.items():
            self.texts[request] = [*self.texts[request], *new]


class TableDraft(Drafter):
    """Drafts by a shape over a table, with the package's own growth and noise."""

    def __init__(self, table: Table, rules: Sequence[Sampling], shape: Shape) -> None:
        self.session = TableSession(table, rules)
        self.shape = shape

    @property
    def learner(self) -> Learner:
        return self.shape

    def propose(self, states: Mapping[int, State]) -> dict[int, Tree]:
        growing = {r: self.shape.grow(state) for r, state in states.items()}
        return drive(self.session.score, growing, {})

    def commit(self, tokens: Mapping[int, Sequence[int]]) -> None:
        self.session.commit(tokens)


# -- trees -------------------------------------------------------------------------------------


Rows = list[tuple[int, int]]


def rows(most: int = 14, tokens: int = 4) -> st.SearchStrategy[Rows]:
    """What :func:`grown` makes any tree of."""
    row = st.tuples(st.integers(0, 1000), st.integers(0, tokens - 1))
    return st.lists(row, max_size=most)


def grown(rows: Rows) -> Tree:
    """A tree of chosen nodes. Not for use in strategies: beartype's checks draw randomness."""
    tree = Tree()
    for where, token in rows:
        tree = add(tree, where % (len(tree) + 1) + ROOT, token)
    return tree


def random_tree(rng: random.Random, nodes: int, tokens: Callable[[], int]) -> Tree:
    """``nodes`` nodes hung anywhere, siblings with different tokens where chance allows."""
    tree = Tree()
    for node in range(nodes):
        parent = rng.randint(ROOT, node - 1)
        tree = add(tree, parent, tokens())
    return tree


# -- statistics --------------------------------------------------------------------------------


def chi_square(counts: Tensor, law: Tensor) -> float:
    """The p-value of observed counts under an exact law; cells of probability 0 must be empty."""
    assert abs(float(law.sum()) - 1) < 1e-6
    counts, law = counts.double(), law.double()
    if bool((counts[law == 0] > 0).any()):
        return 0.0
    counts, law = counts[law > 0], law[law > 0]
    expected = law * counts.sum()
    # cells too thin for the approximation are counted together
    thin = expected < 5
    if bool(thin.any()):
        counts = torch.cat([counts[~thin], counts[thin].sum()[None]])
        expected = torch.cat([expected[~thin], expected[thin].sum()[None]])
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.double)
    return float(torch.special.gammaincc(freedom, statistic / 2))
