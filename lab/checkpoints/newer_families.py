"""The newer families, most of 2025 and 2026, as data: what their tiny checkpoints are made of.

The tests run on checkpoints of a few layers with random weights, which ``lab.checkpoints`` makes
(``python -m lab make-checkpoint``). A family is an architecture of transformers, such as Gemma 3.
Each entry of ``NEWER_FAMILIES`` names transformers' own classes and the settings that make them
small. Language models with layers of several kinds have so many layers that each kind occurs. A
sliding window is shorter than the prompts of the tests. Older families are in ``families.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from lab.checkpoints.available_classes import AvailableClasses
from lab.checkpoints.families import (
    NORMAL,
    OMNI_TOKENS,
    PATCH,
    QWEN_TOKENS,
    SIDE,
    TOWER,
    Family,
    Ids,
    Parts,
    Size,
)

EXTRA_PACKAGES = {
    "gemma3n": "timm",
    "fast-vlm": "timm",
    "perception-lm": "timm",
    "smolvlm": "num2words",
}
"""By family, of this file or of ``families.py``: a package that transformers needs besides."""

hf = AvailableClasses()

PAD = 256  # The id of the padding token, which is the first after the 256 ids of bytes.
WINDOW = 16  # Tokens of a sliding window: fewer than any prompt of the tests has.


# -- how a recipe becomes a config and a processor ---------------------------------------------


@dataclass(frozen=True)
class Times:
    """A setting that is ``factor`` times the language model's hidden size."""

    factor: float

    def value(self, size: Size) -> int:
        return int(self.factor * size.hidden)


@dataclass(frozen=True)
class PerLayer:
    """A setting with one entry a layer: the pattern, repeated until every layer has an entry."""

    pattern: tuple[str, ...]

    def value(self, size: Size) -> list[str]:
        return [self.pattern[i % len(self.pattern)] for i in range(size.layers)]


HIDDEN = Times(1)


@dataclass(frozen=True)
class Recipe:
    """What a family's tiny config and processor are made of. It is no drafting method.

    ``text``, ``vision`` and ``top`` may hold ``Times`` and ``PerLayer`` values, which are filled in
    when the size of the language model is known.
    """

    config: Any  # The class of the config.
    processor: Any  # The class of the processor.
    # The parts of the processor, such as its image processor: argument -> (class, its settings).
    readers: Mapping[str, tuple[Any, Mapping[str, Any]]]
    # Settings of the whole config that are ids of special tokens: setting -> the token's key in
    # ``Family.tokens``, or several names for a list of ids.
    ids: Mapping[str, str | Sequence[str]]
    text: Mapping[str, Any] = field(default_factory=dict)  # Settings of the language model.
    vision: Mapping[str, Any] = field(default_factory=dict)  # Settings of the vision tower.
    top: Mapping[str, Any] = field(default_factory=dict)  # Other settings of the whole config.
    options: Mapping[str, Any] = field(default_factory=dict)  # Other arguments of the processor.
    layers: int = 2  # The least number of layers of the language model.
    vocab: int = 0  # The least number of rows of the embedding.
    start: str | None = None  # Text of the tokenizer's ``bos_token``, where the processor uses it.
    without: tuple[str, ...] = ()  # Settings of ``Size.text`` that this language model has not.


def _build(recipe: Recipe, size: Size, ids: Ids) -> Parts:
    """Returns a config and a function that makes its processor, as ``Family.build`` must.

    ``ids`` are those of the family's special tokens.
    """
    size = replace(
        size, layers=max(size.layers, recipe.layers), vocab=max(size.vocab, recipe.vocab)
    )
    text = {key: value for key, value in size.text().items() if key not in recipe.without}
    config = recipe.config(
        text_config=text | _resolve(recipe.text, size),
        vision_config=_resolve(recipe.vision, size),
        **{"tie_word_embeddings": False} | _resolve(recipe.top, size) | _ids_of(recipe.ids, ids),
    )
    return config, partial(_make_processor, recipe)


def _make_processor(recipe: Recipe, tokenizer: Any, template: str) -> Any:
    if recipe.start is not None:
        tokenizer.bos_token = recipe.start
    readers = {name: kind(**settings) for name, (kind, settings) in recipe.readers.items()}
    return recipe.processor(
        tokenizer=tokenizer, chat_template=template, **readers, **recipe.options
    )


def _ids_of(names: Mapping[str, str | Sequence[str]], ids: Ids) -> dict[str, Any]:
    """Returns each setting with an id in place of a token's name, or a list in place of several."""
    return {
        key: ids[name] if isinstance(name, str) else [ids[each] for each in name]
        for key, name in names.items()
    }


def _resolve(value: Any, size: Size) -> Any:
    """Returns settings in which ``Times`` and ``PerLayer`` are replaced by their values."""
    if isinstance(value, Times | PerLayer):
        return value.value(size)
    if isinstance(value, Mapping):
        return {key: _resolve(each, size) for key, each in value.items()}
    return value


