"""The run-time type checker of the tests: shapes and types, with an int allowed for a float."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
