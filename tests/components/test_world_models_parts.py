"""V, M, C and CMA-ES of World Models: losses by hand, the temperature, the paper's sizes, states that come back."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_lab.components.heads.linear_controller import LinearController
from rl_lab.components.planners.cma_es import CMAES
from rl_lab.components.world_model.conv_vae import ConvVAE, draw_latent, vae_loss
from rl_lab.components.world_model.mdn_rnn import MDNRNN, DreamStarts, Mixture, mdn_rnn_loss
from rl_lab.types import ActionSpec, ArraySpec, Batch, ConfigError, MissingExtraError
from rl_lab.utils.tree import equal, leaves_with_paths
from tests.tiny_dreamer import random_rows

SMALL_IMAGE = {"image": ArraySpec((16, 16, 1), "uint8")}
SMALL: dict[str, Any] = {"latents": 3, "channels": (4, 8), "kernels_down": (4, 4), "kernels_up": (6, 6)}
DISCRETE, CONTINUOUS = ActionSpec("discrete", (3,)), ActionSpec("continuous", (2,))


def small_vae() -> ConvVAE:
    torch.manual_seed(0)
    return ConvVAE(observation=SMALL_IMAGE, **SMALL)


def small_memory(action: ActionSpec = DISCRETE, **settings: Any) -> MDNRNN:
    torch.manual_seed(1)
    return MDNRNN(input_size=6, action=action, hidden=5, gaussians=4, **settings)


def rows_of(action: ActionSpec = DISCRETE) -> Batch:
    return random_rows(SMALL_IMAGE, action)


# --- V -----------------------------------------------------------------------------------------


def test_the_paper_sizes_have_the_papers_number_of_parameters() -> None:
    vae = ConvVAE(observation={"image": ArraySpec((64, 64, 3), "uint8")})
    assert sum(each.numel() for each in vae.parameters()) == 4_348_547  # as the paper's table for CarRacing
    memory = MDNRNN(input_size=64, action=ActionSpec("continuous", (3,)))
    assert LinearController(input_size=memory.output_size, action=memory.action).evolved.numel() == 867
    # 422,368 there: torch's LSTM has a second bias, and the reward and the end are predicted as well.
    assert sum(each.numel() for each in memory.parameters()) == 422_368 + 4 * 256 + 2 * 257
    images = torch.zeros(2, 5, 64, 64, 3, dtype=torch.uint8)
    normal = vae({"image": images})
    assert normal.shape == (2, 5, 64)
    assert vae.decode(draw_latent(normal)).shape == images.shape
    shown = vae.reconstruct(torch.randn(2, 40))["image"]
    assert shown.shape == (2, 64, 64, 3) and shown.dtype == torch.uint8


def test_the_loss_of_the_autoencoder_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    vae = small_vae()
    images = rows_of()["image"][0]
    monkeypatch.setattr(torch, "randn_like", lambda tensor: torch.full_like(tensor, 0.5))
    normal = vae({"image": images}).detach().double()
    drawn, kl = torch.zeros(7, 3), []
    for n in range(7):
        total = 0.0
        for z in range(3):
            mean, log_variance = float(normal[n, z]), float(normal[n, 3 + z])
            drawn[n, z] = mean + 0.5 * math.sqrt(math.exp(log_variance))
            total += 0.5 * (math.exp(log_variance) + mean**2 - 1.0 - log_variance)
        kl.append(total)
    pixels = vae.decode(drawn).detach().double()
    error = sum(float((pixels[n] - images[n].double() / 255.0).square().sum()) for n in range(7)) / 7
    loss = vae_loss(vae, {"image": images}, kl_tolerance=0.0)
    assert float(loss.terms["reconstruction"].detach()) == pytest.approx(error, rel=1e-5)
    assert float(loss.terms["kl"].detach()) == pytest.approx(sum(kl) / 7, rel=1e-4)
    free = vae_loss(vae, {"image": images}, kl_tolerance=2.0)
    assert float(free.terms["kl"].detach()) == pytest.approx(6.0) and float(free.metrics["train/vae_kl"]) < 6.0
    assert not torch.autograd.grad(free.terms["kl"], vae.to_normal.weight)[0].any()  # below the tolerance: no pull


def test_the_autoencoder_overfits_one_batch() -> None:
    vae, images = small_vae(), (rows_of()["image"][0, :3] > 127).to(torch.uint8) * 255
    images[:, :, :8], images[0, :8], images[1, 8:] = 255, 0, 0  # pictures, not noise
    optimizer = torch.optim.Adam(vae.parameters(), lr=5e-3)
    errors = []
    for _ in range(60):
        loss = vae_loss(vae, {"image": images}, kl_tolerance=0.5)
        optimizer.zero_grad()
        (loss.terms["reconstruction"] + 0.01 * loss.terms["kl"]).backward()
        optimizer.step()
        errors.append(float(loss.terms["reconstruction"].detach()))
    assert errors[-1] < 0.5 * errors[0]


@pytest.mark.parametrize(
    ("observation", "settings", "sentence"),
    [
        ({"vector": ArraySpec((3,), "float32")}, {}, "sees one image, and there are: vector .* shows pixels"),
        ({"left": ArraySpec((16, 16, 1), "uint8"), "right": ArraySpec((16, 16, 1), "uint8")}, {}, "one of left, right"),
        (SMALL_IMAGE, {"key": "picture"}, "components.vae.key is picture"),
        (SMALL_IMAGE, {"kernels_up": (5, 6)}, "draws 14x14 pixels .* images have 16x16: resize them"),
        (SMALL_IMAGE, {"kernels_up": (6,)}, "lists of one length"),
    ],
)
def test_images_that_do_not_fit_are_refused(
    observation: dict[str, ArraySpec], settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        ConvVAE(observation=observation, **{**SMALL, **settings})


def test_other_observations_are_not_looked_at() -> None:
    observation = {**SMALL_IMAGE, "variables": ArraySpec((1,), "float32")}
    assert ConvVAE(observation=observation, **SMALL).image_key == "image"


# --- C ---------------------------------------------------------------------------------------


def test_one_number_is_cut_into_choices() -> None:
    controller = LinearController(input_size=1, action=DISCRETE, choices_in_order=[1, 0, 2])
    assert controller.evolved.numel() == 2
    numbers = torch.tensor([-9.0, -0.34, -0.33, 0.33, 0.34, 9.0]).clamp(-0.999, 0.999).atanh()
    taken = controller(numbers.view(1, -1, 1), torch.tensor([[1.0, 0.0]]))
    assert taken.tolist() == [[1, 1, 0, 0, 2, 2]]
    assert controller(torch.tensor([[[1e9]]]), torch.tensor([[1.0, 0.0]])).item() == 2  # tanh is 1 there


@pytest.mark.parametrize(("action", "order"), [(DISCRETE, [0, 1]), (DISCRETE, [0, 1, 1]), (CONTINUOUS, [0, 1])])
def test_an_order_that_does_not_fit_the_action_is_refused(action: ActionSpec, order: list[int]) -> None:
    with pytest.raises(ConfigError, match=rf"choices_in_order is \{order}: .* the action is {action.kind} with"):
        LinearController(input_size=1, action=action, choices_in_order=order)


# --- M -----------------------------------------------------------------------------------------


def mixture_of(*shape: int) -> Mixture:
    generator = torch.Generator().manual_seed(3)
    weight, mean, log_std = (torch.randn(*shape, generator=generator, dtype=torch.float64) for _ in range(3))
    return Mixture(torch.log_softmax(weight, dim=-1), mean, 0.3 * log_std)


def test_the_log_likelihood_of_a_mixture_by_a_loop() -> None:
    mixture = mixture_of(4, 3, 5)
    latent = torch.randn(4, 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    found = mixture.log_likelihood(latent)
    for n in range(4):
        for z in range(3):
            density = 0.0
            for k in range(5):
                std = math.exp(float(mixture.log_std[n, z, k]))
                distance = (float(latent[n, z]) - float(mixture.mean[n, z, k])) / std
                normal = math.exp(-0.5 * distance**2) / (std * math.sqrt(2.0 * math.pi))
                density += math.exp(float(mixture.log_weight[n, z, k])) * normal
            assert float(found[n, z]) == pytest.approx(math.log(density), rel=1e-12)


def test_dreams_end_where_it_is_likely_or_as_often_as_predicted() -> None:
    torch.manual_seed(0)
    for dream_ends, rates in {"likely": (1.0, 0.0), "drawn": (0.8, 0.4), "expected": (0.8, 0.4)}.items():
        memory = small_memory(dream_ends=dream_ends)
        for probability, rate in zip((0.8, 0.4), rates, strict=True):
            with torch.no_grad():
                memory.outcome_output.weight.zero_()
                memory.outcome_output.bias[1] = -math.log(probability / (1.0 - probability))
            going_on = memory.survival(torch.randn(20_000, 13))
            assert set(going_on.tolist()) <= {0.0, 1.0} or dream_ends == "expected"
            assert float(going_on.mean()) == pytest.approx(rate, abs=0.02 if dream_ends == "drawn" else 1e-6)
    with pytest.raises(ConfigError, match="dream_ends is 'never': write one of likely, drawn, expected"):
        small_memory(dream_ends="never")


@torch.no_grad()
def test_ends_that_weigh_more_are_learnt_to_be_likelier_and_told_as_they_are() -> None:
    """Of five rows one ends: with a weight of 9 the learnt odds are 9 to 4, those that are told 1 to 4."""
    memory = small_memory(dream_ends="expected", end_weight=9.0)
    memory.outcome_output.weight.zero_()
    memory.outcome_output.bias[1] = math.log(9.0 / 4.0)
    features = torch.randn(3, 13)
    assert memory.continue_probability(features).mean().tolist() == pytest.approx([0.8] * 3)
    assert memory.survival(features).tolist() == pytest.approx([0.8] * 3)
    memory.dream_ends = "likely"
    for probability, goes_on in ((0.09, 1.0), (0.11, 0.0)):  # 1 / (1 + 9) between them
        memory.outcome_output.bias[1] = math.log(9.0 * probability / (1.0 - probability))
        assert memory.survival(features).tolist() == [goes_on] * 3
    with pytest.raises(ConfigError, match="end_weight is 0.0: write a number above 0, such as 10"):
        small_memory(end_weight=0.0)


@torch.no_grad()
def test_the_loss_of_ends_by_their_weight_by_hand() -> None:
    memory, rows = small_memory(end_weight=10.0), rows_of()
    latent = torch.randn(3, 7, 3, generator=torch.Generator().manual_seed(6))
    _, end = memory.outcome(memory.hidden_of_rows(latent, rows["action"], rows["is_first"]))
    total, count, ends = 0.0, 0, 0
    for b, t in ((b, t) for b in range(3) for t in range(1, 7) if not rows["is_first"][b, t]):
        chance = 1.0 / (1.0 + math.exp(-float(end[b, t])))
        is_end = bool(rows["is_terminal"][b, t])
        total -= 10.0 * math.log(chance) if is_end else math.log(1.0 - chance)
        count, ends = count + 1, ends + is_end
    assert ends > 0
    assert float(mdn_rnn_loss(memory, rows, latent).terms["end"]) == pytest.approx(total / count, rel=1e-4)


@pytest.mark.parametrize("temperature", [0.25, 1.0, 2.0])
def test_temperature_flattens_weights_and_widens_normals(temperature: float) -> None:
    """Weights are powers 1 / temperature, made to add up to 1; variances are multiplied by the temperature."""
    torch.manual_seed(5)
    weights = torch.tensor([0.7, 0.3])
    mixture = Mixture(
        weights.log().expand(40_000, 1, 2),
        torch.tensor([-50.0, 50.0]).expand(40_000, 1, 2),
        torch.tensor([0.0, math.log(2.0)]).expand(40_000, 1, 2),
    )
    drawn = mixture.sample(torch.tensor(temperature))[:, 0]
    powers = weights ** (1.0 / temperature)
    assert float((drawn < 0).float().mean()) == pytest.approx(float(powers[0] / powers.sum()), abs=0.01)
    for is_chosen, mean, std in ((drawn < 0, -50.0, 1.0), (drawn > 0, 50.0, 2.0)):
        chosen = drawn[is_chosen]
        if len(chosen) > 1_000:
            assert float(chosen.mean()) == pytest.approx(mean, abs=0.15)
            assert float(chosen.std()) == pytest.approx(std * math.sqrt(temperature), rel=0.05)
    assert (mixture.mode() == -50.0).all()


@pytest.mark.parametrize("action", [DISCRETE, CONTINUOUS], ids=["discrete", "continuous"])
def test_the_memory_before_a_row_has_seen_the_rows_before_it(action: ActionSpec) -> None:
    memory, rows = small_memory(action), rows_of(action)
    latent = torch.randn(3, 7, 3, generator=torch.Generator().manual_seed(6))
    hidden = memory.hidden_of_rows(latent, rows["action"], rows["is_first"])
    assert not hidden[:, 0].any() and not hidden[0, 4].any()  # row 4 of the first sequence begins an episode
    state = memory.initial_state(3, torch.device("cpu"))
    is_first = rows["is_first"].clone()
    is_first[:, 0] = True
    for t in range(7):  # as it acts: row by row
        previous = rows["action"][:, t - 1] if t else torch.zeros_like(rows["action"][:, 0])
        normal = torch.cat((latent[:, t], torch.zeros(3, 3)), dim=-1)
        state, _ = memory.observe(normal, previous, state, is_first[:, t], deterministic=True)
        assert torch.allclose(state["hidden"], hidden[:, t], atol=1e-6)


@torch.no_grad()
def test_the_loss_of_the_memory_by_hand() -> None:
    memory, rows = small_memory(), rows_of()
    latent = torch.randn(3, 7, 3, generator=torch.Generator().manual_seed(6))
    hidden = memory.hidden_of_rows(latent, rows["action"], rows["is_first"])
    totals = dict.fromkeys(("latent", "reward", "end"), 0.0)
    count = 0
    for b in range(3):
        for t in range(1, 7):
            if rows["is_first"][b, t]:
                continue  # nothing foretells how an episode begins
            count += 1
            reward, end = memory.outcome(hidden[b, t])
            totals["latent"] -= float(memory.mixture(hidden[b, t]).log_likelihood(latent[b, t]).mean())
            totals["reward"] += float((reward - rows["reward"][b, t]) ** 2)
            chance = 1.0 / (1.0 + math.exp(-float(end)))
            totals["end"] -= math.log(chance if rows["is_terminal"][b, t] else 1.0 - chance)
    assert count == 17
    for name, term in mdn_rnn_loss(memory, rows, latent).terms.items():
        assert float(term) == pytest.approx(totals[name] / count, rel=1e-4), name


def test_every_part_of_the_memory_learns_and_it_overfits_one_batch() -> None:
    memory, rows = small_memory(CONTINUOUS), rows_of(CONTINUOUS)
    latent = torch.randn(3, 7, 3, generator=torch.Generator().manual_seed(6)).requires_grad_()
    losses = []
    optimizer = torch.optim.Adam(memory.parameters(), lr=1e-2)
    for _ in range(80):
        optimizer.zero_grad()
        total = sum(mdn_rnn_loss(memory, rows, latent.detach()).terms.values(), torch.zeros(()))
        total.backward()
        assert all(each.grad is not None and each.grad.any() for each in memory.parameters())
        optimizer.step()
        losses.append(float(total.detach()))
    assert losses[-1] < losses[0] - 1.0


@pytest.mark.parametrize("sees", [[], ["latent", "latent"], ["image"]])
def test_what_a_controller_may_see_is_checked(sees: list[str]) -> None:
    with pytest.raises(ConfigError, match="controller_sees .* latent, hidden, cell"):
        small_memory(controller_sees=sees)


def test_a_controller_sees_what_it_is_given() -> None:
    for sees, size in ((["latent"], 3), (["latent", "hidden"], 8), (["latent", "hidden", "cell"], 13)):
        memory = small_memory(controller_sees=sees)
        state = {part: torch.full((2, size), i) for i, (part, size) in enumerate(memory.state_sizes().items())}
        inputs = memory.controller_inputs(memory.features(state))
        assert inputs.shape == (2, memory.output_size) == (2, size)
        assert inputs.unique().tolist() == list(range(len(sees)))


def test_dreams_begin_where_episodes_began() -> None:
    starts = DreamStarts(capacity=4, input_size=2)
    normal = torch.stack((torch.arange(12.0).view(2, 6), torch.full((2, 6), -100.0)), dim=-1)  # no variance
    is_first = torch.zeros(2, 6, dtype=torch.bool)
    is_first[0, 0] = is_first[0, 3] = is_first[1, 2] = True
    torch.manual_seed(0)
    starts.keep(normal, is_first)
    assert set(starts.draw(100)[:, 0].round().abs().tolist()) == {0.0, 3.0, 8.0}
    starts.keep(normal + 20.0, is_first)  # two of the three take the places of the oldest
    starts.normals[:, 1] = -100.0
    assert set(starts.draw(100)[:, 0].round().abs().tolist()) == {8.0, 20.0, 23.0, 28.0}


# --- C -----------------------------------------------------------------------------------------


def test_several_controllers_answer_at_once_each_with_its_own_parameters() -> None:
    controller = LinearController(input_size=2, action=CONTINUOUS)
    assert len(controller.evolved) == 6
    parameters = torch.randn(3, 6, generator=torch.Generator().manual_seed(8))
    inputs = torch.randn(3, 4, 2, generator=torch.Generator().manual_seed(9))
    answers = controller(inputs, parameters)
    for p in range(3):
        weight, bias = parameters[p, :4].view(2, 2), parameters[p, 4:]
        for r in range(4):
            assert torch.allclose(answers[p, r], torch.tanh(weight @ inputs[p, r] + bias), atol=1e-6)


def test_of_choices_the_largest_output_wins() -> None:
    parameters = torch.tensor([[0.0, 0.0, 0.0, 1.0, 3.0, 2.0]])  # biases alone
    assert LinearController(input_size=1, action=DISCRETE)(torch.zeros(1, 2, 1), parameters).tolist() == [[1, 1]]
    several = LinearController(input_size=1, action=ActionSpec("multi_discrete", (1, 2)))
    assert several(torch.zeros(1, 2, 1), parameters).tolist() == [[[0, 0], [0, 0]]]


# --- CMA-ES ------------------------------------------------------------------------------------


def evolve(evolution: CMAES, generations: int) -> list[Tensor]:
    asked = []
    for _ in range(generations):
        asked.append(evolution.ask())
        evolution.tell(asked[-1], reward(asked[-1]))
    return asked


def reward(parameters: Tensor) -> Tensor:
    scales = torch.arange(1, parameters.shape[1] + 1)
    return -((parameters - 0.7) ** 2 * scales).sum(dim=-1)


def test_evolution_finds_the_parameters_that_earn_the_most() -> None:
    torch.manual_seed(0)
    evolution = CMAES(population=12, initial_std=0.3)
    evolution.begin(torch.zeros(5))
    evolve(evolution, 60)
    assert torch.allclose(evolution.mean(), torch.full((5,), 0.7, dtype=torch.float64), atol=0.03)
    assert evolution.generations == 60 and evolution.std() < 0.05


@pytest.mark.parametrize("is_asked", [False, True], ids=["between generations", "in mid-generation"])
@pytest.mark.parametrize("generations", [0, 1, 7])
def test_evolution_goes_on_exactly_from_plain_values(generations: int, is_asked: bool, tmp_path: Any) -> None:
    torch.manual_seed(1)
    evolution = CMAES(population=8, initial_std=0.3)
    evolution.begin(torch.zeros(9))
    evolve(evolution, generations)
    population = evolution.ask() if is_asked else None
    torch.save(evolution.get_state(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    again = CMAES(population=8, initial_std=0.3)
    random_state = torch.get_rng_state()
    again.set_state(state)
    assert torch.equal(torch.get_rng_state(), random_state)  # restoring draws nothing
    assert equal(again.get_state(), state)
    found = []
    for each in (evolution, again):
        torch.set_rng_state(random_state)
        if population is not None:
            each.tell(population, reward(population))
        found.append(torch.stack(evolve(each, 12)))
    assert torch.equal(found[0], found[1])


def test_a_saved_strategy_holds_its_two_matrices_once() -> None:
    torch.manual_seed(2)
    evolution = CMAES(population=8, initial_std=0.3)
    evolution.begin(torch.zeros(60))
    evolve(evolution, 5)
    state = evolution.get_state()
    sizes = [leaf.nbytes for _, leaf in leaves_with_paths(state["strategy"]) if isinstance(leaf, Tensor)]
    assert 2 * 60 * 60 * 8 <= sum(sizes) < 2.4 * 60 * 60 * 8  # the covariance and its eigenvectors, float64
    again = CMAES(population=8, initial_std=0.3)
    again.set_state(state)
    assert again._strategy.C is again._strategy.sm.C and again._strategy.B is again._strategy.sm.B


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cma", None)
    with pytest.raises(MissingExtraError, match=r"rl-lab\[evolution\]"):
        CMAES()


@pytest.mark.parametrize("settings", [{"population": 3}, {"initial_std": 0.0}])
def test_settings_without_a_spread_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="number from 4 and a number above 0"):
        CMAES(**settings)