def _family(
    recipe: Recipe,
    tokens: Mapping[str, str],
    image: str,
    video: str = "",
    audio: str = "",
    more: tuple[str, ...] = (),
) -> Family:
    """Returns the family of a recipe. The other arguments are the fields of ``Family``."""
    return Family(partial(_build, recipe), image, video, audio, tokens, more)


# -- settings that several families share ------------------------------------------------------

# Sizes in these settings are pixels of a side. Only those of PIXELS are pixels of a whole picture,
# though transformers calls them edges. GRID is for processors that cut a picture of any size into
# patches, SQUARE for those that resize it to a square.
ROPE = dict(rope_type="default", rope_theta=1e4)
EDGE = dict(height=SIDE, width=SIDE)
PIXELS = dict(shortest_edge=28 * 28, longest_edge=SIDE * SIDE * 4)
GRID: dict[str, Any] = dict(size=PIXELS, patch_size=PATCH, merge_size=2, **NORMAL)
GRID_IMAGES = GRID | dict(temporal_patch_size=2)
GRID_VIDEOS = GRID_IMAGES | dict(do_sample_frames=False)  # The frames are sampled already.
SQUARE: dict[str, Any] = dict(size=EDGE, **NORMAL)
WHOLE_FRAMES = dict(cap_pixels_per_frame=False)
SIGLIP = TOWER | dict(
    model_type="siglip_vision_model", image_size=SIDE, patch_size=PATCH, vision_use_head=False
)
CELLS = (SIDE // PATCH) ** 2  # Patches of a square picture.
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)

QWEN_TOWER: dict[str, Any] = dict(
    depth=2,
    hidden_size=32,
    intermediate_size=48,
    num_heads=2,
    patch_size=PATCH,
    out_hidden_size=HIDDEN,
    num_position_embeddings=64,
)
QWEN_IDS = {f"{name}_id": name for name in QWEN_TOKENS}
QWEN_IMAGE, QWEN_VIDEO = "<|vision_start|><|image_pad|><|vision_end|>", "<|video_pad|>"


# -- Qwen 3.5 and Qwen 3 Omni ------------------------------------------------------------------

QWEN35_TEXT: dict[str, Any] = dict(
    head_dim=32,
    rope_parameters=ROPE
    | dict(mrope_section=[2, 1, 1], mrope_interleaved=True, partial_rotary_factor=0.25),
    layer_types=PerLayer(("linear_attention",) * 3 + ("full_attention",)),
    linear_conv_kernel_dim=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
)

QWEN35 = Recipe(
    config=hf.Qwen3_5Config,
    processor=hf.Qwen3VLProcessor,
    readers=dict(
        image_processor=(hf.Qwen2VLImageProcessor, GRID_IMAGES),
        video_processor=(hf.Qwen3VLVideoProcessor, GRID_VIDEOS | WHOLE_FRAMES),
    ),
    ids=QWEN_IDS,
    text=QWEN35_TEXT,
    vision=QWEN_TOWER,
    layers=4,
)

QWEN35_MOE = replace(
    QWEN35,
    config=hf.Qwen3_5MoeConfig,
    text=QWEN35_TEXT | EXPERTS | dict(shared_expert_intermediate_size=64),
    without=("intermediate_size",),
)


def _qwen3_omni(size: Size, ids: Ids) -> Parts:
    """Returns the parts of Qwen 3 Omni without its voice, like the hub's checkpoints.

    Only the thinker, which writes the text, is loaded from such a checkpoint.
    """
    thinker = dict(
        audio_config=dict(
            num_mel_bins=16,
            encoder_layers=1,
            encoder_attention_heads=2,
            encoder_ffn_dim=48,
            d_model=32,
            n_window=20,
            n_window_infer=40,
            downsample_hidden_size=16,
            output_dim=size.hidden,
        ),
        vision_config=_resolve(QWEN_TOWER, size) | dict(depth=3, deepstack_visual_indexes=[0, 1]),
        text_config=size.text(
            head_dim=32,
            rope_parameters=ROPE | dict(mrope_section=[4, 6, 6], mrope_interleaved=True),
            **EXPERTS,
        ),
        image_token_id=ids["image_token"],
        video_token_id=ids["video_token"],
        audio_token_id=ids["audio_token"],
        vision_start_token_id=ids["vision_bos_token"],
        vision_end_token_id=ids["vision_eos_token"],
        audio_start_token_id=ids["audio_bos_token"],
        audio_end_token_id=ids["audio_eos_token"],
        tie_word_embeddings=False,
    )

    def processor(tokenizer: Any, template: str) -> Any:
        return hf.Qwen3OmniMoeProcessor(
            image_processor=hf.Qwen2VLImageProcessor(**GRID_IMAGES),
            video_processor=hf.Qwen2VLVideoProcessor(**GRID_VIDEOS, **WHOLE_FRAMES),
            feature_extractor=hf.WhisperFeatureExtractor(feature_size=16, chunk_length=4),
            tokenizer=tokenizer,
            chat_template=template,
        )

    return hf.Qwen3OmniMoeConfig(thinker_config=thinker, enable_audio_output=False), processor


