"""A draft beside the target: the process, what runs in it, and the drafter that speaks with it."""
