"""The modules of a model that stand outside of its decoder, by the quickest kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from saccade.model import kernels
from saccade.model.fidelity import is_patched
from saccade.model.kernels import Matrix, Quickest, compiled, fp32_on_cpu, windows


class Tower:
    """The modules of a model that stand outside of its decoder: its vision tower.

    What is computed stays Hugging Face's; while a prompt is read, linear modules and those that
    project patches multiply with copies of their weights, and attention without a mask is by the
    quickest kernel.
    """

    def __init__(self, model: nn.Module, decoder: nn.Module, head: nn.Module) -> None:
        own = {*decoder.modules(), head}
        outside = [module for module in model.modules() if module not in own]
        self._windowed = windows.towers_of(outside)
        forwards: list[tuple[nn.Module, Matrix, Callable[[Tensor], Tensor]]] = []
        for module in outside:
            if not _plain(module):
                continue
            if type(module) is nn.Linear:
                matrix = Matrix(module.weight.data, module.bias)
                forwards.append((module, matrix, _linear(matrix)))
            elif type(module) is nn.Conv3d:
                matrix = Matrix(module.weight.data.flatten(1), module.bias)
                forwards.append((module, matrix, _patches(module, matrix)))
        self._quickest = Quickest([matrix for _, matrix, _ in forwards])
        self._forwards = forwards if self._quickest else []
        self._quicker: dict[tuple[int, ...], bool] = {}  # our attention, by what it is over

    def prepare(self) -> None:
        """As :meth:`Quickest.refresh`, with which every prompt begins."""
        self._quickest.refresh()

    def weights_changed(self) -> bool:
        """As :meth:`Quickest.weights_changed`."""
        return self._quickest.weights_changed()

    @contextmanager
    def quick(self) -> Iterator[None]:
        """While this lasts the modules multiply by what was measured to be quickest."""
        self._quickest.refresh()
        for module, _, forward in self._forwards:
            vars(module)["forward"] = forward
        if self._forwards and compiled.is_available():
            theirs = ALL_ATTENTION_FUNCTIONS["sdpa"]
            ALL_ATTENTION_FUNCTIONS["sdpa"] = partial(self._attend, theirs)
        try:
            with windows.attended_at_once(self._windowed):
                yield
        finally:
            with suppress(KeyError):  # it never was there, or another thread's prompt took it away
                del ALL_ATTENTION_FUNCTIONS["sdpa"]
            for module, _, _ in self._forwards:
                vars(module).pop("forward", None)

    def _attend(
        self,
        theirs: Callable[..., tuple[Tensor, None]],
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
        """What layers call for attention: ``theirs`` unless ours does the same, and quicker."""
        kept = dict(is_causal=is_causal, scaling=scaling, dropout=dropout, **named)
        other = partial(theirs, module, query, key, value, attention_mask, **kept)
        heads, new, width = query.shape[1:]
        causal = vars(module).get("is_causal", True) if is_causal is None else is_causal
        plain = fp32_on_cpu((query, key, value))
        more = attention_mask is not None or any(each is not None for each in named.values())
        if causal or dropout or more or not plain or not compiled.supports_head_dim(width):
            return other()
        all_see = query.new_zeros(new, 1)

        def ours() -> tuple[Tensor, None]:
            rows = zip(query, key, value, strict=True)
            scale = width**-0.5 if scaling is None else scaling
            found = [compiled.attend(q, k, v, all_see, scale).transpose(0, 1) for q, k, v in rows]
            return torch.stack(found), None

        of = heads, key.shape[1], width, new.bit_length()
        if of not in self._quicker:
            calls: dict[str, Callable[[], object]] = {"theirs": other, "ours": ours}
            seconds = kernels.least(("tower", of), lambda: {of: kernels.quickest(calls)})[of]
            self._quicker[of] = seconds["ours"] < seconds["theirs"]
        return ours() if self._quicker[of] else other()


def _plain(module: nn.Module) -> bool:
    """Whether a module's own weight is what it multiplies with, and nobody else stepped in."""
    weight = module._parameters.get("weight")
    own = "forward" not in vars(module) and not is_patched(module)
    return own and weight is not None and type(weight.data) is Tensor


def _linear(matrix: Matrix) -> Callable[[Tensor], Tensor]:
    def forward(x: Float[Tensor, "*rows into"]) -> Float[Tensor, "*rows out"]:
        return matrix(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)

    return forward


def _patches(convolution: nn.Conv3d, matrix: Matrix) -> Callable[[Tensor], Tensor]:
    """A convolution over patches as large as its kernel is one product: Qwen's processors cut them
    so. Of anything else it stays a convolution."""
    own = convolution.forward

    def forward(x: Tensor) -> Tensor:
        plain = not any(convolution.padding) and convolution.groups == 1
        if not plain or x.shape[2:] != convolution.kernel_size:
            return own(x)
        return matrix(x.flatten(1)).view(x.shape[0], -1, 1, 1, 1)

    return forward
