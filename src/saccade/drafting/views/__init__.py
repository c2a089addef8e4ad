"""What a draft sees: views, the selectors they prune by, and the saliency these rank by."""
