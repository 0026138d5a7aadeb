"""The simplex method for the few rows that multipliers are chosen over: no solver of linear programs is needed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from layerwise.geometry.arrays import Floats

STEPS = 500  # a bound: some hundreds of columns over some ten rows take tens
QUICK = 50  # steps by the steepest column, which is quicker, but may go round in circles
TOLERANCE = 1e-10


def simplex(cost: Floats, matrix: Floats, right: Floats, basis: Sequence[int]) -> tuple[Floats, Floats]:
    """Minimises cost·z over z >= 0 with matrix z = right: z (columns,) and its dual prices (rows,).

    cost: (columns,); matrix: (rows, columns); right: (rows,); basis: the columns of a feasible z, as many as there are
    rows. The least must be finite. In the end columns enter by Bland's rule (Math. Oper. Res. 2(2), 1977), which ends.
    """
    basis = list(basis)
    for step in range(STEPS):
        square = matrix[:, basis]
        prices = np.linalg.solve(square.T, cost[basis])
        reduced = cost - prices @ matrix
        cheaper = np.flatnonzero(reduced < -TOLERANCE)
        if not cheaper.size:
            break
        entering = int(reduced.argmin() if step < QUICK else cheaper[0])
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
