"""``saccade train-draft``: a draft distilled for a target of one's own, by a paper's recipe."""
