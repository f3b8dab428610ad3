"""Fast paths of small networks on a CPU equal the formulas they stand for."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from kernel_harness import VARIANTS, Call, Inputs, Variant, check
from torch import Tensor, nn

from rl_lab.components.heads.actor_critic import Actor, Critic
from rl_lab.components.heads.distributions import Categorical, SquashedGaussian
from rl_lab.components.heads.q_values import QValues
from rl_lab.components.heads.soft_actor_critic import SoftActor, Temperature, TwinCritic
from rl_lab.components.networks.encoders import MLP, ObservationEncoder
from rl_lab.components.networks.ensemble import EnsembleMLP
from rl_lab.components.networks.memory import GRUMemory
from rl_lab.components.networks.normalizers import ObservationNormalizer
from rl_lab.kernels import cpu_mlp, door
from rl_lab.training.optimizer import Optimizer
from rl_lab.training.target_network import TargetNetwork
from rl_lab.types import ActionSpec, ArraySpec, TimeStep
from rl_lab.workflows.dqn import DQN
from rl_lab.workflows.ppo import PPO, ppo_loss
from rl_lab.workflows.sac import SAC

CPU = "rl_lab.kernels.cpu_mlp:"
LOSSES = "rl_lab.kernels.cpu_losses:"
PPO_LOSSES = "rl_lab.kernels.cpu_ppo:"
CONTINUOUS = ActionSpec("continuous", (3,))
DISCRETE = ActionSpec("discrete", (4,))


@pytest.fixture(autouse=True)
def _asks_as_the_workflows_do() -> Iterator[None]:
    """Losses may bring their gradients, as where `gradient_step` takes them."""
    with door.precomputed_gradients():
        yield


def seeded(make: Callable[[], Any]) -> Any:
    torch.manual_seed(3)
    return make()


def mlp(activation: str, output_size: int | None, *, with_input: bool = False) -> Callable[[Inputs], Call]:
    def make(inputs: Inputs) -> Call:
        network = seeded(lambda: MLP(input_size=5, hidden_sizes=(8, 6), activation=activation, output_size=output_size))
        features = inputs.normal(5, requires_grad=with_input)
        return Call(network, (features,), modules=[network], leaves=[features])

    return make


def ensemble(inputs: Inputs) -> Call:
    network = seeded(lambda: EnsembleMLP(size=3, input_size=7, hidden_sizes=(8, 6), output_size=2))
    features, action = inputs.normal(5), inputs.normal(2, requires_grad=True)
    return Call(network, (features, action), modules=[network], leaves=[action])


def ppo(inputs: Inputs) -> Call:
    parts = {"input_size": 5, "hidden_sizes": (8, 8)}
    actor, critic = seeded(lambda: (Actor(action=DISCRETE, output_gain=1.0, **parts), Critic(**parts)))
    features = inputs.normal(5, requires_grad=True)
    args = (actor, critic, features, ppo_sample(inputs))
    return Call(ppo_loss, args, {"clip_range": 0.1}, modules=[actor, critic], leaves=[features])


def ppo_sample(inputs: Inputs) -> dict[str, Tensor]:
    return {
        "action": inputs.integers(4),
        "log_prob": -1.4 + 0.3 * inputs.uniform(),
        "advantage": inputs.normal(),
        "return": inputs.normal(),
        "value": inputs.normal(),
    }


def ppo_step(*, normalizer: str = "off", hidden_sizes: tuple[int, ...] = (), **keywords: Any):
    def make(inputs: Inputs) -> Call:
        spec = {"vector": ArraySpec((5,), "float32")}
        workflow = PPO(loss_scales={"policy": 1.0, "value": 0.5, "entropy": 0.01})
        parts = {"input_size": 5, "hidden_sizes": (8, 8)}
        workflow.encoder = seeded(lambda: ObservationEncoder(observation=spec, hidden_sizes=hidden_sizes))
        parts["input_size"] = workflow.encoder.output_size
        workflow.actor, workflow.critic = seeded(
            lambda: (Actor(action=DISCRETE, output_gain=1.0, **parts), Critic(**parts))
        )
        workflow.observation_normalizer = ObservationNormalizer(observation=spec, mode=normalizer)
        workflow.memory = workflow.critic_encoder = None
        modules = [workflow.encoder, workflow.actor, workflow.critic]
        workflow.optimizer = Optimizer(parameters=modules)
        sample = {"vector": inputs.normal(5), **ppo_sample(inputs)}
        return Call(
            workflow.loss, (sample,), {"clip_range": 0.1, "value_clip_range": None, **keywords}, modules=modules
        )

    return make


def dqn(
    *,
    double: bool = True,
    huber: float | None = 1.0,
    dueling: bool = False,
    weighted: bool = False,
    n_step: int = 1,
    normalizer: str = "off",
):
    def make(inputs: Inputs) -> Call:
        spec = {"vector": ArraySpec((5,), "float32")}
        workflow = DQN(double=double, n_step=n_step, reward_clip=2.0 if weighted else None)
        encoder = ObservationEncoder(observation=spec, hidden_sizes=())
        head = seeded(
            lambda: QValues(input_size=5, action=DISCRETE, hidden_sizes=(8, 8), dueling=dueling, huber_threshold=huber)
        )
        workflow.head, workflow.network = head, nn.Sequential(encoder, head)
        workflow.optimizer = Optimizer(parameters=[head])
        workflow.target = TargetNetwork(workflow.network)
        with torch.no_grad():
            for parameter in workflow.target.parameters():
                parameter.mul_(0.9)
        workflow.observation_keys = ("vector",)
        workflow.observation_normalizer = ObservationNormalizer(observation=spec, mode=normalizer)
        batch = {
            "vector": inputs.normal(n_step + 1, 5),
            "action": inputs.integers(4, n_step + 1),
            "reward": inputs.normal(n_step + 1),
            "is_last": (ended := inputs.uniform(n_step + 1) < 0.1),
            "is_terminal": ended & (inputs.uniform(n_step + 1) < 0.5),
        }
        batch["is_last"][:, 0] = False
        if weighted:
            batch["weight"] = inputs.uniform()
        return Call(workflow.loss, (batch,), modules=[head])

    return make


def acting(workflow: Any, inputs: Inputs, *, mode: str, mask: bool, modules: list[nn.Module]) -> Call:
    observation = {"vector": inputs.normal(5)}
    if mask:
        observation["action_mask"] = torch.ones(inputs.rows, 4, dtype=torch.bool)
    flags = [torch.zeros(inputs.rows, dtype=torch.bool)] * 3
    time_step = TimeStep(observation, inputs.normal(), *flags)
    return Call(torch.no_grad()(workflow.act), (time_step, None), {"mode": mode}, modules=modules)


def dqn_act(*, mode: str = "train", mask: bool = False, **settings: Any) -> Callable[[Inputs], Call]:
    def make(inputs: Inputs) -> Call:
        workflow = dqn(**settings)(inputs).formula.__self__  # type: ignore[attr-defined]
        workflow._acting_epsilon = 0.5
        return acting(workflow, inputs, mode=mode, mask=mask, modules=[workflow.network])

    return make


def sac(**parts: nn.Module) -> SAC:
    workflow = SAC()
    workflow.optimizers = {name: Optimizer(parameters=[part]) for name, part in parts.items()}
    vars(workflow).update(parts)
    return workflow


def sac_critic(*, weighted: bool, learns: bool = False, **settings: Any) -> Callable[[Inputs], Call]:
    def make(inputs: Inputs) -> Call:
        critic = seeded(lambda: TwinCritic(input_size=5, action=CONTINUOUS, hidden_sizes=(8, 8), **settings))
        weight = inputs.uniform() if weighted else None
        features = inputs.normal(5, requires_grad=learns)
        args = (features, inputs.uniform(3) * 2 - 1, inputs.normal(), weight)
        return Call(sac(critic=critic).critic_loss, args, modules=[critic], leaves=[features])

    return make


def sac_policy(*, chosen: int | None = None, **settings: Any) -> Callable[[Inputs], Call]:
    """`chosen`: how many rows take the second critic's value."""

    def make(inputs: Inputs) -> Call:
        actor = seeded(lambda: SoftActor(input_size=5, action=CONTINUOUS, hidden_sizes=(8, 8)))
        critic = seeded(lambda: TwinCritic(input_size=5, action=CONTINUOUS, hidden_sizes=(8, 8), **settings))
        features = inputs.normal(5)
        if chosen is not None:
            with torch.no_grad():  # the second critic is the lesser one only where the first feature is large
                for parameter in critic.parameters():
                    parameter[1] = parameter[0]
                critic.networks.weights[0][1, 0] = torch.tensor([1.0] + [0.0] * 7)
                critic.networks.biases[0][1, 0, 0] = -50.0
                critic.networks.weights[1][1, 0] = torch.tensor([1.0] + [0.0] * 7)
                critic.networks.biases[1][1, 0, 0] = 0.0
                critic.networks.weights[2][:, 0, 0] = torch.tensor([0.0, -1.0])
                critic.networks.weights[0][0, 0] = critic.networks.biases[0][0, 0, 0] = 0.0
                features[:, 0] = 0.0
                features[:chosen, 0] = 100.0
        args = (features, inputs.normal(3), torch.tensor(0.3))
        return Call(sac(actor=actor, critic=critic).policy_loss, args, modules=[actor])

    return make


