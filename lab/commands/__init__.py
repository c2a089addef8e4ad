"""The commands of ``python -m lab``, grouped into files by what they are about."""
