"""In what shape a draft grows, and what forwards cost here."""