def sac_temperature(*, mask: bool = False) -> Callable[[Inputs], Call]:
    def make(inputs: Inputs) -> Call:
        temperature = Temperature(action=DISCRETE if mask else CONTINUOUS, initial=0.3)
        keywords = {"mask": inputs.uniform(4) < 0.9} if mask else {}
        return Call(
            sac(temperature=temperature).temperature_loss, (inputs.normal().mean(),), keywords, modules=[temperature]
        )

    return make


def sac_soft_value(**settings: Any) -> Callable[[Inputs], Call]:
    def make(inputs: Inputs) -> Call:
        actor = seeded(lambda: SoftActor(input_size=5, action=CONTINUOUS, hidden_sizes=(8, 8)))
        critic = seeded(lambda: TwinCritic(input_size=5, action=CONTINUOUS, hidden_sizes=(8, 8), **settings))
        workflow = sac(actor=actor, critic=critic)
        workflow.encoder = ObservationEncoder(observation={"vector": ArraySpec((5,), "float32")}, hidden_sizes=())
        workflow.slow_critic, workflow.slow_encoder = TargetNetwork(critic), None
        args = ({"vector": inputs.normal(5)}, torch.tensor(0.3))
        return Call(workflow.soft_value, args, modules=[actor, workflow.slow_critic])

    return make


