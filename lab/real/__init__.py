"""What holds on real weights: answers, where the target looks, and a page of both."""
