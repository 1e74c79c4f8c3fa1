"""``headrace bench aims``: what Headrace is held to on one GPU, beside figures that were written to files.

In: JSON files of other ``headrace bench`` commands. Out: one line for each aim with what was seen, from which command,
or that no file tells. Figures of different sources are not one result, and that is said.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from headrace.errors import ConfigError

Figures = Mapping[str, Any]
STEP_LAGS = (0, 1)
"""At 0 engine and trainer take turns on the GPU, at 1 they compute at the same time."""


class Aim(NamedTuple):
    name: str
    bench: str
    of: Callable[[Figures], bool]
    """Whether a file of that command is about it."""
    seen: Callable[[Figures], float]
    least: float | None = None
    most: float | None = None
    unit: str = ""

    def is_met(self, value: float) -> bool:
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)

    def wanted(self) -> str:
        sign, bound = ("at least", self.least) if self.least is not None else ("at most", self.most)
        assert bound is not None
        return f"{sign} {bound:g}{self.unit}"


def _of(shape: str) -> Callable[[Figures], bool]:
    return lambda figures: figures["shape"] == shape


def _against_vllm(shape: str) -> Callable[[Figures], bool]:
    """On the workload of the aim: all samples at once, in one turn."""

    def is_about(figures: Figures) -> bool:
        ours = figures.get("headrace", {})
        return "seconds" in figures.get("vllm", {}) and (shape, 1, 1) == (
            ours["shape"],
            ours["rounds"],
            ours["turns"],
        )

    return is_about


def _model_flops_use(figures: Figures) -> float:
    """With the prompts of a group computed once, as in training."""
    return max(case["mfu"] for case in figures["cases"] if case["share_prefixes"]) * 100


def _has_ipc(shape: str) -> Callable[[Figures], bool]:
    return lambda figures: figures["shape"] == shape and bool(_within_gpu(figures))


def _within_gpu(figures: Figures) -> list[Figures]:
    return [cell for cell in figures["cells"] if (cell["bundle"], cell["transport"]) == ("full", "cuda_ipc")]


def _checkpointing(figures: Figures) -> Figures:
    """TRL where it is asked for no more memory than it needs; nothing where it was not run so."""
    tried = figures.get("trl", {}).get("tried", ())
    return next((one for one in tried if one["checkpointing"] and "seconds" in one), {})


def _quickest(figures: Figures) -> Figures:
    """Our side taking turns or at the same time, whichever took less; nothing where neither was run."""
    rows = [row for row in figures["headrace"] if row["max_lag"] in STEP_LAGS]
    return min(rows, key=lambda row: row["seconds"], default={})


def _is_step(figures: Figures) -> bool:
    return figures["shape"] == "qwen2-1.5b" and bool(_quickest(figures) and _checkpointing(figures))


def _of_trl(name: str) -> Callable[[Figures], float]:
    return lambda figures: _checkpointing(figures)[name] / _quickest(figures)[name]


def _mismatch_with(weights: str) -> Callable[[Figures], float]:
    def part(figures: Figures) -> float:
        gaps = figures["gaps"]
        return float(gaps["mismatch"]["mean"] / gaps[f"vllm_trl_{weights}"]["mean"])

    return part


def _is_mismatch(figures: Figures) -> bool:
    return figures["shape"] == "qwen2-1.5b" and "vllm_trl_bfloat16" in figures["gaps"]


AIMS = (
    *(
        Aim(f"rollouts against vLLM, {shape}", "engine", _against_vllm(shape), lambda f: f["ratio"], least, unit="x")
        for shape, least in (("qwen2-0.5b", 3.0), ("qwen2-1.5b", 1.8), ("qwen2-7b", 1.2))
    ),
    Aim(
        "the quicker step against TRL with checkpointing", "step", _is_step, _of_trl("seconds"), 3.0, unit="x",
    ),
    Aim("peak memory of TRL over that of this step", "step", _is_step, _of_trl("peak_bytes"), 1.0, unit="x"),
    *(
        Aim(f"model-FLOPs use, {shape}", "train", _of(shape), _model_flops_use, least, unit="%")
        for shape, least in (("qwen2-1.5b", 55.0), ("qwen2-7b", 45.0))
    ),
    *(
        Aim(
            f"stall for new weights, {shape}", "sync", _has_ipc(shape), lambda f: _within_gpu(f)[0]["stall_ms"],
            most=most, unit=" ms",
        )
        for shape, most in (("qwen2-1.5b", 5.0), ("qwen2-7b", 15.0))
    ),
    *(
        Aim(
            f"mismatch, of TRL's with {weights} weights and vLLM", "mismatch", _is_mismatch,
            _mismatch_with(weights), most=0.5, unit="x",
        )
        for weights in ("bfloat16", "float32")
    ),
    Aim("start, cold", "start", _of("qwen2-1.5b"), lambda f: f["cold"]["seconds"], most=60.0, unit=" s"),
    Aim("start, warm", "start", _of("qwen2-1.5b"), lambda f: f["warm"]["seconds"], most=20.0, unit=" s"),
    Aim("a long run that leaks nothing", "soak", lambda f: True, lambda f: f["minutes"], 8.0, unit=" min"),
)  # fmt: skip


def read(
    files: Iterable[Path], *, progress: Callable[[str], None] = lambda line: None
) -> list[dict[str, Any]]:
    """Figures of ``headrace bench`` commands. A folder stands for those among the JSON files in it."""
    found = []
    for given in files:
        for file in sorted(given.glob("*.json")) if given.is_dir() else [given]:
            try:
                figures = json.loads(file.read_text(encoding="utf-8"))
            except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
                raise ConfigError(
                    f"{file}: it cannot be read ({error}); name files that --json has written"
                ) from error
            said = _fault(figures)
            if not said:
                found.append(figures)
                continue
            said = f"{file}: {said}"
            if not given.is_dir():
                raise ConfigError(f"{said}; name files of headrace bench")
            progress(f"{said}, so it is left out")
    if not found:
        raise ConfigError("no file with figures: name some that headrace bench ... --json FILE has written")
    return found


def _fault(figures: Any) -> str:
    """Why figures cannot be used; empty: they can."""
    if not isinstance(figures, dict) or "taken" not in figures:
        return "it does not say how its figures were taken"
    if figures["taken"]["bench"] == "step" and not isinstance(figures.get("headrace"), list):
        return "its step is in an older form, without one row for each lag"
    return ""


def run(found: Sequence[Figures]) -> dict[str, Any]:
    """For each aim what the last file about it says."""
    lines = []
    for aim in AIMS:
        about = [figures for figures in found if figures["taken"]["bench"] == aim.bench and aim.of(figures)]
        line: dict[str, Any] = {"aim": aim.name, "wanted": aim.wanted(), "seen": None}
        if about:
            last = max(about, key=lambda figures: figures["taken"]["date"])
            value = aim.seen(last)
            line |= {"seen": value, "unit": aim.unit, "is_met": aim.is_met(value), "taken": last["taken"]}
        lines.append(line)
    sources = sorted({line["taken"]["source"] for line in lines if line["seen"] is not None})
    return {"aims": lines, "sources": sources}


def table(figures: Figures) -> Table:
    """The figures for people."""
    titles = {0: "nothing that is held to an aim", 1: "of one version"}
    title = titles.get(len(figures["sources"]), "of different versions, so not one result")
    drawn = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name, justify in (
        ("aim", "left"),
        ("wanted", "left"),
        ("seen", "right"),
        ("", "left"),
        ("taken", "left"),
    ):
        drawn.add_column(name, justify=justify)  # type: ignore[arg-type]
    for line in figures["aims"]:
        if line["seen"] is None:
            drawn.add_row(line["aim"], line["wanted"], "-", "not measured", "")
            continue
        facts = line["taken"]
        drawn.add_row(
            line["aim"],
            line["wanted"],
            f"{line['seen']:.2f}{line['unit']}",
            "met" if line["is_met"] else "missed",
            f"{facts['date']}, {facts['device']}, source {facts['source']}",
        )
    return drawn
