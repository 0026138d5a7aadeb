"""Views follow the batch: a network of reshapes at another batch is what it would have been, imported there."""

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerwise.errors import LayerwiseError
from layerwise.ops.base import Op
from layerwise.ops.tensor.view import Expand, Permute, Reshape, Slice
from layerwise.tensor import TensorSpec

IMAGE, TOKENS = ("n", "c", "h", "w"), ("n", "s", "c")

Atoms = list[list[str]]  # dimensions as products of named sizes


def sizes(atoms: Atoms, named: dict[str, int]) -> tuple[int, ...]:
    return tuple(prod(named[a] for a in dim) for dim in atoms)


@st.composite
def programs(draw: st.DrawFn) -> tuple[Atoms, list[tuple[str, object]]]:
    """A network of reshapes and permutes, by names of sizes, so that it can be written for any batch "n"."""
    starts: list[Atoms] = [[["n"], ["a"], ["b", "c"]], [["a"], ["n"], ["b", "c"]], [["n", "a"], ["b"], ["c"]]]
    start = draw(st.sampled_from(starts))
    now, steps = [list(d) for d in start], []
    bound: set[str] = set()  # sizes that were inner parts of a dimension
    for _ in range(draw(st.integers(1, 6))):
        i = draw(st.integers(0, len(now) - 1))
        match draw(st.sampled_from(["merge", "split", "permute", "unsqueeze", "squeeze"])):
            case "merge" if i + 1 < len(now):
                merged = now[i] + now[i + 1]
                # Of samples inside two other sizes, or inside one that is bound itself, no trace is left.
                if "n" in merged[2:] or ("n" in merged[1:] and merged[0] in bound):
                    continue
                now = [*now[:i], merged, *now[i + 2 :]]
                steps.append(("reshape", [list(d) for d in now]))
            case "split" if len(now[i]) > 1:
                at = draw(st.integers(1, len(now[i]) - 1))
                bound.update(now[i][at:])
                now = [*now[:i], now[i][:at], now[i][at:], *now[i + 1 :]]
                steps.append(("reshape", [list(d) for d in now]))
            case "permute":
                order = draw(st.permutations(range(len(now))))
                now = [now[j] for j in order]
                steps.append(("permute", tuple(order)))
            case "unsqueeze":
                now = [*now[:i], [], *now[i:]]
                steps.append(("reshape", [list(d) for d in now]))
            case "squeeze":
                now = [d for d in now if d]
                steps.append(("reshape", [list(d) for d in now]))
    return start, steps


def imported(program: tuple[Atoms, list[tuple[str, object]]], named: dict[str, int]) -> tuple[TensorSpec, list[Op]]:
    start, steps = program
    dims = tuple("n" if d[0] == "n" else None if "n" in d else d[0] for d in start)
    spec = TensorSpec(sizes(start, named), tuple({"a": "s", "b": "c", "c": None}.get(d or "", d) for d in dims))
    ops: list[Op] = [
        Permute(what) if kind == "permute" else Reshape(sizes(what, named))  # type: ignore[arg-type]
        for kind, what in steps
    ]
    return spec, ops


@given(programs(), st.integers(2, 6), st.integers(2, 8), st.permutations([2, 3, 5]))
def test_rebatch_is_import_at_another_batch(
    program: tuple[Atoms, list[tuple[str, object]]], old: int, new: int, primes: list[int]
) -> None:
    named = dict(zip("abc", primes, strict=True))
    x, ops = imported(program, named | {"n": old})
    y, expected = imported(program, named | {"n": new})
    for op, wanted in zip(ops, expected, strict=True):
        again = op.rebatch((x,), op.output(x), (y,))
        assert again == wanted, f"{op} from {x} to {y}"
        x, y = op.output(x), again.output(y)


@pytest.mark.parametrize(
    ("dims", "shapes"),
    [
        (IMAGE, [("n", 6, 5, 4), ("n", 120), ("n", 120, 1, 1)]),
        (IMAGE, [("n", 6, 1, 1), ("n", 6), ("n", 2, 3)]),
        (TOKENS, [("n", 5, 12), ("n5", 12), ("n5", 3, 4), ("n", 5, 12)]),
        (TOKENS, [("n", 5, 12), ("n", 1, 5, 12), ("n", 5, 12)]),
        (("s", "n", "c"), [(5, "n", 12), ("n5", 12), (5, "n", 12)]),
        (("s", "n", "c"), [(5, "n", 12), (5, "n3", 4)]),
        (("n", "c"), [("n", 6), ("n", 6, 1, 1), ("n", 1, 6), (1, "n", 6)]),
    ],
)
@pytest.mark.parametrize("batch", [2, 3, 5])
def test_a_batch_of_one_that_is_written_into_the_network(
    dims: tuple[str, ...], shapes: list[tuple[str | int, ...]], batch: int
) -> None:
    """ONNX bakes a leading 1; and back from another batch to 1."""

    def at(shape: tuple[str | int, ...], n: int) -> tuple[int, ...]:
        return tuple(int(s[1:] or 1) * n if isinstance(s, str) else s for s in shape)

    for old, new in ((1, batch), (batch, 1), (batch, batch + 1)):
        if old == 1 and shapes[-1][0] == 1:
            continue  # (1, 1, 6) may be either; see `_samples`
        x, y = TensorSpec(at(shapes[0], old), dims), TensorSpec(at(shapes[0], new), dims)
        for shape in shapes[1:]:
            op = Reshape(at(shape, old))
            again = op.rebatch((x,), op.output(x), (y,))
            assert again == Reshape(at(shape, new))
            x, y = op.output(x), again.output(y)


def test_other_views_follow_the_batch() -> None:
    x, y = TensorSpec((4, 1, 6), TOKENS), TensorSpec((10, 1, 6), TOKENS)

    def again(op: Op) -> Op:
        return op.rebatch((x,), op.output(x), (y,))

    assert again(Expand((4, 5, 6))) == Expand((10, 5, 6))
    assert again(Expand((-1, 5, -1))).output(y).shape == (10, 5, 6)
    assert again(Expand((1, 5, 6))).output(y).shape == (10, 5, 6)
    assert again(Slice(0, 2, 4)) == Slice(0, 5, 10)
    assert again(Slice(0, 0, 2**63 - 1)).output(y).shape == (10, 1, 6)
    assert again(Slice(2, 1, 3)) == Slice(2, 1, 3)
    assert again(Slice(0, 3, -5, -1)) == Slice(0, 9, -11, -1)  # all in reverse
    for part in (Slice(0, 1, 2), Slice(0, 3, 1, -1)):
        with pytest.raises(LayerwiseError, match="cannot be adapted to"):
            again(part)
    pair = Reshape((3, 8))  # of six samples
    six, five = (TensorSpec((n, 4), ("n", "c")) for n in (6, 5))
    with pytest.raises(LayerwiseError, match="cannot be adapted to"):
        pair.rebatch((six,), pair.output(six), (five,))
    token = Expand((4, 1, 6), samples=True)
    alone = TensorSpec((1, 1, 6), (None, None, "c"))
    assert token.output(alone).dims == ("n", None, "c")
    assert token.at_batch(5, 10).output(alone).shape == (10, 1, 6)
