"""The simplex method for the few rows that multipliers are chosen over: no solver of linear programs is needed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from layerwise.geometry.arrays import Floats

STEPS = 1000  # a bound: some hundreds of columns over some ten rows take tens
TOLERANCE = 1e-10


def simplex(cost: Floats, matrix: Floats, right: Floats, basis: Sequence[int]) -> tuple[Floats, Floats]:
    """Minimises cost·z over z >= 0 with matrix z = right: z (columns,) and its dual prices (rows,).

    cost: (columns,); matrix: (rows, columns); right: (rows,); basis: the columns of a feasible z, as many as there are
    rows. The least must be finite. Columns enter by Bland's rule (Math. Oper. Res. 2(2), 1977), so that nothing cycles.
    """
    basis = list(basis)
    for _ in range(STEPS):
        square = matrix[:, basis]
        prices = np.linalg.solve(square.T, cost[basis])
        cheaper = np.flatnonzero(cost - prices @ matrix < -TOLERANCE)
        if not cheaper.size:
            break
        entering = int(cheaper[0])
        level, change = np.linalg.solve(square, np.stack([right, matrix[:, entering]], 1)).T
        shrinking = np.flatnonzero(change > TOLERANCE)
        if not shrinking.size:  # rounding: a least is promised
            break
        ratio = level[shrinking] / change[shrinking]
        tied = shrinking[ratio <= ratio.min() + TOLERANCE]
        leaving = min(tied.tolist(), key=lambda row: basis[row])
        basis[leaving] = entering
    solution: Floats = np.zeros(len(cost))
    square = matrix[:, basis]
    solution[basis] = np.maximum(np.linalg.solve(square, right), 0.0)
    return solution, np.linalg.solve(square.T, cost[basis]).astype(np.float64)