def sample(inputs: Inputs) -> Call:
    return Call(Categorical(inputs.normal(4)).sample)


def squashed(inputs: Inputs) -> Call:
    mean, log_std = inputs.normal(3, requires_grad=True), inputs.normal(3, requires_grad=True, scale=0.1)
    policy = SquashedGaussian(mean, log_std.clamp(-5.0, 2.0))
    return Call(
        policy.rsample_with_log_prob, (torch.randn(mean.shape, generator=inputs.generator),), leaves=[mean, log_std]
    )


def gru(inputs: Inputs) -> Call:
    memory = seeded(lambda: GRUMemory(input_size=5, hidden_size=6))
    features, state = inputs.normal(7, 5, requires_grad=True), inputs.normal(6, requires_grad=True)
    is_first = inputs.uniform(7) < 0.2
    return Call(memory.unroll, (features, state, is_first), modules=[memory], leaves=[features, state])


CASES: dict[str, tuple[str, Callable[[Inputs], Call], int]] = {  # path, call, fewest rows that it takes
    "tanh": (f"{CPU}MLP_FORWARD", mlp("tanh", 3), 64),
    "tanh, last layer active, input learns": (f"{CPU}MLP_FORWARD", mlp("tanh", None, with_input=True), 64),
    "relu": (f"{CPU}MLP_FORWARD", mlp("relu", 1, with_input=True), 64),
    "ensemble": (f"{CPU}ENSEMBLE_FORWARD", ensemble, 64),
    "ppo": (f"{PPO_LOSSES}PPO_LOSS", ppo, 64),
    "ppo step": (f"{PPO_LOSSES}PPO_STEP_LOSS", ppo_step(), 64),
    "ppo step, normalised": (f"{PPO_LOSSES}PPO_STEP_LOSS", ppo_step(normalizer="rolling", with_metrics=False), 64),
    "dqn": (f"{LOSSES}DQN_LOSS", dqn(), 64),
    "dqn, single, squared": (f"{LOSSES}DQN_LOSS", dqn(double=False, huber=None), 64),
    "dqn, dueling, weighted, 3 steps": (f"{LOSSES}DQN_LOSS", dqn(dueling=True, weighted=True, n_step=3), 64),
    "dqn acting": (f"{LOSSES}DQN_ACT", dqn_act(), 1),
    "dqn acting, dueling": (f"{LOSSES}DQN_ACT", dqn_act(dueling=True), 1),
    "sac critic": (f"{LOSSES}SAC_CRITIC_LOSS", sac_critic(weighted=False), 64),
    "sac critic, features learn": (f"{LOSSES}SAC_CRITIC_LOSS", sac_critic(weighted=False, learns=True), 64),
    "sac critic, weighted": (f"{LOSSES}SAC_CRITIC_LOSS", sac_critic(weighted=True), 64),
    "sac policy": (f"{LOSSES}SAC_POLICY_LOSS", sac_policy(), 64),
    "sac policy, one row of one critic": (f"{LOSSES}SAC_POLICY_LOSS", sac_policy(chosen=1), 64),
    "sac policy, no row of one critic": (f"{LOSSES}SAC_POLICY_LOSS", sac_policy(chosen=0), 64),
    "sac temperature": (f"{LOSSES}SAC_TEMPERATURE_LOSS", sac_temperature(), 1),
    "sac soft value": (f"{LOSSES}SAC_SOFT_VALUE", sac_soft_value(), 1),
    "categorical sample": (f"{LOSSES}CATEGORICAL_SAMPLE", sample, 1),
    "squashed draw": ("rl_lab.kernels.squashed:DRAW", squashed, 1),
    "gru": ("rl_lab.kernels.gru:UNROLL", gru, 1),
}


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_a_fast_path_equals_its_formula(case: str, variant: Variant) -> None:
    name, make, fewest = CASES[case]
    check(name, make, variant, is_used=variant.rows >= fewest)


