"""Which families of the table the cuda target does not run yet, and why."""

REFUSED: dict[str, str] = {}
