"""Runs the modules outside a model's decoder, such as its vision tower, by the fastest kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from saccade.model import kernels
from saccade.model.change_detection import LIBRARIES, OUR_FILES, comes_from, is_patched
from saccade.model.kernels import Matrix, TunedMatrices, are_fp32_on_cpu, compiled, tower_windows

ALIGNMENT = 8  # Tensor cores read 16 bytes at once, which are this many numbers of two bytes.


class OutsideKernels:
    """The modules of a model that are outside its decoder, such as its vision tower.

    Hugging Face's modules say what is computed. While a prompt is read, faster kernels compute it:

    * In fp32 on a CPU: linear modules and the convolutions that project patches, both as matrix
      products that may use copies of the weights; and attention that has no mask and is not causal.
    * In 16 bits on a GPU: linear modules whose sizes are no multiples of ``ALIGNMENT``, and
      attention over windows.
    """

    def __init__(self, model: nn.Module, decoder: nn.Module, head: nn.Module) -> None:
        in_decoder = {*decoder.modules(), head}
        outside = [module for module in model.modules() if module not in in_decoder]
        self._windowed_towers = tower_windows.windowed_towers(outside)
        linear_modules = [module for module in outside if isinstance(module, nn.Linear)]
        self._unaligned = [module for module in linear_modules if _has_unaligned_sizes(module)]
        # Modules that are one matrix product, with the matrix and a forward that multiplies by it.
        forwards: list[tuple[nn.Module, Matrix, Callable[[Tensor], Tensor]]] = []
        for module in outside:
            if not _is_plain(module):
                continue
            if type(module) is nn.Linear:
                matrix = Matrix(module.weight.data, module.bias)
                forwards.append((module, matrix, _linear_forward(matrix)))
            elif type(module) is nn.Conv3d:
                matrix = Matrix(module.weight.data.flatten(1), module.bias)
                forwards.append((module, matrix, _patch_forward(module, matrix)))
        # A prompt has many rows. For such products only fp32 on CPUs has kernels that beat torch's.
        matrices = [matrix for _, matrix, _ in forwards]
        is_fp32 = are_fp32_on_cpu(matrix.weight for matrix in matrices)
        self._matrices = TunedMatrices(matrices if is_fp32 else [])
        self._forwards = forwards if self._matrices else []
        self._is_ours_quicker: dict[tuple[int, ...], bool] = {}
        """Whether our attention is quicker, by (heads, key heads, head size, binary digits of the
        number of rows). So 512 to 1023 rows are timed once."""

    def prepare(self) -> None:
        """Chooses kernels for the current number of torch's threads, and copies the weights that
        they need.

        Reading a prompt does this too. Calling it earlier saves the first prompt the wait.
        """
        self._matrices.refresh()

    def weights_changed(self) -> bool:
        """Returns whether weights were changed in place since their copies were made."""
        return self._matrices.weights_changed()

    @contextmanager
    def use_quickest_kernels(self) -> Iterator[None]:
        """Makes the modules use the fastest kernels of this machine while the block runs."""
        self._matrices.refresh()
        aligned: list[nn.Module] = []
        for each in self._unaligned:
            if _is_plain(each) and _is_half_on_gpu(each.weight):
                vars(each)["forward"] = _aligned_forward(each)
                aligned.append(each)
        for module, _, forward in self._forwards:
            vars(module)["forward"] = forward
        registered_attention = ALL_ATTENTION_FUNCTIONS["sdpa"]
        # An attention function that the caller registered is not replaced.
        may_replace = comes_from(registered_attention, (*LIBRARIES, OUR_FILES))
        # ``self._forwards`` is empty unless the weights are in fp32 on a CPU. Only there our
        # attention can be used.
        if self._forwards and compiled.is_available() and may_replace:
            ALL_ATTENTION_FUNCTIONS["sdpa"] = partial(self._attend, registered_attention)
        try:
            with tower_windows.attend_to_all_windows_at_once(self._windowed_towers):
                yield
        finally:
            # Deleting our entry brings the library's own function back. Another thread's prompt may
            # have deleted it already.
            if comes_from(ALL_ATTENTION_FUNCTIONS["sdpa"], (OUR_FILES,)):
                with suppress(KeyError):
                    del ALL_ATTENTION_FUNCTIONS["sdpa"]
            for module in (*aligned, *(module for module, _, _ in self._forwards)):
                vars(module).pop("forward", None)

    def _attend(
        self,
        registered_attention: Callable[..., tuple[Tensor, None]],
        module: nn.Module,
        query: Float[Tensor, "batch head new head_dim"],
        key: Float[Tensor, "batch kv_head new head_dim"],
        value: Float[Tensor, "batch kv_head new head_dim"],
        attention_mask: Tensor | None,
        *,
        is_causal: bool | None = None,
        scaling: float | None = None,
        dropout: float = 0.0,
        **named: Any,
    ) -> tuple[Float[Tensor, "batch new head head_dim"], None]:
        """Attends by ``registered_attention``, or by our kernel where that is equal and quicker."""
        options = dict(is_causal=is_causal, scaling=scaling, dropout=dropout, **named)
        call_theirs = partial(
            registered_attention, module, query, key, value, attention_mask, **options
        )
        heads, new, width = query.shape[1:]
        causal = vars(module).get("is_causal", True) if is_causal is None else is_causal
        is_fp32_on_cpu = are_fp32_on_cpu((query, key, value))
        has_other_arguments = attention_mask is not None or any(
            each is not None for each in named.values()
        )
        is_plain_attention = not causal and not dropout and not has_other_arguments
        can_use_ours = is_plain_attention and is_fp32_on_cpu and compiled.supports_head_dim(width)
        if not can_use_ours:
            return call_theirs()
        # Without a bias our kernel is causal. With one every row sees every key, and the bias is
        # added to the logits of the last keys. So a bias of 0 for the last key changes no logit,
        # and serves only to let every row see every key.
        zero_bias = query.new_zeros(new, 1)

        def call_ours() -> tuple[Tensor, None]:
            rows = zip(query, key, value, strict=True)
            scale = width**-0.5 if scaling is None else scaling
            outs = [compiled.attend(q, k, v, zero_bias, scale).transpose(0, 1) for q, k, v in rows]
            return torch.stack(outs), None

        # The quicker one is found at the first call of about this size. The times that earlier
        # processes measured on this machine count too. As soon as there are
        # ``kernels.MAX_MEASUREMENTS`` measurements of both, no further one is made.
        size = heads, key.shape[1], width, new.bit_length()
        if size not in self._is_ours_quicker:
            calls: dict[str, Callable[[], object]] = {"theirs": call_theirs, "ours": call_ours}

            def measure() -> dict[tuple[int, ...], dict[str, float]]:
                """Returns the seconds of both calls, by size."""
                return {size: kernels.time_calls(calls)}

            times = kernels.shortest_times(("tower", size), measure)[size]
            self._is_ours_quicker[size] = times["ours"] < times["theirs"]
        return call_ours() if self._is_ours_quicker[size] else call_theirs()


def _is_plain(module: nn.Module) -> bool:
    """Returns whether a module has an ordinary weight, and nobody replaced its forward."""
    weight = module._parameters.get("weight")
    unchanged = "forward" not in vars(module) and not is_patched(module)
    return unchanged and weight is not None and type(weight.data) is Tensor


def _has_unaligned_sizes(module: nn.Linear) -> bool:
    """Returns whether a GPU cannot use its fastest products for a linear module of these sizes."""
    return type(module) is nn.Linear and any(
        size % ALIGNMENT for size in (module.in_features, module.out_features)
    )


def _is_half_on_gpu(weight: Tensor) -> bool:
    return weight.device.type == "cuda" and weight.dtype in (torch.float16, torch.bfloat16)


def _aligned_forward(module: nn.Linear) -> Callable[[Tensor], Tensor]:
    """Returns a linear module's forward over sizes that are padded with zeros.

    A product whose rows are not multiples of 16 bytes takes more than twice as long on an H100,
    and Qwen2.5-VL's tower has such rows. Padding the weights in every call costs next to nothing.
    """

    def forward(x: Float[Tensor, "*rows into"]) -> Float[Tensor, "*rows out"]:
        more_in = -module.in_features % ALIGNMENT
        more_out = -module.out_features % ALIGNMENT
        weight = pad(module.weight, (0, more_in, 0, more_out))
        bias = None if module.bias is None else pad(module.bias, (0, more_out))
        return linear(pad(x, (0, more_in)), weight, bias)[..., : module.out_features]

    return forward


def _linear_forward(matrix: Matrix) -> Callable[[Tensor], Tensor]:
    def forward(x: Float[Tensor, "*rows into"]) -> Float[Tensor, "*rows out"]:
        return matrix(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)

    return forward


def _patch_forward(convolution: nn.Conv3d, matrix: Matrix) -> Callable[[Tensor], Tensor]:
    """Returns a forward that computes a convolution over single patches as one product.

    Qwen's processors cut patches that are as large as the convolution's kernel. Inputs of any other
    size go to the module's own forward.
    """
    own_forward = convolution.forward

    def forward(x: Tensor) -> Tensor:
        is_one_product = not any(convolution.padding) and convolution.groups == 1
        if not is_one_product or x.shape[2:] != convolution.kernel_size:
            return own_forward(x)
        return matrix(x.flatten(1)).view(x.shape[0], -1, 1, 1, 1)

    return forward