LARGE = ("tanh", "relu", "ensemble", "dqn", "sac critic", "sac policy", "sac policy, one row of one critic")


@pytest.mark.parametrize("is_there", [True, False], ids=["oneDNN", "MKL"])
@pytest.mark.parametrize("case", LARGE)
def test_the_products_of_large_networks_equal_the_formula(
    case: str, is_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every product counts as a large one here; torch without oneDNN, or told to leave it alone, has another."""
    name, make, fewest = CASES[case]
    calls = []
    monkeypatch.setattr(cpu_mlp, "MOST_PRODUCTS", 0)
    monkeypatch.setattr(cpu_mlp, "MOST_PRODUCTS_OF_MKL", 0)
    if cpu_mlp._onednn_linear is not None:
        linear = cpu_mlp._onednn_linear
        monkeypatch.setattr(cpu_mlp, "_onednn_linear", lambda *given: calls.append(given) or linear(*given))
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", is_there)
    for variant in VARIANTS:
        check(name, make, variant, is_used=variant.rows >= fewest)
    assert bool(calls) == (is_there and cpu_mlp._onednn_linear is not None)


@pytest.mark.parametrize("case", ["tanh", "relu", "ensemble"])
def test_without_gradients_any_number_of_rows_is_taken(case: str) -> None:
    name, make, _ = CASES[case]
    for rows in (0, 1, 2, 65):
        with torch.no_grad():
            check(name, make, Variant(rows=rows))


def test_frozen_networks_get_no_gradient() -> None:
    def frozen(inputs: Inputs) -> Call:
        call = ppo(inputs)
        call.args[1].requires_grad_(False)
        return call

    check(f"{PPO_LOSSES}PPO_LOSS", frozen, Variant())


@pytest.mark.parametrize(
    "change",
    [
        lambda sample, keywords: keywords.update(value_clip_range=0.2),
        lambda sample, keywords: sample.update(valid=torch.ones(64, dtype=torch.bool)),
        lambda sample, keywords: sample.update(action_mask=torch.ones(64, 4, dtype=torch.bool)),
    ],
)
def test_what_the_fast_ppo_loss_does_not_know_runs_as_it_is_written(change: Callable[..., None]) -> None:
    def other(inputs: Inputs) -> Call:
        call = ppo(inputs)
        change(call.args[3], call.keywords)
        return call

    check(f"{PPO_LOSSES}PPO_LOSS", other, Variant(), is_used=False)


@pytest.mark.parametrize(
    ("settings", "is_critic_known", "is_policy_known"),
    [
        ({"num_critics": 3}, True, True),
        ({"num_critics": 3, "target_subset": 2}, True, False),
        ({"norm": "layer"}, False, False),
    ],
)
def test_what_the_fast_sac_losses_know_of_critics(
    settings: dict[str, Any], is_critic_known: bool, is_policy_known: bool
) -> None:
    check(f"{LOSSES}SAC_CRITIC_LOSS", sac_critic(weighted=False, **settings), Variant(), is_used=is_critic_known)
    check(f"{LOSSES}SAC_POLICY_LOSS", sac_policy(**settings), Variant(), is_used=is_policy_known)


def test_targets_of_a_drawn_subset_and_masked_entropies_run_as_they_are_written() -> None:
    drawn = sac_soft_value(num_critics=3, target_subset=2)
    check(f"{LOSSES}SAC_SOFT_VALUE", drawn, Variant(), is_used=False)
    check(f"{LOSSES}SAC_TEMPERATURE_LOSS", sac_temperature(mask=True), Variant(), is_used=False)


def test_sac_that_takes_its_steps_otherwise_gets_a_graph() -> None:
    class OwnSteps(SAC):
        def improve_policy(self, *inputs: Any) -> Any:
            return super().improve_policy(*inputs)

    def other(make: Callable[[Inputs], Call], kind: type) -> Callable[[Inputs], Call]:
        def made(inputs: Inputs) -> Call:
            call = make(inputs)
            workflow = call.formula.__self__  # type: ignore[attr-defined]
            for part in (workflow,) if kind is OwnSteps else workflow.optimizers.values():
                part.__class__ = kind
            return call

        return made

    for kind in (OwnOptimizer, OwnSteps):
        check(f"{LOSSES}SAC_CRITIC_LOSS", other(sac_critic(weighted=False), kind), Variant(), is_used=False)
        check(f"{LOSSES}SAC_POLICY_LOSS", other(sac_policy(), kind), Variant(), is_used=False)
        check(f"{LOSSES}SAC_TEMPERATURE_LOSS", other(sac_temperature(), kind), Variant(), is_used=False)


def test_the_fast_dqn_loss_does_not_know_normalised_observations() -> None:
    check(f"{LOSSES}DQN_LOSS", dqn(normalizer="rolling"), Variant(), is_used=False)


def test_where_the_encoder_of_ppo_learns_too_its_loss_leaves_a_graph() -> None:
    check(f"{PPO_LOSSES}PPO_STEP_LOSS", ppo_step(hidden_sizes=(8,)), Variant(), is_used=False)


@pytest.mark.parametrize("other", [{"mode": "eval"}, {"mask": True}, {"normalizer": "rolling"}], ids=str)
def test_what_the_fast_dqn_policy_does_not_know_runs_as_it_is_written(other: dict[str, Any]) -> None:
    check(f"{LOSSES}DQN_ACT", dqn_act(**other), Variant(), is_used=False)


@pytest.mark.parametrize(
    "change",
    [
        lambda network: setattr(network, "activation", torch.tanh),
        lambda network: setattr(network, "activation", torch.sin),
        lambda network: setattr(network.hidden[1], "weight", nn.Parameter(2.0 * network.hidden[1].weight.detach())),
        lambda network: setattr(network.hidden[1].weight, "data", 2.0 * network.hidden[1].weight.data),
        lambda network: setattr(network.hidden[1].weight, "data", network.hidden[1].weight.data.t()),
        lambda network: network.hidden[1].weight.data.mul_(2.0),
        lambda network: setattr(network.output, "bias", None),
        lambda network: network.hidden.append(nn.Linear(8, 8)),
        lambda network: network.hidden.__setitem__(0, nn.Linear(5, 8)),
        lambda network: setattr(network, "output", None),
        lambda network: setattr(network.output, "forward", lambda features: 3.0 * features),
        lambda network: setattr(network.output, "__class__", type("Tripled", (nn.Linear,), {"forward": _tripled})),
        lambda network: network.output.register_forward_hook(lambda module, given, output: 2.0 * output),
        lambda network: network.register_forward_pre_hook(lambda module, given: (2.0 * given[0],)),
        lambda network: network.double().float(),
    ],
)
def test_whatever_changes_on_a_network_that_was_read_before_is_noticed(change: Callable[[Any], Any]) -> None:
    network, rows = MLP(input_size=5, hidden_sizes=(8, 8), output_size=2, activation="relu"), torch.randn(64, 5)
    door.open_door(True)
    with torch.no_grad():
        network(rows)
        assert door.in_use()
        change(network)
        fast = network(rows)
        with door.plain_formulas():
            torch.testing.assert_close(fast, network(rows))


def test_another_forward_on_the_class_of_a_network_that_was_read_before_is_noticed() -> None:
    class Mine(MLP):
        pass

    call = dqn()(Inputs(Variant(), 0))
    workflow = call.formula.__self__  # type: ignore[attr-defined]
    workflow.head.advantage.__class__ = Mine
    door.open_door(True)
    call.formula(*call.args)
    assert door.in_use()
    Mine.forward = lambda network, features: 2.0 * MLP.forward(network, features)  # type: ignore[method-assign]
    fast = call.formula(*call.args).terms["value"]
    with door.plain_formulas():
        torch.testing.assert_close(fast, call.formula(*call.args).terms["value"])


def test_a_network_that_was_read_is_not_kept_alive() -> None:
    network = MLP(input_size=5, hidden_sizes=(8,), output_size=2)
    network(torch.randn(64, 5))
    gone = weakref.ref(network)
    del network
    gc.collect()
    assert gone() is None


def _tripled(layer: nn.Linear, features: Tensor) -> Tensor:
    return 3.0 * nn.Linear.forward(layer, features)


def _doubled(formula: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **keywords: tuple(2.0 * each for each in formula(*args, **keywords))


@pytest.mark.parametrize(
    ("case", "owner", "name", "replacement"),
    [
        ("dqn", QValues, "loss", _doubled(QValues.loss)),
        ("ppo step", Critic, "forward", lambda critic, features: critic.network(features).squeeze(-1) * 2.0),
        ("sac critic", TwinCritic, "forward", lambda critic, *inputs: 2.0 * critic.networks(*inputs).squeeze(-1)),
        ("tanh", nn.Linear, "forward", lambda layer, features: 2.0 * features @ layer.weight.t() + layer.bias),
    ],
)
def test_a_method_replaced_on_its_class_after_the_first_use_is_what_runs(
    case: str, owner: type, name: str, replacement: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a notebook does it: `QValues.loss = ...`."""
    path, make, _ = CASES[case]
    check(path, make, Variant())
    monkeypatch.setattr(owner, name, replacement)
    check(path, make, Variant(), is_used=False)
    monkeypatch.undo()
    check(path, make, Variant())


def test_a_method_given_to_a_subclass_after_its_first_use_is_what_runs() -> None:
    class Mine(Critic):
        pass

    def mine(inputs: Inputs) -> Call:
        call = ppo(inputs)
        call.args[1].__class__ = Mine
        return call

    check(f"{PPO_LOSSES}PPO_LOSS", mine, Variant())
    Mine.forward = lambda self, features: 2.0 * Critic.forward(self, features)  # type: ignore[method-assign]
    check(f"{PPO_LOSSES}PPO_LOSS", mine, Variant(), is_used=False)


@pytest.mark.parametrize("name", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("case", ["ppo step", "dqn", "sac critic", "sac policy", "sac temperature"])
def test_a_hook_for_the_gradient_of_a_parameter_is_respected(case: str, name: str) -> None:
    """`weight.register_hook(...)` after the first use: gradients that a loss brings with it would pass it by."""
    path, make, _ = CASES[case]
    call = make(Inputs(Variant(), 0))
    check(path, lambda inputs: call, Variant())
    handle = getattr(call.learning()[0], name)(lambda gradient: None)
    check(path, lambda inputs: call, Variant(), is_used=False)
    handle.remove()
    check(path, lambda inputs: call, Variant())


def test_hooks_and_other_activations_are_respected() -> None:
    network = MLP(input_size=5, hidden_sizes=(8,), output_size=2)
    features, seen = torch.randn(64, 5), []
    network.hidden[0].register_forward_hook(lambda *_: seen.append(1))
    door.open_door(True)
    network(features)
    assert seen == [1] and not door.in_use()
    other = MLP(input_size=5, hidden_sizes=(8,), output_size=2, activation="silu")
    other(features)
    normed = MLP(input_size=5, hidden_sizes=(8,), output_size=2, norm="layer")
    normed(features)
    MLP(input_size=5, hidden_sizes=(8,), output_size=2, noisy=True)(features)
    assert not door.in_use()


def test_a_subclass_that_changes_a_part_of_the_formula_is_not_replaced() -> None:
    class Doubled(Critic):
        def forward(self, features: Tensor) -> Tensor:
            return 2.0 * super().forward(features)

    def doubled(inputs: Inputs) -> Call:
        call = ppo(inputs)
        call.args[1].__class__ = Doubled
        return call

    check(f"{PPO_LOSSES}PPO_LOSS", doubled, Variant(), is_used=False)


class RegularisedDQN(DQN):
    def learn(self, batch: dict[str, Tensor], numbers: dict[str, Tensor]) -> dict[str, Tensor]:
        return super().learn(batch, numbers)


class RegularisedPPO(PPO):
    def loss(self, *args: Any, **keywords: Any) -> Any:
        return super().loss(*args, **keywords)


class OwnOptimizer(Optimizer):
    def apply(self, loss: Tensor) -> Any:  # type: ignore[override]
        return super().apply(2.0 * loss)


@pytest.mark.parametrize(("case", "kind"), [("dqn", RegularisedDQN), ("ppo step", RegularisedPPO)])
@pytest.mark.parametrize("part", ["workflow", "optimizer"])
def test_a_workflow_that_takes_its_steps_otherwise_gets_a_graph(case: str, kind: type, part: str) -> None:
    """Fast losses that bring gradients have none: who overrides what hands them on must see the formula."""
    name, make, _ = CASES[case]

    def other(inputs: Inputs) -> Call:
        call = make(inputs)
        workflow = call.formula.__self__  # type: ignore[attr-defined]
        if part == "workflow":
            workflow.__class__ = kind
        else:
            workflow.optimizer.__class__ = OwnOptimizer
        return Call(workflow.loss, call.args, call.keywords, modules=call.modules)

    check(name, other, Variant(), is_used=False)


def test_moved_and_replaced_parameters_are_found() -> None:
    network = EnsembleMLP(size=2, input_size=3, hidden_sizes=(4,), output_size=1)
    rows = torch.randn(70, 3)
    first = network(rows)
    with torch.no_grad():
        network.weights[0].data = network.weights[0].data.clone() * 2.0
        second = network(rows)
        with door.plain_formulas():
            torch.testing.assert_close(second, network(rows))
    assert not torch.equal(first, second)


def test_a_change_in_place_before_backward_is_noticed() -> None:
    network = MLP(input_size=5, hidden_sizes=(8,), output_size=2)
    output = network(torch.randn(64, 5))
    with torch.no_grad():
        network.hidden[0].weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_a_second_derivative_names_the_cure() -> None:
    network = MLP(input_size=5, hidden_sizes=(8,), output_size=2)
    features = torch.randn(64, 5, requires_grad=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice .* runtime.fast_paths=off"):
        torch.autograd.grad(network(features).sum(), features, create_graph=True)


@pytest.mark.parametrize("place", ["hidden", "output"])
def test_a_replaced_layer_is_the_one_that_runs_and_learns(place: str) -> None:
    def replaced(inputs: Inputs) -> Call:
        call = ppo(inputs)
        network = call.args[0].network
        with torch.random.fork_rng():
            torch.manual_seed(9)
            if place == "output":
                network.output = nn.Linear(8, 4)
            else:
                network.hidden[0] = nn.Linear(5, 8)
        return call

    check(f"{PPO_LOSSES}PPO_LOSS", replaced, Variant())


def test_other_activations_and_parameters_of_an_ensemble_are_noticed() -> None:
    network, rows = EnsembleMLP(size=2, input_size=3, hidden_sizes=(4,), output_size=1), torch.randn(70, 3)
    network(rows)
    network.activation = torch.tanh
    fast = network(rows)
    with door.plain_formulas():
        torch.testing.assert_close(fast, network(rows))
    network.weights[0] = nn.Parameter(network.weights[0].detach())
    network(rows).sum().backward()
    assert network.weights[0].grad is not None


@pytest.mark.parametrize(
    "change",
    [
        lambda actor: setattr(actor, "forward", lambda features, mask=None: Actor.forward(actor, 2.0 * features, mask)),
        lambda actor: actor.network.register_full_backward_pre_hook(lambda module, gradient: None),
        lambda actor: setattr(actor.network.hidden[0], "bias", None),
        lambda actor: setattr(actor.network.output, "forward", lambda features: torch.zeros(len(features), 4)),
    ],
    ids=["forward replaced", "backward hook", "no bias", "layer replaced"],
)
def test_what_was_changed_on_an_instance_runs_as_it_is(change: Callable[[Any], Any]) -> None:
    def changed(inputs: Inputs) -> Call:
        call = ppo(inputs)
        change(call.args[0])
        return call

    check(f"{PPO_LOSSES}PPO_LOSS", changed, Variant(), is_used=False)


class DoubledLinear(nn.Linear):
    def forward(self, features: Tensor) -> Tensor:
        return 2.0 * super().forward(features)


@pytest.mark.parametrize(
    "change",
    [
        lambda memory: memory.from_state.register_forward_hook(lambda layer, inputs, output: 2.0 * output),
        lambda memory: setattr(memory, "from_state", DoubledLinear(6, 18)),
        lambda memory: setattr(memory, "from_state", nn.Linear(6, 18, bias=False)),
    ],
    ids=["hook", "another layer", "no bias"],
)
def test_another_recurrent_layer_of_a_memory_is_what_runs(change: Callable[[Any], Any]) -> None:
    memory = GRUMemory(input_size=4, hidden_size=6)
    rows = torch.randn(3, 5, 4), torch.randn(3, 6), torch.zeros(3, 5, dtype=torch.bool)
    door.open_door(True)
    memory.unroll(*rows)
    assert door.in_use().pop("gru:UNROLL")
    change(memory)
    door.open_door(True)
    found, _ = memory.unroll(*rows)
    found.sum().backward()
    assert "gru:UNROLL" not in door.in_use()
    with door.plain_formulas():
        torch.testing.assert_close(found, memory.unroll(*rows)[0])


def test_per_sample_gradients_and_a_forward_derivative_by_torch_func() -> None:
    network, rows = MLP(input_size=4, hidden_sizes=(8,), output_size=1), torch.randn(70, 4)
    network(rows)
    parameters = {name: each.detach() for name, each in network.named_parameters()}

    def output(parameters: dict[str, Tensor], row: Tensor) -> Tensor:
        return torch.func.functional_call(network, parameters, (row,)).sum()

    each = torch.func.vmap(torch.func.grad(output), in_dims=(None, 0))(parameters, rows)
    network(rows).sum().backward()
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(each[name].sum(0), parameter.grad, msg=name)
    with torch.no_grad():
        _, along = torch.func.jvp(network, (rows,), (torch.ones_like(rows),))
    leaf = rows.clone().requires_grad_()
    network(leaf).sum().backward()
    torch.testing.assert_close(along[:, 0], leaf.grad.sum(dim=1))


def test_gradients_that_only_the_formula_knows_are_not_lost() -> None:
    def learnt_temperature(inputs: Inputs) -> Call:
        call = sac_policy()(inputs)
        temperature = torch.tensor(0.3, requires_grad=True)
        return Call(call.formula, (*call.args[:2], temperature), modules=call.modules, leaves=[temperature])

    check(f"{LOSSES}SAC_POLICY_LOSS", learnt_temperature, Variant(), is_used=False)
