"""Every carrier crosses a process boundary unchanged, and nothing else does."""

from __future__ import annotations

import dataclasses
import json
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from headrace import types
from headrace.wire import FrameBuilder, decode, encode


def same(a: Any, b: Any) -> bool:
    """Equal in value, type, dtype and shape, all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if dataclasses.is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b or (a != a and b != b)


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def examples() -> dict[str, Any]:
    """One of each carrier, every optional field given."""
    fork = types.ForkPoint(request_id="0/1/2", num_tokens=2, version=3)
    pivot = types.Pivot(prompt_ids=ints(9), prefix_ids=ints(8), depth=0.5, fork=fork, engine="engine-0")
    task = types.Task(
        id="t-1",
        prompt=({"role": "user", "content": "2+2?"},),
        columns={"answer": 4, "tags": ["a"]},
        pivot=pivot,
    )
    sampling = types.Sampling(max_tokens=8, temperature=0.5, top_k=3, stop_ids=(1, 2))
    routing = types.Routing(
        experts=np.arange(8, dtype=np.uint8).reshape(2, 2, 2), recorded=np.array([True, False, True])
    )
    mask = types.SamplingMask(token_ids=ints(5, 6, 7), offsets=np.array([0, 2, 2, 3], dtype=np.int64))
    completion = types.Completion(
        token_ids=ints(5, 6, 7),
        logprobs=np.array([-0.5, -1.5, -np.inf], dtype=np.float32),
        versions=ints(1, 1, 2),
        finish_reason="stop",
        kv_versions=np.array([[1, 4], [2, 1]], dtype=np.int32),
        routing=routing,
        sampling_mask=mask,
    )
    request = types.Request(
        id="0/1/2",
        prompt_ids=ints(9, 8),
        sampling=sampling,
        seed=2**62,
        prefix=completion,
        hold_s=5.0,
        fork=fork,
    )
    turn = types.Turn(
        prompt_ids=ints(9, 8), completion=completion, sampling=sampling, seed=3, engine="engine-0"
    )
    trajectory = types.Trajectory(
        turns=(turn, turn), text="four \u2713", rewards={"exact": 1.0, "style": None}
    )
    episode = types.Episode(group=7, attempt=1, task=task, trajectories=(trajectory,))
    column = types.ScoreColumn(
        source="process",
        group=7,
        attempt=1,
        rewards={"exact": 1.0, "style": None},
        step_ends=ints(2, 5),
        step_scores=np.array([0.5, -1], dtype=np.float32),
        logprobs=(np.zeros(3, dtype=np.float32),),
        versions=ints(0, 3),
    )
    judged = types.StepScores(scores=np.array([0.5], dtype=np.float32), version=3)
    question = types.StepQuestion(
        attempt="7/1", task=task, token_ids=ints(9, 8, 5), num_prompt=2, ends=ints(3), num_known=0, last=True
    )
    teacher = types.TeacherScores(
        logprobs=np.array([0, -0.5, -1.5], dtype=np.float32),
        top_ids=np.arange(6, dtype=np.int32).reshape(3, 2),
        top_logprobs=np.full((3, 2), -np.inf, dtype=np.float32),
        teacher="math",
        version=4,
    )
    group = types.EpisodeGroup(
        group=7,
        task=task,
        episodes=(episode, episode),
        returns=(1.0, 0.0),
        ref_logprobs=(np.zeros(3, dtype=np.float32), np.full(2, -0.5, dtype=np.float32)),
        scores=(column,),
        teacher=(teacher, teacher),
    )
    sample = types.Sample(
        group=7,
        attempt=1,
        token_ids=ints(9, 8, 5),
        loss_mask=np.array([False, False, True]),
        behavior_logprobs=np.array([0, 0, -0.25], dtype=np.float32),
        versions=ints(-1, -1, 3),
        advantages=np.array([0, 0, 0.5], dtype=np.float32),
        temperature=1.0,
        kv_versions=types.NO_KV,
        ref_logprobs=np.zeros(3, dtype=np.float32),
        teacher=teacher,
        routing=routing,
        sampling_mask=mask,
        component="pivot",
    )
    batch = types.TrainBatch(step=3, version=2, samples=(sample, sample))
    result = types.StepResult(
        step=3, version=3, num_loss_tokens=2, skipped="non-finite", metrics={"loss": float("nan")}
    )
    blob = types.TensorBlob(name="w", dtype="BF16", shape=(2, 1), data=np.arange(4, dtype=np.uint8))
    slot = types.TensorSlot(name="w", dtype="BF16", shape=(2, 1), offset=0, num_bytes=4)
    patch = types.TensorPatch(
        name="w",
        dtype="BF16",
        shape=(2, 1),
        places=np.array([1], dtype=np.int64),
        bits=np.array([7], dtype=np.uint16),
    )
    manifest = types.WeightManifest(
        version=3,
        base_version=None,
        kind="full",
        transport="shared-memory",
        location="/dev/shm/x",
        num_bytes=4,
        digest="d",
        slots=(slot,),
    )
    status = types.RoleStatus(
        role="engine-0", version=3, progress=10, seconds={"decode": 1.5}, counters={"steps": 2.0}
    )
    made = (
        fork, pivot, task, sampling, routing, mask, completion, request, turn, trajectory, episode, teacher, column,
        question, judged, group, sample, batch, result, blob, patch, slot, manifest, status,
    )  # fmt: skip
    return {type(value).__name__: value for value in made}


CARRIERS = [name for name, value in vars(types).items() if dataclasses.is_dataclass(value)]


def test_there_is_an_example_of_every_carrier():
    assert set(examples()) == set(CARRIERS)


@pytest.mark.parametrize("name", CARRIERS)
def test_every_carrier_comes_back_unchanged(name):
    value = examples()[name]
    assert same(decode(encode(value)), value)


@pytest.mark.parametrize("name", CARRIERS)
def test_a_carrier_only_takes_its_fields_when_it_is_made(name):
    """Those of a frame are made without a call of their class."""
    cls = vars(types)[name]
    assert cls.__mro__ == (cls, object) and not {"__post_init__", "__new__"} & vars(cls).keys()
    assert cls.__dataclass_params__.init and all(field.init for field in dataclasses.fields(cls))


def test_same_notices_differences():
    task = types.Task(id="a", prompt="p")
    assert not same(ints(1), ints(2))
    assert not same(ints(1), np.array([1], dtype=np.int64))
    assert not same((1,), [1])
    assert not same(task, dataclasses.replace(task, id="b"))


any_array = arrays.arrays(
    dtype=st.sampled_from(
        [np.bool_, np.uint8, np.uint16, np.int32, np.int64, np.float16, np.float32, np.float64]
    ),
    shape=arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
)
leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | any_array
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text() | st.integers(), inner, max_size=3),
    ),
    max_leaves=12,
)


@given(trees)
def test_any_nesting_comes_back_unchanged(tree):
    assert same(decode(encode(tree)), tree)


@given(st.sampled_from(["$a", "$t", "$d", "$c", "f"]), trees)
def test_keys_that_look_like_the_encoding_are_just_keys(key, tree):
    assert same(decode(encode({key: tree})), {key: tree})


@pytest.mark.parametrize(
    "view",
    [
        lambda a: a[::2],
        lambda a: a[:, ::-1],
        lambda a: a.T,
        np.asfortranarray,
    ],
)
def test_views_of_any_layout_keep_their_values(view):
    value = view(np.arange(24, dtype=np.float32).reshape(4, 6))
    np.testing.assert_array_equal(decode(encode(value)), value)


def test_numpy_scalars_become_plain_numbers():
    back = decode(encode([np.float32(0.5), np.int64(3), np.bool_(True)]))
    assert back == [0.5, 3, True]
    assert [type(v) for v in back] == [float, int, bool]


def test_a_memoryview_is_as_good_as_bytes():
    assert same(decode(memoryview(encode({"a": ints(1, 2)}))), {"a": ints(1, 2)})


def test_many_small_arrays_share_one_header_each_dtype():
    one = len(encode([ints(1)]))
    thousand = len(encode([ints(1)] * 1000))
    assert (thousand - one) / 999 < 40


class Stranger:
    pass


@dataclasses.dataclass
class Task:
    """Shares its name with a carrier, and is none."""

    id: str


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (Stranger(), "value: Stranger"),
        ({"a": [0, Stranger()]}, ".a[1]: Stranger"),
        ((1, {"b": {1, 2}}), "[1].b: set"),
        (types.Task(id="t", prompt="p", columns={"x": b"bytes"}), ".columns.x: bytes"),
        (Task(id="t"), "value: Task"),
    ],
)
def test_unsupported_type_names_its_path(value, path):
    with pytest.raises(TypeError) as caught:
        encode(value)
    assert str(caught.value) == f"{path} cannot cross a process boundary"


def test_a_frame_can_only_name_carriers():
    head = json.dumps({"Stranger": []}).encode()
    with pytest.raises(KeyError, match="Stranger"):
        decode(struct.pack("<13Q", len(head), *[0] * 12) + head)


def test_what_a_frame_holds_twice_is_written_once_and_shared():
    prompt_ids, sampling = np.arange(1000, dtype=np.int32), types.Sampling(max_tokens=8)
    requests = [types.Request(id=str(i), prompt_ids=prompt_ids, sampling=sampling, seed=i) for i in range(8)]
    builder = FrameBuilder()
    for request in requests:
        builder.add(["call", request])
    frame = builder.take()
    assert len(frame) < 2 * prompt_ids.nbytes
    back = [request for _, request in decode(frame)]
    assert same(back, requests)
    assert (
        len({id(request.prompt_ids) for request in back})
        == len({id(request.sampling) for request in back})
        == 1
    )


def test_a_value_that_cannot_be_carried_leaves_the_others_as_they_were():
    builder = FrameBuilder()
    shared = ints(1, 2, 3)
    builder.add({"before": shared})
    with pytest.raises(TypeError, match=r"\[1\]: Stranger"):
        builder.add([ints(4, 5), Stranger(), ints(6)])
    builder.add({"after": [shared, ints(7)]})
    assert len(builder) == 2
    assert same(decode(builder.take()), [{"before": shared}, {"after": [shared, ints(7)]}])
    assert decode(builder.take()) == []


@pytest.mark.parametrize(
    "odd",
    [
        {"token_ids": np.arange(3)},
        {"token_ids": np.array(5, dtype=np.int32)},
        {"token_ids": np.zeros((3, 2), dtype=np.int32)},
        {"token_ids": np.zeros(0, dtype=np.int32)},
        {"ref_logprobs": None},
        {"kv_versions": np.arange(12, dtype=np.int32).reshape(6, 2)[::2]},
        {"temperature": np.float32(0.5)},
    ],
)
def test_lists_of_one_carrier_may_differ_in_every_field(odd):
    sample = examples()["Sample"]
    other = dataclasses.replace(sample, **odd)
    expected = dataclasses.replace(other, temperature=float(other.temperature))
    for order in ([sample, other], [other, sample, sample]):
        wanted = [expected if s is other else s for s in order]
        assert same(decode(encode(order)), wanted)
        assert same(decode(encode(tuple(order))), tuple(wanted))


def test_arrays_of_every_width_are_aligned():
    widths = ["int8", "int64", "float16", "int32", "bool", "float64", "uint8"]
    back = decode(encode([np.ones(3, dtype=name) for name in widths]))
    assert all(a.flags.aligned for a in back)
