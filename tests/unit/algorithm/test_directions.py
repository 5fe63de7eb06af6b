"""Every option of the algorithm changes the result in the direction that its documentation states.

From the option as it is typed to the number that it changes, on one step of three completions whose ratios
lie around 1. That each number is right is for the other files of this folder.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from covey.algorithm.advantages import advantages
from covey.algorithm.contrast import contrast, contrast_sums
from covey.algorithm.losses import LossInputs, LossOutput, policy_loss
from covey.batching.credit import row_credits
from covey.batching.needs import needs
from covey.batching.pack import pack
from covey.config import from_dict
from covey.config.values import kind_of
from covey.learner.optimizer import Masters
from covey.learner.reference import MovingReference
from covey.options.schema import FACTS, OPTIONS, group_of
from covey.training.loss import loss
from covey.training.objective import EntropyBonus, Objective, objective_of
from covey.types import Denominators
from support.checks import BASE
from support.steps import OPTIMIZER, plan_of, policy, rollout, rows

# Completions of 4, 2 and 1 tokens; the second is bad.
RATIO = torch.tensor([1.5, 1.2, 0.9, 1.3, 0.6, 6.0, 0.7])
OLD = torch.tensor([-1.0, -0.5, -2.0, -1.5, -1.0, -3.0, -0.7])
SEQUENCE, COUNT = torch.tensor([0, 0, 0, 0, 1, 1, 2]), torch.tensor([4, 2, 1])


def config_of(**options: Any) -> Any:
    resolved = from_dict({**BASE, **options})
    assert resolved.problems == ()
    return resolved.config


def over(**options: Any) -> Objective:
    """The objective of a run of five steps."""
    config = config_of(**options)
    return objective_of(config, needs(config, 1), 5)


def step(lost: float = 0.0, **options: Any) -> tuple[LossOutput, torch.Tensor, torch.Tensor]:
    """The loss, and its gradient by logprobs and entropies; tokens `lost` nats since they were sampled."""
    inputs = LossInputs(
        logprob_N=(OLD + RATIO.log()).requires_grad_(),
        old_logprob_N=OLD,
        ref_logprob_N=OLD if options.get("beta") else None,
        advantage_N=torch.tensor([1.0, 1.0, 1.0, 1.0, -1.0, -1.0, 0.5]),
        sequence_N=SEQUENCE,
        trained_count_S=COUNT,
        episode_count_S=COUNT,
        denominators=Denominators(num_episodes=3, num_tokens=7, max_completion_length=10),
        sampler_logprob_N=OLD - torch.tensor([1.0, 0.5, 0.0, 0.0, -0.8, 2.0, 0.0]) + lost,
        entropy_N=torch.ones(7, requires_grad=True),
    )
    out = policy_loss(inputs, loss(config_of(**options)))
    leaves = [inputs.logprob_N, inputs.entropy_N]
    gradient = torch.autograd.grad(out.loss, leaves, allow_unused=True, materialize_grads=True)
    return out, *gradient


def slopes(**options: Any) -> torch.Tensor:
    """The size (N,) of each token's gradient."""
    return step(**options)[1].abs()


def summed(name: str, **options: Any) -> float:
    return float(step(**options)[0].sums[name])


def spread(reward: list[list[float]], **options: Any) -> torch.Tensor:
    config = config_of(**options)
    value = torch.tensor(reward, dtype=torch.float64)
    valid = torch.ones_like(value, dtype=torch.bool)
    return advantages(value, valid, config.advantage_estimator, config.scale_rewards)


def loss_type() -> None:
    # A short completion weighs more where each is averaged first, a long one where it is summed.
    def share(name: str, **options: Any) -> float:
        found = slopes(loss_type=name, epsilon=9.0, epsilon_high=9.0, **options)
        return float(found[6] / found.sum())

    assert share("luspo") == pytest.approx(share("dapo")) == pytest.approx(share("dr_grpo"))
    assert share("grpo") > share("dapo")
    # At what the clip takes, cispo, sapo and vespo leave a gradient.
    assert slopes(loss_type="dapo")[0] == 0
    assert all(slopes(loss_type=name)[0] > 0 for name in ("cispo", "sapo", "vespo"))
    assert (slopes(loss_type="fipo")[4:6] >= slopes(loss_type="dapo")[4:6]).all()


