"""How a training run shows how far it is: a bar in a terminal, a few lines elsewhere."""

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

BAR_COLUMNS = (
    TextColumn("{task.description}"),
    BarColumn(bar_width=24),
    MofNCompleteColumn(),
    TextColumn("{task.fields[report]}"),
    TimeRemainingColumn(),
)
"""Of the bar; its task has a field `report`."""
BAR_CHARACTERS = 24 + 1 + 7 + 4
"""What the bar, the slash, the time and the gaps between columns take."""
REPORTS_WITHOUT_TERMINAL = 10
"""Lines that a run prints where there is no terminal."""
