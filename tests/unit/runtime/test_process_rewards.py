"""Steps judged while attempts are still sampled: on the virtual clock, with a scripted scorer."""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from harness import MemorySink, OneTurn, make_pipeline, make_plan
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.algos.advantages import grpo
from headrace.algos.process import token_advantages
from headrace.data.record_checks import Limits
from headrace.data.steps import StepRule, judge_versions, split, step_borders
from headrace.engines.scripted import ScriptedEngine, hashed_script
from headrace.errors import RoleError
from headrace.observe.verdict import hidden_share
from headrace.plan import virtual_clock
from headrace.replay.check import check_recording
from headrace.replay.view import group_lines
from headrace.runtime.journal import read
from headrace.runtime.plan import ProcessPlan
from headrace.runtime.recording import read_recording
from headrace.runtime.state import RunState
from headrace.scoring.process_scorer import ProcessScorer, StepFunction
from headrace.trainers.scripted import ScriptedTrainer
from headrace.types import RoleStatus, ScoreColumn, StepScores, Trajectory

RULE = StepRule(kind="tokens", num_tokens=5)


class ScriptedSteps:
    """A step is worth its mean token id over 100; a token that was not seen before takes ``token_s``."""

    def __init__(self, *, token_s: float = 0.0, seconds: float = 0.0) -> None:
        self._token_s, self._seconds = token_s, seconds
        self._seen: dict[str, int] = {}
        self._working = asyncio.Lock()
        self.asked: list[tuple[str, int]] = []
        """(attempt, where the step ends), for every score given."""
        self.num_tokens = self.version = 0

    async def score_steps(self, question):
        async with self._working:
            new = len(question.token_ids) - self._seen.get(question.attempt, 0)
            self.num_tokens += new
            await asyncio.sleep(self._seconds + self._token_s * new)
        self._seen[question.attempt] = len(question.token_ids)
        self.note(question)
        scores = self.answer(question.token_ids, question.ends, question.num_prompt, question.num_known)
        return StepScores(scores=scores, version=self.version)

    def note(self, question):
        new = question.ends[question.num_known :] - question.num_prompt
        self.asked += [(question.attempt, int(end)) for end in new]

    def answer(self, token_ids, ends, num_prompt, num_known):
        borders = [num_prompt, *ends.tolist()]
        means = [token_ids[a:b].mean() / 100 for a, b in pairwise(borders)]
        return np.array(means[num_known:], np.float32)

    async def status(self):
        return RoleStatus(role="process", version=0, progress=self.num_tokens, seconds={})

    async def close(self): ...


class TooShort(ScriptedSteps):
    def answer(self, *given):
        return super().answer(*given)[:-1]


def judge_of_too_few():
    """A function that leaves the last step out."""
    function = StepFunction(lambda steps: [0.0] * (len(steps) - 1), name="judge", decode=str)
    return ProcessScorer(function, threaded=False)


class NotANumber(ScriptedSteps):
    def answer(self, *given):
        return super().answer(*given) * np.nan


class Dead(ScriptedSteps):
    def answer(self, *given):
        raise RoleError("process died (killed by SIGKILL)")

    async def status(self):
        raise RoleError("process died (killed by SIGKILL)")


class FailsOnTheWay(ScriptedSteps):
    """Judges finished attempts only, and counts whom it refused."""

    def __init__(self):
        super().__init__()
        self.refused = []

    async def score_steps(self, question):
        if not question.last:
            self.refused.append(question.attempt)
            raise ValueError("busy")
        return await super().score_steps(question)


class Hanging(ScriptedSteps):
    async def status(self):
        await asyncio.sleep(1e6)


class RecordingTrainer(ScriptedTrainer):
    def __init__(self, **options):
        super().__init__(**options)
        self.samples = {}
        self.step_at = []

    async def step(self, batch):
        self.step_at.append(asyncio.get_running_loop().time())
        self.samples |= {(s.group, s.attempt): s for s in batch.samples}
        return await super().step(batch)


def process_plan(*, plan=None, **changes):
    process = ProcessPlan(rule=RULE, deadline_s=2.0, **(plan or {}))
    return make_plan(**{"checkpoint_every": 0, "process": process, **changes})


