"""One record through every boundary: wire, journal, checkpoint, resume, sample, packed row; and back from damage."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import wire
from headrace.data import completions, masks
from headrace.data.packing import pack
from headrace.data.samples import build_samples
from headrace.errors import ConfigError
from headrace.runtime.checkpoint import CheckpointStore, recover
from headrace.runtime.journal import Journal, salvage, segment_path
from headrace.runtime.recording import read_recording
from headrace.runtime.state import RunState
from headrace.types import Completion, Routing, Sampling, SamplingMask, ScoreColumn, Task, Turn


def some_turn(rng: np.random.Generator, *, cut: bool, routed: bool, prompt_ids: np.ndarray) -> Turn:
    num_tokens, num_prompt = int(rng.integers(1, 9)), len(prompt_ids)
    token_ids = rng.integers(0, 50, num_tokens).astype(np.int32)
    versions = np.sort(rng.integers(0, 4, num_tokens)).astype(np.int32)
    rows = num_prompt + num_tokens - 1
    mask = routing = None
    if cut:
        sets = [np.unique(np.append(rng.integers(0, 50, rng.integers(0, 6)), token)) for token in token_ids]
        offsets = np.cumsum([0, *map(len, sets)]).astype(np.int64)
        mask = SamplingMask(token_ids=np.concatenate(sets).astype(np.int32), offsets=offsets)
    if routed:
        recorded = np.append(rng.random(rows) < 0.8, False)
        experts = rng.integers(0, 255, (int(recorded.sum()), 2, 3)).astype(np.uint8)
        routing = Routing(experts=experts, recorded=recorded)
    return Turn(
        prompt_ids=prompt_ids,
        completion=Completion(
            token_ids=token_ids,
            logprobs=-rng.random(num_tokens).astype(np.float32),
            versions=versions,
            finish_reason=str(rng.choice(["stop", "length"])),
            kv_versions=np.array([[0, 1], [2, rows - 1]] if rows > 1 else [[1, rows]], np.int32),
            routing=routing,
            sampling_mask=mask,
        ),
        sampling=Sampling(
            max_tokens=9, temperature=0.5 + float(rng.random()), top_p=0.9 if cut else 1.0, stop_ids=(3, 4)
        ),
        seed=int(rng.integers(0, 2**62)),
        engine=f"engine-{rng.integers(0, 3)}",
    )


def journalled(rng, journal, state, group: int, turns: list[list[Turn]], checkpoint) -> None:
    """Write what a run would; turns grow in pieces, and ``checkpoint`` may be taken in between."""

    def write(record):
        state.apply(record)
        journal.write(record)
        journal.flush()
        checkpoint()

    task = Task(id=f"t{group}", prompt="p", columns={"answer": group})
    write({"kind": "admit", "group": group, "task": task, "attempts": len(turns), "version": 0})
    for attempt, given_turns in enumerate(turns):
        for number, turn in enumerate(given_turns):
            where = {"group": group, "attempt": attempt, "turn": number}
            done, known = turn.completion, 0
            for end in np.unique(rng.integers(0, done.num_tokens + 1, 2)).tolist():
                if end > known:
                    so_far = piece(done, len(turn.prompt_ids), end)
                    write({"kind": "tokens", **where, "more": completions.tail(so_far, known)})
                    known = end
            write({"kind": "turn", **where, "value": replace(turn, completion=completions.tail(done, known))})
        told = [[list(range(len(given_turns))), f"text {attempt}", "policy", True]]
        write({"kind": "episode", "group": group, "attempt": attempt, "trajectories": told})
    rewards = [{"exact": float(attempt)} for attempt in range(len(turns))]
    columns = [
        ScoreColumn(source="outcome", group=group, attempt=a, rewards=r) for a, r in enumerate(rewards)
    ]
    write({"kind": "scores", "columns": columns})
    write({"kind": "scored", "group": group, "returns": [r["exact"] for r in rewards], "missing": []})


def piece(done: Completion, num_prompt: int, end: int) -> Completion:
    """What an engine hands back of a completion that is interrupted after ``end`` tokens."""
    routing = done.routing
    if routing is not None:
        kept = routing.recorded[: num_prompt + end].copy()
        kept[-1] = False
        routing = Routing(experts=routing.experts[: int(kept.sum())], recorded=kept)
    mask = done.sampling_mask
    return Completion(
        token_ids=done.token_ids[:end],
        logprobs=done.logprobs[:end],
        versions=done.versions[:end],
        finish_reason="abort",
        kv_versions=np.array([[0, num_prompt + end - 1]], np.int32),
        routing=routing,
        sampling_mask=None if mask is None else masks.cut(mask, 0, end),
    )


def same(a: object, b: object) -> bool:
    """Bit for bit, by what the wire makes of both."""
    return wire.encode(a) == wire.encode(b)


@given(seed=st.integers(0, 2**20), cut=st.booleans(), routed=st.booleans(), checkpoint_at=st.integers(0, 60))
def test_every_field_of_a_rollout_survives_every_boundary(seed, cut, routed, checkpoint_at):
    rng = np.random.default_rng(seed)
    turns = []
    for _ in range(2):
        attempts = []
        for _ in range(2):
            prompt_ids = rng.integers(0, 50, rng.integers(1, 6)).astype(np.int32)
            attempts.append([
                some_turn(rng, cut=cut, routed=routed, prompt_ids=prompt_ids) for _ in range(rng.integers(1, 3))
            ])  # fmt: skip
        turns.append(attempts)
    with TemporaryDirectory() as folder:
        run_dir, state = Path(folder), RunState()
        journal = Journal(run_dir / "journal", 0)
        save(run_dir, state, journal, 0)
        written = iter(range(10_000))

        def checkpoint():
            if next(written) == checkpoint_at:
                state.step = 1
                save(run_dir, state, journal, 1)

        for group, attempts in enumerate(turns):
            journalled(rng, journal, state, group, attempts, checkpoint)
        journal.close()
        recovered = recover(CheckpointStore(run_dir, keep=2)).state
        recording = read_recording(run_dir)
    assert not recording.damages
    for group, attempts in enumerate(turns):
        scored, live = recovered.live(group).scored, state.live(group).scored
        assert same(scored, live)
        assert same(list(recording.groups[group].episodes()), list(live.episodes))
        for attempt, given_turns in enumerate(attempts):
            (trajectory,) = scored.episodes[attempt].trajectories
            assert same(list(trajectory.turns), given_turns)
        samples = wire.decode(wire.encode(build_samples(scored, [0.5, -0.5])))
        assert same(samples, build_samples(live, [0.5, -0.5]))
        check_packed(samples)


def check_packed(samples) -> None:
    """Each loss token of a row has the kept ids that its sample has for it."""
    for share in (False, True):
        (row,) = pack(samples, row_tokens=10_000, share_prefixes=share)
        if row.sampling_mask is None:
            assert all(sample.sampling_mask is None for sample in samples)
            continue
        for t in np.flatnonzero(row.loss_mask):
            sample = samples[row.sample_index[row.sequence[t]]]
            mask, at = sample.sampling_mask, int(row.position_ids[t])
            got = row.sampling_mask.token_ids[row.sampling_mask.offsets[t] : row.sampling_mask.offsets[t + 1]]
            np.testing.assert_array_equal(got, mask.token_ids[mask.offsets[at] : mask.offsets[at + 1]])
            assert row.token_ids[t] in got


def save(run_dir: Path, state: RunState, journal: Journal, step: int) -> None:
    """A checkpoint of the controller alone."""
    frame = wire.encode({"state": state.snapshot(), "journal_bytes": journal.rotate(step)})
    folder = run_dir / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(parents=True)
    (folder / "controller.state").write_bytes(frame)


def a_run(run_dir: Path, num_groups: int = 3) -> list[int]:
    """Groups of one attempt and one turn; returns where each frame of the journal begins."""
    rng, state = np.random.default_rng(0), RunState()
    journal = Journal(run_dir / "journal", 0)
    for group in range(num_groups):
        turn = some_turn(rng, cut=True, routed=False, prompt_ids=np.arange(3, dtype=np.int32))
        journalled(rng, journal, state, group, [[turn]], lambda: None)
    journal.close()
    return [offset for offset, _ in salvage(segment_path(run_dir / "journal", 0))]


@pytest.mark.parametrize("cut", [1, 9, 30])
def test_a_record_cut_off_at_the_end_is_named_and_the_rest_is_read(tmp_path, cut):
    offsets = a_run(tmp_path)
    path = segment_path(tmp_path / "journal", 0)
    path.write_bytes(path.read_bytes()[:-cut])
    recording = read_recording(tmp_path)
    (damage,) = recording.damages
    assert (damage.file, damage.offset) == (path, offsets[-1])
    assert recording.num_records == len(offsets) - 1
    assert [group.ended for group in recording.groups.values()] == ["buffered", "buffered", "generating"]


@pytest.mark.parametrize("where", ["length", "checksum", "body"])
def test_damage_in_the_middle_costs_the_records_it_hit(tmp_path, where):
    offsets = a_run(tmp_path)
    path = segment_path(tmp_path / "journal", 0)
    data = bytearray(path.read_bytes())
    data[offsets[1] + {"length": 2, "checksum": 5, "body": 40}[where]] ^= 0xFF
    path.write_bytes(data)
    recording = read_recording(tmp_path)
    (damage,) = recording.damages
    assert (damage.file, damage.offset) == (path, offsets[1])
    assert recording.num_records == len(offsets) - 1
    assert len(recording.groups[2].episodes()) == 1


def test_a_frame_of_another_version_is_damage_too(tmp_path):
    a_run(tmp_path)
    journal = Journal(tmp_path / "journal", 0)
    journal.write({"kind": "unheard-of", "group": 0, "attempt": 0})
    journal.close()
    (damage,) = read_recording(tmp_path).damages
    assert "unheard-of" in damage.text


def test_groups_are_found_whole_though_their_admission_lies_before_the_oldest_segment(tmp_path):
    rng, state = np.random.default_rng(0), RunState()
    journal, writes = Journal(tmp_path / "journal", 0), iter(range(100))

    def checkpoint():
        if next(writes) == 3:
            save(tmp_path, state, journal, 5)
            segment_path(tmp_path / "journal", 0).unlink()

    prompt_ids = np.arange(3, dtype=np.int32)
    turns = [[some_turn(rng, cut=True, routed=True, prompt_ids=prompt_ids)] for _ in range(2)]
    journalled(rng, journal, state, 0, turns, checkpoint)
    journal.close()
    group = read_recording(tmp_path).groups[0]
    assert group.task is not None and not read_recording(tmp_path).damages
    for attempt, (turn,) in enumerate(turns):
        assert same(group.attempts[attempt].turns[0], turn)


def test_a_checkpoint_that_cannot_be_read_is_named(tmp_path):
    a_run(tmp_path)
    folder = tmp_path / "checkpoints" / "step-00000000"
    folder.mkdir(parents=True)
    (folder / "controller.state").write_bytes(b"short")
    recording = read_recording(tmp_path)
    assert [damage.file.name for damage in recording.damages] == ["controller.state"]
    assert len(recording.groups) == 3


def test_a_directory_without_a_journal_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds no journal"):
        read_recording(tmp_path)
