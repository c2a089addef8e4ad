"""The options that commands share which measure a target or a pair."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from saccade.cli import command_options, run_setup
from saccade.cli.command_options import DeviceOptions

if TYPE_CHECKING:
    from saccade.inputs import Loaded, Pair


@dataclass(frozen=True)
class TargetOptions(DeviceOptions):
    """A target, and the device, number type and threads that it runs with."""

    target: command_options.Target = None

    def loaded(self) -> Loaded:
        """Loads the target, or the embedded one if none is named."""
        from saccade.inputs import load

        return load(self.target or "shapes", dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class PairOptions(TargetOptions):
    """A target and a draft, and how often each method runs on them."""

    draft: command_options.Draft = None
    repeat: command_options.Repeat = 3

    def models(self, *, quiet: bool) -> Pair:
        """Loads the pair; without a named target, the embedded target.

        Without a named draft, the draft is the one that ``saccade.inputs.load_pair`` finds for the
        target: the embedded draft, a draft head in the target's checkpoint, or None.
        """
        return run_setup.load_models(
            self.target or "shapes", self.draft, quiet=quiet, dtype=self.dtype, device=self.device
        )