def importance_sampling_level() -> None:
    own = slopes(loss_type="grpo", epsilon=9.0, epsilon_high=9.0)[:4]
    for level in ("sequence", "sequence_token"):
        of_all = slopes(loss_type="grpo", epsilon=9.0, epsilon_high=9.0, importance_sampling_level=level)[:4]
        assert own.max() > 1.5 * own.min()
        assert torch.allclose(of_all, of_all[:1].expand(4), rtol=1e-5)


def advantage_estimator() -> None:
    reward = [[1.0, 0.0], [5.0, 4.0]]
    plain = spread(reward, scale_rewards="none")
    siblings = spread(reward, scale_rewards="none", advantage_estimator="rloo")
    assert torch.allclose(siblings, 2 * plain)
    over_all = spread(reward, scale_rewards="none", advantage_estimator="reinforce_plus_plus")
    assert (over_all[0] < 0).all() and (over_all[1] > 0).all()


def scale_rewards() -> None:
    reward = [[1.0, 0.0], [10.0, 0.0]]
    size = {name: spread(reward, scale_rewards=name).abs().amax(dim=1) for name in ("group", "batch", "none")}
    assert size["group"][1] == pytest.approx(float(size["group"][0]), rel=1e-3)
    for name in ("batch", "none"):
        assert size[name][1] == pytest.approx(10 * float(size[name][0]))
    assert size["batch"][1] < size["none"][1]


def epsilon() -> None:
    assert summed("clip_ratio/low_mean", epsilon=0.3) > summed("clip_ratio/low_mean", epsilon=0.5)


def epsilon_high() -> None:
    counts = [summed("clip_ratio/high_mean", epsilon_high=value) for value in (0.1, 0.25, 0.6)]
    assert counts == [3.0, 2.0, 0.0]
    weighed = [slopes(loss_type="cispo", epsilon_high=cap)[5] for cap in (2.0, 5.0, 9.0)]
    assert weighed[0] < weighed[1] < weighed[2]


def _course(name: str, of: Callable[[Objective, int], float], start: float, end: float, **more: Any) -> None:
    """It goes from the value to the end; a cosine is slower at first."""
    options = {name: start, f"{name}_end": end, **more}
    line = [of(over(**options), at) for at in range(5)]
    curve = [of(over(**options, **{f"{name}_schedule": "cosine"}), at) for at in range(5)]
    for values in (line, curve):
        assert (values[0], values[-1]) == (pytest.approx(start), pytest.approx(end))
    assert abs(curve[1] - start) < abs(line[1] - start)
    assert abs(curve[3] - end) < abs(line[3] - end)


def epsilon_end() -> None:
    _course("epsilon", lambda found, at: found.loss_at(at).epsilon, 0.2, 0.1)


def beta_end() -> None:
    _course("beta", lambda found, at: found.loss_at(at).beta, 0.1, 0.0)
    _course("beta", lambda found, at: found.credit_at(at).beta, 0.0, 0.1, kl_in_reward=True)


def entropy_coef_end() -> None:
    _course("entropy_coef", lambda found, at: found.loss_at(at).entropy_coef, 0.1, 0.0)


def delta() -> None:
    losses = [float(step(delta=value)[0].loss.detach()) for value in (1.5, 4.0, 9.0)]
    assert losses[0] < losses[1] < losses[2]
    assert slopes(delta=4.0)[5] == 0 < slopes(delta=9.0)[5]


def _gate(name: str, inside: slice, outside: slice) -> None:
    plain, steep = slopes(loss_type="sapo"), slopes(loss_type="sapo", **{name: 4.0})
    assert (steep[inside] < plain[inside]).all()
    assert torch.equal(steep[outside], plain[outside])


def tau_pos() -> None:
    _gate("tau_pos", slice(0, 1), slice(4, 6))


def tau_neg() -> None:
    _gate("tau_neg", slice(4, 6), slice(0, 4))


def _vespo(name: str, place: int, elsewhere: int) -> None:
    """More of it takes weight from the completion at `place` and leaves the one at `elsewhere`."""
    plain = slopes(loss_type="vespo")
    more = slopes(loss_type="vespo", **{name: 5.0})
    assert more[place] < plain[place]
    assert more[elsewhere] == plain[elsewhere]


def vespo_k_pos() -> None:
    _vespo("vespo_k_pos", 6, 4)  # 0.7: a good completion that became unlikelier


def vespo_lambda_pos() -> None:
    _vespo("vespo_lambda_pos", 0, 4)  # 2.1: one that became likelier


