"""Whether a pair fits and pays, by its published shapes and before any weight is loaded."""