def run(tmp_path, plan, scorer, **parts):
    async def main():
        made = {name: factory() for name, factory in parts.items()}
        made.setdefault("trainer", RecordingTrainer())
        made.setdefault("sink", MemorySink())
        made.setdefault("engines", [ScriptedEngine(script=hashed_script(mean_tokens=20), token_s=0.01)])
        steps = scorer()
        pipeline = make_pipeline(tmp_path, plan, environment=OneTurn(max_tokens=64), process=steps, **made)
        await pipeline.run()
        return pipeline, made["trainer"], made["sink"], steps

    return virtual_clock.run(main())


def expected_advantages(samples, returns_of, *, form, weight):
    """Written out from the finished tokens alone."""
    by_group = {}
    for (group, attempt), sample in sorted(samples.items()):
        by_group.setdefault(group, []).append((attempt, sample))
    for group, members in by_group.items():
        ends, scores = [], []
        for _, sample in members:
            ids = sample.token_ids[sample.loss_mask]
            ends.append(split(ids, sample.behavior_logprobs[sample.loss_mask], RULE, finished=True))
            borders = [0, *ends[-1].tolist()]
            means = [ids[a:b].mean() / 100 for a, b in pairwise(borders)]
            scores.append(np.array(means, np.float32))
        outcome = grpo([returns_of(sample) for _, sample in members])
        advantages = token_advantages(outcome, ends, scores, form=form, weight=weight)
        yield from (((group, a), adv) for (a, _), adv in zip(members, advantages, strict=True))


def parity(sample):
    return float(sample.token_ids[sample.loss_mask][0] % 2 == 0)


@pytest.mark.parametrize("form", ["sum", "min", "potential"])
@pytest.mark.parametrize("token_s", [0.0, 0.001])
def test_steps_judged_on_the_way_are_those_of_the_finished_text(tmp_path, form, token_s):
    plan = process_plan(plan={"form": form, "weight": 0.5})
    pipeline, trainer, _, steps = run(tmp_path, plan, lambda: ScriptedSteps(token_s=token_s))
    assert pipeline.state.missing_scores == {}
    assert len(set(steps.asked)) == len(steps.asked), "no step is scored twice"
    assert len(trainer.samples) == 36
    for key, advantages in expected_advantages(trainer.samples, parity, form=form, weight=0.5):
        sample = trainer.samples[key]
        np.testing.assert_allclose(sample.advantages[sample.loss_mask], advantages, atol=1e-6)


class LastWord(ScriptedEngine):
    """Reports its last tokens, and has ended before anybody could do anything about the report."""

    async def generate(self, request, on_progress=None):
        done = await super().generate(request, on_progress)
        if on_progress is not None and done.finish_reason != "abort":
            on_progress(replace(done, finish_reason="abort"))
        return done


def test_a_report_that_the_end_of_its_turn_overtakes_is_not_counted_as_another_turn(tmp_path):
    pipeline, trainer, _, steps = run(
        tmp_path,
        process_plan(),
        ScriptedSteps,
        engines=lambda: [LastWord(script=hashed_script(mean_tokens=20), token_s=0.01)],
    )
    assert pipeline.state.missing_scores == {}
    assert len(set(steps.asked)) == len(steps.asked), "no step is scored twice"
    for key, advantages in expected_advantages(trainer.samples, parity, form="potential", weight=1.0):
        sample = trainer.samples[key]
        np.testing.assert_allclose(sample.advantages[sample.loss_mask], advantages, atol=1e-6)


class TwoTurns(OneTurn):
    """The second prompt repeats everything before it."""

    async def run(self, task, policy):
        first = await policy.sample(np.array([int(task.id)], np.int32), self._sampling)
        prompt = np.concatenate([first.prompt_ids, first.completion.token_ids, [7, 7]]).astype(np.int32)
        second = await policy.sample(prompt, self._sampling)
        return (Trajectory(turns=(first, second), text=""),)


