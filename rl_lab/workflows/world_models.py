"""World Models: learn to see, learn to foresee, and evolve a small controller on the environment or inside the dream.

"World Models" (Ha and Schmidhuber 2018, arXiv:1803.10122)

    V  update_vae         z_t ~ N(mean, variance) of the image of row t             reconstruction + KL
    M  update_memory      h_t = LSTM(h_t-1, z_t-1, a_t-1)                           -log P(z_t | h_t), reward, end
    C  update_controller  a_t = W [z_t, h_t] + b, one generation of CMA-ES          mean return of R rollouts

A phase lists one hook at a time, so that the method is a curriculum. `update_controller` in an offline phase evolves
inside the dream, with temperature; in an online phase on the environment, whose N copies play the candidates' rollouts:

    environment 0   [candidate 0, rollout 0][candidate 2, rollout 0]...    where an episode ends, the next rollout that
    environment 1   [candidate 1, rollout 0][candidate 3, rollout 0]...    waits begins; after the last: a generation
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from rl_lab.components.world_model.conv_vae import draw_latent, vae_loss
from rl_lab.components.world_model.mdn_rnn import DreamStarts, mdn_rnn_loss
from rl_lab.components.world_model.remembered_latents import RememberedLatents
from rl_lab.training.schedules import Schedule, value_at
from rl_lab.types import Batch, CollectResult, ConfigError, Metrics, Phase, PolicyStep, StateTree, TimeStep
from rl_lab.workflows.base import Mode, WorldModelWorkflow, checked_scales, named
from rl_lab.workflows.context import WorkflowContext
from rl_lab.workflows.latent_states import BEFORE, marked, those_marked

TERMS = {"vae": ("reconstruction", "kl"), "memory": ("latent", "reward", "end")}
RETURNS = "returns"  # the buffer of phases that evolve on the environment
DREAM_CHUNK = 25  # steps of a dream between two looks who is still in it
LEAST_DREAMS = 64  # a batch that is not halved further
FADED = 0.05  # the probability of getting so far below which a dream counts no more
NOBODY = -1  # a rollout that is none: the generation has no more of them to begin


class VAE(Protocol):
    output_size: int
    image_key: str
    reconstruct: Callable[[Tensor], Batch]

    def __call__(self, observation: Batch) -> Tensor: ...


class Memory(Protocol):
    """A state is a dictionary of tensors `[N, ...]`; nobody but the memory knows its parts."""

    initial_state: Callable[[int, torch.device], Batch]
    observe: Callable[..., tuple[Batch, Tensor]]
    dream_step: Callable[[Batch, Tensor, Tensor | float | None], Batch]
    imagine: Callable[..., tuple[Batch, Tensor]]
    begin: Callable[[Batch], tuple[Batch, Batch]]
    features: Callable[[Batch], Tensor]
    controller_inputs: Callable[[Tensor], Tensor]
    reward: Callable[[Tensor], Any]
    continue_probability: Callable[[Tensor], Any]
    survival: Callable[[Tensor], Tensor]


class Controller(Protocol):
    evolved: Tensor

    def __call__(self, inputs: Tensor, parameters: Tensor) -> Tensor: ...


class Evolution(Protocol):
    population: int
    generations: int
    has_begun: bool
    mean: Callable[[], Tensor]
    std: Callable[[], float]
    begin: Callable[[Tensor], None]
    ask: Callable[[], Tensor]
    tell: Callable[[Tensor, Tensor], None]
    get_state: Callable[[], StateTree]
    set_state: Callable[[StateTree], None]


class WorldModels(WorldModelWorkflow):
    """A variational autoencoder, a recurrent mixture density network, and a linear controller that is evolved."""

    captured: ClassVar[tuple[str, ...]] = ("learn_vae", "learn_memory", "dream", "respond")
    part_groups: ClassVar[Mapping[str, tuple[str, ...]]] = {"world_model": ("vae", "memory", "dream_starts")}

    def __init__(
        self,
        *,
        images_per_update: int | None = 100,
        kl_tolerance: float = 0.5,
        rollouts: int = 16,
        temperature: float | Schedule = 1.0,
        dream_steps: int = 1000,
        dream_starts: int = 1000,
        loss_scales: Mapping[str, float | Schedule],
    ) -> None:
        whole = {"rollouts": rollouts, "dream_steps": dream_steps, "dream_starts": dream_starts}
        for name, value in {**whole, "images_per_update": images_per_update}.items():
            if value is not None and value < 1:
                raise ConfigError(f"algorithm.{name} is {value}: write a whole number from 1.")
        ends = (temperature.start, temperature.end) if isinstance(temperature, Schedule) else (temperature,)
        if kl_tolerance < 0.0 or min(end for end in ends if end is not None) <= 0.0:
            raise ConfigError(
                f"algorithm.kl_tolerance is {kl_tolerance} and temperature is {temperature}: write a number from 0 and "
                "one above 0, such as 0.5 and 1.15."
            )
        self.images_per_update, self.kl_tolerance, self.temperature = images_per_update, kl_tolerance, temperature
        self.rollouts, self.dream_steps, self.num_starts = rollouts, dream_steps, dream_starts
        self.loss_scales = checked_scales(loss_scales, algorithm="World Models", terms=sum(TERMS.values(), ()))
        self.is_evolving, self.generations_begun = False, 0  # whether candidates are tried on the environment now
        self.candidates: Tensor | None = None  # [P, n] of the generation under way on the environment

    def initialize(self, context: WorkflowContext) -> None:
        super().initialize(context)
        if context.spec.has_action_mask:
            raise ConfigError(
                f"World Models obeys no action masks, which {context.spec.id} shows: write `algorithm=dreamer`."
            )
        self.vae: VAE = context.components.require("vae", VAE)
        self.memory: Memory = context.components.require("memory", Memory)
        self.controller: Controller = context.controllers.require("controller", Controller)
        self.evolution: Evolution = context.controllers.require("evolution", Evolution)
        self.optimizers = {name: context.optimizers.require(name) for name in TERMS}
        self.dream_starts = DreamStarts(capacity=self.num_starts, input_size=self.vae.output_size)
        context.components.add("dream_starts", self.dream_starts.to(context.runtime.device))
        self.latents = RememberedLatents(self.vae, context.runtime)  # type: ignore[arg-type]
        self.next_rollout = torch.zeros((), dtype=torch.int64, device=context.runtime.device)
        self.encoder, self.dynamics, self.decoder = self.vae, self.memory, self.vae  # as films name them
        self.reward_head, self.continue_head = self.memory.reward, self.memory.continue_probability

    def check_phase(self, phase: Phase) -> None:
        super().check_phase(phase)
        evolves = "update_controller" in phase.workflow_hooks and phase.type == "online"
        is_alone = phase.controller is None and len(phase.workflow_hooks) == 1
        if phase.type != "eval_only" and (evolves != (phase.buffer == RETURNS) or (evolves and not is_alone)):
            raise ConfigError(
                f"Phase '{phase.name}': one that evolves a controller on the environment is online and has `buffer: "
                f"{RETURNS}`, `workflow_hooks: [update_controller]` and no `controller`; every other one has `buffer: "
                "replay`. With `type: offline` a controller is evolved in the dream."
            )

    def enter_phase(self, phase: Phase) -> None:
        super().enter_phase(phase)
        self.is_evolving = phase.type == "online" and "update_controller" in phase.workflow_hooks

    # --- acting ---

    def act(self, time_step: TimeStep, state: Any, *, mode: Mode) -> PolicyStep:
        """`state` is the memory's, the action that followed it, and the rollout being played; is_first forgets all."""
        before = self.blank_state(time_step) if state is None else dict(state)
        parameters, rollout, extras = self.controller.evolved.unsqueeze(0), before.pop("rollout"), {}
        if self.is_evolving and mode == "train":
            assert self.candidates is not None
            rollout = self.assign(rollout, time_step.is_first)
            candidate = torch.where(rollout == NOBODY, NOBODY, rollout % self.evolution.population)
            parameters = self.candidates[candidate.clamp(min=0)].float()
            extras = {"candidate": candidate, "generation": torch.full_like(rollout, self.generations_begun)}
        rows = {self.vae.image_key: time_step.observation[self.vae.image_key], "is_first": time_step.is_first}
        after = self.respond({**rows, **marked(BEFORE, before), "parameters": parameters}, {}, is_sure=mode == "eval")
        looked_at = self.latents.seen(after.pop("normal")) if mode == "train" else {}
        return PolicyStep(after["action"], {**after, "rollout": rollout}, extras or looked_at)

    @torch.no_grad()
    def respond(self, rows: Batch, numbers: Batch, *, is_sure: bool) -> Batch:
        """To images `[N, ...]` and what was before them: the state after them, and actions."""
        before = those_marked(BEFORE, rows)
        with self.context.runtime.autocast():
            known = self.vae(rows), before.pop("action"), before, rows["is_first"]
            seen, normal = self.memory.observe(*known, deterministic=is_sure)
            return {**seen, "normal": normal, "action": self.decide(self.memory.features(seen), rows["parameters"])}

    def decide(self, features: Tensor, parameters: Tensor) -> Tensor:
        """Actions `[N, ...]` in states, of one controller `[1, n]` or of one for each `[N, n]`."""
        inputs = self.memory.controller_inputs(features).unflatten(0, (len(parameters), -1))
        return self.controller(inputs, parameters).flatten(0, 1)

    def extras_of_others(self, time_step: TimeStep) -> Batch:
        return self.latents.blank(time_step.num_envs, time_step.reward.device)

    def blank_state(self, time_step: TimeStep) -> Batch:
        spec, count, device = self.context.spec.action, time_step.num_envs, time_step.reward.device
        action = torch.zeros(count, *spec.shape, dtype=getattr(torch, spec.dtype), device=device)
        rollout = torch.full((count,), NOBODY, device=device)
        return {**self.memory.initial_state(count, device), "action": action, "rollout": rollout}

    def assign(self, rollout: Tensor, is_first: Tensor) -> Tensor:
        """Which rollout of the generation each environment plays `[N]`: where an episode begins, the next one."""
        waiting = self.next_rollout + is_first.cumsum(dim=0) - 1
        begun = torch.where(waiting < self.evolution.population * self.rollouts, waiting, NOBODY)
        self.next_rollout = self.next_rollout + is_first.sum()
        return torch.where(is_first, begun, rollout)

    def collect_step(self, step: int, *, phase: Phase) -> CollectResult:
        """Rows; where a controller is evolved, a generation begins with new episodes everywhere."""
        if self.is_evolving and (self.candidates is None or phase.progress.cycles == 0):
            self.candidates = self.new_population().to(self.context.runtime.device)
            self.generations_begun += 1
            self.next_rollout = torch.zeros_like(self.next_rollout)
            self.context.collector.restart()
        return super().collect_step(step, phase=phase)

    # --- learning ---

    def update_world_model(self, batch: Batch, *, phase: Phase) -> Metrics:
        return self.update_vae(batch, phase=phase) | self.update_memory(batch, phase=phase)  # from the same rows

    def update_vae(self, batch: Batch, *, phase: Phase) -> Metrics:
        """V from single images, `images_per_update` of those in the rows."""
        images = batch[self.vae.image_key].flatten(0, 1)
        if (count := self.images_per_update) is not None:
            images = images[torch.randint(len(images), (count,), device=images.device)]
        self.latents.forget()
        return self.learn_from({self.vae.image_key: images}, phase, "vae", self.learn_vae)

    def update_memory(self, batch: Batch, *, phase: Phase) -> Metrics:
        """M from sequences, in the latents of V as it is."""
        rows = {key: batch[key] for key in ("action", "reward", "is_first", "is_terminal")}
        rows["normal"] = self.latents.of_rows(batch)
        return self.learn_from(rows, phase, "memory", self.learn_memory)

    def learn_from(self, rows: Batch, phase: Phase, name: str, learn: Callable[[Batch, Batch], Batch]) -> Metrics:
        scales = {term: value_at(self.loss_scales[term], phase.progress) for term in TERMS[name]}
        runtime, rate = self.context.runtime, named(self.optimizers[name].prepare(phase.progress), name)
        return {**rate, **learn(runtime.to_device(rows), runtime.numbers(scales))}

    def learn_vae(self, batch: Batch, numbers: Batch) -> Batch:
        """Images `[B, ...]` to new parameters of V."""
        with self.context.runtime.autocast():
            loss = vae_loss(self.vae, batch, kl_tolerance=self.kl_tolerance)  # type: ignore[arg-type]
        return self.gradient_step(self.optimizers["vae"], loss, numbers, name="vae")

    def learn_memory(self, batch: Batch, numbers: Batch) -> Batch:
        """Rows `[B, T]` to new parameters of M, and to places where dreams may begin."""
        with self.context.runtime.autocast():
            self.dream_starts.keep(batch["normal"], batch["is_first"])
            loss = mdn_rnn_loss(self.memory, batch, draw_latent(batch["normal"]))  # type: ignore[arg-type]
        return self.gradient_step(self.optimizers["memory"], loss, numbers, name="memory")

    def update_controller(self, batch: Batch, *, phase: Phase) -> Metrics:
        """One generation: of the rollouts that were played on the environment, or inside the dream."""
        if "episode_return" in batch:
            assert self.candidates is not None
            population, self.candidates = self.candidates, None
            order = batch["candidate"].argsort(stable=True)  # every candidate has as many
            earned, lengths = (batch[key][order].view(len(population), -1) for key in ("episode_return", "length"))
        else:
            population = self.new_population()
            dreamt = self.dream_rollouts(population, value_at(self.temperature, phase.progress))
            earned, lengths = dreamt["episode_return"], dreamt["length"]
        returns = earned.mean(dim=1)
        self.evolution.tell(population, returns)
        self.controller.evolved.copy_(self.evolution.mean())
        return {
            "controller/generation": self.evolution.generations,
            "controller/generation_return_mean": returns.mean(),
            "controller/generation_return_max": returns.max(),
            "controller/generation_return_min": returns.min(),
            "controller/generation_length_mean": lengths.double().mean(),
            "controller/evolution_std": self.evolution.std(),
        }

    def new_population(self) -> Tensor:
        """Parameters to try, `[P, n]`, in double precision as evolution keeps them."""
        if not self.evolution.has_begun:
            self.evolution.begin(self.controller.evolved)
        return self.evolution.ask()

    def dream_rollouts(self, population: Tensor, temperature: float) -> Batch:
        """What candidates `[P, n]` earn in dreams from the same R places, and their lengths: `[P, R]` each."""
        device, count = self.context.runtime.device, len(population) * self.rollouts
        place, candidates = torch.arange(count, device=device), population.to(device, torch.float32)
        found = {key: torch.zeros(count, device=device) for key in ("episode_return", "length")}
        running = {**self.memory.initial_state(count, device), **found, "alive": torch.ones(count, device=device)}
        running["latent"] = self.dream_starts.draw(self.rollouts).repeat(len(population), 1)
        numbers = self.context.runtime.numbers({"temperature": temperature})
        for step in range(0, self.dream_steps, DREAM_CHUNK):
            acting = {"candidates": candidates, "candidate": place // self.rollouts}
            running = self.dream(running | acting, numbers, steps=min(DREAM_CHUNK, self.dream_steps - step))
            for key in found:
                found[key][place] = running[key]
            going_on, half = int((running["alive"] >= FADED).sum()), len(place) // 2  # the other half leaves the batch
            if going_on == 0:
                break
            if LEAST_DREAMS <= half >= going_on:
                kept = running["alive"].argsort(descending=True, stable=True)[:half]
                running, place = {key: value[kept] for key, value in running.items()}, place[kept]
        return {key: value.view(len(population), -1) for key, value in found.items()}

    @torch.no_grad()
    def dream(self, batch: Batch, numbers: Batch, *, steps: int) -> Batch:
        """So many steps of dreams `[N, ...]`: states, how much of them goes on, and what they earned so far."""
        state = dict(batch)
        parameters = state.pop("candidates")[state.pop("candidate")]  # [N, n]
        earned, length, alive = (state.pop(key) for key in ("episode_return", "length", "alive"))
        with self.context.runtime.autocast():
            features = self.memory.features(state)
            for _ in range(steps):
                state = self.memory.dream_step(state, self.decide(features, parameters), numbers["temperature"])
                features = self.memory.features(state)
                earned = earned + self.memory.reward(features).mean() * alive
                length = length + alive
                alive = alive * self.memory.survival(features)
        return {**state, "alive": alive, "episode_return": earned, "length": length}

    # --- dreaming, for people ---

    @torch.inference_mode()
    def imagine(self, start: Batch, *, horizon: int) -> Batch:
        """From states `[N, ...]` on, the controller acting: states, `reward`, image at 0..H; `action` at 0..H-1."""
        evolved = self.controller.evolved.unsqueeze(0)
        with self.context.runtime.autocast():
            states, action = self.memory.imagine(start, lambda features, _: self.decide(features, evolved), horizon)
            features = self.memory.features(states)
            foreseen = {"reward": self.memory.reward(features).mean(), "action": action}
            return {**self.vae.reconstruct(features), **states, **foreseen}

    # --- resuming ---

    def get_state(self) -> StateTree:
        kept = {key: getattr(self, key) for key in ("candidates", "next_rollout", "generations_begun")}
        return {"evolution": self.evolution.get_state(), **kept}

    def set_state(self, state: StateTree) -> None:
        device = self.context.runtime.device
        self.evolution.set_state(state["evolution"])
        self.candidates = None if state["candidates"] is None else state["candidates"].to(device)
        self.next_rollout, self.generations_begun = state["next_rollout"].to(device), state["generations_begun"]
