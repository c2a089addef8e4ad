"""The named methods, a file a paper, and the choices on each axis; everything else is an override.

``registry`` has what each file brings, ``names`` reads ``NAME/axis=value/...``.
"""

from saccade.methods.names import AXES as AXES
from saccade.methods.names import axes as axes
from saccade.methods.names import choices as choices
from saccade.methods.names import resolve as resolve
from saccade.methods.registry import DRAFTERS as DRAFTERS
from saccade.methods.registry import FAMILIES as FAMILIES
from saccade.methods.registry import SCHEDULES as SCHEDULES
from saccade.methods.registry import SHAPES as SHAPES
from saccade.methods.registry import SYSTEMS as SYSTEMS
from saccade.methods.registry import VIEWS as VIEWS
from saccade.methods.registry import WEIGHTS as WEIGHTS
