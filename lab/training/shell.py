"""A pretrained Llama behind the embedded pair's eyes, and the adapter that teaches it to see.

`shell` puts a Llama's weights into `Qwen2_5_VLForConditionalGeneration` bit for bit: no biases, and
M-RoPE's sections over the same frequencies, so that on text alone both say the same. In front of it
is the pair's vision tower. What learns is the merger between them and a term of low rank beside
every matrix of the language model (LoRA, Hu et al. 2021): an `Adapter`, 11 MB as a file.
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

RANK = 16
MERGER = "model.visual.merger.mlp."
TEXT = "model.language_model."
# Of the language model's special tokens, some that its chats never hold, and what they become.
RENAMED = {"<repo_name>": "<|vision_start|>", "<reponame>": "<|vision_end|>"}
RENAMED |= {"<file_sep>": "<|vision_pad|>", "<filename>": "<|image_pad|>"}
RENAMED |= {"<gh_stars>": "<|video_pad|>"}
FILE = "adapter.safetensors"
KEPT = (  # of a Llama's configuration
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "rms_norm_eps"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)


class Low(nn.Module):
    """A matrix with a term of low rank beside it, which adds nothing before it is trained."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        beside = F.linear(F.linear(x, self.down), self.up)
        whole: Tensor = self.base(x) + beside
        return whole


class Adapter(nn.Module):
    """All that learns: the merger and, by the name of each matrix, the two parts of its term."""

    def __init__(self, model: Any, rank: int = RANK) -> None:
        super().__init__()
        self.merger = model.model.visual.merger.mlp
        self.lora = nn.ParameterDict()
        lm = model.model.language_model
        matrices = [(n, m) for n, m in lm.named_modules() if isinstance(m, nn.Linear)]
        for name, matrix in matrices:
            low = Low(matrix, rank)
            lm.set_submodule(name, low)
            for part, value in (("down", low.down), ("up", low.up)):
                self.lora[f"{name}.{part}".replace(".", "/")] = value


def fold(model: Any, adapter: Mapping[str, Tensor]) -> None:
    """Put what an adapter learnt into the shell's own weights."""
    state = model.state_dict()
    for name, value in adapter.items():
        kind, _, rest = name.partition(".")
        if kind == "merger":
            state[MERGER + rest].copy_(value)
        elif rest.endswith("/up"):
            term = value.float() @ adapter[name.removesuffix("up") + "down"].float()
            state[f"{TEXT}{rest.removesuffix('/up').replace('/', '.')}.weight"].add_(term)


def shell(llama: LlamaForCausalLM, pair: Any, tok: Any) -> Qwen2_5_VLForConditionalGeneration:
    """The language model behind the pair's tower, with a merger that knows nothing."""
    told = llama.config
    half = told.hidden_size // told.num_attention_heads // 2
    side = 3 * half // 8
    image, video, start, end = tok.convert_tokens_to_ids(
        ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
    )
    model = Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config={name: getattr(told, name) for name in KEPT}
            | {
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": told.rope_parameters["rope_theta"],
                    "mrope_section": [half - 2 * side, side, side],
                },
                "tie_word_embeddings": True,
                "use_sliding_window": False,
            },
            vision_config=pair.config.vision_config.to_dict()
            | {"out_hidden_size": told.hidden_size},
            image_token_id=image,
            video_token_id=video,
            vision_start_token_id=start,
            vision_end_token_id=end,
            tie_word_embeddings=True,
        )
    ).float()
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=told.eos_token_id, pad_token_id=told.pad_token_id
    )
    state = model.state_dict()
    text = {n.replace("model.", TEXT, 1): v for n, v in llama.state_dict().items()}
    seen = {n: v for n, v in pair.state_dict().items() if n.startswith("model.visual.")}
    for name, value in chain(seen.items(), text.items()):
        if not name.startswith(f"{MERGER}2."):
            state[name].copy_(value)
    for name, value in state.items():
        if name.startswith(TEXT) and name.endswith("_proj.bias"):
            value.zero_()
    last = state[f"{MERGER}2.weight"]
    nn.init.normal_(last, std=float(llama.lm_head.weight.detach().std()) / last.shape[1] ** 0.5)
    state[f"{MERGER}2.bias"].zero_()
    return model.eval().requires_grad_(False)


def tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The language model's tokenizer, with names for what stands for pictures and videos."""
    raw = json.loads((folder / "tokenizer.json").read_text())
    for token in raw["added_tokens"]:
        token["content"] = RENAMED.get(token["content"], token["content"])
    raw["model"]["vocab"] = {RENAMED.get(k, k): v for k, v in raw["model"]["vocab"].items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(raw)),
        unk_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=list(SPECIAL[3:]),
        model_max_length=8192,
    )


def begin(text: Path | None = None) -> tuple[Qwen2_5_VLForConditionalGeneration, Any]:
    """The shell of a Llama's checkpoint (that of `saccade real make` unless told), and its
    tokenizer. Raises ModelError where it is not there."""
    folder = real_weights.require_checkpoint() if text is None else text
    llama = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    tok = tokenizer(folder)
    return shell(llama, build.load(EMBEDDED / "target"), tok), tok


def write(adapter: Mapping[str, Tensor], file: Path) -> None:
    """The adapter's file, in bfloat16."""
    save_file({n: v.bfloat16().contiguous() for n, v in adapter.items()}, file)


def seeing(file: Path, text: Path | None = None) -> tuple[Qwen2_5_VLForConditionalGeneration, Any]:
    """The model that an adapter's file makes of the shell, and its tokenizer."""
    if not file.is_file():
        raise ModelError(f"no adapter at {file}: `python -m lab seeing train` makes one")
    model, tok = begin(text)
    fold(model, load_file(file))
    return model, tok


def save(model: Any, tok: Any, out: Path) -> None:
    """Write an ordinary checkpoint folder, in float32, with the pair's way of reading pictures."""
    pair = build.saved_processor(EMBEDDED / "target")
    model.save_pretrained(out)
    Qwen2_5_VLProcessor(
        image_processor=pair.image_processor,
        tokenizer=tok,
        video_processor=pair.video_processor,
        chat_template=build.CHAT_TEMPLATE,
    ).save_pretrained(out)
