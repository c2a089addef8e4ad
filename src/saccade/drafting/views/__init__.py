"""What a draft sees: views, the selectors they prune by, and the scores these rank by."""