def vespo_k_neg() -> None:
    plain, more = slopes(loss_type="vespo"), slopes(loss_type="vespo", vespo_k_neg=5.0)
    assert more[4] > plain[4]  # 3.6 to the power of 5 instead of 3
    assert more[0] == plain[0]


def vespo_lambda_neg() -> None:
    _vespo("vespo_lambda_neg", 4, 0)


def real_tau() -> None:
    # Scores are divided by it: at equal scores the slope by the log ratio is steeper by as much.
    advantage, group, zeros = torch.tensor([1.0, -1.0]), torch.tensor([0, 0]), torch.zeros(2)
    sums = contrast_sums(zeros, advantage, group, 1)
    flat, steep = (
        contrast(zeros, advantage, group, sums, over(loss_type="real", real_tau=tau).loss.real_tau)
        for tau in (1.0, 0.1)
    )
    assert torch.allclose(steep.coefficient_S, 10 * flat.coefficient_S)
    assert flat.coefficient_S.tolist() == [-0.5, 0.5]


FREE = {"loss_type": "fipo", "fipo_clip_range": 0.0, "fipo_safety_threshold": None, "epsilon_high": 9.0}


def fipo_decay_rate() -> None:
    # After the first token of the first completion the ratios are above 1 on the whole.
    near, far = (float(slopes(**FREE, fipo_decay_rate=rate)[0]) for rate in (0.5, 100.0))
    assert far > near


def fipo_clip_range() -> None:
    found = [summed("fipo/influence_weight_mean", loss_type="fipo", fipo_clip_range=x) for x in (0.1, 0.3)]
    assert found[0] < found[1] < summed("fipo/influence_weight_mean", **FREE)


def fipo_clip_high_only() -> None:
    both = slopes(loss_type="fipo", fipo_clip_high_only=False, epsilon=9.0)[6]
    assert both < slopes(loss_type="fipo", epsilon=9.0)[6]


def fipo_safety_threshold() -> None:
    held, free = (slopes(loss_type="fipo", fipo_safety_threshold=x)[5] for x in (4.0, 9.0))
    assert held < free
    assert summed("fipo/safety_keep_ratio", loss_type="fipo", fipo_safety_threshold=4.0) == 6.0


def beta() -> None:
    none, some, more = (float(step(beta=x)[0].loss.detach()) for x in (0.0, 0.1, 0.2))
    assert none < some < more


def kl_estimator() -> None:
    assert summed("kl", beta=0.1, kl_estimator="k1") == pytest.approx(float(RATIO.log().sum()), rel=1e-4)
    assert summed("kl", beta=0.1, kl_estimator="k2") > 0
    assert summed("kl", beta=0.1, kl_estimator="k3") > 0


def kl_in_reward() -> None:
    config = config_of(beta=0.5, kl_in_reward=True, scale_rewards="none")
    assert loss(config).beta == 0.0
    assert needs(config, 1).kl_in_reward
    groups = rollout()
    samples = [row.annotated.sample for row in rows()]
    strayed = [0.0] * 11 + [2.0]  # the last row has moved away from the first model
    plain, paid = row_credits(groups, samples, config), row_credits(groups, samples, config, strayed)
    assert paid[-1].advantage == pytest.approx(plain[-1].advantage - 0.5 * 2.0 * 3 / 4)
    assert paid[-2].advantage == pytest.approx(plain[-2].advantage + 0.5 * 2.0 / 4)
    assert [c.advantage for c in paid[:8]] == [c.advantage for c in plain[:8]]


def use_bias_correction_kl() -> None:
    plain, moved = (float(step(beta=0.1, use_bias_correction_kl=x)[0].loss.detach()) for x in (False, True))
    assert moved > plain  # the token that strayed furthest has ratio 6


def _reference(steps: int, **options: Any) -> float:
    """A weight of the reference, which starts at 0, after so many steps of a policy whose weights are 1."""
    own, reference = policy("prefix"), policy("prefix")
    with torch.no_grad():
        for part in reference.parameters():
            part.zero_()
        for part in own.parameters():
            part.fill_(1.0)
    moving = MovingReference(own, reference, config_of(beta=0.1, **options), dtype=torch.float32)
    for number in range(1, steps + 1):
        moving.move(number, Masters.of(own, OPTIMIZER).each())
    return float(next(reference.parameters()).detach().flatten()[0])


SYNC = {"sync_ref_model": True}


