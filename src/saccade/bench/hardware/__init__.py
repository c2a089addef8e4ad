"""What forwards and machines cost: profiles, GPUs, prefills, many at once."""