def test_steps_of_several_turns_are_told_in_order_and_none_reaches_into_the_next(tmp_path):
    async def main():
        pipeline = make_pipeline(
            tmp_path,
            process_plan(),
            engines=[ScriptedEngine(script=hashed_script(mean_tokens=20), token_s=0.01)],
            environment=TwoTurns(max_tokens=32),
            trainer=(trainer := RecordingTrainer()),
            process=ScriptedSteps(token_s=0.0005),
        )
        await pipeline.run()
        return pipeline.state, trainer

    state, trainer = virtual_clock.run(main())
    groups, again = [], RunState()
    for record in read(tmp_path / "journal", 0):
        again.apply(record)
        if record["kind"] == "scored":
            groups.append(again.live(record["group"]).scored)
    assert state.missing_scores == {}
    assert len(groups) >= 12
    for group in groups:
        for episode in group.episodes:
            first, second = (turn.completion for turn in episode.trajectories[0].turns)
            wanted = [
                *split(first.token_ids, first.logprobs, RULE, finished=True),
                *(split(second.token_ids, second.logprobs, RULE, finished=True) + first.num_tokens),
            ]
            assert step_borders(group, episode.attempt)[0].tolist() == wanted
    for sample in trainer.samples.values():
        assert np.ptp(sample.advantages[sample.loss_mask]) > 0


class TwoAgents(OneTurn):
    """Two who take turns, and one of whose words nothing comes: turns 0 and 2, turn 1, and turn 3 in no trajectory."""

    async def run(self, task, policy):
        start = np.array([int(task.id)], np.int32)
        first = await policy.sample(start, self._sampling)
        answer = await policy.sample(np.append(start, np.int32(8)), self._sampling)
        prompt = np.concatenate([start, first.completion.token_ids, [7, 7]]).astype(np.int32)
        second = await policy.sample(prompt, self._sampling)
        await policy.sample(np.append(start, np.int32(9)), self._sampling)
        return Trajectory(turns=(first, second), text=""), Trajectory(turns=(answer,), text="")


class AllSamples(ScriptedTrainer):
    """Remembers both samples of every attempt, in order."""

    def __init__(self, **options):
        super().__init__(**options)
        self.samples = {}

    async def step(self, batch):
        for sample in batch.samples:
            self.samples.setdefault((sample.group, sample.attempt), []).append(sample)
        return await super().step(batch)


def check_two_agents(samples, form):
    """Each agent's advantages are those among the same agents of the other attempts."""
    for group in {group for group, _ in samples}:
        attempts = [samples[key] for key in sorted(samples) if key[0] == group]
        assert all(len(agents) == 2 for agents in attempts)
        outcome = grpo([parity(agents[0]) for agents in attempts])
        for place in range(2):
            members = [agents[place] for agents in attempts]
            ends, scores = zip(*map(steps_of_sample, members), strict=True)
            wanted = token_advantages(outcome, ends, scores, form=form, weight=1.0)
            for sample, advantages in zip(members, wanted, strict=True):
                np.testing.assert_allclose(sample.advantages[sample.loss_mask], advantages, atol=1e-6)


def steps_of_sample(sample):
    """Where its steps end in its sampled tokens, and what the scripted scorer thinks of them; turns lie apart."""
    ends, scores, before = [], [], 0
    places = np.flatnonzero(sample.loss_mask)
    for turn in np.split(sample.token_ids[places], np.flatnonzero(np.diff(places) > 1) + 1):
        here = split(turn, np.zeros(len(turn), np.float32), RULE, finished=True)
        scores += [turn[a:b].mean() / 100 for a, b in pairwise([0, *here.tolist()])]
        ends += (here + before).tolist()
        before += len(turn)
    return np.array(ends), np.array(scores, np.float32)


def two_agents(run_dir, plan):
    """The scorer is so slow that turns end while it is asked about the one before."""
    return make_pipeline(
        run_dir,
        plan,
        engines=[ScriptedEngine(script=hashed_script(mean_tokens=12), token_s=0.01)],
        environment=TwoAgents(max_tokens=32),
        trainer=AllSamples(),
        process=ScriptedSteps(token_s=0.002),
    )


@pytest.mark.parametrize("form", ["sum", "min", "potential"])
def test_steps_of_several_trajectories_belong_to_the_trajectory_they_were_sampled_in(tmp_path, form):
    async def main():
        pipeline = two_agents(tmp_path, process_plan(plan={"form": form}))
        await pipeline.run()
        return pipeline

    pipeline = virtual_clock.run(main())
    assert pipeline.state.missing_scores == {}
    assert len(pipeline._trainer.samples) == 36
    check_two_agents(pipeline._trainer.samples, form)
    report = check_recording(read_recording(tmp_path), Limits(), seed=0)
    assert report.num_checked["steps"] >= 36
    assert not [found for found in report.faults if found.check in ("steps", "group", "episode")]