def sync_ref_model() -> None:
    assert _reference(4, ref_model_sync_steps=2) == 0.0
    assert _reference(4, **SYNC, ref_model_sync_steps=2) > 0.0


def ref_model_sync_steps() -> None:
    rare, often = (_reference(6, **SYNC, ref_model_sync_steps=x) for x in (3, 2))
    assert (rare, often) == pytest.approx((0.84, 0.936))


def ref_model_mixup_alpha() -> None:
    found = [_reference(3, **SYNC, ref_model_sync_steps=3, ref_model_mixup_alpha=x) for x in (0.2, 0.6, 1.0)]
    assert found == pytest.approx([0.2, 0.6, 1.0])


def entropy_coef() -> None:
    found = [step(entropy_coef=x)[2] for x in (0.0, 0.1, 0.2)]
    assert found[0].count_nonzero() == 0
    assert (found[1] < 0).all() and torch.allclose(found[2], 2 * found[1])


def _adaptive(seen: list[float], **options: Any) -> EntropyBonus:
    found = over(use_adaptive_entropy=True, entropy_coef=0.1, **options).bonus
    assert found is not None
    for entropy in seen:
        found.observe(entropy)
    return found


def use_adaptive_entropy() -> None:
    assert _adaptive([0.1]).weight > 0.1 > _adaptive([0.5]).coef
    assert _adaptive([0.5]).weight == 0.0


def entropy_target() -> None:
    assert _adaptive([0.5], entropy_target=0.6).coef > 0.1 > _adaptive([0.5], entropy_target=0.4).coef


def entropy_coef_delta() -> None:
    assert _adaptive([0.1], entropy_coef_delta=0.05).coef > _adaptive([0.1], entropy_coef_delta=0.01).coef


def entropy_coef_min() -> None:
    assert _adaptive([9.0] * 50, entropy_coef_min=0.03).coef == 0.03


def entropy_coef_max() -> None:
    assert _adaptive([0.0] * 50, entropy_coef_max=0.12).coef == 0.12


def top_entropy_quantile() -> None:
    given = rows()
    kept = []
    for share in (0.2, 0.6):
        assert needs(config_of(top_entropy_quantile=share), 1).entropy
        (batch,) = pack(given, plan_of(top_entropy_quantile=share), 0)
        kept.append(sum(int(m.keep_N.sum()) for m in batch.micro_batches))
        # First tokens of siblings have one entropy, and are in together.
        assert 0 <= kept[-1] - share * batch.denominators.num_tokens <= 4
    assert kept[0] < kept[1]


def mask_truncated_completions() -> None:
    groups, samples = rollout(), [row.annotated.sample for row in rows()]
    masked = [
        [c.masked for c in row_credits(groups, samples, config_of(mask_truncated_completions=on))]
        for on in (False, True)
    ]
    assert [m.count("truncated") for m in masked] == [0, 1]


def off_policy_sequence_mask_delta() -> None:
    # The bad completion has lost 0.76 nats a token, and the good ones stay whatever they lost.
    name = "off_policy_mask/masked_frac"
    assert [summed(name, lost=2.0, off_policy_sequence_mask_delta=x) for x in (0.5, 1.0)] == [2.0, 0.0]
    assert slopes(lost=2.0, off_policy_sequence_mask_delta=0.5)[5] == 0
    assert slopes(lost=2.0, off_policy_sequence_mask_delta=1.0)[5] > 0
    assert name not in step()[0].sums


def _outside(**options: Any) -> float:
    return summed("rollout_correction/clipped_frac", **options)


def rollout_importance_sampling_mode() -> None:
    cut, out = (slopes(rollout_importance_sampling_mode=f"token_{how}")[5] for how in ("truncate", "mask"))
    assert cut == pytest.approx(2 * float(slopes()[5]))
    assert out == 0.0
    # Of the completion the ratio is e^0.6, not above 2.
    assert slopes(rollout_importance_sampling_mode="sequence_mask")[5] > 0


def rollout_importance_sampling_threshold() -> None:
    mode = {"rollout_importance_sampling_mode": "token_mask"}
    counts = [_outside(**mode, rollout_importance_sampling_threshold=bound) for bound in (1.5, 2.0, 8.0)]
    assert counts == [3.0, 2.0, 0.0]