# -- GLM ---------------------------------------------------------------------------------------

GLM_TOKENS = {
    "image_token": "<|image|>",
    "video_token": "<|video|>",
    "image_start_token": "<|begin_of_image|>",
    "image_end_token": "<|end_of_image|>",
    "video_start_token": "<|begin_of_video|>",
    "video_end_token": "<|end_of_video|>",
}
GLM_MARKUP = (
    "<|begin_of_image|><|image|><|end_of_image|>",
    "<|begin_of_video|><|video|><|end_of_video|>",
)
GLM_TEXT: dict[str, Any] = dict(
    rope_parameters=ROPE | dict(mrope_section=[2, 3, 3], partial_rotary_factor=0.5)
)

GLM4V = Recipe(
    config=hf.Glm4vConfig,
    processor=hf.Glm4vProcessor,
    readers=dict(
        image_processor=(hf.Glm4vImageProcessor, GRID_IMAGES),
        video_processor=(hf.Glm4vVideoProcessor, GRID_VIDEOS),
    ),
    ids={f"{name}_id": name for name in GLM_TOKENS},
    text=GLM_TEXT,
    vision=dict(
        depth=1,
        hidden_size=32,
        num_heads=2,
        image_size=SIDE,
        patch_size=PATCH,
        out_hidden_size=HIDDEN,
        intermediate_size=48,
    ),
)

GLM46V = replace(
    GLM4V,
    config=hf.Glm46VConfig,
    processor=hf.Glm46VProcessor,
    readers=dict(
        image_processor=(hf.Glm46VImageProcessor, GRID_IMAGES),
        video_processor=(hf.Glm46VVideoProcessor, GRID_VIDEOS),
    ),
)

GLM4V_MOE = replace(
    GLM4V,
    config=hf.Glm4vMoeConfig,
    text=GLM_TEXT
    | dict(
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
    ),
)


# -- Gemma and PaliGemma -----------------------------------------------------------------------

GEMMA_TOKENS = {
    "image_token": "<image_soft_token>",
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
}
GEMMA_TEXT: dict[str, Any] = dict(
    head_dim=32,
    sliding_window=WINDOW,
    layer_types=PerLayer(("sliding_attention", "sliding_attention", "full_attention")),
)

