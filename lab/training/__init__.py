"""How the embedded pair was trained, and the page of what it learnt."""