def vllm_importance_sampling_mode() -> None:
    # Two completions have the products e^1.5 and e^1.2, above 3.
    assert _outside(vllm_importance_sampling_mode="sequence_mask") == 6.0
    assert (
        _outside(rollout_importance_sampling_mode="sequence_mask", rollout_importance_sampling_threshold=3.0)
        == 0
    )


def vllm_importance_sampling_clip_max() -> None:
    mode = {"vllm_importance_sampling_mode": "sequence_truncate"}
    found = [slopes(**mode, vllm_importance_sampling_clip_max=bound)[5] for bound in (1.0, 2.0, None)]
    assert found[0] < found[1] < found[2]


def vllm_importance_sampling_clip_min() -> None:
    mode = {"vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_max": None}
    assert _outside(**mode, vllm_importance_sampling_clip_min=0.7) == 1.0
    assert _outside(**mode) == 0.0


DIRECTIONS: dict[str, Callable[[], None]] = {
    function.__name__: function
    for function in (
        *(loss_type, importance_sampling_level, advantage_estimator, scale_rewards),
        *(epsilon, epsilon_high, epsilon_end, delta, tau_pos, tau_neg),
        *(vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg, real_tau),
        *(fipo_decay_rate, fipo_clip_range, fipo_clip_high_only, fipo_safety_threshold),
        *(beta, beta_end, kl_estimator, kl_in_reward, use_bias_correction_kl),
        *(sync_ref_model, ref_model_sync_steps, ref_model_mixup_alpha),
        *(entropy_coef, entropy_coef_end, use_adaptive_entropy, entropy_target),
        *(entropy_coef_delta, entropy_coef_min, entropy_coef_max, top_entropy_quantile),
        *(mask_truncated_completions, off_policy_sequence_mask_delta),
        *(rollout_importance_sampling_mode, rollout_importance_sampling_threshold),
        *(vllm_importance_sampling_mode, vllm_importance_sampling_clip_max),
        vllm_importance_sampling_clip_min,
    )
}
# A schedule is tried with its end.
DIRECTIONS |= {f"{name}_schedule": DIRECTIONS[f"{name}_end"] for name in ("epsilon", "beta", "entropy_coef")}


@pytest.mark.parametrize("name", DIRECTIONS)
def test_direction(name: str) -> None:
    DIRECTIONS[name]()


# A value that changes the gradient of the step above wherever the loss reads it.
OWN = {
    **{"epsilon": 0.5, "epsilon_high": 0.1, "tau_pos": 4.0, "tau_neg": 4.0, "vespo_k_pos": 5.0},
    **{"vespo_lambda_pos": 5.0, "vespo_k_neg": 5.0, "vespo_lambda_neg": 5.0, "fipo_decay_rate": 0.5},
    **{"fipo_clip_range": 0.3, "fipo_clip_high_only": False, "fipo_safety_threshold": 9.0},
}


@pytest.mark.parametrize("loss", [name for name in kind_of("loss_type").choices if name != "real"])
def test_a_loss_reads_the_options_that_are_declared_as_its_own(loss: str) -> None:
    """A warning says of all others that they have no effect."""
    for name, value in OWN.items():
        read_if = FACTS[name].read_if
        assert read_if is not None and read_if.option == "loss_type"
        plain, changed = slopes(loss_type=loss), slopes(loss_type=loss, **{name: value})
        assert torch.equal(plain, changed) != read_if.holds(loss), name
    rest = {n for n, f in FACTS.items() if f.read_if is not None and f.read_if.option == "loss_type"}
    assert rest - OWN.keys() == {"epsilon_end", "real_tau"}


# These say which groups a rollout has, which whole runs show.
OF_GROUPS = {
    "dynamic_sample": "test_every_group_has_signal_and_steps_are_whole",
    "max_resample_times": "test_too_few_draws_leave_groups_without_signal",
    "replay_buffer_size": "test_replayed_groups_are_older_and_their_ratio_is_not_one",
}
# It says what the old log-probabilities are, before any loss is computed.
OF_OLD = {"use_decoupled_loss": "test_the_loss_of_mixed_versions"}


def test_no_option_is_left_out() -> None:
    tests = Path(__file__).parents[2]
    for file, names in (("journeys/test_selection.py", OF_GROUPS), ("unit/learner/test_ages.py", OF_OLD)):
        assert all(f"def {name}(" in (tests / file).read_text() for name in names.values())
    assert {*DIRECTIONS, *OF_GROUPS, *OF_OLD} == {name for name in OPTIONS if group_of(name) == "algorithm"}
