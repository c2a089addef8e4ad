"""Who drafts, from what it sees, in what shape and when; recipes of all four."""
