"""Communication as autograd functions, in the same order on all ranks.

All ranks must communicate in one order, but autograd knows only what this rank has, and would communicate whenever that
suits this rank. So an *order token*, a tensor of one element, passes through every communication. A backward pass meets
it in exactly the reverse order, even on a rank that has no part of a layer. The backward pass of a backward pass (a
gradient penalty) does too, because each backward function is built from these functions again. A pass that begins
inside another pass's graph (a Laplacian) goes on with the token that it finds there (`_token`). So the passes of all
orders form one chain, and the last pass goes through it from its end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from layerwise.comm.base import Comm
from layerwise.errors import LayerwiseError
from layerwise.graph.layer_graph import LayerGraph
from layerwise.run.schedule.redistribute import Flight, TimedTransfer


class Communication(NamedTuple):
    """A communication and its adjoint, as functions of this rank's part of a tensor (None: it has no part).

    adjoint: called once in every backward pass.
    """

    run: Callable[[Tensor | None], Tensor | None]
    adjoint: Callable[[], Communication]


def at_once(there: TimedTransfer, back: TimedTransfer) -> Communication:
    """Returns the communication of a tensor that is sent and awaited at the same place in the order."""
    return Communication(there, lambda: at_once(back, there))


def issued_early(there: TimedTransfer, back: TimedTransfer) -> tuple[Communication, Communication]:
    """Returns the two communications of a tensor that is sent at one place in the order and awaited at a later one.

    The first returns no tensor; the second takes none. The backward transfer starts where the tensor was awaited and
    ends where it was sent.
    """
    flights, arriving = list[Flight](), list[Communication]()

    def gradient_leaves() -> Communication:
        leaving, awaited = issued_early(back, there)
        arriving[:] = [awaited]
        return leaving

    first = Communication(lambda x: flights.append(there.begin(x)), arriving.pop)
    return first, Communication(lambda _: there.finish(flights.pop()), gradient_leaves)


def begins(token: Tensor, parameters: Sequence[Tensor], at_end: Callable[[], None]) -> Tensor:
    """Returns the order token, a leaf of autograd. A backward pass for some tensors only must not ask for parameters.

    Working parameters stand in for the parameters, so PyTorch would find no path to these and return None, or nothing.
    at_end: called when a backward pass has passed every communication; the pass reaches the parameters after it.
    """
    result: Tensor = _Begins.apply(at_end, token, *parameters)  # type: ignore[no-untyped-call]
    return result


def ordered(
    token: Tensor,
    *tensors: Tensor,
    at_backward: Callable[..., Sequence[Tensor] | None] | None = None,
    saved: Sequence[Tensor | None] = (),
) -> tuple[Tensor, ...]:
    """Returns the token and the tensors; in the backward pass the token waits for the gradients of all these tensors.

    at_backward: called in the backward pass with what is `saved` until then, as autograd saves tensors: a backward pass
    frees them, and PyTorch raises if they were written to. The graph of that backward pass saves what it returns in the
    same way, if the pass is to be differentiated again.
    """
    result: tuple[Tensor, ...] = _Ordered.apply(at_backward, saved, False, token, *tensors)  # type: ignore[no-untyped-call]
    return result


def communicated(token: Tensor, x: Tensor | None, way: Communication) -> tuple[Tensor, Tensor | None]:
    """Returns the token and `way` of x. The backward pass applies its adjoint to the gradient."""
    result: tuple[Tensor, Tensor | None] = _Communicated.apply(token, x, way, False)  # type: ignore[no-untyped-call]
    return result


def zeros_for(token: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """Returns the token. In the backward pass, parameters that only other ranks hold get an empty gradient, in their
    turn.

    A part that this rank has computed and nobody reads gets zeros: the rank still takes part in the layer's sums over
    ranks.
    """
    result: Tensor = _ZerosFor.apply(token, *tensors) if tensors else token  # type: ignore[no-untyped-call]
    return result


def ends(
    token: Tensor,
    outputs: Sequence[Tensor | None],
    scales: Sequence[float],
    dtype: torch.dtype,
    begin: Callable[[Sequence[bool]], None],
) -> tuple[Tensor, ...]:
    """Returns the outputs; a missing one is an empty tensor of type `dtype`. The backward pass scales the gradients.

    begin: called when a backward pass arrives, with whether each output has a gradient.
    """
    present = (token.new_zeros(0, dtype=dtype) if out is None else out for out in outputs)
    result: tuple[Tensor, ...] = _Ends.apply(token, scales, begin, *present)  # type: ignore[no-untyped-call]
    return result


def _token(ctx: Any, token: Tensor | None) -> Tensor:
    """Returns a pass's token at a function: where the pass begins, a new one, or the one of the pass whose graph it is
    in.

    The latter is an output of the function, so whoever differentiates both passes reaches this one first.
    """
    if token is not None:
        return token
    another: Tensor = ctx.saved_tensors[-1].clone() if ctx.in_backward else torch.zeros(())
    return another


class _Begins(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, at_end: Callable[[], None], token: Tensor, *parameters: Tensor) -> Tensor:
        ctx.leaf, ctx.count, ctx.at_end = get_gradient_edge(token).node, len(parameters), at_end
        ctx.set_materialize_grads(False)
        return token.view_as(token)

    @staticmethod
    def backward(ctx: Any, token: Tensor | None) -> tuple[None, ...]:
        if not torch._C._will_engine_execute_node(ctx.leaf):  # a gradient of some parameter is wanted, not the token
            raise LayerwiseError(
                "torch.autograd.grad or backward(inputs=...) asked for the gradient of parameters, which autograd "
                "cannot find when a plan runs layers one by one: call loss.backward(), which averages over the ranks, "
                "and read .grad"
            )
        ctx.at_end()
        nothing: tuple[None, ...] = (None,) * (2 + ctx.count)
        return nothing


class _Ordered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        at_backward: Callable[..., Sequence[Tensor] | None] | None,
        saved: Sequence[Tensor | None],
        in_backward: bool,
        *tensors: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        ctx.at_backward, ctx.in_backward = at_backward, in_backward
        ctx.set_materialize_grads(False)
        outputs = tuple(None if x is None else x.view_as(x) for x in tensors)
        ctx.save_for_backward(*saved, *outputs[: int(in_backward)])
        return outputs

    @staticmethod
    def backward(ctx: Any, token: Tensor | None, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = None if ctx.at_backward is None else ctx.at_backward(*ctx.saved_tensors)
        token = _token(ctx, token)
        if torch.is_grad_enabled():  # this pass is to be differentiated again, in its order
            passed = _Ordered.apply(None, saved or (), True, token, *gradients)  # type: ignore[no-untyped-call]
            return None, None, None, *passed
        return None, None, None, token, *gradients


class _Communicated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, token: Tensor, x: Tensor | None, way: Communication, in_backward: bool
    ) -> tuple[Tensor, Tensor | None]:
        ctx.way, ctx.has_input, ctx.in_backward = way, x is not None, in_backward
        ctx.set_materialize_grads(False)
        token = token.view_as(token)
        if in_backward:  # a backward pass that is to be differentiated again calls this
            ctx.save_for_backward(token)
        return token, way.run(x)

    @staticmethod
    def backward(ctx: Any, token: Tensor | None, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        token, back = _token(ctx, token), ctx.way.adjoint()
        if torch.is_grad_enabled():
            token, result = _Communicated.apply(token, gradient, back, True)  # type: ignore[no-untyped-call]
        else:
            result = back.run(gradient)
        return token, result if ctx.has_input else None, None, None


class _ZerosFor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, *tensors: Tensor) -> Tensor:
        ctx.like, ctx.in_backward = [(x.shape, x.dtype, x.device) for x in tensors], False
        ctx.set_materialize_grads(False)
        return token.view_as(token)

    @staticmethod
    def backward(ctx: Any, token: Tensor | None) -> tuple[Tensor | None, ...]:
        token = _token(ctx, token)
        zeros = (torch.zeros((), dtype=dtype, device=device).expand(shape) for shape, dtype, device in ctx.like)
        wanted = ctx.needs_input_grad[1:]
        return token, *(zero if needed else None for zero, needed in zip(zeros, wanted, strict=True))


class _Ends(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, token: Tensor, scales: Sequence[float], begin: Callable[[Sequence[bool]], None], *outputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.scales, ctx.begin = scales, begin
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(token)  # so that PyTorch refuses a second backward pass here, on all ranks alike
        clones = tuple(out.clone() for out in outputs)
        ctx.mark_non_differentiable(*(out for out in clones if not (out.is_floating_point() or out.is_complex())))
        return clones

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        (token,) = ctx.saved_tensors
        ctx.begin([g is not None for g in gradients])
        pairs = zip(gradients, ctx.scales, strict=True)
        scaled = (g if g is None or scale == 1 else g * scale for g, scale in pairs)
        # The backward pass of this backward pass comes before that of the forward pass.
        return token.clone(), None, None, *scaled


def factors(graph: LayerGraph, part: float) -> list[float]:
    """Returns, for each output, the factor that makes a rank's gradients those of the mean over the global batch.

    part: the fraction of the batch that this rank's loss averages over.
    """
    losses = [graph.losses.get(name) for name in graph.layers[-1].inputs]
    return [1.0 if loss == "sum" else part for loss in losses]


def sum_of_losses(loss: Tensor, comm: Comm) -> Tensor:
    """Returns the sum of all ranks' losses, on every rank."""
    total: Tensor = _SumOfLosses.apply(loss, comm)  # type: ignore[no-untyped-call]
    return total


class _SumOfLosses(torch.autograd.Function):
    """The sum of a number over the ranks; every rank already has the same gradient of it."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, comm: Comm) -> Tensor:
        total: Tensor = loss.detach().clone().reshape(1)
        if comm.size > 1:
            comm.all_reduce(total, tuple(range(comm.size)), "io", "the loss").wait()
        summed: Tensor = total.reshape(())
        return summed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
