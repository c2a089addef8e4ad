"""TABED's P as its published code makes it: LLaVA-1.5's 24 x 24 features, averaged to 12 x 12
before the projector sees them."""

from __future__ import annotations

import torch
from torch.nn.functional import avg_pool2d, gelu

from saccade.model.prompt_reader import average_blocks

SIDE, HALF = 24, 12


def test_p_averages_features_and_then_projects():
    """Claim: of 576 features 144 means are left, a block's at all its cells, and the projector
    reads means. Fails for our old reading, by which what it made of each feature was averaged
    after it: a projector that is not linear tells."""
    features = torch.randn(1, SIDE * SIDE, 5, generator=torch.Generator().manual_seed(0))
    square = features.transpose(1, 2).unflatten(2, (SIDE, SIDE))
    means = avg_pool2d(square, 2).flatten(2).transpose(1, 2)
    assert means.shape[1] == HALF * HALF
    averages = average_blocks(features, (SIDE, SIDE)).unflatten(1, (HALF, 2, HALF, 2))
    for corner in ((0, 0), (0, 1), (1, 0), (1, 1)):
        own = averages[:, :, corner[0], :, corner[1]].flatten(1, 2)
        assert torch.allclose(own, means, atol=1e-6)
    after = avg_pool2d(gelu(square), 2).flatten(2).transpose(1, 2)
    assert not torch.allclose(gelu(averages[:, :, 0, :, 0].flatten(1, 2)), after, atol=1e-2)
