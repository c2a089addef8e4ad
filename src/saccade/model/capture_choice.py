"""Which captured forwards a model has: those of the fused decoder, or of modules with states."""

from __future__ import annotations

from saccade.model import cuda_graphs
from saccade.model.backbone import Backbone
from saccade.model.captured_recurrent import RecurrentGraphs, can_be_captured
from saccade.model.cuda_graphs import CudaGraphs


def is_capturing_worthwhile(backbone: Backbone) -> bool:
    """Returns whether captured forwards are worthwhile: on a GPU, where they are supported."""
    if backbone.device.type not in cuda_graphs.DEVICE_TYPES:
        return False
    return backbone.fused is not None or can_be_captured(backbone)


def graphs_of(backbone: Backbone) -> CudaGraphs:
    """Returns the captured forwards of a model, which are made at the first call.

    A model that is stopped early (``Backbone.first_layers``) has its own, over the whole model's
    pool. It does not matter which of the two is passed first. Raises ModelError where forwards of
    such a model cannot be captured.
    """
    graphs_by_depth = backbone.graphs
    if backbone.layer_count not in graphs_by_depth:
        pool = None if backbone.full_backbone is None else graphs_of(backbone.full_backbone).pool
        kind = RecurrentGraphs if backbone.mixers else CudaGraphs
        graphs_by_depth[backbone.layer_count] = kind(backbone, pool=pool)
    return graphs_by_depth[backbone.layer_count]
