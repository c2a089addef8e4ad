"""The former name of the laboratory, which is ``lab``."""
