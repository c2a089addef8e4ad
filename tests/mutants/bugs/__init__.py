"""Bugs to plant, by what they break: one small change each, and the tests that must notice it."""

from bugs import (
    drafting,
    heads,
    hosts,
    kernels,
    methods,
    model,
    packed,
    requests,
    states,
    verification,
    worker_process,
)
from bugs.bug import PlantedBug

BUGS: tuple[PlantedBug, ...] = (
    *verification.BUGS,
    *model.BUGS,
    *states.BUGS,
    *kernels.BUGS,
    *drafting.BUGS,
    *heads.BUGS,
    *packed.BUGS,
    *hosts.BUGS,
    *worker_process.BUGS,
    *methods.BUGS,
    *requests.BUGS,
)
