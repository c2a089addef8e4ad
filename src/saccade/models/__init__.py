"""From a name to a loaded model, and from a question to its inputs."""

<<<<<<< HEAD
from saccade.models.asking import ask, ask_draft, converse, put, same_inputs
=======
from saccade.models.asking import ask, ask_draft, joined, put, shown
>>>>>>> 11953766e708d7bf3df43bd16f3eb7e8e74d8866
from saccade.models.loading import (
    DTYPES,
    EMBEDDED,
    NAMES,
    QUANTIZERS,
    Loaded,
    bits,
    check_folder,
    check_pair,
    check_tokenizers,
    load,
    load_pair,
    pick_device,
    precision,
    read_config,
    read_processor,
)

__all__ = [
    "DTYPES",
    "EMBEDDED",
    "NAMES",
    "QUANTIZERS",
    "Loaded",
    "ask",
    "ask_draft",
    "bits",
    "check_folder",
    "check_pair",
    "check_tokenizers",
<<<<<<< HEAD
    "converse",
=======
    "joined",
>>>>>>> 11953766e708d7bf3df43bd16f3eb7e8e74d8866
    "load",
    "load_pair",
    "pick_device",
    "precision",
    "put",
    "read_config",
    "read_processor",
<<<<<<< HEAD
    "same_inputs",
=======
    "shown",
>>>>>>> 11953766e708d7bf3df43bd16f3eb7e8e74d8866
]
