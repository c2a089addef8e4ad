"""What forwards cost and say: long prefills, many requests at once, rows of low precision."""
