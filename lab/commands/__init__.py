"""The commands of ``python -m lab``, a file each."""
