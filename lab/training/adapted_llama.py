"""Puts a pretrained Llama behind the embedded pair's vision tower, with an adapter to train.

The embedded pair is the small Qwen2.5-VL target and draft that come with this package. The training
of the adapter, by which the Llama learns to see drawn clips, is in `seeing.py`.

`put_behind_tower` copies a Llama's weights into `Qwen2_5_VLForConditionalGeneration` bit for bit.
The biases are zero and M-RoPE's sections have the same frequencies, so both models have the same
logits on text. The `Adapter` is what training changes: the merger, which makes visual tokens of the
tower's output, and a term of low rank beside every matrix of the language model (LoRA, Hu et al.
2021). The file of an adapter has 11 MB.
"""

import json
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    GenerationConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
)

from lab.training import build
from lab.training.model import SPECIAL
from saccade.core.errors import ModelError
from saccade.inputs import real_weights
from saccade.inputs.checkpoints import EMBEDDED

RANK = 16  # Of the low-rank terms.
# How the names of the merger's matrices and of the language model's weights begin.
MERGER = "model.visual.merger.mlp."
TEXT = "model.language_model."
# Special tokens that the language model's chats never have -> the names that they get here, because
# prompts with pictures and videos need such tokens.
RENAMED_TOKENS = {"<repo_name>": "<|vision_start|>", "<reponame>": "<|vision_end|>"}
RENAMED_TOKENS |= {"<file_sep>": "<|vision_pad|>", "<filename>": "<|image_pad|>"}
RENAMED_TOKENS |= {"<gh_stars>": "<|video_pad|>"}
ADAPTER_FILE = "adapter.safetensors"
CONFIG_FIELDS = (  # The fields of a Llama's config that the new model's text config copies.
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "rms_norm_eps",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


class LowRankLinear(nn.Module):
    """A matrix ``base`` with the term ``up @ down`` of low rank, which is zero before training."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        low_rank = F.linear(F.linear(x, self.down), self.up)
        total: Tensor = self.base(x) + low_rank
        return total


class Adapter(nn.Module):
    """The parts of a model that are trained: the merger, and the factors of the low-rank terms.

    Making an adapter changes the model: a :class:`LowRankLinear` takes the place of each matrix of
    its language model. The adapter's tensors are the model's own, so training one trains both.
    """

    def __init__(self, model: Any, rank: int = RANK) -> None:
        super().__init__()
        self.merger = model.model.visual.merger.mlp
        self.lora = nn.ParameterDict()
        lm = model.model.language_model
        matrices = [(n, m) for n, m in lm.named_modules() if isinstance(m, nn.Linear)]
        for name, matrix in matrices:
            low = LowRankLinear(matrix, rank)
            lm.set_submodule(name, low)
            for part, value in (("down", low.down), ("up", low.up)):
                # A ParameterDict takes no dots in names: "layers/0/self_attn/q_proj/up".
                self.lora[f"{name}.{part}".replace(".", "/")] = value


def fold_adapter(model: Any, adapter: Mapping[str, Tensor]) -> None:
    """Adds an adapter's low-rank terms to the weights of a model that has no such terms yet.

    The adapter's merger replaces the model's. Weights of an adapter have names such as
    `merger.2.weight` for the merger, and `lora.layers/0/self_attn/q_proj/up` (and `down`) for the
    factors of a term.
    """
    state = model.state_dict()
    for name, value in adapter.items():
        kind, _, rest = name.partition(".")
        if kind == "merger":
            state[MERGER + rest].copy_(value)
        elif rest.endswith("/up"):
            down = adapter[name.removesuffix("up") + "down"]
            matrix = rest.removesuffix("/up").replace("/", ".")
            state[f"{TEXT}{matrix}.weight"].add_(value.float() @ down.float())


def put_behind_tower(
    llama: LlamaForCausalLM, pair: Any, tok: Any
) -> Qwen2_5_VLForConditionalGeneration:
    """Returns a Qwen2.5-VL model that has the Llama's decoder behind the vision tower of `pair`.

    `pair` is the embedded pair's target or draft. The first layer of the merger is copied from it
    as well, and the last one is random, because its output has the Llama's width. `tok` is the
    tokenizer that `load_tokenizer` returns. No weight of the result requires a gradient.
    """
    config = llama.config
    # M-RoPE divides a head's frequencies among time, row and column: 32 as 8, 12 and 12.
    frequencies = config.hidden_size // config.num_attention_heads // 2
    space = 3 * frequencies // 8
    image, video, start, end = tok.convert_tokens_to_ids(
        ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
    )
    model = Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config={name: getattr(config, name) for name in CONFIG_FIELDS}
            | {
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": config.rope_parameters["rope_theta"],
                    "mrope_section": [frequencies - 2 * space, space, space],
                },
                "tie_word_embeddings": True,
                "use_sliding_window": False,
            },
            vision_config=pair.config.vision_config.to_dict()
            | {"out_hidden_size": config.hidden_size},
            image_token_id=image,
            video_token_id=video,
            vision_start_token_id=start,
            vision_end_token_id=end,
            tie_word_embeddings=True,
        )
    ).float()
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    # All weights are copied but those of the merger's last layer.
    state = model.state_dict()
    text = {n.replace("model.", TEXT, 1): v for n, v in llama.state_dict().items()}
    vision = {n: v for n, v in pair.state_dict().items() if n.startswith("model.visual.")}
    for name, value in chain(vision.items(), text.items()):
        if not name.startswith(f"{MERGER}2."):
            state[name].copy_(value)
    for name, value in state.items():
        if name.startswith(TEXT) and name.endswith("_proj.bias"):
            value.zero_()  # A Llama has no such biases.
    # If the inputs of this layer have a standard deviation of 1, visual tokens begin with the one
    # that the Llama's head has.
    last = state[f"{MERGER}2.weight"]
    nn.init.normal_(last, std=float(llama.lm_head.weight.detach().std()) / last.shape[1] ** 0.5)
    state[f"{MERGER}2.bias"].zero_()
    return model.eval().requires_grad_(False)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Returns the tokenizer of the Llama in `folder`, with tokens for pictures and videos.

    These are the special tokens of ``RENAMED_TOKENS``, so the vocabulary does not grow.
    """
    raw = json.loads((folder / "tokenizer.json").read_text())
    for token in raw["added_tokens"]:
        token["content"] = RENAMED_TOKENS.get(token["content"], token["content"])
    raw["model"]["vocab"] = {RENAMED_TOKENS.get(k, k): v for k, v in raw["model"]["vocab"].items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(raw)),
        unk_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=list(SPECIAL[3:]),  # Those of pictures and videos.
        model_max_length=8192,
    )


