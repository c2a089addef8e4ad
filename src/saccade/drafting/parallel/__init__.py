"""A draft beside the target: its process, the code in it, and the drafter that talks to it."""