def test_a_source_that_is_asked_at_the_end_counts_trajectories_one_after_the_other(tmp_path):
    class Halves:
        """Two steps for each trajectory."""

        name, required, per_attempt, concurrency, deadline_s = "halves", False, True, 9, 5.0

        async def score(self, task, episodes):
            columns = []
            for episode in episodes:
                sizes = [sum(t.completion.num_tokens for t in one.turns) for one in episode.trajectories]
                ends = [e for a, b in pairwise([0, *np.cumsum(sizes).tolist()]) for e in ((a + b) // 2, b)]
                columns.append(
                    ScoreColumn(
                        source=self.name,
                        group=episode.group,
                        attempt=episode.attempt,
                        step_ends=np.unique([e for e in ends if e]).astype(np.int32),
                        step_scores=np.ones(len({e for e in ends if e}), np.float32),
                    )
                )
            return columns

    async def main():
        pipeline = make_pipeline(
            tmp_path,
            make_plan(checkpoint_every=2),
            engines=[ScriptedEngine(script=hashed_script(mean_tokens=12), token_s=0.01)],
            environment=TwoAgents(max_tokens=32),
            sources=[Halves()],
        )
        return await pipeline.run()

    assert virtual_clock.run(main()).missing_scores == {}
    report = check_recording(read_recording(tmp_path), Limits(), seed=0)
    assert report.num_checked["steps"] > 0
    assert not [found for found in report.faults if found.check == "steps"]


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(lives=st.lists(st.floats(0.0, 2.0), max_size=4), checkpoint_every=st.integers(0, 2))
def test_several_trajectories_killed_at_random_moments(lives, checkpoint_every):
    plan, samples = process_plan(steps=4, checkpoint_every=checkpoint_every), {}

    async def one_life(run_dir, life_s):
        pipeline = two_agents(run_dir, plan)
        task = asyncio.ensure_future(pipeline.run())
        done, _ = await asyncio.wait({task}, timeout=life_s)
        if not done:
            pipeline._journal.flush = lambda: None
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return pipeline.state if done else None, pipeline._trainer.samples

    with tempfile.TemporaryDirectory() as name:
        for life_s in (*lives, None):
            state, trained = virtual_clock.run(one_life(Path(name), life_s))
            samples |= trained
            report = check_recording(read_recording(Path(name)), Limits(), seed=0)
            assert not [found for found in report.faults if found.check == "steps"]
            if state is not None:
                break
    assert state.step == 4 and state.missing_scores == {}
    assert len(samples) == 4 * 2 * 3
    check_two_agents(samples, "potential")


def test_most_steps_are_judged_before_their_attempt_ends_and_cost_their_new_tokens_only(tmp_path):
    beside = []

    class Watching(ScriptedSteps):
        async def score_steps(self, question):
            beside.append((len(question.ends) - question.num_known, question.last))
            return await super().score_steps(question)

    _, trainer, _, steps = run(tmp_path, process_plan(), Watching)
    early = sum(count for count, last in beside if not last)
    assert early > 0.6 * sum(count for count, _ in beside)
    assert steps.num_tokens == sum(sample.num_tokens for sample in trainer.samples.values())


def test_scores_say_which_version_of_the_judge_gave_them(tmp_path):
    """It changes every 25 questions, in the middle of attempts and between those of a group."""

    class Learning(ScriptedSteps):
        num_asked = 0

        async def score_steps(self, question):
            self.num_asked += 1
            self.version = self.num_asked // 25
            said = await super().score_steps(question)
            return replace(said, scores=np.full_like(said.scores, said.version))

    run(tmp_path, process_plan(), Learning)
    again, mixed, groups = RunState(), 0, 0
    for record in read(tmp_path / "journal", 0):
        again.apply(record)
        if record["kind"] == "scored":
            for column in again.live(record["group"]).scored.scores:
                # This judge says its version, so a version that came off would show.
                np.testing.assert_array_equal(judge_versions(column), column.step_scores)
                mixed += np.ptp(judge_versions(column)) > 0
                groups += 1
    assert groups == 36 and mixed > 0
    report = check_recording(read_recording(tmp_path), Limits(), seed=0)
    assert not [found for found in report.faults if found.check == "steps"]
    recorded = read_recording(tmp_path).groups[1]
    shown = [line for line in group_lines(recorded, None) if line.startswith("  scores")]
    assert len(shown) == 3 and any("given by 0 x" in line or "given by 1 x" in line for line in shown)


def test_scoring_hides_behind_generation(tmp_path):
    """The scenario of docs/scoring.md: up to 32 attempts at 50 tokens a second, a scorer of 2000 a second, lag 1."""
    _, _, sink, _ = run(
        tmp_path,
        process_plan(steps=20, groups_per_step=4, group_size=4),
        lambda: ScriptedSteps(token_s=0.0005),
        engines=lambda: [ScriptedEngine(script=hashed_script(mean_tokens=40), token_s=0.02)],
        trainer=lambda: RecordingTrainer(token_s=0.0005),
    )
    last = sink.of("step")[-1]
    (role,) = [role for role in last["roles"] if role["role"] == "scoring"]
    assert role["counters"]["process_s"] > 1.0
    assert hidden_share(role["seconds"]) >= 0.9
    assert last["missing_scores"] == {}


@pytest.mark.parametrize("max_lag", [0, 2])
def test_the_trainer_never_waits_for_a_step_score_past_its_deadline(tmp_path, max_lag):
    pipeline, trainer, _, _ = run(
        tmp_path,
        process_plan(max_lag=max_lag),
        lambda: ScriptedSteps(seconds=1e6),
        engines=lambda: [ScriptedEngine(script=lambda r: np.arange(12, dtype=np.int32), token_s=0.01)],
        trainer=lambda: RecordingTrainer(token_s=0.0),
    )
    assert np.diff([0.0, *trainer.step_at]).max() <= 2.0 + 0.12 + 1e-6
    assert pipeline.state.missing_scores == {"process: late": 36}


@pytest.mark.parametrize(
    ("scorer", "why", "words"),
    [
        (TooShort, "invalid", "scores for"),
        (judge_of_too_few, "invalid", "judge returned 1 scores for the 2 steps of attempt"),
        (NotANumber, "invalid", "not finite"),
        (Dead, "dead", "killed by SIGKILL"),
    ],
)
def test_a_scorer_at_fault_leaves_the_outcome_and_is_named(tmp_path, scorer, why, words):
    pipeline, trainer, sink, _ = run(tmp_path, process_plan(), scorer)
    assert pipeline.state.step == 6
    assert pipeline.state.missing_scores == {f"process: {why}": 36}
    assert words in sink.of("warning")[0]["text"]
    for group in {group for group, _ in trainer.samples}:
        members = [trainer.samples[(group, attempt)] for attempt in range(3)]
        for sample, advantage in zip(members, grpo([parity(m) for m in members]), strict=True):
            np.testing.assert_allclose(sample.advantages[sample.loss_mask], advantage)


def test_a_question_that_fails_on_the_way_and_not_at_the_end_is_counted_though_nothing_is_missing(tmp_path):
    pipeline, trainer, sink, steps = run(tmp_path, process_plan(), FailsOnTheWay)
    state, last = pipeline.state, sink.of("step")[-1]
    assert len(steps.refused) > 0
    # An attempt is not judged on the way again once that has failed.
    assert len(set(steps.refused)) == len(steps.refused)
    assert state.asked_again == {"process: failed": len(steps.refused)}
    assert last["asked_again"].keys() == {"process: failed"}
    assert state.missing_scores == {}
    advantages = expected_advantages(trainer.samples, parity, form="potential", weight=1.0)
    for key, expected in advantages:
        sample = trainer.samples[key]
        np.testing.assert_allclose(sample.advantages[sample.loss_mask], expected, rtol=1e-5)
    assert RunState.restore(state.snapshot()).asked_again == state.asked_again


def test_a_scorer_that_does_not_say_how_it_is_holds_nothing_up(tmp_path):
    pipeline, trainer, _, _ = run(tmp_path, process_plan(), Hanging)
    assert pipeline.state.step == 6
    assert np.diff(trainer.step_at).max() < 2.0


class Hopeless(ScriptedSteps):
    """Despises the first attempt of every group."""

    async def score_steps(self, question):
        self.note(question)
        value = -1.0 if question.attempt.endswith("/0") else 1.0
        return StepScores(scores=np.full(len(question.ends) - question.num_known, value, np.float32))


@pytest.mark.parametrize("mode", ["never", "abort", "drain"])
def test_hopeless_attempts_are_sampled_no_further_and_trained_as_they_are(tmp_path, mode):
    pipeline, trainer, sink, _ = run(
        tmp_path,
        process_plan(plan={"abort_below": 0.0}, interrupt=mode),
        Hopeless,
        engines=lambda: [ScriptedEngine(script=lambda r: np.arange(60, dtype=np.int32), token_s=0.01)],
    )
    lengths = {key: sample.num_loss_tokens for key, sample in trainer.samples.items()}
    assert {n for (_, attempt), n in lengths.items() if attempt} == {60}
    # Two steps of five tokens, found when the engine next reports, and the piece under way then.
    assert {n for (_, attempt), n in lengths.items() if not attempt} <= {12, 16}
    assert pipeline.state.num_given_up == 12
    assert sink.of("step")[-1]["given_up"] >= 6
    assert pipeline.state.missing_scores == {}
    pipeline.state.ledger.check()


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(lives=st.lists(st.floats(0.0, 1.5), max_size=4), mode=st.sampled_from(["never", "abort"]))
def test_what_was_given_up_stays_given_up_through_any_number_of_deaths(lives, mode):
    plan = process_plan(plan={"abort_below": 0.0}, steps=3, interrupt=mode)

    async def one_life(run_dir, life_s):
        pipeline = make_pipeline(
            run_dir,
            plan,
            engines=[ScriptedEngine(script=lambda r: np.arange(60, dtype=np.int32), token_s=0.01)],
            environment=OneTurn(max_tokens=64),
            trainer=(trainer := RecordingTrainer()),
            process=Hopeless(),
        )
        task = asyncio.ensure_future(pipeline.run())
        done, _ = await asyncio.wait({task}, timeout=life_s)
        if done:
            return task.result(), trainer
        pipeline._journal.flush = lambda: None
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return None, trainer

    samples = {}
    with tempfile.TemporaryDirectory() as name:
        for life_s in (*lives, None):
            state, trainer = virtual_clock.run(one_life(Path(name), life_s))
            samples |= trainer.samples
            if state is not None:
                break
    assert state.num_given_up == 3 * 2
    assert state.missing_scores == {}
    state.ledger.check()
    lengths = {key: sample.num_loss_tokens for key, sample in samples.items()}
    assert all(n == 60 if attempt else n <= 20 for (_, attempt), n in lengths.items())


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    lives=st.lists(st.floats(0.0, 2.0), max_size=4),
    mode=st.sampled_from(["never", "abort"]),
    checkpoint_every=st.integers(0, 2),
)
def test_killed_at_random_moments(lives, mode, checkpoint_every):
    """No step in the journal is scored again, and the advantages are those of a run that was never killed."""
    plan = process_plan(steps=4, interrupt=mode, checkpoint_every=checkpoint_every)

    async def one_life(run_dir, life_s):
        steps = ScriptedSteps(token_s=0.002)
        pipeline = make_pipeline(
            run_dir,
            plan,
            engines=[ScriptedEngine(script=hashed_script(mean_tokens=20), token_s=0.02)],
            environment=OneTurn(max_tokens=64),
            trainer=(trainer := RecordingTrainer(token_s=0.002)),
            process=steps,
        )
        known = {
            (f"{live.group}/{attempt}", int(end))
            for live in pipeline.state.groups.values()
            for attempt, column in live.columns.get("process", {}).items()
            for end in column.step_ends
        }
        task = asyncio.ensure_future(pipeline.run())
        done, _ = await asyncio.wait({task}, timeout=life_s)
        assert not known & set(steps.asked)
        if done:
            return task.result(), trainer
        pipeline._journal.flush = lambda: None
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return None, trainer

    samples = {}
    with tempfile.TemporaryDirectory() as name:
        for life_s in (*lives, None):
            state, trainer = virtual_clock.run(one_life(Path(name), life_s))
            samples |= trainer.samples
            if state is not None:
                break
    assert state.step == 4
    assert state.missing_scores == {}
    state.ledger.check()
    assert len(samples) == 4 * 2 * 3
    for key, advantages in expected_advantages(samples, parity, form="potential", weight=1.0):
        np.testing.assert_allclose(samples[key].advantages[samples[key].loss_mask], advantages, atol=1e-6)