def load_untrained(text: Path | None = None) -> tuple[Qwen2_5_VLForConditionalGeneration, Any]:
    """Returns a pretrained Llama behind the pair's tower, without an adapter, and its tokenizer.

    `text` is the Llama's folder. By default it is the one that `saccade real make` writes, and
    ModelError is raised if that does not exist.
    """
    folder = real_weights.require_checkpoint() if text is None else text
    llama = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    tok = load_tokenizer(folder)
    return put_behind_tower(llama, build.load(EMBEDDED / "target"), tok), tok


def write_adapter(adapter: Mapping[str, Tensor], file: Path) -> None:
    """Writes an adapter to a file in bfloat16."""
    save_file({n: v.bfloat16().contiguous() for n, v in adapter.items()}, file)


def load_adapted(
    file: Path, text: Path | None = None
) -> tuple[Qwen2_5_VLForConditionalGeneration, Any]:
    """Returns the Llama behind the pair's tower with an adapter folded in, and its tokenizer.

    `file` is the adapter's, and `text` as for `load_untrained`. Raises ModelError if there is no
    such file.
    """
    if not file.is_file():
        raise ModelError(f"there is no adapter at {file}; `python -m lab seeing train` makes one")
    model, tok = load_untrained(text)
    fold_adapter(model, load_file(file))
    return model, tok


def save_checkpoint(model: Any, tok: Any, out: Path) -> None:
    """Writes an ordinary checkpoint folder, with the embedded pair's image processing.

    The weights keep their dtype, which is float32 for a model of `load_adapted`.
    """
    pair = build.load_processor(EMBEDDED / "target")
    model.save_pretrained(out)
    Qwen2_5_VLProcessor(
        image_processor=pair.image_processor,
        tokenizer=tok,
        video_processor=pair.video_processor,
        chat_template=build.CHAT_TEMPLATE,
    ).save_pretrained(out)