GEMMA3 = Recipe(
    config=hf.Gemma3Config,
    processor=hf.Gemma3Processor,
    readers=dict(image_processor=(hf.Gemma3ImageProcessor, SQUARE)),
    ids=dict(
        image_token_index="image_token", boi_token_index="boi_token", eoi_token_index="eoi_token"
    ),
    text=GEMMA_TEXT | dict(query_pre_attn_scalar=32),
    vision=SIGLIP,
    top=dict(mm_tokens_per_image=CELLS // 4),
    options=dict(image_seq_length=CELLS // 4),
    layers=4,
)

GEMMA_SOUND_TOKENS = {
    "audio_token": "<audio_soft_token>",
    "boa_token": "<start_of_audio>",
    "eoa_token": "<end_of_audio>",
}
# The embedding has 320 rows. Gemma3n has one token of its vision tower and one of its audio tower,
# which have the last two ids here, 318 and 319.
GEMMA3N = Recipe(
    config=hf.Gemma3nConfig,
    processor=hf.Gemma3nProcessor,
    readers=dict(
        feature_extractor=(hf.Gemma3nAudioFeatureExtractor, {}),
        image_processor=(hf.SiglipImageProcessor, dict(size=dict(height=64, width=64))),
    ),
    ids={f"{name}_id": name for name in (*GEMMA_TOKENS, *GEMMA_SOUND_TOKENS)},
    text=GEMMA_TEXT
    | dict(
        vocab_size_per_layer_input=320,
        hidden_size_per_layer_input=16,
        num_kv_shared_layers=3,
        laurel_rank=8,
        activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0, 0.0, 0.0],
    ),
    vision=dict(
        architecture="mobilenetv5_300m_enc",
        hidden_size=2048,
        vocab_size=1,
        vocab_offset=318,
        model_args=dict(channel_multiplier=0.05, msfa_output_resolution=4),
    ),
    top=dict(
        vision_soft_tokens_per_image=16,
        audio_soft_tokens_per_image=8,
        audio_config=dict(
            hidden_size=32,
            conf_num_attention_heads=2,
            conf_num_hidden_layers=1,
            sscp_conv_channel_size=[8, 4],
            vocab_size=1,
            vocab_offset=319,
        ),
    ),
    options=dict(image_seq_length=16, audio_seq_length=8),
    layers=6,
)

GEMMA4_TOKENS = {
    "image_token": "<|image|>",
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "video_token": "<|video|>",
    "audio_token": "<|audio|>",
    "boa_token": "<|audio>",
    "eoa_token": "<audio|>",
}
GEMMA4_PIXELS = dict(patch_size=8, max_soft_tokens=70, pooling_kernel_size=3)
GEMMA4 = Recipe(
    config=hf.Gemma4Config,
    processor=hf.Gemma4Processor,
    readers=dict(
        feature_extractor=(hf.Gemma4AudioFeatureExtractor, {}),
        image_processor=(hf.Gemma4ImageProcessor, GEMMA4_PIXELS),
        video_processor=(hf.Gemma4VideoProcessor, GEMMA4_PIXELS | dict(do_sample_frames=False)),
    ),
    ids={f"{name}_id": name for name in GEMMA4_TOKENS if name != "eoa_token"}
    | {"eoa_token_index": "eoa_token"},
    text=GEMMA_TEXT
    | dict(
        vocab_size_per_layer_input=320,
        hidden_size_per_layer_input=16,
        num_kv_shared_layers=3,
        global_head_dim=64,
        pad_token_id=PAD,
        use_bidirectional_attention="vision",
    ),
    vision=dict(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        patch_size=8,
        position_embedding_size=1024,
    ),
    top=dict(audio_config=None),
    layers=6,
)

PALIGEMMA = Recipe(
    config=hf.PaliGemmaConfig,
    processor=hf.PaliGemmaProcessor,
    readers=dict(
        image_processor=(hf.SiglipImageProcessor, SQUARE | dict(image_seq_length=CELLS)),
    ),
    ids=dict(image_token_index="image_token"),
    text=dict(model_type="gemma", head_dim=32),
    vision=SIGLIP,
    top=dict(projection_dim=HIDDEN, hidden_size=HIDDEN),
    start="<|endoftext|>",
    vocab=1536,  # Its processor adds 1152 tokens for places and outlines.
)


# -- Mistral, Llama 4, Aya and Perception ------------------------------------------------------

MISTRAL3 = Recipe(
    config=hf.Mistral3Config,
    processor=hf.PixtralProcessor,
    readers=dict(
        image_processor=(
            hf.PixtralImageProcessor,
            dict(size=dict(longest_edge=2 * SIDE), patch_size=PATCH, **NORMAL),
        )
    ),
    ids=dict(image_token_index="image_token"),
    text=dict(model_type="mistral", head_dim=32, sliding_window=None),
    vision=TOWER | dict(model_type="pixtral", image_size=4 * SIDE, patch_size=PATCH, head_dim=16),
    options=dict(patch_size=PATCH, spatial_merge_size=2),
)
MISTRAL_TOKENS = {
    "image_token": "[IMG]",
    "image_break_token": "[IMG_BREAK]",
    "image_end_token": "[IMG_END]",
}

LLAMA4_TOKENS = {
    "image_token": "<|image|>",
    "patch_token": "<|patch|>",
    "boi_token": "<|image_start|>",
    "eoi_token": "<|image_end|>",
    "tile_x_separator_token": "<|tile_x_separator|>",
    "tile_y_separator_token": "<|tile_y_separator|>",
}
LLAMA4 = Recipe(
    config=hf.Llama4Config,
    processor=hf.Llama4Processor,
    readers=dict(image_processor=(hf.Llama4ImageProcessor, SQUARE | dict(max_patches=4))),
    ids=dict(
        image_token_index="patch_token", boi_token_index="boi_token", eoi_token_index="eoi_token"
    ),
    text=dict(
        head_dim=32,
        intermediate_size_mlp=160,
        num_local_experts=4,
        interleave_moe_layer_step=2,
        attention_chunk_size=WINDOW,
        no_rope_layer_interval=4,
    ),
    vision=dict(
        hidden_size=32,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=SIDE,
        patch_size=PATCH,
        vision_output_dim=32,
        projector_input_dim=32,
        projector_output_dim=32,
    ),
    options=dict(patch_size=PATCH, pixel_shuffle_ratio=0.5),
    layers=4,
)

AYA_TOKENS = {
    "image_token": "<image>",
    "patch_token": "<|IMG_PATCH|>",
    "start_token": "<|START_OF_IMG|>",
    "end_token": "<|END_OF_IMG|>",
    "line_token": "<|IMG_LINE_BREAK|>",
}
AYA = Recipe(
    config=hf.AyaVisionConfig,
    processor=hf.AyaVisionProcessor,
    readers=dict(
        image_processor=(
            hf.GotOcr2ImageProcessor,
            SQUARE | dict(crop_to_patches=True, max_patches=4),
        )
    ),
    ids=dict(image_token_index="patch_token"),
    text=dict(
        model_type="cohere2",
        head_dim=32,
        sliding_window=WINDOW,
        layer_types=PerLayer(("sliding_attention",) * 3 + ("full_attention",)),
    ),
    vision=SIGLIP,
    top=dict(downsample_factor=2, adapter_layer_norm_eps=1e-6),
    options=dict(patch_size=PATCH, img_size=SIDE, downsample_factor=2),
    layers=4,
)

PERCEPTION = Recipe(
    config=hf.PerceptionLMConfig,
    processor=hf.PerceptionLMProcessor,
    readers=dict(
        image_processor=(
            hf.PerceptionLMImageProcessor,
            dict(tile_size=SIDE, max_num_tiles=4, size=EDGE, **NORMAL),
        ),
        video_processor=(hf.PerceptionLMVideoProcessor, SQUARE | dict(do_sample_frames=False)),
    ),
    ids=dict(image_token_id="image_token", video_token_id="video_token"),
    text=dict(model_type="llama"),
    vision=dict(
        model_type="timm_wrapper",
        architecture="vit_pe_core_large_patch14_336",
        do_pooling=False,
        num_classes=1,
        model_args=dict(
            embed_dim=32,
            depth=2,
            num_heads=2,
            img_size=[SIDE, SIDE],
            use_post_transformer_norm=False,
        ),
    ),
    top=dict(projector_pooling_ratio=2, vision_use_cls_token=True),
    options=dict(patch_size=PATCH, pooling_ratio=2),
)

FAST_VLM = Recipe(
    config=hf.FastVlmConfig,
    processor=hf.LlavaProcessor,
    readers=dict(
        image_processor=(
            hf.CLIPImageProcessor,
            dict(size=dict(shortest_edge=128), crop_size=dict(height=128, width=128), **NORMAL),
        )
    ),
    ids=dict(image_token_index="image_token"),
    text=dict(model_type="qwen2"),
    vision=dict(
        model_type="timm_wrapper",
        architecture="fastvit_mci3",
        do_pooling=True,
        global_pool="avg",
        hidden_size=128,
        model_args=dict(
            inference_mode=True,
            layers=[1, 1, 1, 1, 1],
            embed_dims=[8, 16, 16, 32, 64],
            mlp_ratios=[2, 2, 2, 2, 2],
        ),
    ),
    top=dict(image_seq_length=4),
    options=dict(
        patch_size=64, vision_feature_select_strategy="full", num_additional_image_tokens=0
    ),
)


# -- pictures of square tiles ------------------------------------------------------------------

IDEFICS3 = Recipe(
    config=hf.Idefics3Config,
    processor=hf.Idefics3Processor,
    readers=dict(
        image_processor=(
            hf.Idefics3ImageProcessor,
            dict(
                size=dict(longest_edge=2 * SIDE), max_image_size=dict(longest_edge=SIDE), **NORMAL
            ),
        )
    ),
    ids=dict(image_token_id="image_token"),
    text=dict(model_type="llama"),
    vision=TOWER | dict(image_size=SIDE, patch_size=PATCH),
    top=dict(scale_factor=2),
    options=dict(image_seq_len=CELLS // 4),
)
IDEFICS_TOKENS = {
    "image_token": "<image>",
    "fake_image_token": "<fake_token_around_image>",
    "global_image_token": "<global-img>",
    "end_of_utterance_token": "<end_of_utterance>",
}
TILE_TOKENS = tuple(f"<row_{i}_col_{j}>" for i in (1, 2) for j in (1, 2))

OVIS2_TOKENS = {
    "image_token": "<image>",
    "atom_token": "<IMG_ATOM>",
    "start_token": "<IMG_START>",
    "grid_token": "<IMG_GRID>",
    "column_token": "<IMG_COL>",
    "row_token": "<IMG_ROW>",
    "end_token": "<IMG_END>",
}
OVIS2 = Recipe(
    config=hf.Ovis2Config,
    processor=hf.Ovis2Processor,
    readers=dict(
        image_processor=(
            hf.Ovis2ImageProcessor,
            SQUARE | dict(crop_to_patches=True, max_patches=4),
        )
    ),
    ids=dict(
        image_token_id="atom_token",
        visual_indicator_token_ids=(
            "start_token",
            "grid_token",
            "column_token",
            "row_token",
            "end_token",
        ),
    ),
    text=dict(model_type="qwen2"),
    vision=TOWER
    | dict(
        image_size=SIDE,
        patch_size=PATCH,
        vocab_size=64,
        hidden_stride=2,
        num_visual_indicator_tokens=5,
    ),
    top=dict(hidden_size=HIDDEN, vocab_size=320),
    options=dict(image_seq_length=CELLS // 4),
)

DEEPSEEK_VL = Recipe(
    config=hf.DeepseekVLConfig,
    processor=hf.DeepseekVLProcessor,
    readers=dict(image_processor=(hf.DeepseekVLImageProcessor, SQUARE)),
    ids=dict(image_token_id="image_token"),
    text=dict(model_type="llama"),
    vision=SIGLIP,
    options=dict(num_image_tokens=CELLS),
)

LFM2_TOKENS = {
    "image_token": "<image>",
    "image_start_token": "<|image_start|>",
    "image_end_token": "<|image_end|>",
    "image_thumbnail_token": "<|img_thumbnail|>",
}
LFM2 = Recipe(
    config=hf.Lfm2VlConfig,
    processor=hf.Lfm2VlProcessor,
    readers=dict(
        image_processor=(
            hf.Lfm2VlImageProcessor,
            dict(
                encoder_patch_size=PATCH,
                tile_size=2 * SIDE,
                size=dict(height=2 * SIDE, width=2 * SIDE),
                min_image_tokens=4,
                max_image_tokens=16,
                max_tiles=4,
                **NORMAL,
            ),
        )
    ),
    ids=dict(image_token_id="image_token"),
    text=dict(
        model_type="lfm2",
        layer_types=PerLayer(("conv", "full_attention")),
        block_auto_adjust_ff_dim=False,
        conv_L_cache=3,
    ),
    vision=TOWER
    | dict(
        model_type="siglip2_vision_model",
        num_patches=64,
        patch_size=PATCH,
        vision_use_head=False,
    ),
    top=dict(projector_hidden_size=32),
    layers=4,
)

STEP_TOKENS = {
    "image_token": "<im_patch>",
    "image_start_token": "<im_start>",
    "image_end_token": "<im_end>",
    "patch_start_token": "<patch_start>",
    "patch_end_token": "<patch_end>",
    "patch_newline_token": "<patch_newline>",
}
STEP37 = Recipe(
    config=hf.Step3p7Config,
    processor=hf.Step3p7Processor,
    readers=dict(
        image_processor=(
            hf.Step3p7ImageProcessor,
            dict(size=dict(height=112, width=112), patch_size=SIDE, max_image_size=224, **NORMAL),
        )
    ),
    ids=dict(image_token_id="image_token"),
    text=dict(
        head_dim=32,
        pad_token_id=PAD,
        layer_types=PerLayer(("full_attention", "sliding_attention")),
        mlp_layer_types=PerLayer(("dense", "sparse")),
        sliding_window=WINDOW,
        num_local_experts=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        share_expert_dim=64,
    ),
    vision=dict(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=112,
        patch_size=PATCH,
        mlp_ratio=1.5,
        max_position_embeddings=64,
    ),
    layers=4,
)


# -- pictures in a grid of patches -------------------------------------------------------------

LFM3 = Recipe(
    config=hf.Lfm3VlConfig,
    processor=hf.Lfm3VlProcessor,
    readers=QWEN35.readers,
    ids=QWEN_IDS,
    text=dict(
        model_type="lfm3",
        head_dim=32,
        sliding_window=WINDOW,
        layer_types=PerLayer(("conv", "conv", "full_attention", "sliding_attention")),
    ),
    vision=dict(
        hidden_size=32,
        intermediate_size=48,
        patch_size=PATCH,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
    ),
    top=dict(projector_hidden_size=32),
    layers=4,
)

ERNIE_TOKENS = {
    "image_token": "<|IMAGE_PLACEHOLDER|>",
    "image_start_token": "<|IMAGE_START|>",
    "image_end_token": "<|IMAGE_END|>",
    "video_token": "<|VIDEO_PLACEHOLDER|>",
    "video_start_token": "<|VIDEO_START|>",
    "video_end_token": "<|VIDEO_END|>",
}
ERNIE = Recipe(
    config=hf.Ernie4_5_VLMoeConfig,
    processor=hf.Ernie4_5_VLMoeProcessor,
    readers=dict(
        image_processor=(hf.Ernie4_5_VLMoeImageProcessor, GRID),
        video_processor=(
            hf.Ernie4_5_VLMoeVideoProcessor,
            GRID_VIDEOS | dict(draw_on_frames=False, min_frames=2),
        ),
    ),
    ids={f"{name}_id": name for name in ERNIE_TOKENS},
    text=dict(
        rope_parameters=ROPE | dict(mrope_section=[6, 6, 4]),
        mlp_layer_types=PerLayer(("dense", "sparse")),
        moe_intermediate_size=[64, 32],
        moe_k=2,
        moe_num_experts=4,
        moe_num_shared_experts=1,
    ),
    vision=dict(depth=1, hidden_size=32, num_heads=2, intermediate_size=48, patch_size=PATCH),
)

KIMI_TOKENS = {
    "image_token": "<|media_pad|>",
    "video_token": "<|kimi_k25_video_placeholder|>",
    "vision_start_token": "<|media_begin|>",
    "vision_end_token": "<|media_end|>",
    "media_content_token": "<|media_content|>",
}
KIMI_PIXELS = dict(
    size=dict(max_height=2 * SIDE, max_width=2 * SIDE), patch_size=PATCH, merge_size=2, **NORMAL
)
KIMI = Recipe(
    config=hf.Kimi_K25Config,
    processor=hf.Kimi_K25Processor,
    readers=dict(
        image_processor=(hf.Kimi_K25ImageProcessor, KIMI_PIXELS),
        video_processor=(hf.Kimi_K25VideoProcessor, KIMI_PIXELS | dict(do_sample_frames=False)),
    ),
    ids={f"{name}_id": name for name in KIMI_TOKENS if name != "media_content_token"},
    text=dict(
        model_type="deepseek_v3",
        num_key_value_heads=4,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=24,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=64,
        first_k_dense_replace=1,
    ),
    vision=TOWER | dict(patch_size=PATCH, pos_emb_height=16, pos_emb_width=16),
    top=dict(projection_hidden_size=32),
)

HUNYUAN_TOKENS = {
    "image_token": "<|hy_image|>",
    "image_start_token": "<|hy_image_start|>",
    "image_end_token": "<|hy_image_end|>",
    "image_newline_token": "<|hy_image_newline|>",
}
HUNYUAN = Recipe(
    config=hf.HunYuanVLConfig,
    processor=hf.HunYuanVLProcessor,
    readers=dict(image_processor=(hf.HunYuanVLImageProcessor, GRID)),
    ids=dict(
        image_token_id="image_token",
        im_start_id="image_start_token",
        im_end_id="image_end_token",
        im_newline_id="image_newline_token",
    ),
    text=dict(head_dim=32, rope_parameters=ROPE | dict(mrope_section=[4, 4, 4, 4])),
    vision=TOWER
    | dict(
        patch_size=PATCH,
        out_hidden_size=HIDDEN,
        text_hidden_size=HIDDEN,
        max_image_size=4 * SIDE,
        min_image_size=28,
        max_vit_seq_len=256,
    ),
)

PADDLE = Recipe(
    config=hf.PaddleOCRVLConfig,
    processor=hf.PaddleOCRVLProcessor,
    readers=dict(image_processor=(hf.PaddleOCRVLImageProcessor, GRID)),
    ids=QWEN_IDS,
    text=dict(head_dim=32, rope_parameters=ROPE | dict(mrope_section=[4, 6, 6])),
    vision=TOWER | dict(image_size=SIDE, patch_size=PATCH),
)

MINIMAX_TOKENS = {
    "image_token": "]<]image[>[",
    "video_token": "]<]video[>[",
    "vision_start_token": "]<]start of image[>[",
    "vision_end_token": "]<]end of image[>[",
}
MINIMAX = Recipe(
    config=hf.MiniMaxM3VLConfig,
    processor=hf.MiniMaxM3VLProcessor,
    readers=dict(
        image_processor=(hf.MiniMaxM3VLImageProcessor, GRID_IMAGES),
        video_processor=(hf.MiniMaxM3VLVideoProcessor, GRID_VIDEOS | dict(size=EDGE)),
    ),
    ids=dict(image_token_index="image_token", video_token_index="video_token"),
    text=dict(
        head_dim=32,
        rope_parameters=ROPE | dict(partial_rotary_factor=0.5),
        num_local_experts=4,
        num_experts_per_tok=2,
        dense_intermediate_size=160,
        shared_intermediate_size=64,
        rotary_dim=16,
        mlp_layer_types=PerLayer(("dense", "sparse")),
        layer_types=PerLayer(("full_attention", "minimax_m3_sparse")),
        index_n_heads=2,
        index_head_dim=32,
        index_block_size=8,
        index_topk_blocks=2,
    ),
    vision=TOWER | dict(image_size=SIDE, patch_size=PATCH),
    top=dict(projector_hidden_size=HIDDEN),
    layers=2,
)

MINICPM_TOKENS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "image_start_token": "<image>",
    "image_end_token": "</image>",
    "slice_start_token": "<slice>",
    "slice_end_token": "</slice>",
    "image_id_start_token": "<image_id>",
    "image_id_end_token": "</image_id>",
}
MINICPM_PIXELS = dict(patch_size=PATCH, scale_resolution=2 * SIDE, max_slice_nums=4, **NORMAL)
MINICPM46 = Recipe(
    config=hf.MiniCPMV4_6Config,
    processor=hf.MiniCPMV4_6Processor,
    readers=dict(
        image_processor=(hf.MiniCPMV4_6ImageProcessor, MINICPM_PIXELS),
        video_processor=(
            hf.MiniCPMV4_6VideoProcessor,
            MINICPM_PIXELS | dict(do_sample_frames=False),
        ),
    ),
    ids=dict(image_token_id="image_token", video_token_id="video_token"),
    text=QWEN35_TEXT | dict(model_type="qwen3_5_text", rope_parameters=ROPE),
    vision=TOWER | dict(num_hidden_layers=2, image_size=2 * SIDE, patch_size=PATCH),
    top=dict(insert_layer_id=0, image_size=2 * SIDE),
    layers=4,
)
MINICPM47 = replace(MINICPM46, config=hf.MiniCPMV4_7Config, processor=hf.MiniCPMV4_7Processor)

MOLMO2_TOKENS = {
    "image_token": "<|image|>",
    "video_token": "<|video|>",
    "image_patch_token": "<im_patch>",
    "column_token": "<im_col>",
    "image_start_token": "<im_start>",
    "low_image_start_token": "<low_res_im_start>",
    "image_end_token": "<im_end>",
    "frame_start_token": "<frame_start>",
    "frame_end_token": "<frame_end>",
    "low_image_token": "<im_low>",
}
MOLMO2 = Recipe(
    config=hf.Molmo2Config,
    processor=hf.Molmo2Processor,
    readers=dict(
        image_processor=(
            hf.Molmo2ImageProcessor,
            SQUARE | dict(max_crops=4, overlap_margins=[1, 1], patch_size=PATCH),
        ),
        video_processor=(
            hf.Molmo2VideoProcessor,
            SQUARE | dict(patch_size=PATCH, pooling_size=[2, 2], do_sample_frames=False),
        ),
    ),
    ids=dict(
        image_patch_id="image_patch_token",
        image_start_token_id="image_start_token",
        low_res_image_start_token_id="low_image_start_token",
        image_end_token_id="image_end_token",
        frame_start_token_id="frame_start_token",
        frame_end_token_id="frame_end_token",
    ),
    text=dict(head_dim=32, additional_vocab_size=0),
    vision=TOWER
    | dict(
        num_hidden_layers=2,
        num_key_value_heads=2,
        head_dim=16,
        image_size=[SIDE, SIDE],
        patch_size=PATCH,
        num_position_embeddings=CELLS,
    ),
    top=dict(
        adapter_config=dict(
            vision_feature_layer=[1, 0],
            hidden_size=32,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=16,
            intermediate_size=48,
            text_hidden_size=HIDDEN,
        )
    ),
)


NEWER_FAMILIES: dict[str, Family] = {
    "qwen3.5": _family(QWEN35, QWEN_TOKENS, QWEN_IMAGE, QWEN_VIDEO),
    "qwen3.5-moe": _family(QWEN35_MOE, QWEN_TOKENS, QWEN_IMAGE, QWEN_VIDEO),
    "qwen3-omni-moe": Family(
        _qwen3_omni,
        "<|vision_bos|><|IMAGE|><|vision_eos|>",
        "<|vision_bos|><|VIDEO|><|vision_eos|>",
        "<|audio_bos|><|AUDIO|><|audio_eos|>",
        OMNI_TOKENS,
    ),
    "glm4v": _family(GLM4V, GLM_TOKENS, *GLM_MARKUP),
    "glm4.6v": _family(GLM46V, GLM_TOKENS, *GLM_MARKUP),
    "glm4v-moe": _family(GLM4V_MOE, GLM_TOKENS, *GLM_MARKUP),
    "gemma3": _family(GEMMA3, GEMMA_TOKENS, "<start_of_image>"),
    "gemma3n": _family(GEMMA3N, GEMMA_TOKENS | GEMMA_SOUND_TOKENS, "<image_soft_token>"),
    "gemma4": _family(GEMMA4, GEMMA4_TOKENS, "<|image|>", "<|video|>"),
    "paligemma": _family(PALIGEMMA, {"image_token": "<image>"}, "<image>"),
    "mistral3": _family(MISTRAL3, MISTRAL_TOKENS, "[IMG]"),
    "llama4": _family(LLAMA4, LLAMA4_TOKENS, "<|image|>"),
    "aya-vision": _family(
        AYA,
        AYA_TOKENS,
        "<image>",
        more=("TILE_GLOBAL", *(f"TILE_{number}" for number in range(1, 5))),
    ),
    "perception-lm": _family(
        PERCEPTION,
        {"image_token": "<|image|>", "video_token": "<|video|>"},
        "<|image|>",
        "<|video|>",
    ),
    "fast-vlm": _family(FAST_VLM, {"image_token": "<image>"}, "<image>\n"),
    "idefics3": _family(IDEFICS3, IDEFICS_TOKENS, "<image>", more=TILE_TOKENS),
    "ovis2": _family(OVIS2, OVIS2_TOKENS, "<image>\n"),
    "deepseek-vl": _family(
        DEEPSEEK_VL, {"image_token": "<image_placeholder>"}, "<image_placeholder>"
    ),
    "lfm2-vl": _family(LFM2, LFM2_TOKENS, "<image>"),
    "lfm3-vl": _family(LFM3, QWEN_TOKENS, QWEN_IMAGE, QWEN_VIDEO),
    "step3.7": _family(STEP37, STEP_TOKENS, "<im_patch>"),
    "ernie4.5-vl-moe": _family(
        ERNIE,
        ERNIE_TOKENS,
        "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
        "<|VIDEO_START|><|VIDEO_PLACEHOLDER|><|VIDEO_END|>",
    ),
    "kimi-k2.5": _family(
        KIMI,
        KIMI_TOKENS,
        "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>",
        "<|kimi_k25_video_placeholder|>",
    ),
    "hunyuan-vl": _family(
        HUNYUAN, HUNYUAN_TOKENS, "<|hy_image_start|><|hy_image|><|hy_image_end|>"
    ),
    "paddleocr-vl": _family(PADDLE, QWEN_TOKENS, QWEN_IMAGE),
    "minimax-m3-vl": _family(MINIMAX, MINIMAX_TOKENS, "]<]image[>[", "]<]video[>["),
    "minicpm-v4.6": _family(MINICPM46, MINICPM_TOKENS, "<|image_pad|>", "<|video_pad|>"),
    "minicpm-v4.7": _family(MINICPM47, MINICPM_TOKENS, "<|image_pad|>", "<|video_pad|>"),
    "molmo2": _family(MOLMO2, MOLMO2_TOKENS, "<|image|>", "<|video|>"),
}
"""The families by the names that ``python -m lab make-checkpoint`` takes."""
