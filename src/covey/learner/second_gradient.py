"""The gradient of an optimizer step a second time: plain autograd over its rows, without accumulation.

What a backend hands to the optimizer has gone through backward passes that add up, casts, buffers and sums
over ranks. Here each row's gradient is taken beside all that, from the loss in closed form, and the two are
compared. Nothing is left behind: no `.grad` is written, random numbers are drawn as before, and what is kept
of a gradient is a few elements of every tensor.

Axes: N trained tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from covey.algorithm.loss_types.declare import Average
from covey.algorithm.loss_types.registry import loss_named
from covey.algorithm.losses import LossConfig
from covey.comm import Comm
from covey.learner.backends.base import Backend
from covey.models.quantized import coarsest_dtype
from covey.types import Batch, Denominators, GradientMatch, MicroBatch, TokenStats

# Elements of a tensor's gradient that are compared.
_SAMPLED = 1 << 11
# A tensor with less than this share of the whole gradient is held to that share: its own may be rounding. In
# bfloat16 biases of a vision tower's norms, sums over all patches that nearly cancel, had a hundredth of the
# whole gradient and were up to 8 % apart, both sides equally far from the gradient in float32.
_SMALL, _SMALL_LOW = 1e-3, 2e-2


class RandomStates:
    """The states of torch's random generators at a moment, so that dropout can be drawn a second time."""

    def __init__(self, device: torch.device) -> None:
        self._devices = [device] if device.type == "cuda" else []
        self._states = (torch.get_rng_state(), *map(torch.cuda.get_rng_state, self._devices))

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Within it the generators go on from that moment; behind it they are where they were."""
        with torch.random.fork_rng(devices=self._devices):
            torch.set_rng_state(self._states[0])
            for device, state in zip(self._devices, self._states[1:], strict=True):
                torch.cuda.set_rng_state(state, device)
            yield


def compare_gradients(
    batch: Batch, backend: Backend, config: LossConfig, random_states: RandomStates, comm: Comm
) -> GradientMatch | None:
    """How far the gradient that the backend has accumulated is from that of the step's rows.

    For a step before which nothing has been updated since its rows were sampled or annotated, so that every
    ratio is 1. `random_states` are of the moment before the backward passes. None where the rows have no
    gradient. Collective.
    """
    with random_states.restored():
        own_rows = second_gradient(batch, backend, config, comm)
    counts = [part.numel() for part in own_rows.values()]
    expected = comm.sum_tensor(torch.cat([part.double().cpu() for part in own_rows.values()]))
    actual = {name: _sample(gradient).double().cpu() for name, gradient in backend.gradients()}
    whole = float(expected.norm())
    if not whole > 0.0:
        return None
    policy = backend.policy
    is_low = coarsest_dtype(policy, next(policy.parameters()).dtype) != torch.float32
    least = (_SMALL_LOW if is_low else _SMALL) * whole
    gaps = {
        name: float((actual[name] - part).norm() / max(float(part.norm()), least))
        for name, part in zip(own_rows, expected.split(counts), strict=True)
    }
    worst = max(gaps, key=lambda n: gaps[n] if gaps[n] == gaps[n] else float("inf"))
    scale = float(torch.cat([actual[n] for n in own_rows]) @ expected) / whole**2
    return GradientMatch(scale=scale, gap=comm.max([gaps[worst]])[0], worst=worst)


def second_gradient(batch: Batch, backend: Backend, config: LossConfig, comm: Comm) -> dict[str, Tensor]:
    """Elements of the gradient of this rank's rows by the name of every trained tensor, in float32."""

    def surrogate(stats: TokenStats, micro: MicroBatch) -> Tensor:
        comm.activity.advance()
        derivative_N = loss_derivative(stats.logprob_N.detach(), micro, batch.denominators, config)
        value = (stats.logprob_N * derivative_N).sum()
        if config.entropy_coef != 0.0:
            entropy_derivative_N = _entropy_derivative(micro, batch.denominators, config)
            value = value + (stats.entropy_N * entropy_derivative_N).sum()
        return value

    return backend.plain_gradient(batch.micro_batches, surrogate, _sample)


def loss_derivative(logprob_N: Tensor, micro: MicroBatch, total: Denominators, config: LossConfig) -> Tensor:
    """d loss / d logprob (N,) of the step's loss, but for an entropy bonus, where every ratio is 1.

    There no clip is reached, every weight and gate is 1, and the derivative of a token's term is what the
    loss declares, mostly -A (the policy gradient). With d = ref - logprob that of k1 = -d is 1, of
    k2 = d^2 / 2 is -d, and of k3 = exp(d) - d - 1 is 1 - exp(d); times the ratio, the estimate itself is
    added.
    """
    loss = loss_named(config.loss_type)
    assert loss.derivative_at_1 is not None, f"{loss.name} declares no derivative at a ratio of 1"
    own_N = micro.episode_count_S[micro.sequence_N].float()
    denominator_N = {
        Average.EPISODE: own_N * total.num_episodes,
        Average.EPISODES: torch.full_like(own_N, total.num_episodes),
        Average.LENGTH: torch.full_like(own_N, total.num_episodes * total.max_completion_length),
        Average.TOKENS: torch.full_like(own_N, total.num_tokens),
    }[loss.average]
    derivative_N = loss.derivative_at_1 * micro.advantage_N
    if micro.keep_N is not None:
        derivative_N = derivative_N * micro.keep_N
    if config.beta != 0.0:
        assert micro.ref_logprob_N is not None, "beta > 0 needs reference logprobs"
        d_N = micro.ref_logprob_N - logprob_N
        kl_derivative_N, estimate_N = {
            "k1": (torch.ones_like(d_N), -d_N),
            "k2": (-d_N, d_N * d_N / 2.0),
            "k3": (1.0 - torch.exp(d_N), torch.exp(d_N) - d_N - 1.0),
        }[config.kl_estimator]
        if config.use_bias_correction_kl:
            kl_derivative_N = kl_derivative_N + estimate_N
        derivative_N = derivative_N + config.beta * kl_derivative_N
    return derivative_N / denominator_N


def _entropy_derivative(micro: MicroBatch, total: Denominators, config: LossConfig) -> Tensor:
    """d loss / d entropy (N,) of the entropy bonus."""
    keep_N = torch.ones_like(micro.advantage_N) if micro.keep_N is None else micro.keep_N
    count = total.num_tokens if total.num_kept is None else total.num_kept
    return -config.entropy_coef / count * keep_N


def _sample(tensor: Tensor) -> Tensor:
    """Elements of a tensor, evenly spread; the odd stride keeps them out of one column."""
    return tensor.reshape(-1)[:: (tensor.numel() // _SAMPLED) | 1]
