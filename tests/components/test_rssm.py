"""The recurrent state-space model: one step and many steps agree, resets forget, gradients arrive."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rl_lab.components.world_model.latents import CategoricalLatent, GaussianLatent
from rl_lab.components.world_model.layers import BlockLinear
from rl_lab.components.world_model.rssm import RSSM, BlockGRU, CellSizes
from rl_lab.types import ActionSpec, ConfigError

CPU = torch.device("cpu")
DISCRETE = ActionSpec("discrete", (3,))
CONTINUOUS = ActionSpec("continuous", (2,))
MULTI = ActionSpec("multi_discrete", (2, 3))


def make(action: ActionSpec = DISCRETE, *, gaussian: bool = False, recurrence: str = "block_gru") -> RSSM:
    torch.manual_seed(0)
    latent = GaussianLatent(size=6) if gaussian else CategoricalLatent(groups=4, classes=3)
    blocks = 4 if recurrence == "block_gru" else 1
    return RSSM(input_size=5, action=action, latent=latent, recurrence=recurrence, deter=8, hidden=6, blocks=blocks)


def actions(spec: ActionSpec, *leading: int) -> Tensor:
    if spec.kind == "continuous":
        return torch.randn(*leading, 2) * 2.0
    if spec.kind == "discrete":
        return torch.randint(0, 3, leading)
    return torch.stack([torch.randint(0, size, leading) for size in spec.sizes], dim=-1)


@pytest.mark.parametrize("spec", [DISCRETE, CONTINUOUS, MULTI], ids=lambda spec: spec.kind)
@pytest.mark.parametrize(("gaussian", "recurrence"), [(False, "block_gru"), (True, "gru")])
def test_a_sequence_equals_its_rows_one_by_one_with_resets_between(
    spec: ActionSpec, gaussian: bool, recurrence: str
) -> None:
    model = make(spec, gaussian=gaussian, recurrence=recurrence)
    embedding, action = torch.randn(2, 6, 5), actions(spec, 2, 6)
    is_first = torch.tensor([[0, 0, 1, 0, 0, 0], [1, 0, 0, 0, 1, 1]], dtype=torch.bool)
    begin = {"deter": torch.randn(2, 8).tanh(), "stoch": torch.rand(2, model.latent.size)}
    draws = model.latent.noise(6, 2, device=CPU)
    model.latent.noise = lambda *leading, device: draws  # type: ignore[method-assign]
    together, posteriors = model.observe_sequence(embedding, action, is_first, begin)
    state = begin
    for t in range(6):
        model.latent.noise = lambda *leading, device, t=t: draws[t]  # type: ignore[method-assign]
        state, posterior = model.observe(embedding[:, t], action[:, t], state, is_first[:, t])
        assert torch.allclose(together["deter"][:, t], state["deter"], atol=1e-6)
        assert torch.allclose(together["stoch"][:, t], state["stoch"], atol=1e-6)
        assert torch.allclose(posteriors[:, t], posterior, atol=1e-5)


def test_a_first_row_forgets_the_state_and_the_action_before_it() -> None:
    model = make()
    embedding, first = torch.randn(1, 5), torch.tensor([True])
    blank = model.initial_state(1, CPU)
    other = {key: torch.ones_like(value) for key, value in blank.items()}
    results = [
        model.observe(embedding, torch.tensor([action]), state, first, deterministic=True)[0]["deter"]
        for action, state in ((0, blank), (2, other))
    ]
    assert torch.equal(results[0], results[1])
    later = model.observe(embedding, torch.tensor([2]), other, ~first, deterministic=True)[0]["deter"]
    assert not torch.allclose(later, results[0])


def test_what_was_seen_before_a_reset_leaves_no_trace_and_gets_no_gradient() -> None:
    model = make()
    embedding = torch.randn(1, 4, 5, requires_grad=True)
    is_first = torch.tensor([[False, False, True, False]])
    state, _ = model.observe_sequence(embedding, actions(DISCRETE, 1, 4), is_first, model.initial_state(1, CPU))
    state["deter"][:, 3].sum().backward()
    assert embedding.grad is not None
    assert embedding.grad[0, :2].abs().sum() == 0.0
    assert embedding.grad[0, 2].abs().sum() > 0.0


def test_continuous_actions_are_pressed_into_the_unit_box_and_choices_become_one_hots() -> None:
    assert make(CONTINUOUS).encode_action(torch.tensor([[0.5, -3.0]])).tolist() == [[0.5, -1.0]]
    assert make(DISCRETE).encode_action(torch.tensor([2])).tolist() == [[0.0, 0.0, 1.0]]
    assert make(MULTI).encode_action(torch.tensor([[1, 0]])).tolist() == [[0.0, 1.0, 1.0, 0.0, 0.0]]


def test_a_dream_begins_with_its_start_and_repeats_single_steps() -> None:
    model = make()
    start = {"deter": torch.randn(3, 8).tanh(), "stoch": model.latent.unpack(torch.zeros(3, 4, dtype=torch.uint8))}
    chosen = [torch.tensor([0, 1, 2]), torch.tensor([2, 2, 0])]
    states, action = model.imagine(start, lambda features, step: chosen[step], 2, deterministic=True)
    assert states["deter"].shape == (3, 3, 8) and states["stoch"].shape == (3, 3, 12)
    assert torch.equal(states["deter"][:, 0], start["deter"])
    assert torch.equal(action, torch.stack(chosen, dim=1))
    state = start
    for t in range(2):
        state = model.imagine_step(state, chosen[t], None)
        assert torch.allclose(states["deter"][:, t + 1], state["deter"], atol=1e-6)


def test_the_block_gru_is_the_recurrence_written_with_whole_matrices() -> None:
    torch.manual_seed(1)
    cell = BlockGRU(CellSizes(deter=8, hidden=3, blocks=2, stoch=4, action=2))
    deter, stoch, action = torch.randn(5, 8), torch.randn(5, 4), torch.randn(5, 2)
    inputs = torch.cat((cell.from_deter(deter), cell.from_stoch(stoch), cell.from_action(action)), dim=-1)
    repeated = torch.cat((deter.view(5, 2, 4), inputs.unsqueeze(1).expand(5, 2, 9)), dim=-1).flatten(1)
    mixed = cell.activation(cell.mix_norm(cell.mix(repeated)))
    gates = cell.gates(mixed).view(5, 2, 12)
    reset, candidate, update = (part.flatten(1) for part in gates.split(4, dim=-1))
    candidate = torch.tanh(torch.sigmoid(reset) * candidate)
    update = torch.sigmoid(update - 1.0)
    expected = update * candidate + (1.0 - update) * deter
    assert torch.allclose(cell(deter, stoch, action), expected, atol=1e-6)


def test_block_linear_multiplies_each_block_with_its_own_part() -> None:
    layer = BlockLinear(4, 2, blocks=2)
    layer.weight.data = torch.tensor([[[1.0], [2.0]], [[3.0], [4.0]]])
    layer.bias.data = torch.tensor([0.0, 0.5])
    assert layer(torch.tensor([[1.0, 1.0, 1.0, 10.0]])).tolist() == [[3.0, 43.5]]


def test_block_weights_start_with_the_std_of_the_whole_input() -> None:
    torch.manual_seed(0)
    layer = BlockLinear(512, 512, blocks=8)
    assert float(layer.weight.detach().std()) == pytest.approx(512**-0.5, rel=0.02)
    assert float(layer.weight.detach().abs().max()) <= 2.0 / 0.87962566 * 512**-0.5 + 1e-6


def test_a_packed_state_is_the_state_up_to_half_precision() -> None:
    model = make()
    embedding = torch.randn(4, 5)
    state, _ = model.observe(embedding, actions(DISCRETE, 4), model.initial_state(4, CPU), torch.ones(4).bool())
    row = model.pack(state)
    assert {key: value.dtype for key, value in row.items()} == {
        "context_deter": torch.float16,
        "context_stoch": torch.uint8,
    }
    back = model.unpack(row)
    assert torch.allclose(back["deter"], state["deter"], atol=5e-4)
    assert torch.equal(back["stoch"], state["stoch"].detach())


def test_impossible_shapes_are_refused() -> None:
    latent = CategoricalLatent(groups=2, classes=2)
    with pytest.raises(ConfigError, match="dynamics: blocks is 3, which does not divide deter 8: write a divisor"):
        RSSM(input_size=5, action=DISCRETE, latent=latent, deter=8, hidden=4, blocks=3)
    with pytest.raises(ConfigError, match="blocks is 2, but recurrence gru has one block: write blocks: 1"):
        RSSM(input_size=5, action=DISCRETE, latent=latent, recurrence="gru", deter=8, hidden=4, blocks=2)
    with pytest.raises(ConfigError, match="dynamics: posterior_layers is 0; write a whole number from 1 on"):
        RSSM(input_size=5, action=DISCRETE, latent=latent, deter=8, hidden=4, posterior_layers=0)
    with pytest.raises(ConfigError, match="dynamics recurrence: 'lstm' is not known; allowed: block_gru, gru"):
        RSSM(input_size=5, action=DISCRETE, latent=latent, recurrence="lstm", deter=8, hidden=4)
    with pytest.raises(ConfigError, match="blocks is 3, which does not divide 8 and 4: write a divisor of both"):
        BlockLinear(8, 4, blocks=3)


def test_sizes_of_nothing_are_refused() -> None:
    for sizes in ({"deter": 0}, {"hidden": 0}):
        with pytest.raises(
            ConfigError, match=r"dynamics: deter is \d+ and hidden is \d+; write whole numbers from 1 on"
        ):
            RSSM(input_size=5, action=DISCRETE, latent=CategoricalLatent(groups=4, classes=3), **sizes)  # type: ignore[arg-type]


def test_the_recurrence_may_be_normed_by_itself() -> None:
    """As in DreamerV2, whose gates are normed and nothing else."""
    shared = {"input_size": 5, "action": DISCRETE, "latent": CategoricalLatent(groups=4, classes=3), "blocks": 1}
    rssm = RSSM(**shared, recurrence="gru", deter=8, hidden=6, norm="none", recurrence_norm="layer")  # type: ignore[arg-type]
    normed = {name.rsplit(".", 1)[0] for name, _ in rssm.named_parameters() if "norm" in name}
    assert normed == {"cell.gates_norm"}


def test_a_normed_gru_norms_the_layer_before_its_gates_too() -> None:
    """As in the first release of DreamerV3."""
    shared = {"input_size": 5, "action": DISCRETE, "latent": CategoricalLatent(groups=4, classes=3), "blocks": 1}
    rssm = RSSM(**shared, recurrence="gru", deter=8, hidden=6, norm="layer", prior_layers=1)  # type: ignore[arg-type]
    normed = {name.rsplit(".", 1)[0] for name, _ in rssm.named_parameters() if "norm" in name}
    assert normed == {"cell.gates_norm", "cell.input.norm", "prior_stack.layers.0.norm", "posterior_layer.norm"}


def test_what_was_nan_does_not_outlive_the_end_of_an_episode() -> None:
    model = make(CONTINUOUS)
    action = torch.zeros(2, 2, 2)
    action[:, 0] = torch.nan  # the answer to the last row of an episode counts for nothing
    begin = {key: torch.full_like(value, torch.nan) for key, value in model.initial_state(2, CPU).items()}
    is_first = torch.tensor([[True, False], [True, False]])
    states, _ = model.observe_sequence(torch.randn(2, 2, 5), action, is_first, begin)
    gradients = torch.autograd.grad(states["deter"].sum(), list(model.cell.parameters()))
    assert all(each.isfinite().all() for each in (*states.values(), *gradients))
    kept, _ = model.observe_sequence(torch.randn(2, 2, 5), torch.zeros_like(action), ~is_first, begin)
    assert kept["deter"][:, 0].isnan().all() and kept["deter"][:, 1].isfinite().all()
