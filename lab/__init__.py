"""What the papers claim, measured again: studies, claims, tables, the pair's training."""
